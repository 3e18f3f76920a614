"""Steps on storage as sources: what lies in a directory is read like a state that somebody serves, without a keeper.

``file://DIR?step=300&rank=1`` is an address: the directory, and if wanted the step, and the rank of whose file alone
something is to be read. Which step it is, and that no byte of it is damaged, is known before a target is touched.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, TypeVar

from transfuse._errors import SourcesDiffer, StateError, TransfuseError
from transfuse._keeper.restored import (
    RestoredState,
    damage,
    describe_slots,
    differing_leaves,
    manifest_in,
    suspects,
)
from transfuse._keeper.slot_file import Label, SlotView
from transfuse._keeper.storage import Record, Storage, StorageTrouble, folder_of
from transfuse._remote.in_process import InProcess
from transfuse._state.manifest import Manifest

logger = logging.getLogger("transfuse")

T = TypeVar("T")
_WORD = r"(?:step|rank)=\d{1,18}"
_CHOICE = re.compile(rf"\?({_WORD}(?:&{_WORD})*)$", re.ASCII)
#: How many leaves a message names.
MAX_NAMED = 10


class StepsAddress(NamedTuple):
    """What an address of a directory says."""

    directory: str
    step: int | None = None
    #: Only what this rank has written.
    rank: int | None = None

    @classmethod
    def of(cls, address: str) -> StepsAddress:
        found = _CHOICE.search(address)
        if found is None:
            return cls(address)
        words = dict(word.split("=") for word in found[1].split("&"))
        step, rank = words.get("step"), words.get("rank")
        return cls(address[: found.start()], None if step is None else int(step), None if rank is None else int(rank))

    @property
    def address(self) -> str:
        words = [f"{name}={value}" for name, value in (("step", self.step), ("rank", self.rank)) if value is not None]
        return self.directory + ("?" + "&".join(words) if words else "")


class DamagedStep(StateError):
    """A step that cannot be used. It says which, and which of its files or leaves."""


@dataclass(frozen=True)
class SavedStep:
    """A step in a directory."""

    storage: Storage
    label: Label
    record: Record

    @property
    def step(self) -> int:
        return self.label.step

    def __str__(self) -> str:
        return f"{self.storage.where}/{folder_of(self.label)}"

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.record.files.values())

    def _open(self, ranks: Iterable[int], *, only_head: bool = False) -> dict[int, SlotView]:
        """The files of these ranks, mapped. Their heads are checked."""
        found: dict[int, SlotView] = {}
        for rank in ranks:
            fd = self.storage.open(self.label, self.record, rank, only_head=only_head)
            try:
                found[rank] = SlotView(fd, writable=False)
            finally:
                os.close(fd)
        return found

    def _check_present(self, ranks: Iterable[int]) -> None:
        missing = sorted(set(ranks) - set(self.storage.present(self.label, self.record)))
        if missing:
            raise DamagedStep(f"{self} is damaged: the files of ranks {missing} are missing, or have another size")

    @property
    def ranks(self) -> range:
        return range(self.record.world_size)

    def manifest(self, rank: int) -> Manifest:
        """What a rank's state holds. No tensor is read."""
        with self._naming():
            return manifest_in(rank, self._open([rank], only_head=True)[rank])

    def states(self, rank: int | None = None) -> dict[int, RestoredState]:
        """The states of all ranks, or of this one. The bytes of their tensors are not checked yet."""
        with self._naming():
            if rank is None:
                self._check_present(self.ranks)
                views = self._open(self.ranks)
                return {one: describe_slots(one, views) for one in self.ranks}
            self._check_present([rank])
            views = self._open([rank])
            owners = set(views[rank].brief().bundles.owners.tolist()) - {rank}
            self._check_present(owners)
            return {rank: describe_slots(rank, views | self._open(owners))}

    def check_files(self) -> None:
        """Look whether all files are there, with the right sizes and heads. No tensor is read."""
        with self._naming():
            self._check_present(self.ranks)
            self._open(self.ranks, only_head=True)

    def check_bytes(self, states: Mapping[int, RestoredState]) -> None:
        """Compare all bytes of these states with their digests."""
        if wrong := damage(list(states.values()), str(self)):
            raise DamagedStep(wrong)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, StorageTrouble) as error:
            raise DamagedStep(str(error)) from error
        except DamagedStep:
            raise
        except TransfuseError as error:
            raise DamagedStep(f"{self} is damaged: {error}") from error


def _some(leaves: Sequence[str]) -> str:
    return ", ".join(leaves[:MAX_NAMED]) + (", …" if len(leaves) > MAX_NAMED else "")


