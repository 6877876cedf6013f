"""Engines on several GPUs that are imitated, in a process of their own: `python -m support.imitated_ranks`.

Reads cases as JSON from standard input, and prints what the engine of each answers.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from quire import LLM, LoRARequest, RequestOutput, SamplingParams
from quire.engine.parallel import node, rank_set, starters
from support.faults import raising
from support.forked_engines import fork_module
from support.nodes import NodeCommand, as_flags, free_port, running_node

TESTS = Path(__file__).parents[1]
RANK_MODULE = "support.imitated_rank"

Fault = Literal["", "kill", "rank 1", "rank 0"]


class Case(msgspec.Struct):
    """Settings of an engine, prompts, and sampling parameters for all of them; folders of adapters, "" for none.

    `fault`, at the end: a rank is killed, rank 1 gets an unknown command, or rank 0's part of a step fails.
    """

    model: str
    settings: dict[str, Any]
    prompts: list[list[int]]
    params: dict[str, Any]
    adapters: list[str] = []
    num_turns: int = 1   # the same prompts, one after the other
    fault: Fault = ""


class Answers(msgspec.Struct):
    """Tokens and logprobs of each turn, by prompt, and figures of the engine; the error of a fault."""

    token_ids: list[list[list[int]]] = []
    prompt_logprobs: list[list[list[float]]] = []
    num_blocks: int = 0
    weight_bytes: int = 0
    preemptions: dict[str, int] = {}
    graphs: list[tuple[int, int, bool]] = []   # rows and tokens, and whether there are adapters
    error: str = ""
    node: tuple[int, str] = (0, "")      # how the command of the other node has ended, if there is one


def answer(llm: LLM, case: Case) -> Answers:
    """Return the answers of an engine."""
    found = Answers()
    adapters = [LoRARequest("own", number, each) if each else None for number, each in enumerate(case.adapters, 1)]
    for _ in range(case.num_turns):
        params = SamplingParams(**case.params)
        prompts = [list(each) for each in case.prompts]
        outputs = llm.generate(prompts, params, lora_request=adapters or None, use_tqdm=False)
        found.token_ids.append([list(each.outputs[0].token_ids) for each in outputs])
        found.prompt_logprobs.append([prompt_logprobs(each) for each in outputs])
    stats, ready = llm.kv_stats(), llm._engine.ready
    found.num_blocks, found.preemptions = stats.total_blocks, dict(stats.preemptions)
    found.weight_bytes = ready.weights_bytes
    device: Any = getattr(llm._engine.ranks, "_device", None)
    if getattr(device, "_graphs", None) is not None:
        found.graphs = [size[:3] for size, graph in device._graphs._graphs.items() if graph is not None]
    return found


def prompt_logprobs(output: RequestOutput) -> list[float]:
    """Return the logprobs of a prompt's tokens but the first."""
    entries = zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=False)
    return [entry[token].logprob for token, entry in entries if entry]


def break_ranks(llm: LLM, case: Case, other: NodeCommand | None) -> str:
    """Bring a fault about; return the error of the next step."""
    from quire.engine.parallel import rank_messages

    ranks: Any = llm._engine.ranks
    if case.fault == "kill" and other is not None:
        os.kill(other.pids()[1], signal.SIGKILL)
    elif case.fault == "kill":
        ranks.peers[0].process.kill()
    elif case.fault == "rank 1":
        ranks.tell(rank_messages.Compute(7, 1))
    else:
        graphs = ranks._device._graphs
        graphs.clear()
        graphs._forward = raising(ArithmeticError)
    try:
        answer(llm, case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def run_imitated(cases: list[Case], folders: Sequence[Path] = ()) -> list[Answers]:
    """Return what engines on imitated GPUs answer; `folders`: first in their PYTHONPATH."""
    command = [sys.executable, "-m", "support.imitated_ranks"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*folders, TESTS)))}
    ran = subprocess.run(
        command, input=msgspec.json.encode(cases), capture_output=True, timeout=600, check=False, env=environment
    )
    assert ran.returncode == 0, ran.stderr.decode()
    return msgspec.json.decode(ran.stdout.splitlines()[-1], type=list[Answers])


@contextmanager
def other_node(case: Case) -> Iterator[NodeCommand | None]:
    """Run the second node of a case that has two."""
    if case.settings.get("nnodes", 1) == 1:
        yield None
        return
    case.settings["master_port"] = free_port(case.settings["master_addr"])
    flags = *as_flags(case.settings | {"device": "cuda"}), "--node-rank", "1"
    with running_node(case.model, *flags, is_forked=True, rank_module=RANK_MODULE) as command:
        yield command


def main() -> None:
    """Answer the cases of standard input."""
    cases, found = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Case]), list[Answers]()
    from support import imitated_gpu

    imitated_gpu.turn_on(num_cards=4, is_noisy=False)
    from quire.engine.parallel import gpu_ranks

    gpu_ranks.REASON_TIMEOUT_S = 60.0  # a busy machine may stop the rank that is the cause
    rank_set.SILENCE_SHARE = 60.0   # or another one
    node.PROCESS_MODULE = RANK_MODULE
    node.start_module = starters.start_module = fork_module  # type: ignore[assignment]  # what is used of `Popen`
    for case in cases:
        with other_node(case) as other:
            with LLM(case.model, device="cuda", **case.settings) as llm:
                found.append(answer(llm, case))
                if case.fault:
                    found[-1].error = break_ranks(llm, case, other)
            if other is not None:
                found[-1].node = other.wait()
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
