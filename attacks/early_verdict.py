"""A receiver says that it has everything before it can.

Expected: before the first burst that ends the transfer, as after a read from memory. The source knows no better, and
its report says that nothing was sent. In the middle of bursts it is not what is due.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from attacks.peer import PARCEL, VERDICT, WANT, Peer, pattern, want
from attacks.stage import ATTACKER, Attack, Expected, Got, main, send, transport

N = 2 * PARCEL


def send_and_count(pg: Any) -> Got:
    """Nothing was sent, and the report does not say otherwise."""
    w = torch.frombuffer(bytearray(pattern(N)), dtype=torch.uint8)
    end = transport(pg)
    end.send_checkpoint([ATTACKER], {"w": w})
    assert end.report is not None
    return Got((end.report.bytes, end.report.read_bytes, end.report.parcels) == (0, 0, 0), end.report.route)


def at_once(read: Any) -> Any:
    def hostile(peer: Peer) -> None:
        peer.hear_offer()
        peer.say(VERDICT, read)
        if not isinstance(read, list) or type(read[0]) is not dict or len(read[0]) > 16:
            peer.hear_end()

    return hostile


def between_bursts(peer: Peer) -> None:
    peer.hear_offer()
    peer.say(WANT, want(N))
    peer.hear()
    peer.take_burst(answer=None)
    peer.say(VERDICT, b"")
    peer.take_burst()
    peer.say(VERDICT, [{}])
    peer.hear_end()


def with_bursts_under_way(peer: Peer) -> None:
    """It takes nothing of what it has asked for."""
    peer.hear_offer()
    peer.say(WANT, want(N))
    peer.hear()
    peer.say(VERDICT, b"")


DUE = "sent VERDICT where GOT was due"

ATTACKS = {
    "at once": Attack(send_and_count, at_once([{}]), Expected("source", None)),
    "at once, with more bytes read than there are": Attack(
        send_and_count, at_once([{"memory": 1 << 60}]), Expected("source", None)
    ),
    "at once, with less than nothing read": Attack(send_and_count, at_once([{"memory": -5}]), Expected("source", None)),
    "at once, with bytes by a route that there is not": Attack(
        send_and_count, at_once([{"": 5, "air": 7}]), Expected("source", None)
    ),
    "at once, with more routes than there can be": Attack(
        send(), at_once([{str(n): 1 for n in range(17)}]), Expected("source", "ProtocolError", "malformed verdict")
    ),
    "at once, with a number that is none": Attack(
        send(), at_once(["all"]), Expected("source", "ProtocolError", "malformed verdict")
    ),
    "at once, without a body": Attack(send(), at_once(b""), Expected("source", "ProtocolError", "malformed verdict")),
    "between bursts": Attack(send(), between_bursts, Expected("source", "ProtocolError", DUE)),
    "with bursts under way that it never takes": Attack(
        send(timeout=0.4), with_bursts_under_way, Expected("source", "PeerTimeout|ProtocolError", "")
    ),
}

EXPECTED = {name: attack.expected for name, attack in ATTACKS.items()}

if __name__ == "__main__":
    sys.exit(main("attacks.early_verdict", sys.argv[1:]))
