"""Process of a rank on a GPU that is imitated, a fork (support/forked_engines.py) as those of ranks on CPUs."""

from quire.engine.parallel import process, rank
from support import imitated_gpu


def serve(*parts: object) -> None:
    """Serve rank 0 on a card of many."""
    imitated_gpu.turn_on(num_cards=8, is_noisy=False)
    rank.serve(*parts)  # type: ignore[arg-type]


def main() -> None:
    """Be the process of a rank."""
    process.serve = serve  # type: ignore[assignment]
    process.main()
