"""Every attack of ``attacks/``, over a real process group: the honest end does what the attack's data says.

Each script also runs by itself: ``python -m attacks.forged_manifest``.
"""

from __future__ import annotations

import importlib
import pathlib
import pkgutil
from collections.abc import Iterator

import attacks
import pytest
from attacks.stage import Stage

#: Modules that are no attacks themselves.
SHARED = {"peer", "places", "stage", "stream_peer"}
MODULES = sorted({info.name for info in pkgutil.iter_modules(attacks.__path__)} - SHARED)
#: Attacks that make sense on several wires take turns at them. `make soak` has the rest.
ATTACKS = [
    pytest.param(
        f"attacks.{module}",
        name,
        wire,
        id=f"{module}: {name} ({wire})",
        marks=[] if number % len(attack.wires) == at else pytest.mark.soak,
    )
    for module in MODULES
    for number, (name, attack) in enumerate(importlib.import_module(f"attacks.{module}").ATTACKS.items())
    for at, wire in enumerate(attack.wires)
]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


@pytest.mark.parametrize(("module", "name", "wire"), ATTACKS)
def test_attack(module: str, name: str, wire: str, stage: Stage) -> None:
    expected = importlib.import_module(module).ATTACKS[name].expects(wire)
    result = stage.play(module, name, wire)
    assert not result.faults(expected), result


def test_false_lanes_leave_no_threads(stage: Stage) -> None:
    """What waits for a lane that never comes ends with its own deadline, after the transfer."""
    for name in (
        "a lane: that never comes",
        "on a lane: nothing",
        "lanes are to be found at silence",
        "on its lanes a source says nothing",
    ):
        stage.play("attacks.false_lanes", name, "stream")
    stage.play("attacks.false_meetings", "a source says that it has connected", "stream")
    assert stage.left(20.0) == []


@pytest.mark.parametrize("module", MODULES)
def test_script_says_what_it_expects(module: str) -> None:
    script = importlib.import_module(f"attacks.{module}")
    assert script.__doc__
    assert "Expected" in script.__doc__
    assert script.EXPECTED
    text = pathlib.Path(str(script.__file__)).read_text()
    assert f'main("attacks.{module}", sys.argv[1:])' in text
