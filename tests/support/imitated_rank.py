"""Process of a rank on a GPU that is imitated: `python -m support.imitated_rank FD [INHERITED]`."""

from quire.engine.parallel import node, process

MODULE = "support.imitated_rank"
START = f"from quire.engine.parallel import node; node.PROCESS_MODULE = {MODULE!r}; "  # start of a node's command


def use() -> None:
    """Start the ranks of this process on imitated GPUs."""
    node.PROCESS_MODULE = MODULE


def serve(*parts: object) -> None:
    """Serve rank 0 on a card of many; the process beats while torch is loaded."""
    from quire.engine.parallel import rank
    from support import imitated_gpu

    imitated_gpu.turn_on(num_cards=8, is_noisy=False)
    rank.serve(*parts)  # type: ignore[arg-type]


if __name__ == "__main__":
    process.serve = serve  # type: ignore[assignment]
    process.main()
