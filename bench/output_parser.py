"""CPU time of the parser of tool calls and reasoning, per token.

    python bench/output_parser.py    # a table: format, kind of output, microseconds per token (median, least, most)

Content is words; calls are one long argument in pieces of four characters, about what a token is.
"""

import json
import random
import statistics
import time

from quire.server.tools.output_parser import OutputParser
from quire.text.tool_formats.table import find_format, find_reasoning

TEXT = "The quick brown fox jumps over the lazy dog and then, a < b { c } [1] is said.\n"
LINES = "line of code: x = {'a': [1, 2]} \"q\" \\ end\n" * 400
TOOLS = [{"function": {"name": "write", "parameters": {"properties": {"text": {"type": "string"}}}}}]
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "write", "arguments": {json.dumps({"text": LINES})}}}\n</tool_call>',
    "qwen3_coder": f"<tool_call>\n<function=write>\n<parameter=text>\n{LINES}\n</parameter>\n</function>\n</tool_call>",
    "gemma4": f'<|tool_call>call:write{{text:<|"|>{LINES}<|"|>}}<tool_call|>',
    "pythonic": f"[write(text={LINES!r})]",
    "gpt_oss": f"<|channel|>commentary to=functions.write<|message|>{json.dumps({'text': LINES})}",
}
NUM_RUNS = 7


def microseconds(name: str, tokens: list[str]) -> list[float]:
    """Return the CPU time per token of each run, in microseconds."""
    results = []
    for _ in range(NUM_RUNS):
        parser = OutputParser(find_format(name), TOOLS, reasoning=find_reasoning("qwen3"))
        start = time.process_time()
        for token in tokens:
            parser.feed(token)
        parser.finish()
        results.append((time.process_time() - start) / len(tokens) * 1e6)
    return results


def main() -> None:
    """Print the table."""
    generator = random.Random(0)
    words = TEXT.split(" ")
    content = [f" {generator.choice(words)}" for _ in range(5000)]
    for name, call in CALLS.items():
        start = ["<|channel|>final<|message|>"] if name == "gpt_oss" else []
        call_tokens = [call[at : at + 4] for at in range(0, len(call), 4)]
        for kind, tokens in (("content", start + content), ("call", call_tokens)):
            times = microseconds(name, tokens)
            print(f"{name:12} {kind:8} {statistics.median(times):5.2f} {min(times):5.2f} {max(times):5.2f}")


if __name__ == "__main__":
    main()
