"""A plot of bars in groups as SVG, by hand: it needs no library, and a browser shows it."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

HEIGHT, TOP, BOTTOM, LEFT = 260, 40, 80, 46
BAR, GAP, GROUP_GAP = 22, 4, 34
BAR_COLOR, BAND_COLOR, TEXT_COLOR = "#3d6fa5", "#f2c879", "#333"


class Group(NamedTuple):
    """Bars that stand together, over what they are compared with."""

    title: str
    subtitle: str
    bars: list[tuple[int, float]]  # what stands below, and a share of 1
    band: tuple[float, float]


def svg(title: str, groups: Sequence[Group]) -> str:
    """Return the plot, from 0 to 100 %."""
    parts, left = list[str](), LEFT + GROUP_GAP // 2
    for group in groups:
        parts += _group(group, left)
        left += _width(group) + GROUP_GAP
    axis = [
        f'<line x1="{LEFT}" x2="{left}" y1="{_y(share)}" y2="{_y(share)}" stroke="#ddd"/>'
        f'{_text(LEFT - 6, _y(share) + 4, f"{share:.0%}", "end")}'
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    head = _text(LEFT, 20, f"{title}; behind the bars what the paper gives for 2 to 6", "start", size=13)
    size = f'width="{left + 10}" height="{HEIGHT + TOP + BOTTOM}"'
    style = '<style>text { font-family: sans-serif; }</style><rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', style, head, *axis, *parts, "</svg>"]) + "\n"


def _group(group: Group, left: int) -> list[str]:
    width, (low, high) = _width(group), group.band
    parts = [_bar(left - 6, width + 12, low, high, BAND_COLOR)]
    for number, (label, share) in enumerate(group.bars):
        x = left + number * (BAR + GAP)
        parts.append(_bar(x, BAR, 0, share, BAR_COLOR))
        parts.append(_text(x + BAR // 2, _y(share) - 4, f"{share * 100:.0f}", "middle"))
        parts.append(_text(x + BAR // 2, _y(0) + 14, str(label), "middle"))
    middle = left + width // 2
    below = [group.title, *group.subtitle.split(", ")]
    return parts + [_text(middle, _y(0) + 30 + 13 * line, words, "middle") for line, words in enumerate(below)]


def _bar(x: int, width: int, low: float, high: float, color: str) -> str:
    return f'<rect x="{x}" y="{_y(high)}" width="{width}" height="{_y(low) - _y(high)}" fill="{color}"/>'


def _width(group: Group) -> int:
    return len(group.bars) * (BAR + GAP) - GAP


def _y(share: float) -> int:
    return TOP + round(HEIGHT * (1 - share))


def _text(x: int, y: int, words: str, anchor: str, size: int = 10) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="{TEXT_COLOR}">{escape(words)}</text>'
