from __future__ import annotations

import collections
import sys
import types

import pytest

from transfuse._state import class_names


class Outer:
    class Inner:
        pass


class Loud(type):
    def __getattribute__(cls, name: str) -> object:
        raise AssertionError("a metaclass hook ran")


@pytest.mark.parametrize("cls", [int, collections.OrderedDict, Outer, Outer.Inner])
def test_names_lead_back(cls: type) -> None:
    name = class_names.name_of(cls)
    assert name == f"{cls.__module__}:{cls.__qualname__}"
    assert class_names.find(name) is cls


def test_classes_without_a_name_are_refused() -> None:
    class Local:
        pass

    with pytest.raises(ValueError, match="local to a function"):
        class_names.name_of(Local)
    with pytest.raises(ValueError, match="another class has taken the name"):
        class_names.name_of(type("Outer", (), {"__module__": __name__}))
    with pytest.raises(ValueError, match="cannot be found"):
        class_names.name_of(type("Nowhere", (), {"__module__": __name__}))
    with pytest.raises(ValueError, match="cannot be found"):
        class_names.name_of(type("odd name", (), {"__module__": __name__}))
    with pytest.raises(ValueError, match="not imported"):
        class_names.name_of(type("Lost", (), {"__module__": "no.such.module"}))


@pytest.mark.parametrize(
    "name",
    [
        "",
        ":",
        "int",
        ":int",
        "builtins:",
        "builtins.int",
        "builtins:int:int",
        "builtins: int",
        "builtins:int\n",
        "builtins:int.",
        "builtins:.int",
        "builtins:1",
        "builtins:int\0",
        "builtins:int.real",  # a descriptor
        "builtins:len",
        "builtins:int.__class__",
        "os:path",
        "os:path.x",
        "../os:path",
        "x" * 600,
        "os:" + "a" * 10**6,
        b"builtins:int",
        None,
        7,
        ["builtins:int"],
    ],
)
def test_odd_names_find_nothing(name: str) -> None:
    with pytest.raises(LookupError) as caught:
        class_names.find(name)
    assert len(str(caught.value)) < 2 * class_names.MAX_NAME


def test_nothing_is_imported() -> None:
    assert "antigravity" not in sys.modules
    for name in ("antigravity:x", "antigravity:x.y", "xml.antigravity:x"):
        with pytest.raises(LookupError, match="not imported"):
            class_names.find(name)
    assert "antigravity" not in sys.modules


def test_no_hook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module(types.ModuleType):
        def __getattribute__(self, name: str) -> object:
            raise AssertionError("a module hook ran")

    module = Module("hooked")
    scope = types.ModuleType.__getattribute__(module, "__dict__")
    scope["__getattr__"] = lambda name: pytest.fail("the module's __getattr__ ran")
    scope["Loud"] = loud = Loud("Loud", (), {})
    type.__setattr__(loud, "Inner", Outer)
    monkeypatch.setitem(sys.modules, "hooked", module)
    monkeypatch.setitem(sys.modules, "blocked", None)
    assert class_names.find("hooked:Loud") is loud
    assert class_names.find("hooked:Loud.Inner") is Outer
    for name in ("hooked:Absent", "hooked:Loud.Absent", "blocked:Loud"):
        with pytest.raises(LookupError):
            class_names.find(name)


def test_objects_that_only_claim_to_be_classes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Claims:
        def __getattribute__(self, name: str) -> object:
            raise AssertionError("it was asked")

    monkeypatch.setattr(sys.modules[__name__], "claims", Claims(), raising=False)
    monkeypatch.setitem(sys.modules, "claims", Claims())
    for name in (f"{__name__}:claims", "claims:x"):
        with pytest.raises(LookupError):
            class_names.find(name)
