"""One of several sources lies: about the state, about its memory, about its parcels, or by saying nothing.

Expected: the receive is exact, from the others. A state described in another way is outvoted; with one source against
one there is no majority, and the receive fails with the difference. What cannot be found out: a source that sends other
bytes with the digests of those (docs/design.md: digests find damage, not forgery).
"""

from __future__ import annotations

import sys
from typing import Any

from attacks.peer import (
    AGREED,
    CANCEL,
    CHECK,
    MORE,
    OFFER_TAG,
    PARCEL,
    REFUSAL,
    WANT,
    WORKING,
    Peer,
    expand,
    ints,
    manifest,
    offer,
    pack,
    pattern,
    record,
)
from attacks.stage import Attack, Expected, main, receive

N = 2 * PARCEL
#: The attacker, and one or two honest sources.
TWO, THREE = (1, 2), (1, 2, 3)


def honest_offer(**changes: Any) -> list[Any]:
    """What the other sources offer, as far as a receiver compares it."""
    return offer(manifest({"w": N}), **changes)


def says(plain: Any, seed: int = 3) -> Any:
    """Another offer than the others', and other bytes."""

    def hostile(peer: Peer) -> None:
        peer.say_offer(plain)
        peer.serve(pattern(N, seed=seed))

    return hostile


def serves(**how: Any) -> Any:
    """The same offer, and then something wrong with what comes."""

    def hostile(peer: Peer) -> None:
        peer.say_offer(honest_offer())
        peer.serve(pattern(N), **how)

    return hostile


def silent(peer: Peer) -> None:
    """It never even offers."""


def closes(peer: Peer) -> None:
    peer.close()


def refuses(peer: Peer) -> None:
    peer.say(REFUSAL, ["Spite", "why not"], tag=OFFER_TAG, note=peer.tag)


def silent_after_the_offer(peer: Peer) -> None:
    peer.say_offer(honest_offer())


def silent_after_the_want(peer: Peer) -> None:
    peer.say_offer(honest_offer())
    peer.hear()
    peer.agree()


def closes_after_the_want(peer: Peer) -> None:
    silent_after_the_want(peer)
    peer.flush()
    peer.close()


def works_for_ever(peer: Peer) -> None:
    peer.say_offer(honest_offer())
    peer.hear()
    for number in range(300):
        peer.say(WORKING, note=number)
    peer.hear_end()


def records_of_another_transfer(peer: Peer) -> None:
    peer.say_offer(honest_offer())
    peer.hear()
    peer.agree()
    peer.send(pattern(PARCEL, seed=3))
    peer.send(record(99, [0]))
    peer.hear_end()


def cancels(peer: Peer) -> None:
    peer.say_offer(honest_offer())
    peer.hear()
    peer.agree()
    peer.send(pattern(PARCEL, seed=3))
    peer.send(record(peer.transfer, [0], CANCEL))
    peer.say(REFUSAL, ["Spite", "why not"])
    peer.flush(0.5)


def takes_it_back(peer: Peer) -> None:
    """It brings other bytes with the digests of those; asked whether they hold, it says that they have changed."""
    peer.say_offer(honest_offer())
    while True:
        heard = peer.hear()
        if heard.kind == CHECK:
            peer.say(REFUSAL, ["SourceMutated", "they have changed"])
            peer.flush()
            return
        if heard.kind not in (WANT, MORE):
            return
        peer.agree()
        peer.feed(pattern(N, seed=3), expand(heard.plain[6] if heard.kind == WANT else heard.plain[0]))


def answers_nonsense(peer: Peer) -> None:
    peer.say_offer(honest_offer())
    peer.hear()
    peer.say(AGREED, b"\xc1" * 40)
    peer.hear_end()


EXACT = Expected("receiver", None, seconds=8)

