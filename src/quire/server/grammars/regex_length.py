"""Length of a regex with its repetitions written out: what a parser's work on it grows with."""

import re

_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d{1,9})(?:,(\d{0,9}))?\}|[()]|.", re.DOTALL)


def regex_length(pattern: str) -> int:
    """Return how many characters a pattern has, those of a repeated part counted as often as it may be repeated.

    `{n,}` counts n times, `*` and `+` once. Linear in the pattern.
    """
    totals, last = [0], 0               # of each open group, and of the part that a repetition would repeat
    for token in _TOKEN.finditer(pattern):
        text = token[0]
        if text == "(":
            totals.append(0)
        elif text == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        elif token[1] is not None:
            repeated = last * max(1, int(token[1]), int(token[2] or 0))
            totals[-1] += repeated - last
            last = repeated
        else:
            last = 1
            totals[-1] += 1
    return sum(totals)
