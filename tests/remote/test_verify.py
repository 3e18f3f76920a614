"""verify: whether what lies here is what servers have, leaf by leaf, without moving it."""

from __future__ import annotations

import mmap
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

import transfuse
from serving import DEADLINE, LONG, TOKEN, Halt, big_state, servers
from shards import shard
from transfuse import Concat, serve, verify

pytestmark = pytest.mark.filterwarnings("ignore:ShardedTensor:DeprecationWarning", "ignore:.*not writable:UserWarning")


def a_state() -> dict[str, Any]:
    """Leaves of many kinds. Small ones travel in one parcel."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    large = normal(700, 1000)
    return {
        "large": large,
        "tied": large,
        "small": [normal(5) for _ in range(4)],
        "transposed": normal(30, 20).t(),
        "every_other": normal(40)[::2],
        "half": normal(33).bfloat16(),
        "complex": torch.complex(normal(6), normal(6)),
        "conjugate": torch.complex(normal(6), normal(6)).conj(),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "array": np.arange(12.0).reshape(3, 4),
        "text": "long " * 2000,
        "lr": 0.1,
        "betas": (0.9, 0.999),
        "step": 7,
        "none": None,
    }


def a_copy(state: Any) -> Any:
    """The same in memory of its own, laid out in another way: nothing is tied, all tensors are contiguous."""
    if isinstance(state, torch.Tensor):
        return state.clone(memory_format=torch.contiguous_format)
    if isinstance(state, np.ndarray):
        return state.copy()
    if isinstance(state, dict):
        return {key: a_copy(state[key]) for key in reversed(state)}
    return [a_copy(each) for each in state] if isinstance(state, list) else state


FLIPPABLE = {
    **{f"['{name}']": (name,) for name in ("large", "tied", "transposed", "every_other", "half", "complex")},
    **{f"['{name}']": (name,) for name in ("conjugate", "flags", "scalar", "array")},
    **{f"['small'][{i}]": ("small", i) for i in range(4)},
}


@pytest.fixture(scope="module")
def served() -> Any:
    with serve(a_state(), step=7) as server:
        yield server


def test_equal_states_verify_and_nothing_moves(served: transfuse.Server) -> None:
    for mine in (a_state(), a_copy(a_state()), transfuse.fetch(served.address).state):
        found = verify(served.address, mine, expected=served.version)
        assert found, found
        assert (found.leaves, found.step, found.version) == (21, 7, served.version)
        assert (found.report.bytes, found.report.route) == (0, "")
        assert found.report.verified
        assert "step 7 (" in str(found)
        assert "21 of 21 leaves" in str(found)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_one_bit_of_one_leaf_is_found_and_named(served: transfuse.Server, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(FLIPPABLE)))
    mine: Any = a_copy(a_state())
    leaf = mine
    for key in FLIPPABLE[path]:
        leaf = leaf[key]
    tensor = torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf
    memory = tensor.resolve_conj().reshape(-1).view(torch.uint8)
    if tensor.is_conj():
        pytest.fail("copies have no conjugate bit")
    at = data.draw(st.integers(0, len(memory) - 1))
    bit = 0 if tensor.dtype is torch.bool else data.draw(st.integers(0, 7))
    memory[at] ^= 1 << bit
    found = verify(served.address, mine)
    assert not found
    assert list(found.differing) == [path], found
    assert "bytes differ" in found.differing[path]
    memory[at] ^= 1 << bit
    assert verify(served.address, mine)


def double(bits: str) -> float:
    found: float = struct.unpack("<d", bytes.fromhex(bits))[0]
    return found


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])),
        (
            torch.tensor([0x7FC00000, 1], dtype=torch.int32).view(torch.float32),
            torch.tensor([0x7FC00001, 1], dtype=torch.int32).view(torch.float32),
        ),
        (0.0, -0.0),
        (double("000000000000f87f"), double("010000000000f87f")),
        (1, True),
        (1, 1.0),
        ("7", 7),
        ({1, 2}, {1, 3}),
    ],
)  # fmt: skip
def test_what_only_looks_equal_differs(there: object, here: object) -> None:
    with serve({"same": torch.ones(2), "leaf": there}) as server:
        found = verify(server.address, {"same": torch.ones(2), "leaf": here})
        assert not found
        assert list(found.differing) == ["['leaf']"]
        assert verify(server.address, {"same": torch.ones(2), "leaf": there})


def test_a_nan_equals_itself() -> None:
    state = {"w": torch.tensor([float("nan")]), "loss": float("nan")}
    with serve(state) as server:
        assert verify(server.address, a_copy(state))


def test_what_does_not_fit_differs_and_is_no_error() -> None:
    there = {
        "w": torch.ones(3),
        "b": torch.ones(2),
        "v": 1,
        "t": torch.ones(1),
        "deep": {"x": 1},
        "more": torch.ones(1),
    }
    here = {"w": torch.ones(4), "b": torch.ones(2).int(), "v": torch.ones(1), "t": 1, "deep": 5, "own": torch.ones(1)}
    with serve(there) as server:
        found = verify(server.address, here)
        assert not found
        assert {path: why.split(":")[0] for path, why in found.differing.items()} == {
            "['w']": "global shape",
            "['b']": "dtype",
            "['v']": "kind",
            "['t']": "the target cannot be filled",
            "['deep']": "source has a dict of 1, target has a leaf",
        }
        assert (found.only_here, found.only_there) == (("['own']",), ("['deep']['x']", "['more']"))
        assert "only here     ['own']" in str(found)

        grown = a_copy(there) | {"own": torch.ones(1)}
        del grown["more"]
        assert not verify(server.address, grown)
        assert not verify(server.address, grown, strict=True)
        assert verify(server.address, grown, strict=False)


def test_a_list_of_another_length() -> None:
    with serve([torch.ones(1), torch.ones(1)]) as server:
        found = verify(server.address, [torch.ones(1), torch.ones(1), torch.ones(1)])
        assert (bool(found), found.only_here) == (False, ("[2]",))
        found = verify(server.address, [torch.ones(1)])
        assert (bool(found), found.only_there) == (False, ("[1]",))


def test_nothing_is_written_and_no_permission_to_write_is_needed() -> None:
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ) as memory:
        target = torch.frombuffer(memory, dtype=torch.float32)
        with serve({"w": torch.zeros_like(target)}) as server:
            with pytest.raises(transfuse.TargetMismatch, match="cannot be written"):
                transfuse.fetch(server.address, {"w": target})
            assert verify(server.address, {"w": target})
        del target


def test_objects_are_asked_and_given_nothing() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    with serve(state, step=1) as server:
        assert verify(server.address, state)
        assert verify(server.address, model, entry="model")
        with server.mutating(), torch.no_grad():
            model.bias[0] += 1
            optimizer.param_groups[0]["lr"] = 0.5
        other = torch.nn.Linear(4, 4)
        other.load_state_dict(model.state_dict())
        with torch.no_grad():
            other.bias[0] -= 1
        found = verify(server.address, {"model": other, "optimizer": optimizer})
        assert list(found.differing) == ["['model']['bias']"]


# ------------------------------------------------------------------------------------------------- casts, rules, shards


def test_a_cast_at_the_source_is_compared_as_it_arrives() -> None:
    masters = {"w": torch.randn(300, 200), "b": torch.randn(5)}
    with serve(masters) as server:
        mine = {name: tensor.bfloat16() for name, tensor in masters.items()}
        assert verify(server.address, mine, cast=True)
        assert verify(server.address, mine).differing.keys() == {"['w']", "['b']"}
        mine["b"].view(torch.int16)[3] ^= 1
        assert list(verify(server.address, mine, cast=True).differing) == ["['b']"]


def test_what_is_widened_here_is_narrowed_to_be_compared() -> None:
    there = {"w": torch.randn(50, 40).bfloat16(), "h": torch.randn(7).half(), "b": torch.ones(3)}
    with serve(there) as server:
        mine = {"w": torch.zeros(40, 50).t(), "h": torch.zeros(7, dtype=torch.float64), "b": torch.zeros(3)}
        transfuse.fetch(server.address, mine, cast=True)
        assert verify(server.address, mine, cast=True)
        mine["w"].view(torch.int32)[3, 4] ^= 1 << 20
        assert verify(server.address, mine, cast=True).differing == {"['w']": "its bytes differ"}
        mine["w"].view(torch.int32)[3, 4] ^= 1 << 20 | 1
        why = "it holds values that torch.bfloat16 does not have"
        assert verify(server.address, mine, cast=True).differing == {"['w']": why}


@pytest.mark.parametrize("bits", [0x7FC0, 0x7FC1, 0xFF85, 0x7F80])
def test_nans_that_are_widened_here_are_equal_or_not_compared(bits: int) -> None:
    w = torch.tensor([bits, 1], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    with serve({"w": w}) as server:
        mine = {"w": torch.zeros(2)}
        transfuse.fetch(server.address, mine, cast=True)
        found = verify(server.address, mine, cast=True)
        assert not found.differing
        assert bool(found) is not bool(found.not_compared)
        assert found or torch.isnan(w[0])


def test_what_would_be_rounded_here_is_not_compared() -> None:
    with serve({"w": torch.ones(3).bfloat16(), "b": torch.ones(3)}) as server:
        found = verify(server.address, {"w": torch.ones(3).half(), "b": torch.ones(3)}, cast=True)
    assert not found
    assert not found.differing
    assert found.not_compared == {"['w']": "it arrives as torch.bfloat16, and is rounded here"}


def test_rules() -> None:
    there = {
        "model": {"gate": torch.randn(4, 8), "up": torch.randn(4, 8), "bias": torch.randn(8)},
        "other": torch.ones(1),
    }
    rules = [Concat(["model.gate", "model.up"], "gate_up"), transfuse.Rename("model.bias", "bias")]
    gate_up = torch.cat([there["model"]["gate"], there["model"]["up"]])  # type: ignore[index]
    mine = {"gate_up": gate_up, "bias": there["model"]["bias"].clone()}  # type: ignore[index]
    with serve(there) as server:
        assert verify(server.address, mine, map_path=rules)
        assert verify(server.address, mine, map_path=rules, strict=True).only_there == ("other",)
        gate_up[5, 2] += 1
        assert list(verify(server.address, mine, map_path=rules).differing) == ["['gate_up']"]
        with pytest.raises(transfuse.TargetMismatch):
            verify(server.address, mine, map_path=[Concat(["model.gate", "model.nothing"], "gate_up")])


WHOLE = torch.arange(60.0).reshape(10, 6)


def shardings() -> dict[str, list[Any]]:
    return {
        "rows": [shard(WHOLE, [0, 1], rank, Shard(0)) for rank in range(2)],
        "columns": [shard(WHOLE, [0, 1, 2], rank, Shard(1)) for rank in range(3)],
        "whole": [WHOLE.clone()],
        "replicas": [shard(WHOLE, [0, 1], rank, Replicate()) for rank in range(2)],
    }


@pytest.mark.parametrize("there", shardings())
def test_equal_states_with_other_shardings_verify(there: str) -> None:
    with ExitStack() as stack:
        some = [
            stack.enter_context(serve({"w": leaf, "step": 3, "b": torch.ones(2)}, step=3))
            for leaf in shardings()[there]
        ]
        addresses = [server.address for server in some]
        versions = set()
        for here, leaves in shardings().items():
            for leaf in leaves:
                mine = {"w": leaf, "step": 3, "b": torch.ones(2)}
                found = verify(addresses[::-1], mine)
                assert found, (here, found)
                versions.add(found.version)
                local = leaf if here == "whole" else leaf.to_local()
                local[-1, -1] += 1
                assert list(verify(addresses, mine).differing) == ["['w']"], here
        # All receivers are told one version, whichever server they name first.
        assert len(versions) == 1
        (version,) = versions
        assert version == transfuse.fetch(addresses, version=True).version
        if there in ("whole", "replicas"):
            assert {server.version for server in some} == versions


# ----------------------------------------------------------------------------------------------------------- versions


def test_who_has_step_7_while_the_server_is_at_8_is_told_both() -> None:
    w = torch.zeros(10)
    step = 7
    with serve({"w": w}, step=lambda: step) as server:
        mine = {"w": torch.ones(10)}
        installed = transfuse.fetch(server.address, mine, version=True)
        assert verify(server.address, mine, expected=installed.version)
        with server.mutating():
            step += 1
            w += 1
        found = verify(server.address, mine, expected=installed.version)
        assert not found
        assert not found.is_expected
        assert (found.step, found.expected) == (8, installed.version)
        assert found.version == server.version != installed.version
        assert "servers have  step 8 (" in str(found)
        assert "expected      step 7 (" in str(found)
        assert list(found.differing) == ["['w']"]
        # What has moved on by its step alone is another version all the same.
        transfuse.fetch(server.address, mine)
        assert not verify(server.address, mine, expected=7)
        assert verify(server.address, mine, expected=8)


@pytest.mark.parametrize("wrong", ["7", 7.5, b"x", True])
def test_what_is_expected_is_checked(wrong: object) -> None:
    with pytest.raises(TypeError, match="expected takes a Version, a step, or None"):
        verify("127.0.0.1:1", {"w": torch.ones(1)}, expected=wrong)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ what goes wrong meanwhile


def test_a_state_that_changes_meanwhile_is_told(executor: ThreadPoolExecutor) -> None:
    w, halt = torch.arange(1000.0), Halt()
    with serve({"w": w}) as server:
        future = executor.submit(verify, server.address, {"w": w.clone()}, map_path=halt, timeout=LONG)
        assert halt.reached.wait(DEADLINE)
        w[5] += 1  # Outside of mutating(), and behind the back of the source.
        halt.go_on.set()
        with pytest.raises(transfuse.SourceMutated, match="changed"):
            future.result(DEADLINE)


def test_a_source_that_dies_in_the_middle(executor: ThreadPoolExecutor) -> None:
    with servers(2, rate=None) as (fleet, addresses):
        mine = big_state()
        for chosen, dies in ((addresses, 0), (addresses[1:], 1)):
            halt = Halt()
            future = executor.submit(verify, chosen, mine, token=TOKEN, timeout=LONG, map_path=halt)
            assert halt.reached.wait(DEADLINE)
            fleet.kill(dies)
            halt.go_on.set()
            if len(chosen) > 1:
                found = future.result(DEADLINE)
                assert found, found
                assert found.version.digest is not None
            else:
                with pytest.raises(transfuse.PeerLost):
                    future.result(DEADLINE)


def test_a_closed_server_and_a_block_that_changes_the_state() -> None:
    with serve({"w": torch.ones(3)}) as server:
        with server.mutating(), pytest.raises(RuntimeError, match="being changed by this thread"):
            server.version  # noqa: B018
        assert server.version.digest is not None
    with pytest.raises(transfuse.TransfuseError, match="was closed"):
        server.version  # noqa: B018
    with pytest.raises(transfuse.PeerLost):
        verify(server.address, {"w": torch.ones(3)}, timeout=5)
