"""``heal()``: all ranks of a group call it, and ranks that are behind get the state of those that are not.

every rank          its step, or that it has nothing             one round: all know who is behind
the newest          send to all that are behind, at once
those behind        receive from all of these; before a target   a vote of those behind: all may write, or none
                    is written, everything has been planned
every rank          how it went                                  an agreement: all return the step, or raise one error
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, SupportsIndex, Unpack

import msgspec
import torch

from transfuse import _arguments, _errors
from transfuse._errors import StateError, TornState, TransfuseError, as_utf8, let_go
from transfuse._job.face import device_for, group_or_default, one_manner
from transfuse._job.receipt import Receipt
from transfuse._job.state import State
from transfuse._limits import Limits
from transfuse._memory import half_healed
from transfuse._options import OptionKeywords, Options, check_names
from transfuse._report import Report, Step
from transfuse._session.threads import interrupt_behind
from transfuse._transport import PGTransport
from transfuse._wire.group import Group, ProcessGroupLike
from transfuse._wire.roll_call import Failure, RollCall, RoundResult, lost_error

logger = logging.getLogger("transfuse")

#: What a rank says of its step.
NOTHING, STEP, TORN = range(3)
#: How much of an error's text, and how many names, a rank tells the others.
MOST_CHARACTERS, MOST_NAMES = 4000, 20


@one_manner
def heal(
    state: object,
    *,
    step: SupportsIndex | None,
    load: Callable[[Any], object] | None = None,
    group: ProcessGroupLike | None = None,
    timeout: timedelta | float = 60,
    device: torch.device | str | None = None,
    **options: Unpack[OptionKeywords],
) -> Step | None:
    """Bring all ranks of a group to the newest step that one of them has. Every rank calls this.

    Each rank that is behind receives in place, from all ranks at the newest step at once. Replicas (DDP), shards
    (FSDP2, HSDP) and stages of a pipeline are alike in this: each rank gets what its own tensors need from those that
    hold it. If nobody is behind, the ranks tell each other their steps, and that is all.

    Args:
        state: what is sent, or what is received into (:class:`State` says what it can be). Its ``state_dict()`` are
            called only if somebody is behind, and then twice on every rank: tensors that lie elsewhere the second time
            are copies. An object for which something could not land in place (moments of a new optimizer, copies, a
            value that differs) gets it by its ``load_state_dict``, after everything has landed. What nobody takes is an
            error that names it, before anything is written.
        step: the step that this rank's state is at. None: this rank has nothing.
        load: for a ``state`` that is a callable: called with the whole state on ranks that were behind.
        group: a process group of all ranks that take part, with a backend for main memory (gloo). None: the default
            group.
        timeout: how long any of it may go without progress, as a timedelta or in seconds. It must allow for the time
            between the first rank's call and the last one's, and for the state's own calls.
        device: where the backend wants its tensors, as for :class:`PGTransport`. None: the CPU, or what the group's
            backend needs.
        **options: all options of :class:`PGTransport`. DTensors that arrive fresh are on a mesh of the target's own
            unless ``mesh`` says otherwise.

    Returns:
        The newest step, the same on all ranks, with the :class:`Report` of this rank's transfer as its ``report``. None
        if no rank has anything: then nothing was called or touched.

    If anything fails, or a rank is lost, all others raise one error: the same class and text. The text says which ranks
    hold the new step all the same, and which are half-written; on those ``error.torn`` lists the leaves. With
    ``atomic=True`` no target is written before everything has arrived on all ranks that are behind. A rank that was
    left half-written counts as one that has nothing, until it has been healed or its tensors were written to. After a
    loss the group is of no more use: make a new one.
    """
    check_names(heal, options, OptionKeywords)
    given, said = State.of(state, load), _arguments.check_step(step)
    pg = group_or_default(group, "heal")
    healing = _Healing(pg, timeout, device_for(pg, device), given, options)
    try:
        return healing.run(said)
    except BaseException as error:
        if isinstance(error, TransfuseError):
            error.report = healing.report
        del healing
        let_go(error)
        raise


#: What a rank that was behind holds in the end.
AS_IT_WAS, TOUCHED, WHOLE = range(1, 4)


class _Word(Failure, frozen=True):
    """The outcome of one rank. A source that succeeded sends an empty word."""

    #: Whether the error is only a consequence of what other ranks tell.
    follows: bool = False
    #: What it holds, if it was behind, and of which step.
    holds: int = 0
    step: int = 0
    #: Leaves that may be half-written.
    torn: list[str] = msgspec.field(default_factory=list)
    #: What the error's class has beside its text.
    attributes: dict[str, str | int | list[str]] = msgspec.field(default_factory=dict)


class _VotedDown(TransfuseError):
    """Some other rank that is behind cannot receive. This rank has not been touched."""


class _NoPlan(TransfuseError):
    """Some rank was lost before this rank knew who is behind."""


class _OthersLeft(TransfuseError):
    """Some rank was interrupted before it took part in the transfer."""


_decode = msgspec.msgpack.Decoder(_Word).decode
_decode_step = msgspec.msgpack.Decoder(tuple[int, int]).decode


class _Healing:
    """One call of :func:`heal`."""

    def __init__(
        self,
        pg: ProcessGroupLike,
        timeout: timedelta | float,
        device: torch.device,
        state: State,
        options: OptionKeywords,
    ) -> None:
        self._pg, self._timeout, self._device = pg, _arguments.duration(timeout), device
        self._state, self._options = state, options
        # Before the others are told anything.
        _arguments.check_group(pg)
        Options(**options).check(self._timeout, Limits.from_environment(), in_place=True)
        self._calls = RollCall(Group(pg, device), self._timeout.total_seconds(), "healing")
        #: Of this rank's transfer, if there was one.
        self.report: Report | None = None
        self._behind: list[int] = []
        self._newest = 0
        self._target: object = None
        self._receipt: Receipt | None = None
        self._voted = False
        #: Whether a transport tells the others if this rank is interrupted; and whether this rank has seen one leave.
        self._talks = self._saw_leave = False
        #: Whether this rank has everything that it was behind in, and whether the state's objects have taken it.
        self._landed = self._loaded = False
        #: What an earlier heal has left here: the state that was looked at, its torn leaves; what state_dict() raised.
        self._looked_at: list[object] = []
        self._torn: tuple[str, ...] = ()
        self._unasked: BaseException | None = None
        #: What all ranks have agreed on, if that had to be done before the transfer had ended.
        self._agreed_early: RoundResult | None = None

    def run(self, said: int | None) -> Step | None:
        try:
            self._calls.begin()
            step = self._run(said)
            # From now on the caller knows what is in the state.
            for state in self._looked_at:
                half_healed.forget(state)
            return None if step is None else Step(step, self.report)
        except BaseException as error:
            interrupt = interrupt_behind(error)
            if interrupt is None:
                raise
            # Ctrl-C, perhaps. The others are told, and not waited for.
            self._calls.say_last(self._describe(interrupt), leaves=not self._talks)
            raise interrupt from None
        finally:
            self._calls.end()

    def _run(self, said: int | None) -> int | None:
        calls, began = self._calls, time.monotonic()
        failure: BaseException | None = None
        words = calls.open(msgspec.msgpack.encode(self._truth(said)))
        if len(words) < calls.size or calls.left:
            failure = self._unasked or _NoPlan("some ranks have not said how far they are")
        else:
            told = {rank: _decode_step(word) for rank, word in words.items()}
            steps = {rank: step for rank, (kind, step) in told.items() if kind == STEP}
            torn = [rank for rank, (kind, _) in told.items() if kind == TORN]
            self._newest = max(steps.values(), default=0)
            self._behind = [rank for rank in range(calls.size) if rank not in steps or steps[rank] != self._newest]
            if not self._behind:
                return self._newest
            if not steps and not torn:
                if calls.rank == 0 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
                    logger.warning(
                        "torchrun has started all ranks again, and none has a state that could heal the others: the "
                        "job begins anew. transfuse.keep() holds its state over such restarts"
                    )
                return None
            if not steps:
                # Nobody has anything to send, and some ranks that had something are half-written.
                self._behind = []
                if calls.rank in torn:
                    failure = self._unasked or _torn_state(self._torn)
        calls.listen()
        if failure is None and self._behind:
            failure = self._take_part()
        self._end(failure)
        if self._landed:
            sources = [str(rank) for rank in range(calls.size) if rank not in self._behind]
            logger.warning(
                "rank %d was healed: step %d from rank%s %s in %.2f s",
                calls.rank,
                self._newest,
                "s" * (len(sources) > 1),
                ", ".join(sources),
                time.monotonic() - began,
            )
        return self._newest

    def _truth(self, said: int | None) -> tuple[int, int]:
        """What this rank has: what the caller says, unless an earlier heal that failed has left something else."""
        if half_healed.has_notes():
            try:
                state = self._state.tree()
                truth = half_healed.look(state)
            except BaseException as error:  # Also Ctrl-C: the others wait for this rank's first word.
                self._unasked = error
                return TORN, 0
            self._looked_at.append(state)
            if truth.torn:
                self._torn = truth.torn
                logger.warning(
                    "%s is not whole here: a heal that failed left %d leaves torn",
                    "the state" if said is None else f"step {said}",
                    len(truth.torn),
                )
                return TORN, 0
            if truth.step is not None and truth.step != said:
                logger.warning("this rank holds step %d, not %s: a failed heal() came so far", truth.step, said)
                return STEP, truth.step
        return (NOTHING, 0) if said is None else (STEP, said)

    # ---------------------------------------------------------------------------------------------- the transfer

    def _take_part(self) -> BaseException | None:
        """Send or receive. Returns what went wrong on this rank."""
        calls = self._calls
        calls.before_break_off(self._speak_early)
        try:
            with calls.pulsing():
                if calls.rank in self._behind:
                    self._receive()
                else:
                    self._send()
            if self._landed and self._receipt is not None:
                self._receipt.load(self._target)
            self._loaded = self._landed
        except BaseException as error:
            return error
        return None

    def _send(self) -> None:
        with self._make_transport(None) as transport:
            try:
                self._talks = True
                transport.send(self._behind, self._ask_to_send, step=self._newest, watch=self._watch)
            finally:
                self.report = transport.report

    def _receive(self) -> None:
        sources = [rank for rank in range(self._calls.size) if rank not in self._behind]
        transport, permit = None, None
        try:
            mesh = None
            try:
                self._receipt = Receipt(self._state, self._ask)
                self._target, mesh = self._receipt.target, self._receipt.mesh()
                permit = partial(self._receipt.permit, options=self._options, vote=self._vote)
            except BaseException as error:
                transport = self._make_transport(_raises(error))  # It tells the sources.
            else:
                transport = self._make_transport(lambda: self._target, mesh)
            with transport:
                self._talks = True
                self._target = transport.receive(sources, step=self._newest, permit=permit, watch=self._watch)
            self._landed = True
        except BaseException as error:
            if not self._voted and isinstance(error, Exception):
                self._vote(error)
            torn = () if transport is None else transport.torn
            if torn:
                half_healed.note_torn(self._target, torn)
            raise
        finally:
            if transport is not None:
                self.report = transport.report

    def _watch(self) -> None:
        """Do not wait in a transfer for a rank that was interrupted before it took part."""
        if self._calls.left and not self._saw_leave:
            self._saw_leave = True
            raise _OthersLeft(f"ranks {sorted(self._calls.left)} have left")

    def _ask(self, call: Callable[[], Any]) -> Any:
        if self._unasked is not None:
            raise self._unasked
        with self._calls.quiet():
            return call()

    def _ask_to_send(self) -> object:
        """There may be collectives in ``state_dict``, so sources call it as often as the ranks that are behind."""
        self._ask(self._state.tree)
        return self._ask(self._state.tree)

    def _vote(self, error: Exception | None) -> None:
        """Tell the others who are behind whether this rank can receive. Raises if another one cannot."""
        self._voted = True
        agreed = self._calls.agree(self._describe(error), self._behind)
        if error is None and (agreed.lost or any(_decode(word).kind for word in agreed.words.values())):
            raise _VotedDown("another rank that is behind cannot receive")

    def _make_transport(self, state_dict: Callable[[], object] | None, mesh: Any = None) -> PGTransport:
        options: Any = dict(self._options)
        if state_dict is None:
            options["map_path"] = None  # Of receivers, and needs a target.
        if options.get("mesh") is None:
            options["mesh"] = mesh
        return PGTransport(self._pg, self._timeout, self._device, state_dict, **options)

    # ---------------------------------------------------------------------------------------------------- the end

    def _end(self, failure: BaseException | None) -> None:
        """Agree with all ranks on how it went. Raises if one has failed or is lost."""
        everybody = range(self._calls.size)
        if failure is not None and not isinstance(failure, Exception):
            self._note()
            raise failure
        agreed = self._agreed_early or self._calls.agree(self._describe(failure), everybody, last=True)
        error = _error(agreed)
        if error is None:
            if self._landed:
                half_healed.forget(self._target)
            return
        self._note()
        if isinstance(failure, TransfuseError):
            error.torn = failure.torn
        if failure is not None and not isinstance(failure, _VotedDown | _NoPlan | _OthersLeft):
            raise error from failure
        raise error

    def _speak_early(self, why: str) -> None:
        """The watch is about to close this rank's connections, and nobody could be told anything afterwards."""
        is_behind = self._calls.rank in self._behind
        touched = is_behind and not self._options.get("atomic", False)
        word = _Word(
            "PeerTimeout",
            f"PeerTimeout: {why}",
            follows=True,
            holds=TOUCHED if touched else AS_IT_WAS if is_behind else 0,
            step=self._newest,
        )
        self._agreed_early = self._calls.agree(msgspec.msgpack.encode(word), range(self._calls.size), last=True)

    def _note(self) -> None:
        """Remember what is in the targets, since the caller is not told a step."""
        with suppress(TransfuseError):
            if self._loaded:
                half_healed.note_whole(self._target, self._newest)
            elif self._landed:
                half_healed.note_torn(self._target, _EveryPath())

    def _describe(self, error: BaseException | None) -> bytes:
        """What this rank tells the others of how it went."""
        if isinstance(error, _NoPlan):
            holds = AS_IT_WAS  # It may be behind: only others know.
        elif self._calls.rank not in self._behind:
            holds = 0
        elif self._landed:
            holds = WHOLE if error is None else TOUCHED
        else:
            holds = TOUCHED if getattr(error, "torn", ()) else AS_IT_WAS
        if error is None:
            return msgspec.msgpack.encode(_Word(holds=holds, step=self._newest)) if holds else b""
        kind, text, attributes = type(error).__name__, str(error), {}
        torn: list[str] = []
        if isinstance(error, TransfuseError):
            text = str(error.args[0]) if error.args else ""
            torn = [as_utf8(path) for path in error.torn[:MOST_NAMES]]
            attributes = _attributes(error)
        if self._landed:
            text = f"load() failed after everything had landed: {kind}: {text}"
            kind, attributes = "StateError", {}
        word = _Word(
            kind=kind,
            text=as_utf8(f"{kind}: {text}"[:MOST_CHARACTERS]),
            follows=isinstance(error, CONSEQUENCES) and not self._landed,
            holds=holds,
            step=self._newest,
            torn=torn,
            attributes=attributes,
        )
        return msgspec.msgpack.encode(word)


