"""A source lies about the step that its state is of.

Expected: a receiver that names a step takes no other, and both ends say which. A source that names none is refused too.
"""

from __future__ import annotations

import sys
from typing import Any

from attacks.peer import PARCEL, Peer, offer, pattern
from attacks.stage import Attack, Expected, main, receive

N = 2 * PARCEL


def step(number: Any) -> Any:
    def hostile(peer: Peer) -> None:
        peer.say_offer(offer(step=number))
        peer.serve(pattern(N))

    return hostile


MISMATCH = Expected("receiver", "StepMismatch", "the receiver expects step 8")
MALFORMED = Expected("receiver", "ProtocolError", "malformed offer")

ATTACKS = {
    "the step before": Attack(receive(step=8, in_place=True), step(7), MISMATCH),
    "the step after": Attack(receive(step=8), step(9), MISMATCH),
    "a negative step": Attack(receive(step=8), step(-8), MISMATCH),
    "a step of 64 bits": Attack(receive(step=8), step((1 << 64) - 1), MISMATCH),
    "a step of 64 bits, to a receiver that takes any": Attack(
        receive(), step((1 << 64) - 1), Expected("receiver", None)
    ),
    "no step": Attack(receive(step=8, in_place=True), step(None), MISMATCH),
    "no step, to a receiver that takes any": Attack(receive(), step(None), Expected("receiver", None)),
    "half a step": Attack(receive(step=8), step(8.5), MALFORMED),
    "a step in words": Attack(receive(step=8), step("8"), MALFORMED),
    "a step that is a truth": Attack(receive(step=1), step(True), MALFORMED),
}

EXPECTED = {name: attack.expected for name, attack in ATTACKS.items()}

if __name__ == "__main__":
    sys.exit(main("attacks.lying_step", sys.argv[1:]))
