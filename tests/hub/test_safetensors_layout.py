"""What the Hub lays out is what the safetensors library reads."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator

import pytest
import safetensors.torch
import torch

from transfuse._errors import StateError, UnsupportedLeaf
from transfuse._hub.commits import Commit, Commits, Visitor
from transfuse._hub.safetensors_layout import DTYPES, INDEX_NAME, Entry, lay_out
from transfuse._hub.sources import Layouts, LiveSource
from transfuse._remote.live_state import LiveState
from transfuse.testing.exact import assert_exact


def committed(state: object, *, prefix: str = "", max_shard_bytes: int = 1 << 30) -> Commit:
    source = LiveSource(LiveState(state, 3, 30.0), Layouts(prefix, max_shard_bytes))
    with Commits(source, 30.0).reading("main", Visitor(lambda: None)) as commit:
        assert commit is not None
        return commit


def files_of(commit: Commit) -> dict[str, bytes]:
    found = {name: commit.bytes(name) for name in commit.layout.sizes()}
    return {name: bytes(data) for name, data in found.items() if data is not None}


def read(commit: Commit) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, data in files_of(commit).items():
        if name.endswith(".safetensors"):
            # Not safetensors.torch.load, which knows fewer dtypes.
            with tempfile.NamedTemporaryFile(suffix=name) as file:
                file.write(data)
                file.flush()
                tensors |= safetensors.torch.load_file(file.name)
    return tensors


def test_every_dtype_and_shape_is_read_by_the_library() -> None:
    state = {}
    for name, dtype in DTYPES.items():
        for shape in ((), (0,), (3,), (2, 3, 5)):
            raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
            tensor = raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
            state[f"{name}.{len(shape)}.{'x'.join(map(str, shape))}"] = tensor
    found = read(committed(state))
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].shape == tensor.shape
        assert_exact(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_trees_strides_parameters_and_names() -> None:
    state = {
        "a": {"b": torch.nn.Parameter(torch.randn(4, 3)), "c": [torch.randn(2), torch.eye(5)[:, ::2]]},
        "ü 'x'": torch.arange(10).reshape(2, 5).t(),
        "k" * 500: torch.ones(1),
        "n": 5,
        "text": "left out",
        "nothing": None,
    }
    found = read(committed(state))
    assert found.keys() == {"a.b", "a.c.0", "a.c.1", "ü 'x'", "k" * 500}
    assert torch.equal(found["a.c.1"], torch.eye(5)[:, ::2])
    assert torch.equal(found["ü 'x'"], torch.arange(10).reshape(2, 5).t())


def test_tied_weights_are_there_once() -> None:
    weight = torch.randn(64, 64)
    state = {"embed": weight, "head": weight, "view": weight[:32], "turned": weight.t(), "empty": weight[:0]}
    commit = committed(state)
    (file,) = files_of(commit).values()
    assert read(commit).keys() == {"embed", "view", "turned", "empty"}
    assert len(file) < 64 * 64 * 4 * 2.5 + 1000  # once whole, once turned, and half of it
    header = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    assert header["__metadata__"] == {"head": "embed", "format": "pt"}
    # The library's own way to load tied weights knows what to do.
    model = torch.nn.ModuleDict({"embed": torch.nn.Linear(4, 4, bias=False), "head": torch.nn.Linear(4, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    assert read(committed(model.state_dict())).keys() == {"embed.weight"}


def test_shards_and_their_index() -> None:
    state = {f"w{i}": torch.full((10,), float(i)) for i in range(10)} | {"large": torch.zeros(1000)}
    commit = committed(state, max_shard_bytes=100)
    files = files_of(commit)
    index = json.loads(files.pop(INDEX_NAME))
    assert list(files) == [f"model-{i + 1:05}-of-00006.safetensors" for i in range(6)]
    assert index["metadata"]["total_size"] == 4400
    assert index["weight_map"].keys() == state.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(safetensors.torch.load(files[file])[name], state[name])


def test_many_files_are_laid_out_in_a_few_passes() -> None:
    class Counted(list[Entry]):
        passes = 0

        def __iter__(self) -> Iterator[Entry]:
            self.passes += 1
            return super().__iter__()

    # Training waits for a new layout, so its time must not grow with files times tensors.
    entries = Counted(Entry(f"w{i}", f"['w{i}']", torch.float32, (2,)) for i in range(100))
    entries.append(Entry("tied", "['tied']", torch.float32, (2,), "w50"))
    layout = lay_out(entries, 8)
    assert len(layout.files) == 100
    assert entries.passes < 10
    assert [file.name for file in layout.files if b'"tied":"w50"' in file.header] == [
        "model-00051-of-00100.safetensors"
    ]


def test_a_prefix_chooses_and_goes() -> None:
    state = {"model": {"w": torch.ones(2)}, "optimizer": {"w": torch.zeros(2, dtype=torch.complex128)}}
    assert read(committed(state, prefix="model.")).keys() == {"w"}
    with pytest.raises(StateError, match=r"no tensors whose names begin with 'nope\.'"):
        committed(state, prefix="nope.")


def test_what_the_format_cannot_hold_is_named() -> None:
    cases: list[tuple[object, str]] = [
        (torch.zeros(2, dtype=torch.complex128), r"\['x'\].*complex128, which safetensors does not have"),
        (torch.zeros(2, dtype=torch.complex64).conj(), r"\['x'\].*conjugate"),
        (torch.eye(2).to_sparse(), r"\['x'\].*not a plain tensor"),
        (torch.zeros(2, device="meta"), r"\['x'\].*meta"),
    ]
    for leaf, why in cases:
        with pytest.raises(UnsupportedLeaf, match=why):
            committed({"fine": torch.zeros(1), "x": leaf})
    with pytest.raises(UnsupportedLeaf, match=r"\['a\.b'\]: called 'a\.b', as \['a'\]\['b'\] is"):
        committed({"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)})
    with pytest.raises(UnsupportedLeaf, match="safetensors' own"):
        committed({"__metadata__": torch.zeros(1)})
    with pytest.raises(UnsupportedLeaf, match="UTF-8"):
        committed({"\ud800": torch.zeros(1)})
    with pytest.raises(StateError, match="no tensors"):
        committed({"n": 1})


def test_the_layout_is_kept_and_aligned() -> None:
    entries = [Entry(f"{i}", f"[{i}]", dtype, (3, i)) for i, dtype in enumerate(DTYPES.values())]
    layout = lay_out(entries, 50)
    for file in layout.files:
        for entry, place in zip(file.entries, file.places, strict=True):
            assert place % entry.dtype.itemsize == 0
    ends = [(file.start, file.start + file.nbytes) for file in layout.files]
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    assert layout.nbytes == ends[-1][1]
