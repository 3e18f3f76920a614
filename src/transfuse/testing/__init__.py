"""Tools for testing a transport: an oracle for states, and a conformance suite for transports.

A transport is any object with ``send_checkpoint(dst_ranks, state)`` and ``recv_checkpoint(src_rank)``. A factory makes
one for a rank. If the transport's constructor takes the arguments of :class:`Factory`, the class itself is a factory::

    import pytest
    import transfuse.testing

    @pytest.mark.parametrize("case", transfuse.testing.CASES, ids=str)
    def test_conforms(case):
        case.run(MyTransport)

or, without pytest, ``print(transfuse.testing.check(MyTransport))``. Each case tests one promise to users, and its
``about`` says which. A transport that promises less chooses its cases by name::

    promised = [case for case in CASES if not case.name.startswith(("fresh/sparse/", "death/"))]
    assert_conforms(MyTransport, cases=promised)

Ranks are threads, each with a process group on gloo over 127.0.0.1. In the cases ``death/…`` ranks are processes, and
one is killed. These cases, and those that limit how many bytes are sent, look at what passes through the group's
``send`` and ``recv``. No case hangs, whatever the transport does: see ``patience`` of :func:`check`.

``transfuse.testing.ranks`` starts ranks, as threads or as processes, for tests of your own.
``assert_exact`` and ``differences`` compare a received state with the state that was sent, to the last bit.
"""

from transfuse.testing._group import Factory, Transport
from transfuse.testing._stage import Case
from transfuse.testing.conformance import CASES, Results, assert_conforms, check
from transfuse.testing.exact import assert_exact, differences

__all__ = [
    "CASES",
    "Case",
    "Factory",
    "Results",
    "Transport",
    "assert_conforms",
    "assert_exact",
    "check",
    "differences",
]