def _torn_state(torn: Sequence[str]) -> TornState:
    error = TornState(torn)
    names = ", ".join(torn[:10]) + (", …" if len(torn) > 10 else "")
    error.args = (
        f"a heal that failed left {len(torn)} leaves half-written ({names}), and no rank has a step to heal from: load "
        "a checkpoint into them, or write to them otherwise, and call heal() again",
    )
    return error


class _EveryPath(set[str]):
    """Every path."""

    def __contains__(self, path: object) -> bool:
        return True


def _raises(error: BaseException) -> Callable[[], object]:
    def state_dict() -> object:
        raise error

    return state_dict


#: Errors that a rank has because another one has failed.
CONSEQUENCES = (_VotedDown, _NoPlan, _OthersLeft, _errors.SendFailed, _errors.ReceiveFailed, _errors.PeerError)


def _error(agreed: RoundResult) -> TransfuseError | None:
    """The error of all ranks, made of nothing but what all of them have heard. None: all is well."""
    words = {rank: _decode(word) for rank, word in sorted(agreed.words.items())}
    lost = dict(sorted(agreed.lost.items()))
    failures = {rank: word for rank, word in words.items() if word.kind}
    if not lost and all(word.kind == _errors.SendFailed.__name__ for word in failures.values()):
        # Every rank that was behind has everything. So it does not matter who could not send it.
        for rank, word in failures.items():
            logger.warning("rank %d could not send to all, but the others have: %s", rank, word.text)
        return None
    causes = {rank: word for rank, word in failures.items() if not word.follows}
    causes = causes or {} if lost else causes or failures
    lines = [*(f"rank {rank}: {word.text}" for rank, word in causes.items()), *_aftermath(words)]
    if lost:
        return lost_error("healing", lost, *lines)
    return _same_class(next(iter(causes.values())), "\n  ".join(["healing failed, on all ranks:", *lines]))


