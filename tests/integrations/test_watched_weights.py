"""Weights that note what is read of them: any view, any reader; and what is not here is brought before it is read."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from transfuse._state.leaves.layout import Box
from transfuse.integrations.watched_weights import WatchedWeight, settle, whole_box

SHAPE = (6, 4, 10)
VALUES = torch.arange(240.0).view(SHAPE)

Reader = Callable[[torch.Tensor], torch.Tensor]


def watched(here: Box | None, values: torch.Tensor = VALUES) -> tuple[WatchedWeight, list[int]]:
    """A weight of which only this box has its values, and a list of the times that the rest was brought."""
    brought: list[int] = []

    def bring(whole: torch.Tensor) -> None:
        brought.append(1)
        whole.copy_(values)

    weight = WatchedWeight(values.shape, values.dtype, here, bring)
    weight.whole.fill_(-1)
    if here is not None:
        weight.piece.copy_(values[tuple(slice(low, low + n) for low, n in zip(here.start, here.sizes, strict=True))])
    return weight, brought


def load(reader: Reader, weight: WatchedWeight) -> torch.Tensor:
    """As loaders do: a view, looked at, and copied."""
    view, plain = reader(weight.tensor), reader(VALUES)
    assert (view.shape, view.dtype, view.ndim, view.numel()) == (plain.shape, plain.dtype, plain.ndim, plain.numel())
    target = torch.zeros(plain.shape, dtype=plain.dtype)
    target.data.copy_(view)
    return target


READERS: dict[str, tuple[Reader, Box | None]] = {
    "rows": (lambda w: w.narrow(0, 2, 3), Box((2, 0, 0), (3, 4, 10))),
    "columns": (lambda w: w[..., 4:8], Box((0, 0, 4), (6, 4, 4))),
    "a box": (lambda w: w[1:3, :, 4:8], Box((1, 0, 4), (2, 4, 4))),
    "one expert, transposed": (lambda w: w[2].t()[3:5], Box((2, 0, 3), (1, 4, 2))),
    "half, transposed": (lambda w: w.transpose(1, 2).chunk(2, 1)[1], Box((0, 0, 5), (6, 4, 5))),
    "every second": (lambda w: w[::2, 1], Box((0, 1, 0), (5, 1, 10))),
    "an element": (lambda w: w[1, 2, 3], Box((1, 2, 3), (1, 1, 1))),
    "flat rows": (lambda w: w.view(24, 10)[4:8], Box((1, 0, 0), (1, 4, 10))),
    "flat rows of two": (lambda w: w.view(24, 10)[3:7], whole_box(SHAPE)),
    "split": (lambda w: torch.split(w, [2, 4])[1].mT, Box((2, 0, 0), (4, 4, 10))),
    "unbound": (lambda w: w.unbind(0)[3], Box((3, 0, 0), (1, 4, 10))),
    "made contiguous": (lambda w: w[:, 3:].contiguous().view(-1), Box((0, 3, 0), (6, 1, 10))),
    "converted": (lambda w: w[2:3].to(torch.bfloat16)[0, 1:], Box((2, 0, 0), (1, 4, 10))),
    "chosen": (lambda w: w[4:][:, [0, 2]], Box((4, 0, 0), (2, 4, 10))),
    "masked": (lambda w: w[5][w[5] > 230], Box((5, 0, 0), (1, 4, 10))),
    "computed": (lambda w: torch.cat([-w[:2].exp(), w[3:4]]), Box((0, 0, 0), (4, 4, 10))),
    "other bytes": (lambda w: w[1].view(torch.int32), Box((1, 0, 0), (1, 4, 10))),
    "nothing": (lambda w: w[2:2], None),
}


@pytest.mark.parametrize("name", READERS)
def test_what_is_read_is_noted_and_is_enough_the_next_time(name: str) -> None:
    reader, box = READERS[name]
    weight, brought = watched(whole_box(SHAPE))
    assert torch.equal(load(reader, weight), reader(VALUES))
    assert weight.log.box == box
    assert brought == []
    again, brought = watched(box)
    assert torch.equal(load(reader, again), reader(VALUES))
    assert (again.log.box, brought) == (box, [])
    # Without it, all is brought, once.
    nothing, brought = watched(None)
    assert torch.equal(load(reader, nothing), reader(VALUES))
    assert torch.equal(load(reader, nothing), reader(VALUES))
    assert brought == ([1] if box else [])


def random_view(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    for _ in range(draw.randint(1, 5)):
        if not tensor.ndim:
            break
        dim = draw.randrange(tensor.ndim)
        size = tensor.shape[dim]
        match draw.randrange(7):
            case 0 if size:
                low = draw.randrange(size)
                tensor = tensor.narrow(dim, low, draw.randint(1, size - low))
            case 1:
                tensor = tensor.transpose(dim, draw.randrange(tensor.ndim))
            case 2 if size:
                tensor = tensor.select(dim, draw.randrange(size))
            case 3:
                tensor = tensor.unsqueeze(dim)
            case 4:
                tensor = tensor.chunk(2, dim)[0]
            case 5:
                tensor = tensor.reshape(-1, *tensor.shape[2:]) if tensor.ndim > 1 else tensor
            case _:
                tensor = tensor[(slice(None),) * dim + (slice(None, None, draw.randint(1, 3)),)]
    return tensor


def test_random_views_read_what_plain_ones_do() -> None:
    for seed in range(300):
        plain = random_view(random.Random(seed), VALUES)
        weight, _ = watched(None)
        view = random_view(random.Random(seed), weight.tensor)
        assert torch.equal(torch.zeros(plain.shape).copy_(view), plain), seed
        if plain.numel():
            box = weight.log.box
            assert box is not None
            again, brought = watched(box)
            view = random_view(random.Random(seed), again.tensor)
            assert torch.equal(torch.zeros(plain.shape).copy_(view), plain), seed
            assert brought == [], seed


def test_several_reads_are_one_box() -> None:
    weight, _ = watched(whole_box(SHAPE))
    target = torch.zeros(2, 4, 10)
    target[:1] = weight.tensor[1:2]
    target[1:] = weight.tensor[4:5]
    assert weight.log.box == Box((1, 0, 0), (4, 4, 10))


def test_facts_read_nothing() -> None:
    weight, brought = watched(None)
    tensor = weight.tensor
    assert (tensor.shape, tensor.size(0), tensor.dim(), len(tensor), tensor.nbytes) == (SHAPE, 6, 3, 6, 960)
    assert (tensor.dtype, tensor.device.type, tensor.is_meta, tensor.is_contiguous()) == (
        torch.float32,
        "cpu",
        False,
        True,
    )
    assert isinstance(tensor, torch.Tensor)
    assert {tensor: 1}[tensor] == 1
    assert (weight.log.box, brought) == (None, [])


def test_what_writes_reads_first() -> None:
    """A loader may change what it was given."""
    weight, brought = watched(None)
    half = weight.tensor[3:]
    half.mul_(2)
    assert torch.equal(torch.zeros(3, 4, 10).copy_(half), VALUES[3:] * 2)
    assert brought == [1]


@pytest.mark.parametrize("shape", [(), (0, 3), (1,)])
def test_small_weights(shape: tuple[int, ...]) -> None:
    values = torch.full(shape, 3.0, dtype=torch.bfloat16)
    weight, _ = watched(None, values)
    assert torch.equal(torch.zeros(shape, dtype=torch.bfloat16).copy_(weight.tensor), values)
    assert weight.log.box == (whole_box(shape) if values.numel() else None)


def test_what_is_kept_counts_as_read() -> None:
    """``parameter.data = weight`` tells nobody."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    for here, unseen in ((whole_box(SHAPE), []), (Box((0, 0, 0), (2, 4, 10)), ["w"])):
        weight, _ = watched(here)
        log = weight.log
        parameter.data = weight.tensor
        del weight
        assert settle({"w": log}) == unseen
        assert log.box == whole_box(SHAPE)
        parameter.data = torch.zeros(1)
    weight, _ = watched(None)
    log = weight.log
    del weight
    assert (settle({"w": log}), log.box) == ([], None)
