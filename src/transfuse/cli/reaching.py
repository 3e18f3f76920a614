"""What the addresses of a command lead to: servers, a keeper, or a directory of steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from pathlib import Path
from typing import Any

import typer
from torch import nn

import transfuse
from transfuse._errors import PeerError, UnsupportedLeaf
from transfuse._hub.sources import Reached
from transfuse._keeper.saved import StepsAddress
from transfuse._keeper.storage import WRITER_NAME, label_of
from transfuse._limits import Limits
from transfuse._remote.client import check_places, is_directory
from transfuse._state import trees
from transfuse._state.leaves.block import Block, tensor_in
from transfuse._state.leaves.dtensors import is_dtensor
from transfuse._state.manifest import Manifest
from transfuse.cli import keepers
from transfuse.cli.options import duration_of, token_of

__all__ = ["directory_of", "manifests", "reached", "resolved", "whole"]


def directory_of(where: str, step: int | None = None) -> str | None:
    """The URL of a directory of steps, for this step if it names none; None if it is none."""
    place = StepsAddress.of(where)
    if not is_directory(where):
        directory = Path(place.directory)
        if not directory.is_dir() or not any(map(_is_ours, directory.iterdir())):
            return None
        place = place._replace(directory=f"file://{directory}")
    return (place._replace(step=step) if place.step is None else place).address


def _is_ours(path: Path) -> bool:
    return path.name == WRITER_NAME or label_of(path.name) is not None


def resolved(addresses: Sequence[str], step: int | None = None) -> list[str]:
    """The addresses, with the URLs of directories in the place of their names. Nobody is asked."""
    found = [directory_of(one, step) or one for one in addresses]
    if not (len(found) == 1 and found[0].startswith(keepers.PREFIX)):
        try:
            check_places(found)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return found


@contextmanager
def reached(addresses: Sequence[str], token_file: Path | None, timeout: float) -> Iterator[Reached]:
    """The servers behind resolved addresses, and the token for them."""
    if len(addresses) == 1:
        with keepers.served(addresses[0], token_file, timeout) as (behind, token):
            yield Reached(_one_or_all(behind, token, timeout) if behind != list(addresses) else behind, token)
    else:
        yield Reached(addresses, token_of(token_file))


def _one_or_all(ranks: list[str], token: bytes | None, timeout: float) -> list[str]:
    """The ranks of a keeper that are needed. If nothing is sharded each has everything, and some of it its own."""
    if len(ranks) > 1 and not any(one.is_sharded for one in manifests(Reached(ranks, token), timeout)):
        return ranks[:1]
    return ranks


def manifests(servers: Reached, timeout: float) -> list[Manifest]:
    """The descriptions of the servers that answer. Whether these servers hold enough is known later."""
    found, last = [], None
    for address in servers.addresses:
        try:
            found.append(transfuse.peek(address, token=servers.token, timeout=duration_of(timeout)).manifest)
        except PeerError as error:
            last = error
    if not found and last is not None:
        raise last
    return found


def whole(state: Any) -> Any:
    """The state with each DTensor and Block replaced by its tensor.

    A DTensor is whole: its mesh is this process alone. :class:`UnsupportedLeaf` for a Block that is not.
    """
    root, leaves = trees.flatten(state, max_depth=Limits().max_depth)
    found = [_plain(leaf) if is_dtensor(leaf) else tensor_in(leaf) for leaf in leaves]
    for path, leaf in zip(trees.paths(root), leaves, strict=True):
        if isinstance(leaf, Block) and leaf.tensor.shape != leaf.shape:
            raise UnsupportedLeaf(path, f"{leaf} is a part; fetch from all the servers that hold parts of it")
    return state if all(map(is_, found, leaves)) else trees.unflatten(root, found)


def _plain(leaf: Any) -> Any:
    local = leaf.to_local().detach()
    return nn.Parameter(local, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else local