ATTACKS = {
    # -- other states
    "a state of another size": Attack(receive(sources=THREE), says(offer(manifest({"w": N + 16}))), EXACT, helpers=2),
    "a state of another name": Attack(receive(sources=THREE), says(offer(manifest({"v": N}))), EXACT, helpers=2),
    "a state of another dtype": Attack(
        receive(sources=THREE), says(offer(manifest({"w": N}, dtypes=["int8"]))), EXACT, helpers=2
    ),
    "a state of another step": Attack(receive(sources=THREE), says(honest_offer(step=9)), EXACT, helpers=2),
    "one against one": Attack(
        receive(sources=TWO),
        says(offer(manifest({"v": N}))),
        Expected("receiver", "SourcesDiffer", "offers another state", seconds=8),
        helpers=1,
    ),
    # -- no states at all
    "a malformed offer": Attack(receive(sources=TWO), says(b"\xc1" * 50), EXACT, helpers=1),
    "impossible sizes": Attack(receive(sources=TWO), says(honest_offer(parcel_bytes=16)), EXACT, helpers=1),
    "a malformed manifest against one": Attack(
        receive(sources=TWO), says(offer(manifest({"w": N}, tensor_sizes=ints("q", N + 1)))), EXACT, helpers=1
    ),
    "a malformed manifest against two": Attack(
        receive(sources=THREE), says(offer(manifest({"w": N}, tensor_sizes=ints("q", -1)))), EXACT, helpers=2
    ),
    "a device that is none": Attack(
        receive(sources=TWO),
        # Devices are no part of the likeness. If the other source was described first, nobody reads this manifest, and
        # the attacker brings some of the parcels: what it has is right.
        says(offer(manifest({"w": N}, devices=["cpu:nowhere"])), seed=0),
        EXACT,
        helpers=1,
    ),
    "the smallest parcels of all, and then nothing": Attack(
        receive(sources=TWO, timeout=1.2),
        lambda peer: peer.say_offer(honest_offer(parcel_bytes=16384, burst_bytes=16384, staged_bytes=16384)),
        EXACT,
        helpers=1,
    ),
    # -- memory
    "memory of no process": Attack(
        receive(sources=TWO, same_host=True),
        # It may bring some over the group after all: what it has there is right.
        says(honest_offer(routes={"memory": pack([(1 << 22) - 1, 4096, bytes(32), ints("Q", 4096)])}), seed=0),
        EXACT,
        helpers=1,
    ),
    "impossible memory": Attack(
        receive(sources=TWO, same_host=True),
        says(honest_offer(routes={"memory": pack([0, -1, b"", b"x"])})),
        EXACT,
        helpers=1,
    ),
    # -- parcels
    "garbage": Attack(receive(sources=TWO), serves(damage=lambda number, parcel: bytes(len(parcel))), EXACT, helpers=1),
    "garbage, in place": Attack(
        receive(sources=TWO, in_place=True), serves(damage=lambda number, parcel: bytes(len(parcel))), EXACT, helpers=1
    ),
    "wrong digests": Attack(receive(sources=TWO), serves(digest=lambda number, digest: digest ^ 1), EXACT, helpers=1),
    "records of another transfer": Attack(receive(sources=TWO), records_of_another_transfer, EXACT, helpers=1),
    "a cancel": Attack(receive(sources=TWO), cancels, EXACT, helpers=1),
    "bytes that it takes back": Attack(receive(sources=TWO), takes_it_back, EXACT, helpers=1),
    "an agreement that is none": Attack(receive(sources=TWO), answers_nonsense, EXACT, helpers=1),
    # -- nothing
    "no offer": Attack(receive(sources=TWO, timeout=1.2), silent, EXACT, helpers=1),
    "a closed connection": Attack(receive(sources=TWO), closes, EXACT, helpers=1),
    "a refusal": Attack(receive(sources=TWO), refuses, EXACT, helpers=1),
    "silence after the offer": Attack(receive(sources=TWO, timeout=1.2), silent_after_the_offer, EXACT, helpers=1),
    "silence after the want": Attack(receive(sources=TWO, timeout=1.2), silent_after_the_want, EXACT, helpers=1),
    "a closed connection after the want": Attack(receive(sources=TWO), closes_after_the_want, EXACT, helpers=1),
    "signs of life for ever": Attack(receive(sources=TWO), works_for_ever, EXACT, helpers=1),
}

EXPECTED = {name: attack.expected for name, attack in ATTACKS.items()}

if __name__ == "__main__":
    sys.exit(main("attacks.one_of_several", sys.argv[1:]))