def find(place: StepsAddress, use: Callable[[SavedStep], T], step: int | None = None) -> T:
    """The result of ``use`` for the wanted step, or else for the newest one for which it does not fail.

    ``step``: as the place says, unless that says one. A step that is passed over is named in a warning.
    """
    storage = Storage.at(place.directory)
    storage.check(writes=False)
    labels = storage.labels()
    wanted = place.step if step is None else step
    if place.step is not None and wanted != place.step:
        raise ValueError(f"step={step}, and the address says step {place.step}: give one of the two")
    chosen = [label for label in labels if wanted is None or label.step == wanted][: None if wanted is None else 1]
    if not chosen:
        there = ", ".join(str(label.step) for label in labels[:MAX_NAMED]) or "none"
        what = "no step" if wanted is None else f"no step {wanted}"
        raise StateError(f"the directory {storage.where} has {what} that is whole; steps there: {there}")
    failures: list[DamagedStep] = []
    for label in chosen:
        try:
            found = use(_step_at(storage, label))
        except DamagedStep as error:
            failures.append(error)
            continue
        for failure in failures:
            logger.warning("%s. Step %d is used instead", failure, label.step)
        return found
    if len(failures) == 1:
        raise failures[0]
    raise StateError(f"no step in {storage.where} can be used:" + "".join(f"\n  {error}" for error in failures))


def _step_at(storage: Storage, label: Label) -> SavedStep:
    try:
        return SavedStep(storage, label, storage.record(label))
    except (ValueError, StorageTrouble) as error:
        raise DamagedStep(str(error)) from error


def steps(directory: str) -> Iterator[tuple[Label, SavedStep | DamagedStep]]:
    """All steps that have a record, newest first; what is said of those that are damaged."""
    storage = Storage.at(directory)
    storage.check(writes=False)
    for label in storage.labels():
        try:
            yield label, _step_at(storage, label)
        except DamagedStep as error:
            yield label, error


def unfinished(directory: str) -> list[Label]:
    """The steps without a record: somebody writes them, or has died."""
    return sorted(Storage.at(directory).unfinished(), reverse=True)


class CheckedStates(NamedTuple):
    """What is read of a step: every byte of it has been compared with its digest."""

    saved: SavedStep
    states: Mapping[int, RestoredState]


def read(place: StepsAddress, step: int | None = None, entry: str | None = None) -> CheckedStates:
    """The states of a step that together hold everything."""

    def use(saved: SavedStep) -> CheckedStates:
        states = _needed(saved, saved.states(place.rank))
        if entry is not None:
            states = _entries_of(states, entry)
        saved.check_bytes(states)
        _refuse_differing(saved, states)
        return CheckedStates(saved, states)

    return find(place, use, step)


def _needed(saved: SavedStep, states: Mapping[int, RestoredState]) -> Mapping[int, RestoredState]:
    """One rank's state if that is all there is: each rank has everything then. Otherwise all."""
    if any(one.state.manifest.is_sharded for one in states.values()):
        return states
    paths = {rank: set(one.state.manifest.paths) for rank, one in states.items()}
    all_paths = set().union(*paths.values())
    whole = next((rank for rank, some in paths.items() if some == all_paths), None)
    return states if whole is None else {whole: states[whole]}


def _entries_of(states: Mapping[int, RestoredState], entry: str) -> Mapping[int, RestoredState]:
    found = {}
    for rank, state in states.items():
        with suppress(KeyError):
            found[rank] = state.entry(entry)
    if not found:
        raise StateError(f"the state has no entry {entry[:200]!r}")
    return found


def _refuse_differing(saved: SavedStep, states: Mapping[int, RestoredState]) -> None:
    """Refuse to put together states of which nobody can say whose leaves are meant."""
    if len(states) == 1:
        return
    doubtful = suspects([one.compared() for one in states.values()])
    found = differing_leaves(one.leaf_digests(doubtful) for one in states.values()) if doubtful else []
    if found:
        raise SourcesDiffer(
            f"{saved}: {len(found)} leaves differed between the {len(states)} ranks that committed them: "
            f"{_some(found)}. Read one rank's with ?rank=0 at the end of the address, or leave them out with map_path="
        )


@contextmanager
def served(address: str, *, step: int | None, entry: str | None, seconds: float) -> Iterator[list[InProcess]]:
    """The step behind an address, served to this process itself."""
    saved, states = read(StepsAddress.of(address), step, entry)
    timeout = timedelta(seconds=seconds)
    with ExitStack() as stack:
        yield [
            # All bytes have been compared with their digests.
            stack.enter_context(
                InProcess(one.state, f"rank {rank} in {saved}", step=saved.step, timeout=timeout, verify=False)
            )
            for rank, one in states.items()
        ]


def look(address: str, step: int | None = None) -> tuple[int, Manifest]:
    """The step behind an address, and the description of its lowest rank's state. No tensor is read."""
    place = StepsAddress.of(address)
    return find(place, lambda saved: (saved.step, saved.manifest(place.rank or 0)), step)
