"""Process of a rank that joins over TCP, on a GPU that is imitated: `python -m support.imitated_member FD`."""

from quire.engine.parallel import member
from quire.engine.parallel import node as agent
from support import imitated_gpu

MODULE = "support.imitated_member"
START = f"from quire.engine.parallel import node as agent; agent.MEMBER_MODULE = {MODULE!r}; "  # of a node's command


def use() -> None:
    """Let this process start ranks on imitated GPUs."""
    agent.MEMBER_MODULE = MODULE


if __name__ == "__main__":
    imitated_gpu.turn_on(num_cards=8, is_noisy=False)
    member.main()
