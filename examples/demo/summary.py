"""The display at the end: both loss curves, how long each recovery took, and the transfer's report."""

from __future__ import annotations

from collections.abc import Sequence

from examples.demo.kept import Kept
from examples.demo.kept_words import RANKS, STEPS
from examples.demo.outcome import PARTS, Outcome, Recovery, mean_losses
from examples.demo.screen import Screen
from examples.demo.words import Killed
from rich import box
from rich.table import Table
from rich.text import Text

__all__ = ["conclude", "conclude_kept"]

HEIGHT = 7
#: Width of the axis labels.
LABEL = 6


def conclude(outcome: Outcome, screen: Screen) -> None:
    _plot(outcome, screen)
    _verdict(outcome, screen)
    _report(outcome, screen)
    _times(outcome, screen)


def _plot(outcome: Outcome, screen: Screen) -> None:
    """Both curves in one plot. A full point is both runs, an empty point the undisturbed run, a cross the other."""
    undisturbed, killed = mean_losses(outcome.undisturbed), mean_losses(outcome.disturbed)
    # With more steps than columns, show only some of them.
    every = -(-len(undisturbed) // max(10, screen.console.width - LABEL - 4))
    undisturbed, killed = undisturbed[::every], killed[::every]
    low, high = min(*undisturbed, *killed), max(*undisturbed, *killed)
    kills = {event.word.step // every for event in outcome.disturbed if isinstance(event.word, Killed)}

    def row_of(loss: float) -> int:
        return round((high - loss) / ((high - low) or 1.0) * (HEIGHT - 1))

    screen.say()
    for row in range(HEIGHT):
        line = Text(f"{high - (high - low) * row / (HEIGHT - 1):{LABEL}.2f} ┤", style="dim")
        for column, (one, other) in enumerate(zip(undisturbed, killed, strict=True)):
            ours, theirs = row_of(other) == row, row_of(one) == row
            if ours and theirs:
                line.append("●", "green")
            elif ours or theirs:
                line.append("×" if ours else "○", "red")
            else:
                line.append("┊" if column in kills else " ", "red")
        screen.say(line)
    screen.say(Text(" " * (LABEL + 1) + "└" + "─" * len(undisturbed), style="dim"))
    step = f"steps 0 to {outcome.settings['steps'] - 1}"
    screen.say(Text(" " * (LABEL + 2) + f"loss over {step}: ● both runs   ┊ a kill", style="dim"))


def _verdict(outcome: Outcome, screen: Screen) -> None:
    screen.say()
    workers, steps = outcome.settings["workers"], outcome.settings["steps"]
    if outcome.wrong:
        screen.say(Text(f"✗ the two runs differ ({len(outcome.wrong)} differences)", style="bold red"))
        return
    screen.say(
        Text.assemble(
            ("✓ equal bit for bit: ", "bold green"),
            f"the loss of each of {workers} workers at each of {steps} steps, and in the end weights, moments, "
            "scheduler and random number generators on every worker",
        )
    )


def _report(outcome: Outcome, screen: Screen) -> None:
    healing = outcome.healings[0]
    if not healing.reports:
        return
    report = healing.reports[0]
    rows = [row for row in report.rows() if not row[0].startswith("  ") or row[0].startswith("  from")]
    _table(screen, f"The report of worker {healing.rank}'s transfer", ("", ""), rows)


def _times(outcome: Outcome, screen: Screen) -> None:
    title = "Seconds from the kill until the step that it cut off is done"
    _table(screen, title, ["", *outcome.names], _time_rows(outcome.recoveries))
    if outcome.restart is not None:
        lost = outcome.restart.steps - 1
        workers = outcome.settings["workers"]
        healing = (
            "The healing met a second kill, and sources that were slowed down on purpose"
            if outcome.settings["chaos"]
            else "Healing starts one process and loses no step"
        )
        screen.say(
            f"{healing}; restarting starts all {workers}, on the same cores here, and repeats {lost} "
            f"{'step' if lost == 1 else 'steps'} done since the last file."
        )


def conclude_kept(kept: Kept, screen: Screen) -> None:
    """What the second act has shown."""
    screen.say()
    if not kept.is_equal:
        screen.say(Text("✗ the job that was restarted differs from the undisturbed one", style="bold red"))
        return
    screen.say(
        Text.assemble(
            ("✓ equal bit for bit: ", "bold green"),
            f"the losses of {STEPS} steps, weights and moments of {RANKS} workers after both restarts, and of the same "
            "job undisturbed",
        )
    )
    recoveries = kept.from_memory, kept.from_file
    title = "Seconds from the kill until the step that it cut off is done"
    _table(screen, title, ["", "from the keeper's memory", "from a file"], _time_rows(recoveries))
    memory, file = (recovery.steps - 1 for recovery in recoveries)
    screen.say(
        "Both are mostly the time to start Python and to import torch. Of the steps that were done already, "
        f"{memory or 'none'} had to be done again from memory, {file} from the file."
    )


def _time_rows(recoveries: Sequence[Recovery]) -> list[list[str]]:
    """A table of the recoveries' phases side by side."""
    rows = [
        [name, *(f"{one.parts[name]:.2f}" if name in one.parts else "–" for one in recoveries)]
        for name in PARTS
        if any(name in one.parts for one in recoveries)
    ]
    return [*rows, ["all", *(f"{one.seconds:.2f}" for one in recoveries)]]


def _table(screen: Screen, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if screen.console.is_terminal:
        table = Table(*head, box=box.SIMPLE_HEAD)
        table.show_header = any(head)
        for column in table.columns[1:] if any(head) else []:
            column.justify = "right"
        for row in rows:
            table.add_row(*row)
        screen.say()
        # Not as the table's own title, which rich would wrap at the table's width.
        screen.say(Text(title, style="bold"))
        screen.say(table)
        return
    lines = [head, *rows] if any(head) else rows
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    screen.say()
    screen.say(f"{title}:")
    for line in lines:
        screen.say("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
