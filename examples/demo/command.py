"""``python -m examples.demo``: the options, the three runs one after the other, and the second act."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from examples.demo import kept
from examples.demo.crew import Crew
from examples.demo.job import size_of
from examples.demo.model import width_for
from examples.demo.outcome import Outcome, differences, healings, restart
from examples.demo.picture import draw
from examples.demo.run import Course, Kill, run
from examples.demo.screen import Screen
from examples.demo.summary import conclude, conclude_kept
from examples.demo.words import Settings

from transfuse._sizes import human_bytes
from transfuse.cli.errors import Command, Failed
from transfuse.cli.options import available_bytes
from transfuse.testing.ranks import RanksFailed

__all__ = ["app", "demo"]

#: Sizes in millions of parameters.
SIZES = {"tiny": 0.2, "small": 2.0, "medium": 10.0}
#: Memory of a worker: the part that Python and torch take, and bytes per parameter: weights, gradients, moments, sums.
PROCESS_BYTES, BYTES_PER_PARAMETER = 400 << 20, 28
#: With --chaos a healing is slowed down to this time: otherwise it would be over before a source can be killed.
CHAOS_SECONDS = 2.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.command(cls=Command)
def demo(
    workers: Annotated[int, typer.Option(min=2, max=16, help="How many processes train.")] = 4,
    victim: Annotated[int | None, typer.Option(min=0, help="Which worker is killed first.", show_default="2")] = None,
    kills: Annotated[int, typer.Option(min=1, max=10, help="How many times a worker is killed.")] = 1,
    chaos: Annotated[bool, typer.Option("--chaos", help="Kill a source in the middle of the healing as well.")] = False,
    size: Annotated[
        str, typer.Option(metavar="SIZE", help="tiny, small or medium, or millions of parameters.")
    ] = "small",
    steps: Annotated[int, typer.Option(min=4, max=1000, help="How many steps the job trains for.")] = 24,
    seed: Annotated[int, typer.Option(min=0, help="What everything random is drawn from.")] = 2026,
    same_host: Annotated[
        bool,
        typer.Option("--same-host", help="Heal out of the sources' memory, not over the group as between hosts."),
    ] = False,
    compare: Annotated[bool, typer.Option(help="Measure restarting from a file as well.")] = True,
    keeper: Annotated[bool, typer.Option(help="Let torchrun restart all workers of a second job as well.")] = True,
    picture: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw what happened.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the measurements, as JSON.")] = False,
) -> None:
    """Kill a worker of a training job, and watch its peers heal it.

    A small transformer trains on several processes of this machine, data parallel on gloo: first undisturbed; then
    again, and one worker gets SIGKILL in the middle of a step. It starts again as a fresh process, receives weights,
    optimizer, scheduler and random number generators from all its live peers at once, in place, and training goes on.
    Both runs must be the same bit for bit: every loss of every worker at every step, and the final state.
    Then the same kill once more, and everybody starts again from a file, for comparison.

    In a second act torchrun starts the workers, and all of them again when one is killed: nobody is left to heal from.
    They go on from a keeper's memory, and after another kill from a file, for comparison.

    Exit code 1 if anything differs. Takes about a minute on two cores.
    """
    began, load = time.monotonic(), os.getloadavg()[0]
    parameters = millions(size) * 1e6
    victim = check(workers, victim, kills, chaos, steps, parameters, picture)
    screen = Screen(workers, steps, quiet=as_json)
    try:
        with tempfile.TemporaryDirectory(prefix="transfuse-demo-", ignore_cleanup_errors=True) as folder:
            settings = Settings(workers, width_for(parameters), steps, seed, Path(folder), same_host)
            outcome = perform(settings, victim, kills, chaos, compare, screen, began, load)
        if picture is not None:
            picture.write_text(draw(outcome))
        conclude(outcome, screen)
        second = None
        if keeper:
            screen.say()
            screen.begin("Second act: torchrun restarts all workers when one is killed. A keeper's memory survives")
            second = kept.perform(settings.width, seed, screen)
            conclude_kept(second, screen)
    except RanksFailed as error:
        raise Failed(str(error)) from error
    screen.say(f"All of it took {time.monotonic() - began:.0f} s.")
    if as_json:
        print(json.dumps({**outcome.to_dict(), "keeper": second and second.to_dict()}, indent=2))
    if outcome.wrong:
        raise Failed("\n  ".join([f"{len(outcome.wrong)} difference(s) between the two runs:", *outcome.wrong[:10]]))
    if second is not None and not second.is_equal:
        raise Failed("the job that torchrun restarted differs from the undisturbed one")
    if chaos and outcome.killed_sources < kills:
        raise Failed("a healing was over before its source could be killed; choose a larger --size")


def perform(
    settings: Settings, victim: int, kills: int, chaos: bool, compare: bool, screen: Screen, began: float, load: float
) -> Outcome:
    """The runs, in one set of processes for as long as these live."""
    workers, steps = settings.workers, settings.steps
    parameters, state_bytes = size_of(settings.width)
    plan = tuple(Kill((victim + at) % workers, (at + 1) * steps // (kills + 1)) for at in range(kills))
    first = plan[0]
    # The first kill is half-way between two saved files, so it loses as many steps as a kill loses on average.
    every = max(2, steps // 3)
    saved = max(0, first.step - every // 2)
    saves = tuple(range(saved % every, steps, every)) if compare else ()
    rate = state_bytes / (workers - 1) / CHAOS_SECONDS if chaos else None
    screen.say(
        f"{workers} processes train a transformer of {parameters / 1e6:.1f} million parameters with AdamW, "
        f"{human_bytes(state_bytes)} of state each."
    )
    if rate is not None:
        screen.say(
            f"Each source gives {human_bytes(rate)}/s, so that a healing takes {CHAOS_SECONDS:g} s and has a middle."
        )
    with Crew(settings) as crew, screen.watching():
        screen.begin(f"Undisturbed: {steps} steps")
        undisturbed = run(crew, Course(steps), screen)
        screen.begin("The same again, and a worker is killed" + (f", {kills} times" if kills > 1 else ""))
        course = Course(steps, kills=plan, chaos=chaos, saves=saves, max_bytes_per_second=rate)
        disturbed = run(crew, course, screen)
        recovery = None
        if compare:
            screen.begin("For comparison: the same kill, and everybody starts again from a file")
            course = Course(first.step + 1, begin=saved, remedy="restart", kills=(first,))
            recovery = restart(run(crew, course, screen))
    return Outcome(
        {
            "workers": workers,
            "steps": steps,
            "kills": kills,
            "chaos": chaos,
            "seed": settings.seed,
            "same_host": settings.same_host,
            "max_bytes_per_second": rate,
        },
        parameters,
        state_bytes,
        undisturbed,
        disturbed,
        healings(disturbed, workers),
        recovery,
        time.monotonic() - began,
        load,
        differences(undisturbed, disturbed),
    )


# -------------------------------------------------------------------------------------------------------------- options


def millions(size: str) -> float:
    try:
        value = SIZES[size] if size in SIZES else float(size)
    except ValueError:
        value = 0.0
    if not 0.01 <= value <= 1000:
        raise typer.BadParameter(f"{size!r} is neither {', '.join(SIZES)} nor from 0.01 to 1000", param_hint="--size")
    return value


def check(
    workers: int, victim: int | None, kills: int, chaos: bool, steps: int, parameters: float, picture: Path | None
) -> int:
    """Check the options now rather than in the middle. Return the victim."""
    if chaos and workers < 3:
        raise typer.BadParameter("--chaos kills a source while another one is left: it needs 3", param_hint="--workers")
    if steps < 2 * (kills + 1):
        raise typer.BadParameter(f"{kills} kills need at least {2 * (kills + 1)} steps", param_hint="--steps")
    chosen = min(2, workers - 1) if victim is None else victim
    if chosen >= workers:
        raise typer.BadParameter(f"there are workers 0 to {workers - 1}", param_hint="--victim")
    if picture is not None and picture.is_dir():
        raise Failed(f"{picture} is a directory; name a file in it")
    if picture is not None and not os.access(picture if picture.exists() else picture.parent, os.W_OK):
        raise Failed(f"{picture} cannot be written")
    needed, available = workers * (PROCESS_BYTES + BYTES_PER_PARAMETER * parameters), available_bytes()
    if available is not None and available < needed:
        raise MemoryError(
            f"{workers} workers with {parameters / 1e6:g} million parameters need about {human_bytes(needed)} of "
            f"memory, {human_bytes(available)} are available; choose fewer with --workers or --size"
        )
    return chosen
