"""Process of the rank of a GPU that is imitated: `python -m support.imitated_rank FD BOOK`."""

from quire.engine.parallel import gpu_process as process
from quire.engine.parallel.channel import Channel
from quire.engine.parallel.process import run_rank


def serve(channel: Channel) -> None:
    """Serve rank 0 on a card of many; the process beats while torch is loaded."""
    from support import imitated_gpu

    imitated_gpu.turn_on(num_cards=8, is_noisy=False)
    process.serve_rank(channel)


if __name__ == "__main__":
    run_rank(serve)
