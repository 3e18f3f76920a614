"""A picture of the measurements: an SVG that is readable on light and on dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from benchmarks.compare.peers import LIMIT, OURS, Peer
from benchmarks.compare.results import Outcome, Result
from benchmarks.compare.table import duration

__all__ = ["draw"]

#: Greys that contrast with both white and black.
TEXT, BAR, LINE = "#7d8590", "#8c959f", "#d29922"
OURS_COLOR = "#2da44e"

COLUMNS, PANEL, GAP = 2, 560, 40
LABEL, VALUE = 214, 120
ROW, BAR_HEIGHT, HEAD, FOOT = 19, 12, 34, 26
TOP, MARGIN = 62, 16
#: Rough width of a small letter.
WIDTH = 6.5


def draw(outcomes: Sequence[Outcome], caption: str) -> str:
    """Bars of speed, one panel for each case. The panel's width is the speed of the machine's memory."""
    shown = [outcome for outcome in outcomes if outcome.case.pictured] or list(outcomes)
    shown = [outcome for outcome in shown if any(_drawn(outcome))]
    columns = min(COLUMNS, max(1, len(shown)))
    body: list[str] = []
    top = TOP
    for at in range(0, len(shown), columns):
        row = shown[at : at + columns]
        for column, outcome in enumerate(row):
            body += _panel(outcome, MARGIN + column * (PANEL + GAP), top)
        top += max(HEAD + ROW * len(_drawn(outcome)) + FOOT for outcome in row)
    width, height = 2 * MARGIN + columns * PANEL + (columns - 1) * GAP, top + 14
    head = [
        _text(MARGIN, 24, "Moving a state between processes of one machine", size=17, bold=True),
        _text(MARGIN, 43, "Speed: longer is better. × is against torch PGTransport."),
        _line(MARGIN + 410, 32, 46),
        _text(MARGIN + 418, 43, "the kernel reading the same bytes, nothing else"),
    ]
    foot = _text(MARGIN, height - 10, caption, size=11)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" '
            'role="img">',
            f"<title>{escape('Speed of transfuse and its peers, by case')}</title>",
            *head,
            *body,
            foot,
            "</svg>\n",
        ]
    )


def _drawn(outcome: Outcome) -> list[Result]:
    """The peers' bars, the fastest on top. A peer that failed has no bar."""
    timed = [r for r in outcome.results if r.median is not None and r.peer is not LIMIT]
    return sorted(timed, key=lambda result: result.median or 0.0)


def _panel(outcome: Outcome, left: float, top: float) -> list[str]:
    results, limit = _drawn(outcome), outcome.median(LIMIT)
    # The full width is the fastest thing here, the limit or a peer.
    best = min(r.median for r in results if r.median)
    best = min(best, limit) if limit else best
    start, length = left + LABEL, PANEL - LABEL - VALUE
    line = start + length * best / limit if limit else None
    lines = [_text(left, top + 20, outcome.case.full_title, size=13, bold=True)]
    for index, result in enumerate(results):
        assert result.median is not None
        y, ours = top + HEAD + index * ROW, result.peer in OURS
        size = max(1.5, length * best / result.median)
        fill, ink = (OURS_COLOR, OURS_COLOR) if ours else (BAR, TEXT)
        value = duration(result.median) + times(outcome.speed(result))
        at = start + size + 6
        # Keep the text clear of the line.
        at = line + 6 if line and at - 6 < line < at + WIDTH * len(value) else at
        lines += [
            _text(start - 8, y + 10, label(result.peer), end=True, color=ink, bold=ours),
            f'<rect x="{start}" y="{y}" width="{size:.1f}" height="{BAR_HEIGHT}" rx="2" fill="{fill}"/>',
            _text(at, y + 10, value, size=11, color=ink, bold=ours),
        ]
    if line:
        lines.append(_line(line, top + HEAD - 4, top + HEAD + len(results) * ROW - 3))
    return lines


def times(speed: float | None) -> str:
    if speed is None:
        return ""
    return f" · {speed:.2g}×" if speed < 1 else f" · {speed:.1f}×" if speed < 10 else f" · {speed:.0f}×"


def _line(x: float, top: float, bottom: float) -> str:
    return f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="{LINE}" stroke-width="2"/>'


def label(peer: type[Peer]) -> str:
    return peer.name.replace("group route, verify=False", "group, no digests")


def _text(
    x: float, y: float, text: str, *, size: int = 12, color: str = TEXT, bold: bool = False, end: bool = False
) -> str:
    anchor = ' text-anchor="end"' if end else ""
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}"{anchor}{weight}>{escape(text)}</text>'
