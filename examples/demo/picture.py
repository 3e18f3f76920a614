"""A picture: what every worker did when, both loss curves, and how long each recovery took. Plain SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from examples.demo.outcome import PARTS, Outcome, Recovery, mean_losses
from examples.demo.run import Event
from examples.demo.words import Begun, Done, Formed, Healed, Healing, Killed, Left, Ready, Started

from transfuse._sizes import human_bytes

__all__ = ["draw"]

WIDTH, MARGIN, LABEL = 960, 20, 76
LEFT, RIGHT = MARGIN + LABEL, WIDTH - MARGIN
LANE, BAR = 34, 18
PLOT, ROW = 150, 46

#: The picture has a white background of its own, so it can be read on pages of any colour.
INK, FAINT, RULE = "#24292f", "#57606a", "#d0d7de"
STEP, OTHER_STEP, CUT, KILL, START, HEAL = "#54aeff", "#80ccff", "#ffcecb", "#cf222e", "#d4a72c", "#2da44e"
COLORS = {
    "noticing": KILL,
    "ending the others": "#a40e26",
    "starting": START,
    "loading": "#8250df",
    "forming the group": "#8c959f",
    "transfer": HEAL,
    "steps": STEP,
}


def draw(outcome: Outcome) -> str:
    timeline, top = _timeline(outcome, 64)
    curves, top = _curves(outcome, top + 40)
    times, top = _times(outcome, top + 46)
    settings = outcome.settings
    heading = f"{settings['workers']} workers train; one is killed, and its peers heal it"
    about = (
        f"A transformer of {outcome.parameters / 1e6:.1f} million parameters with AdamW, data parallel on gloo, "
        f"{human_bytes(outcome.state_bytes)} of state; processes of one machine."
    )
    height = top + 36
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
            f'height="{height:.0f}" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" '
            'role="img">',
            f"<title>{escape(heading)}</title>",
            f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>',
            _text(MARGIN, 26, heading, size=17, bold=True),
            _text(MARGIN, 46, about, color=FAINT),
            *timeline,
            *curves,
            *times,
            _text(MARGIN, height - 12, outcome.caption, size=11, color=FAINT),
            "</svg>\n",
        ]
    )


# ------------------------------------------------------------------------------------------------------------- timeline


def _timeline(outcome: Outcome, top: float) -> tuple[list[str], float]:
    """One lane for each worker of the disturbed run. Returns also where the next section begins."""
    events = outcome.disturbed
    start = min(event.word.when for event in events if isinstance(event.word, Formed))
    end = max(event.word.when for event in events if isinstance(event.word, Done))
    scale = (RIGHT - LEFT) / (end - start)

    def x(when: float) -> float:
        return LEFT + max(0.0, when - start) * scale

    lines: list[str] = []
    workers = outcome.settings["workers"]
    for rank in range(workers):
        y = top + rank * LANE
        lines.append(_text(LEFT - 10, y + 13, f"worker {rank}", end=True))
        lines.append(f'<rect x="{LEFT}" y="{y + BAR / 2 - 0.5:.1f}" width="{RIGHT - LEFT}" height="1" fill="{RULE}"/>')
    # Draw sources first, so that their lines pass under the bars.
    for event in events:
        if isinstance(event.word, Healing):
            to = top + event.rank * LANE + BAR / 2
            for source in event.word.sources:
                y, at = top + source * LANE + BAR / 2, x(event.word.when) + 2
                path = f"M{at:.1f} {y:.1f} V{to:.1f}"
                lines.append(f'<path d="{path}" stroke="{HEAL}" stroke-width="1.5" stroke-dasharray="3 2"/>')
                lines.append(f'<circle cx="{at:.1f}" cy="{y:.1f}" r="3" fill="{HEAL}"/>')
    for rank in range(workers):
        lines += _lane([event for event in events if event.rank == rank], top + rank * LANE, x)
    bottom = top + workers * LANE
    lines += _seconds(end - start, scale, bottom)
    legend = [
        ("a step", STEP),
        ("a step that is cut off", CUT),
        ("starting a process", START),
        ("transfer", HEAL),
        ("SIGKILL", KILL),
    ]
    at = float(LEFT)
    for name, color in legend:
        lines.append(f'<rect x="{at:.1f}" y="{bottom + 24}" width="11" height="11" rx="2" fill="{color}"/>')
        lines.append(_text(at + 16, bottom + 34, name, size=11, color=FAINT))
        at += 34 + 6.2 * len(name)
    return lines, bottom + 40


def _lane(events: Sequence[Event], y: float, x: Callable[[float], float]) -> list[str]:
    """What one worker did: its steps, its deaths and restarts, and its healing."""
    lines: list[str] = []
    begun: Begun | None = None
    started = healing = None
    for event in events:
        match event.word:
            case Begun():
                begun = event.word
            case Done(step=step, when=when) if begun is not None:
                color = STEP if step % 2 else OTHER_STEP
                lines.append(_bar(x(begun.when), x(when), y, color, f"worker {event.rank}, step {step}", "step"))
                begun = None
            case Killed(when=when) | Left(when=when) if begun is not None:
                lines.append(_bar(x(begun.when), x(when), y, CUT, f"step {begun.step} is cut off", "cut"))
                begun = None
            case Started(when=when):
                started = when
            case Ready(when=when) if started is not None:
                lines.append(_bar(x(started), x(when), y, START, f"worker {event.rank} starts again", "start"))
                started = None
            case Healing(when=when):
                healing = when
            case Healed(when=when, report=report) if healing is not None:
                told = f"worker {event.rank} receives {human_bytes(report.bytes)}"
                lines.append(_bar(x(healing), max(x(when), x(healing) + 4), y, HEAL, told, "transfer"))
    for event in events:
        if isinstance(event.word, Killed):
            at, middle = x(event.word.when), y + BAR / 2
            lines.append(
                f'<path class="kill" d="M{at - 6:.1f} {middle - 6:.1f} l12 12 m0 -12 l-12 12" stroke="{KILL}" '
                'stroke-width="3" stroke-linecap="round"/>'
            )
    return lines


def _bar(left: float, right: float, y: float, color: str, title: str, kind: str) -> str:
    # Leave a thin gap between neighbours.
    width = max(1.0, right - left - 0.8)
    return (
        f'<rect class="{kind}" x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}" rx="1.5" fill="{color}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _seconds(seconds: float, scale: float, y: float) -> list[str]:
    """The axis of time."""
    every = next((unit for unit in (0.5, 1, 2, 5, 10, 20, 50) if seconds / unit <= 12), 100)
    lines = [f'<rect x="{LEFT}" y="{y:.1f}" width="{RIGHT - LEFT}" height="1" fill="{FAINT}"/>']
    for at in range(int(seconds / every) + 1):
        x = LEFT + at * every * scale
        lines.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="1" height="4" fill="{FAINT}"/>')
        lines.append(_text(x, y + 15, f"{at * every:g} s", size=10, color=FAINT, middle=True))
    return lines


# --------------------------------------------------------------------------------------------------------------- losses


def _curves(outcome: Outcome, top: float) -> tuple[list[str], float]:
    """Both runs in one plot: a line for the undisturbed run, a point for each step of the other."""
    undisturbed, killed = mean_losses(outcome.undisturbed), mean_losses(outcome.disturbed)
    low, high = min(*undisturbed, *killed), max(*undisturbed, *killed)
    wide = (RIGHT - LEFT) / max(1, len(undisturbed) - 1)

    def point(step: int, loss: float) -> tuple[float, float]:
        return LEFT + step * wide, top + 18 + (high - loss) / ((high - low) or 1.0) * (PLOT - 18)

    verdict = "equal bit for bit, at every step, on every worker" if not outcome.wrong else "NOT equal"
    title = f"Loss: the line is the undisturbed run, the points are the run above: {verdict}"
    lines = [_text(LEFT, top, title, bold=True)]
    for value in (high, (high + low) / 2, low):
        _, y = point(0, value)
        lines.append(f'<rect x="{LEFT}" y="{y:.1f}" width="{RIGHT - LEFT}" height="1" fill="{RULE}"/>')
        lines.append(_text(LEFT - 10, y + 4, f"{value:.2f}", size=11, color=FAINT, end=True))
    for event in outcome.disturbed:
        if isinstance(event.word, Killed):
            x, _ = point(event.word.step, low)
            lines.append(
                f'<path d="M{x:.1f} {top + 10:.1f} V{top + PLOT:.1f}" stroke="{KILL}" stroke-dasharray="4 3" '
                'stroke-width="1.5"/>'
            )
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (point(*pair) for pair in enumerate(undisturbed)))
    lines.append(f'<polyline points="{path}" fill="none" stroke="{STEP}" stroke-width="5" stroke-opacity="0.45"/>')
    for step, loss in enumerate(killed):
        x, y = point(step, loss)
        told = f"<title>step {step}: {loss:.6f}</title>"
        lines.append(f'<circle class="loss" cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{INK}">{told}</circle>')
    bottom = top + PLOT
    every = max(1, len(killed) // 12)
    lines += [
        _text(point(step, low)[0], bottom + 16, str(step), size=10, color=FAINT, middle=True)
        for step in range(0, len(killed), every)
    ]
    lines.append(_text(LEFT - 10, bottom + 16, "step", size=10, color=FAINT, end=True))
    return lines, bottom + 16


# ---------------------------------------------------------------------------------------------------------------- times


def _times(outcome: Outcome, top: float) -> tuple[list[str], float]:
    """A bar for each recovery, divided into its phases."""
    rows = list(zip(outcome.names, outcome.recoveries, strict=True))
    longest = max(recovery.seconds for _, recovery in rows)
    left = MARGIN + 170
    scale = (RIGHT - left - 60) / longest
    lines = [_text(MARGIN, top, "From the kill until the step that it cut off is done", bold=True)]
    for at, (name, recovery) in enumerate(rows):
        lines += _recovery(name, recovery, left, top + 14 + at * ROW, scale)
    bottom = top + 14 + len(rows) * ROW
    x = float(left)
    for part in PARTS:
        if any(recovery.parts.get(part, 0.0) > 0 for _, recovery in rows):
            lines.append(f'<rect x="{x:.1f}" y="{bottom:.1f}" width="11" height="11" rx="2" fill="{COLORS[part]}"/>')
            lines.append(_text(x + 16, bottom + 10, part, size=11, color=FAINT))
            x += 34 + 6.2 * len(part)
    return lines, bottom + 16


def _recovery(name: str, recovery: Recovery, left: float, y: float, scale: float) -> list[str]:
    lines = [_text(left - 10, y + 14, name, end=True)]
    x = float(left)
    for part in PARTS:
        if seconds := recovery.parts.get(part):
            title = f"<title>{escape(part)}: {seconds:.2f} s</title>"
            lines.append(
                f'<rect class="part" x="{x:.1f}" y="{y:.1f}" width="{seconds * scale:.1f}" height="{BAR}" '
                f'fill="{COLORS[part]}">{title}</rect>'
            )
            x += seconds * scale
    lines.append(_text(x + 8, y + 14, f"{recovery.seconds:.1f} s", bold=True))
    told = " · ".join(f"{part} {recovery.parts[part]:.2f}" for part in PARTS if part in recovery.parts)
    lines.append(_text(left, y + BAR + 14, told, size=11, color=FAINT))
    return lines


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    color: str = INK,
    bold: bool = False,
    end: bool = False,
    middle: bool = False,
) -> str:
    anchor = ' text-anchor="end"' if end else ' text-anchor="middle"' if middle else ""
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}"{anchor}{weight}>{escape(text)}</text>'
