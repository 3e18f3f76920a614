"""Parcels that are held aside: they land in memory of their own, as they travel, until the targets may be written.

:class:`HeldLanding` stands in front of a plan that lands in targets. Every region that has a place in a target lands
here instead, in the order in which it travels; a region that has none lands where the plan says. :meth:`install` then
writes everything that is held into the targets of the plan.

The memory is a range of addresses that has room for every parcel. The kernel gives pages to it where something lands,
and only there. So a parcel that a comparison has found in the targets already takes no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch

from transfuse._errors import LimitExceeded, StateError, some_of
from transfuse._memory import device_copies, packing, streams, vm
from transfuse._memory.arena import reserve
from transfuse._memory.building import Builder
from transfuse._memory.device_copies import PinnedPair
from transfuse._memory.digest import WIDE_BYTES, WideDigests, wide_digest_of
from transfuse._memory.fresh import FreshMemory, HeldMemory, MemorySupply
from transfuse._memory.landing import Built, Landing
from transfuse._memory.packing import LARGEST_ITEM, RegionPlace
from transfuse._memory.patches import Patch, apply, apply_all, bytes_of
from transfuse._state.leaves import dense
from transfuse._state.leaves.codec import BuildContext
from transfuse._state.leaves.registry import Registry
from transfuse._state.region import Ints
from transfuse._state.tensors import Bools


class HeldLanding(Landing):
    """Lands parcels aside that a plan would land in targets. All numbers are those of the plan."""

    def __init__(self, plan: Landing, supply: MemorySupply, *, delta: bool) -> None:
        """``delta``: only a part may have to land."""
        self.plan = plan
        self.manifest, self.cut, self.shares = plan.manifest, plan.cut, plan.shares
        #: Which regions are held, and which parcels have such regions.
        self._aside = plan.in_targets
        self.of_targets: Bools = ~self.cut.of_all_regions(~self._aside)
        #: Which parcels are held on the wire's device, because their targets lie there.
        self._there = self.of_targets & self.cut.of_all_regions(self._on(supply.device) | ~self._aside)
        #: How many bytes each takes, with room for items of any size.
        self._sizes = np.where(self.of_targets, -(-self.cut.nbytes // LARGEST_ITEM) * LARGEST_ITEM, 0)
        self._limits = supply.limits
        #: Patches of parcels in the targets that are held in the place of these parcels.
        self._patches: dict[int, Patch] = {}
        if not delta:
            self.check_room(~self.of_targets)
        there, here = int(self._sizes[self._there].sum()), int(self._sizes[~self._there].sum())
        held = None if supply.kept is None else supply.kept.held
        if held is None or (held.here.numel(), held.there.numel()) != (max(here, 1), there):
            try:
                held = HeldMemory(
                    reserve(here, whole=not delta), torch.empty(there, dtype=torch.uint8, device=supply.device)
                )
            except RuntimeError as error:
                raise LimitExceeded(f"no room for {here + there} bytes that are held aside: {error}") from error
        self._held = held
        #: Once everything is here: which parcels are not held, because the targets have them.
        self.kept: Bools = np.zeros(len(self.cut), dtype=bool)
        #: The digests of the parcels that a comparison has found in the targets: 16 bytes each.
        self._digests = np.zeros(len(self.cut), dtype=f"V{WIDE_BYTES}")
        self.begin()

    def _on(self, device: torch.device) -> Bools:
        """Which regions have targets on this accelerator, and nowhere else."""
        result: Bools = np.zeros(len(self.cut.regions), dtype=bool)
        if device.type != "cpu":
            for region in np.flatnonzero(self._aside & (self.plan.addresses == 0)).tolist():
                result[region] = all(place.view.device == device for place in self.plan.places(region))
        return result

    def check_room(self, kept: Bools) -> None:
        """Raise if more has to be held than may be allocated. ``kept``: parcels that the targets have, or may have."""
        patches = sum(len(patch.changes) for number, patch in self._patches.items() if kept[number])
        fresh, aside = self.plan.memory.nbytes, int(self._sizes[~kept].sum()) + patches
        if fresh + aside > self._limits.max_receive_bytes:
            raise LimitExceeded(
                f"{aside} bytes have to be held aside until they are installed, and {fresh} bytes arrive fresh: more "
                f"than max_receive_bytes={self._limits.max_receive_bytes}; raise it, or receive in place (without "
                "atomic=True and wait=False)"
            )

    @property
    def nbytes(self) -> int:
        """How many bytes are held, once everything is here."""
        patches = sum(len(patch.changes) for number, patch in self._patches.items() if self.kept[number])
        return int(self.cut.nbytes[self.of_targets & ~self.kept].sum()) + patches

    @cached_property
    def _begins(self) -> Ints:
        """For each parcel, where in its memory it begins."""
        result = np.zeros(len(self.cut), dtype=np.int64)
        for some in (self._there, ~self._there):
            result[some] = np.cumsum(self._sizes[some]) - self._sizes[some]
        return result

    @cached_property
    def _first(self) -> Ints:
        """For each region, its parcel: the first of several, which lie one after another."""
        last = np.searchsorted(self.cut.first, np.arange(len(self.cut.regions)), side="right") - 1
        return np.searchsorted(self.cut.first, self.cut.first[last], side="left")

    @cached_property
    def _starts(self) -> Ints:
        """For each region, where in its memory it begins."""
        result: Ints = self._begins[self._first] + self.cut.position
        return result

    def _memory_of(self, parcel: int) -> torch.Tensor:
        return self._held.there if self._there[parcel] else self._held.here

    # -- where regions land

    @cached_property
    def addresses(self) -> Ints:
        here = np.where(self._there[self._first], 0, self._starts + self._held.here.data_ptr())
        return np.where(self._aside, here, self.plan.addresses)

    @cached_property
    def has_single_place(self) -> Bools:
        return self._aside | self.plan.has_single_place

    @cached_property
    def convert(self) -> Bools:
        return self.plan.convert & ~self._aside

    @property
    def held(self) -> Bools:
        return self.plan.held

    @property
    def in_targets(self) -> Bools:
        return np.zeros(len(self.cut.regions), dtype=bool)

    @property
    def also_fresh(self) -> Sequence[int]:
        return ()

    def run(self, region: int, low: int, high: int) -> torch.Tensor | None:
        if not self._aside[region]:
            return self.plan.run(region, low, high)
        start = int(self._starts[region])
        return self._memory_of(self._first[region])[start + low : start + high]

    def places(self, region: int) -> list[RegionPlace]:
        if not self._aside[region]:
            return self.plan.places(region)
        item = int(self.cut.regions.item[region])
        offset, count = int(self._starts[region]) // item, int(self.cut.regions.nbytes[region]) // item
        storage = self._memory_of(self._first[region]).untyped_storage()
        return [RegionPlace(dense.over(storage, dense.ITEM_TYPES[item], offset, (count,), (1,)))]

    def fresh_places(self, region: int) -> list[RegionPlace]:
        return self.plan.fresh_places(region)

    def scratch(self, leaf: int) -> tuple[list[torch.Tensor], list[tuple[int, RegionPlace]]]:
        return self.plan.scratch(leaf)

    def tensors_of(self, regions: Bools) -> Bools:
        return self.plan.tensors_of(regions)

    # -- tensors and leaves

    @property
    def placed(self) -> Bools:
        return self.plan.placed

    @property
    def leaf(self) -> Ints:
        return self.plan.leaf

    @property
    def paths(self) -> Sequence[str]:
        return self.plan.paths

    def targets(self, tensors: Ints) -> tuple[list[torch.Tensor], list[object]]:
        return self.plan.targets(tensors)

    @property
    def fingerprint(self) -> int:
        return ~self.plan.fingerprint  # What lies aside is not where the plan alone would land it.

    @property
    def memory(self) -> FreshMemory:  # type: ignore[override]
        return self.plan.memory._replace(held=self._held)

    # -- what has been written

    @property
    def writes_targets(self) -> bool:
        return False

    def torn(self) -> tuple[str, ...]:
        return self.plan.torn()

    def bump_versions(self) -> None:
        self.plan.bump_versions()

    # -- what the targets have already

    @property
    def before(self) -> Landing:
        return self.plan

    def keep_digests(self, numbers: Ints, digests: WideDigests) -> None:
        """Remember digests of parcels as the targets have them: :meth:`changed` compares them again."""
        self._digests[numbers] = digests

    def hold_patches(self, patches: Sequence[Patch], seconds: float) -> Bools:
        """Hold patches in the place of parcels. Return which parcels have the digests that are due with them."""
        right = apply_all(self.cut, self.plan, patches, seconds, writes=False)
        self._patches.update({patch.number: patch for patch, good in zip(patches, right, strict=True) if good})
        return right

    @property
    def patched(self) -> Bools:
        """Which parcels lie in the targets and have a patch that is held aside."""
        result: Bools = np.zeros(len(self.cut), dtype=bool)
        result[list(self._patches)] = True
        return result

    def _unfold(self, number: int) -> None:
        """Hold a parcel in the place of its patch."""
        patch, buffer = self._patches.pop(number), torch.empty(int(self.cut.nbytes[number]), dtype=torch.uint8)
        packed = packing.pack(self.plan, self.cut, number, buffer)
        apply(patch.changes, bytes_of(packed))
        if wide_digest_of(packed) != patch.due:
            raise StateError(
                f"{some_of(self._leaves_of([number]))} changed while the rest arrived, and delta=True needs what they "
                "had. Nothing was written; fetch again"
            )
        packing.unpack(self, self.cut, number, packed)
        self.kept[number] = False

    def _leaves_of(self, numbers: Sequence[int]) -> list[str]:
        return self.plan.paths_of(sorted({extent.region for n in numbers for extent in self.cut.extents(n)}))

    def changed(self, seconds: float) -> list[str]:
        """Paths of the leaves in which parcels that were kept are no longer what they were."""
        numbers, addresses = np.flatnonzero(self.kept), packing.addresses_of(self.plan, self.cut)
        runs, others = numbers[addresses[numbers] > 0], numbers[addresses[numbers] == 0]
        now = dict(zip(others, packing.wide_digests_of(self.cut, self.plan, others.tolist(), seconds), strict=True))

        def work(some: Iterator[tuple[int, int, int]]) -> None:
            for number, address, nbytes in some:
                now[number] = wide_digest_of((address, nbytes))

        # What has an address is hashed there, without a tensor for each parcel: the caller stands still.
        columns = runs.tolist(), addresses[runs].tolist(), self.cut.nbytes[runs].tolist()
        vm.share_out(list(zip(*columns, strict=True)), work, min(vm.threads(), len(runs) // 8), "transfuse-hash")
        found = np.frombuffer(b"".join(map(now.__getitem__, numbers.tolist())), dtype=self._digests.dtype)
        # An install that was interrupted may have applied some patches already.
        same = (found == self._digests[numbers]) | (found == self._due(numbers))
        differ = numbers[~same]
        return self._leaves_of(differ.tolist())

    def _due(self, numbers: Ints) -> WideDigests:
        """The digests of parcels in the targets once their patches are applied; without one as they were."""
        result = self._digests[numbers]
        for i, number in enumerate(numbers.tolist()):
            if number in self._patches:
                result[i : i + 1] = np.frombuffer(self._patches[number].due, dtype=result.dtype)
        return result

    # -- the result

    def work_ahead(self, build_context: BuildContext, registry: Registry) -> None:
        pass  # What is examined is known when it is known what was kept.

    def build(self, builder: Builder) -> Built:
        """Build the state, and examine what is held. Leaves in targets have their old bytes until :meth:`install`."""
        for region in self.plan.also_fresh:
            for place in self.plan.fresh_places(region):
                self._put(region, place)
        built = self.plan.build(builder)
        for leaf, _ in built.settling:
            if builder.checks_data(leaf):
                tensors, places = self.plan.scratch(leaf)
                for region, place in places:
                    self._put(region, place)
                builder.examine(leaf, tensors)
        return built

    def _put(self, region: int, place: RegionPlace) -> None:
        """Copy what is held of a region to a place."""
        first = int(self._first[region])
        for number in range(first, int(np.searchsorted(self.cut.first, self.cut.first[first], side="right"))):
            if self.kept[number] and number in self._patches:
                self._unfold(number)
            for extent in () if self.kept[number] else self.cut.extents(number):
                run = self.run(*extent[:3]) if extent.region == region else None
                if run is not None:
                    packing.put(place, extent._replace(position=0), run)

    def install(self, seconds: float) -> None:
        """Write what is held into the targets. May be called again after an error.

        ``seconds``: how long a copy to a device may be under way.
        """
        plan = self.plan
        ranges = self.cut.ranges(np.flatnonzero(self.of_targets & ~self.kept))
        region, aside = ranges.region, self._aside[ranges.region]
        straight = aside & (plan.addresses[region] > 0)
        plan.touch(np.unique(region[aside]))
        self._copy_runs(region[straight], ranges.low[straight], ranges.nbytes[straight])
        self._unpack(np.unique(ranges.parcel[aside & ~straight]).tolist(), seconds)
        patches = [patch for number, patch in self._patches.items() if self.kept[number]]
        right = apply_all(self.cut, plan, patches, seconds)
        if not right.all():
            leaves = self._leaves_of([patch.number for patch, good in zip(patches, right, strict=True) if not good])
            raise StateError(
                f"{len(leaves)} leaves were changed by somebody else while they were installed, and are neither old "
                f"nor new now: {some_of(leaves)}; fetch them again"
            )

    def _copy_runs(self, region: Ints, low: Ints, nbytes: Ints) -> None:
        """Copy ranges of regions that are one run of main memory in the targets."""
        theirs, mine = (vm.ranges(place.addresses[region] + low, nbytes) for place in (self, self.plan))
        try:
            vm.copy(theirs, mine, workers=vm.threads(), is_mapped=True)
        except OSError as error:
            packing.check_reach(self.plan, region, mine, write=True)
            raise StateError(f"the targets could not be written: {error}") from error

    def _unpack(self, numbers: Sequence[int], seconds: float) -> None:
        """Write the regions of these parcels that are no runs of main memory in the targets."""
        others = self._aside & (self.plan.addresses == 0)
        here: list[device_copies.Run] = []
        there: list[device_copies.Run] = []
        rest: list[int] = []
        for number in numbers:
            pairs = [
                (self.plan.run(*extent[:3]), self.run(*extent[:3]))
                for extent in self.cut.extents(number)
                if others[extent.region]
            ]
            runs = [(mine, held) for mine, held in pairs if mine is not None and held is not None and not mine.is_cpu]
            if len(runs) < len(pairs):
                rest.append(number)
            else:
                (there if self._there[number] else here).extend(runs)
        device_copies.within(there)
        if here:
            device_copies.from_ordinary(here, seconds)
        largest = int(self.cut.nbytes[rest].max(initial=0))
        inherited = streams.inherit()

        def work(some: Iterator[int]) -> None:
            with inherited(), torch.inference_mode(False), torch.no_grad():
                devices = streams.entered()
                pieces = PinnedPair(largest if devices else 0, devices, seconds)
                for number in some:
                    start, size = int(self._begins[number]), int(self.cut.nbytes[number])
                    held = self._memory_of(number)[start : start + size]
                    if not devices or not held.is_cpu:
                        packing.unpack_some(self.plan, self.cut, number, held, others)
                        continue
                    with pieces.turn() as buffer:
                        buffer[:size].copy_(held)
                        packing.unpack_some(self.plan, self.cut, number, buffer, others)
                pieces.reach_all()

        vm.share_out(rest, work, min(vm.threads(), len(rest) // 2), "transfuse-install")
