"""Process of the rank of a GPU: `python -m quire.engine.parallel.gpu_process FD BOOK`, started by rank 0.

`BOOK` is the file of NCCL's address book. The process beats and ends as that of `quire.engine.parallel.process`.
"""

import sys

from quire.engine.parallel.channel import Channel
from quire.engine.parallel.process import run_rank


def main() -> None:
    """Serve the socket and the file with the numbers given as arguments."""
    run_rank(serve_rank)


def serve_rank(channel: Channel) -> None:
    """Serve rank 0."""
    from quire.engine.parallel.gpu_rank import bring_up  # noqa: PLC0415
    from quire.engine.parallel.nccl import file_store  # noqa: PLC0415 (loads torch, for seconds)
    from quire.engine.parallel.rank import start  # noqa: PLC0415

    book = int(sys.argv[2])
    start(channel, lambda load: bring_up(channel, file_store(book, load.num_ranks), load))()


if __name__ == "__main__":
    main()