def _aftermath(words: Mapping[int, _Word]) -> list[str]:
    """What the ranks that were behind hold now."""
    lines = []
    for holds, state in (
        (WHOLE, "has step {} now, whole"),
        (TOUCHED, "may be half-written"),
        (AS_IT_WAS, "is as it was"),
    ):
        for rank, word in words.items():
            if word.holds == holds:
                names = ", ".join(word.torn[:10]) + (", …" if len(word.torn) > 10 else "")
                lines.append(f"rank {rank} {state.format(word.step)}{': ' if names else ''}{names}")
    return lines


def _attributes(error: TransfuseError) -> dict[str, str | int | list[str]]:
    """What an error has beside its text, as far as it is plain: the rank, the names of leaves."""
    found: dict[str, str | int | list[str]] = {}
    for name, value in vars(error).items():
        if isinstance(value, str | int):
            found[name] = value
        elif name in ("blocks", "mismatches", "leaves"):
            found[name] = [as_utf8(one) for one in value[:MOST_NAMES]]
    return found


def _same_class(word: _Word, text: str) -> TransfuseError:
    """An error of the class that a rank has raised, if it is one of ours."""
    cls = getattr(_errors, word.kind) if word.kind in _errors.__all__ else StateError
    if issubclass(cls, _errors.SendFailed | _errors.ReceiveFailed):
        cls = TransfuseError  # Their causes have not come along.
    error: TransfuseError = cls.__new__(cls)
    error.args = (text,)
    for name, value in word.attributes.items():
        setattr(error, name, tuple(value) if isinstance(value, list) else value)
    return error
