"""Numbers of metrics, added up in memory, and written in the text format of Prometheus."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from itertools import product

from transfuse._errors import as_utf8
from transfuse._metrics.names import Family

#: What a server says that it sends.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Key = tuple[str, tuple[tuple[str, str], ...]]

_LINE = re.compile(r'(?P<name>[a-z_]+)(?:\{(?P<labels>(?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*)\})? (?P<value>[-+.\dA-Za-z]+)')
_LABEL = re.compile(r'([a-z]+)="((?:[^"\\\n]|\\.)*)"')
_UNESCAPED = {"\\\\": "\\", "\\n": "\n", '\\"': '"'}


class Samples:
    """The numbers of these metrics. Every thread may call every method."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = {family.name: family for family in families}
        #: By the name of a sample (``…_sum``, ``…_bucket``) and its labels.
        self._values: dict[Key, float] = {}
        self._lock = threading.Lock()

    # -- what happens

    def add(self, family: Family, amount: float = 1, /, **labels: str) -> None:
        """Count: a counter rises."""
        self._check(family, labels, "counter")
        with self._lock:
            self._add(family.name, labels, amount)

    def set(self, family: Family, value: float, /, **labels: object) -> None:
        """A gauge has this value now; a counter that somebody else counts, too."""
        told = {name: str(label) for name, label in labels.items()}
        self._check(family, told, "gauge", "counter")
        with self._lock:
            self._values[_key(family.name, told)] = value

    def observe(self, family: Family, value: float, /, **labels: str) -> None:
        """Something took this long: a histogram or a summary gets one value more."""
        self._check(family, labels, "histogram", "summary")
        with self._lock:
            for end in (*family.buckets, float("inf")) if family.kind == "histogram" else ():
                self._add(f"{family.name}_bucket", {**labels, "le": _number(end)}, float(value <= end))
            self._add(f"{family.name}_sum", labels, value)
            self._add(f"{family.name}_count", labels, 1)

    def begin(self, *families: Family) -> None:
        """Let counters, and what is like them, begin with 0: what rises from nothing has no rate."""
        for family in families:
            values = [values for values in family.labels.values() if values is not None]
            assert len(values) == len(family.labels), f"{family.name} has labels with any value"
            for some in product(*values):
                labels = dict(zip(family.labels, some, strict=True))
                if family.kind == "counter":
                    self.add(family, 0, **labels)
                    continue
                with self._lock:
                    for name in ("sum", "count"):
                        self._add(f"{family.name}_{name}", labels, 0)
                    for end in (*family.buckets, float("inf")) if family.kind == "histogram" else ():
                        self._add(f"{family.name}_bucket", {**labels, "le": _number(end)}, 0)

    def _add(self, name: str, labels: Mapping[str, str], amount: float) -> None:
        key = _key(name, labels)
        self._values[key] = self._values.get(key, 0) + amount

    def _check(self, family: Family, labels: Mapping[str, str], *kinds: str) -> None:
        assert family.kind in kinds, f"{family.name} is a {family.kind}"
        if self._families.get(family.name) is not family or labels.keys() != family.labels.keys():
            raise ValueError(f"{family.name} has the labels {list(family.labels)}, got {list(labels)}")
        for name, value in labels.items():
            allowed = family.labels[name]
            if allowed is not None and value not in allowed:
                raise ValueError(f"{family.name} has {name} in {list(allowed)}, got {value!r}")

    # -- all together

    def take(self, other: Samples) -> None:
        """Add all that the other has counted."""
        with other._lock:
            theirs = dict(other._values)
        with self._lock:
            for key, value in theirs.items():
                self._values[key] = self._values.get(key, 0) + value

    def move(self) -> Samples:
        """All that was counted, as another object; this one has counted nothing any more."""
        moved = Samples(self._families.values())
        with self._lock:
            moved._values, self._values = self._values, {}
        return moved

    def __bool__(self) -> bool:
        return bool(self._values)

    def text(self) -> str:
        """Everything, in the text format of Prometheus."""
        with self._lock:
            values = dict(self._values)
        return "".join(f"{line}\n" for line in self._lines(values))

    def _lines(self, values: Mapping[Key, float]) -> Iterator[str]:
        by_name: dict[str, list[tuple[tuple[tuple[str, str], ...], float]]] = {}
        for (name, labels), value in values.items():
            by_name.setdefault(name, []).append((labels, value))
        for family in self._families.values():
            names = _names(family)
            if not any(name in by_name for name in names):
                continue
            yield f"# HELP {family.name} {family.help}"
            yield f"# TYPE {family.name} {family.kind}"
            for name in names:
                for labels, value in by_name.get(name, ()):
                    told = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
                    yield f"{name}{{{told}}} {_number(value)}" if told else f"{name} {_number(value)}"

    @classmethod
    def read(cls, families: Iterable[Family], text: str) -> Samples:
        """What :meth:`text` has written. Raises ``ValueError`` if it is something else."""
        found = cls(families)
        known = {name for family in found._families.values() for name in _names(family)}
        for number, line in enumerate(text.splitlines(), 1):
            if line.startswith("#"):
                continue
            match = _LINE.fullmatch(line)
            if match is None or match["name"] not in known:
                raise ValueError(f"line {number} is none of ours: {line[:200]!r}")
            labels = tuple(
                (label, re.sub(r"\\.", lambda one: _UNESCAPED.get(one[0], one[0]), value))
                for label, value in _LABEL.findall(match["labels"] or "")
            )
            found._values[match["name"], labels] = float(match["value"])
        return found


def _names(family: Family) -> tuple[str, ...]:
    """The names of a metric's samples, in the order in which they are written."""
    if family.kind == "histogram":
        return tuple(f"{family.name}_{end}" for end in ("bucket", "sum", "count"))
    if family.kind == "summary":
        return f"{family.name}_sum", f"{family.name}_count"
    return (family.name,)


def _key(name: str, labels: Mapping[str, str]) -> Key:
    return name, tuple(sorted(labels.items()))


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1 << 53 else repr(float(value))


def _escaped(text: str) -> str:
    return as_utf8(text).replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
