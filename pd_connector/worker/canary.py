"""A worker's part of canaries: pulls prompts into scratch memory, and compares them with what was computed here.

No request of vLLM waits for that, so how it ends goes to the scheduler side with the reports.
"""

import logging
import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from layout.cost import CostModel
from layout.geometry import CacheGroup, Plane, Region, WorkerGeometry
from layout.plan import BlockTable
from layout.scratch import blocks_of_tokens, scratch_bytes, scratch_geometry
from pd_connector.orders import CanaryEnds, CanaryReference, CanaryRoom, Cause, Orders, PullOrder, Report, block_table
from pd_connector.worker.agreement import Sample, cache_format, compare, plane_samples, state_samples
from pd_connector.worker.caches import Cache, tensors_of
from pd_connector.worker.device_fence import Fence, RaiseFence, fences, no_fence
from pd_connector.worker.device_memory import device_memory
from pd_connector.worker.peer import PullContext, keep_tails
from pd_connector.worker.pull_end import PullEnd
from pd_connector.worker.pulls import Pulls
from pd_connector.worker.remote_reader import RemoteReader
from pd_connector.worker.same_host import first_way
from pd_connector.worker.worker_role import WorkerRole
from transfer.copies.checksums.block_checksums import BlockReader, in_place
from transfer.copies.checksums.device_reader import DeviceReader
from transfer.copies.checksums.values import read_values
from transfer.memory import HostMemory

logger = logging.getLogger(__name__)

#: Tokens of a canary, if they take no more memory than this on a worker; and canaries at a time, likewise.
_TOKENS, _PROMPTS, _MOST_BYTES = 512, 4, 64 << 20

#: Tokens that prove an engine, where those of a block can be read one by one: blocks may have thousands.
_LEAST_TOKENS = 16

#: How long a connection for canaries stays open without one.
_IDLE_S = 0.0
_OF_DRAFTS = frozenset({"mtp", "draft_model"})  # parts of the names of a draft's layers
_BEHIND_ALL = 1 << 20  # layers that no model has


def canary_room(geometry: WorkerGeometry) -> CanaryRoom:
    """Return how long canaries are on a worker with these caches, and how many it has room for at a time.

    At least two blocks of every cache group, or units: one of them is whole wherever the tokens begin.
    """
    groups = [group for group in geometry.groups if not group.states]
    border = math.lcm(*(group.unit_tokens for group in groups))
    fewest = 2 * border
    tokens = max(_TOKENS, fewest)
    while tokens > fewest and _bytes(geometry, tokens) > _MOST_BYTES:
        tokens = max(tokens // 2, fewest)
    prompts = max(1, min(_PROMPTS, _MOST_BYTES // max(_bytes(geometry, tokens), 1)))
    return CanaryRoom(tokens, prompts, border, max(map(_least_tokens, groups), default=1))


def _least_tokens(group: CacheGroup) -> int:
    """Return how many tokens, from a unit's first on, show something of every plane of a group."""
    by_token = all(
        not plane.packing and plane.tokens_per_row == 1 and plane.tokens.ranks == 1 for plane in group.planes
    )
    return min(group.unit_tokens, _LEAST_TOKENS) if by_token else group.unit_tokens


def _bytes(geometry: WorkerGeometry, tokens: int) -> int:
    return scratch_bytes(geometry, list(blocks_of_tokens(geometry, tokens)))


@dataclass(frozen=True)
class Scratch:
    """Memory of a worker for canaries, as a cache of a few blocks."""

    geometry: WorkerGeometry
    read: BlockReader
    owner: HostMemory | torch.Tensor  # frees the memory with this

    @classmethod
    def allocate(cls, caches: WorkerGeometry, device: torch.device | None) -> "Scratch":
        """Allocate room for canaries of a worker with these ``caches``, in host memory if ``device`` is None.

        Raises:
            MemoryError: the device has too little memory left.
        """
        room = canary_room(caches)
        blocks = [room.prompts * number for number in blocks_of_tokens(caches, room.tokens)]
        size = max(scratch_bytes(caches, blocks), 1)
        if device is None:
            memory = HostMemory(size)
            return cls(scratch_geometry(caches, memory.region, blocks), in_place, memory)
        tensor = device_memory(size, device, "lower gpu_memory_utilization, or set canary to off")
        region = Region(int(tensor.data_ptr()), int(tensor.numel()))
        return cls(scratch_geometry(caches, region, blocks), DeviceReader([tensor]), tensor)


class Comparison:
    """Compares what a worker has computed with what it has pulled. Any thread may call it."""

    def __init__(
        self,
        caches: WorkerGeometry,
        read: BlockReader,
        scratch: Scratch,
        formats: Mapping[Plane, str],
        model_dtype: str,
    ) -> None:
        """Compare ``caches``.

        Args:
            caches: of this rank.
            read: reaches their memory.
            scratch: with what was pulled.
            formats: of the values of each of their planes.
            model_dtype: in which the model computes, as vLLM names it.
        """
        self._caches = caches
        self._read = read
        self._scratch = scratch
        self._formats = formats
        self._model_dtype = model_dtype
        names = sorted({name for group in caches.groups for name in group.layers})
        self._depths = {name: _depth(name, number) for number, name in enumerate(names)}

    def __call__(
        self, pulled: PullOrder, computed: CanaryReference, lacking_states: Container[tuple[int, int]] = ()
    ) -> CanaryEnds:
        """Return whether the two agree. Neither may change meanwhile. ``lacking_states``: see ``PullEnd``."""
        samples = self._samples(pulled, computed) + self._states(pulled, computed, lacking_states)
        difference = compare(samples, self._model_dtype)
        compared = sum(bool(sample.computed.size) for sample in samples)
        return CanaryEnds(1, samples=compared, difference="" if difference is None else str(difference))

    def _samples(self, pulled: PullOrder, computed: CanaryReference) -> list[Sample]:
        samples: list[Sample] = []
        groups = zip(self._caches.groups, self._scratch.geometry.groups, strict=True)
        for number, (ours, theirs) in enumerate(groups):
            here, there = block_table(computed.block_ids[number]), block_table(pulled.local_block_ids[number])
            for cache, scratch in zip(ours.planes, theirs.planes, strict=True) if not ours.states else ():
                if cache.optional:  # what drafts tokens: it may not be there, and no answer depends on it
                    continue
                tokens = pulled.first_token, pulled.end_token
                values = read_values(cache, ours.block_tokens, here, *tokens, self._read)
                others = read_values(scratch, theirs.block_tokens, there, *tokens, self._scratch.read)
                samples += plane_samples(cache, self._formats[cache], self._depths, values, others)
        return samples

    def _states(
        self, pulled: PullOrder, computed: CanaryReference, lacking: Container[tuple[int, int]]
    ) -> list[Sample]:
        """Return the states that both have, at borders of blocks: a running state is after other tokens by now."""
        samples: list[Sample] = []
        for number, (ours, theirs) in enumerate(zip(self._caches.groups, self._scratch.geometry.groups, strict=True)):
            if not ours.states:
                continue
            for entry, (here, there) in enumerate(
                zip(computed.block_ids[number], pulled.local_block_ids[number], strict=False)
            ):
                if not (here and there) or (number, entry) in lacking:
                    continue
                for cache, scratch in zip(ours.planes, theirs.planes, strict=True):
                    rows = cache.block_tokens
                    values = read_values(cache, rows, BlockTable.of([here]), 0, rows, self._read)
                    others = read_values(scratch, rows, BlockTable.of([there]), 0, rows, self._scratch.read)
                    samples += state_samples(cache, self._depths, values, others)
        return samples


def _depth(layer: str, otherwise: int) -> int:
    """Return the place of a layer in the model, which vLLM writes into its name: "model.layers.3.self_attn.attn".

    A draft with a prefix of its own, such as "mtp.0.", is computed from the last layer, and comes behind it.
    """
    number = re.search(r"\.(\d+)\.", layer)
    place = int(number.group(1)) if number else otherwise
    return place if _OF_DRAFTS.isdisjoint(layer.split(".")) else place + _BEHIND_ALL


def plane_formats(geometry: WorkerGeometry, kv_caches: Mapping[str, Cache], cache_dtype: str) -> dict[Plane, str]:
    """Return the format of the values of each plane.

    Args:
        geometry: of ``kv_caches``.
        kv_caches: what the model runner passes, by layer.
        cache_dtype: vLLM's setting.
    """
    formats = {}
    for group in geometry.groups:
        for plane in group.planes:
            tensors = tensors_of(kv_caches[plane.layers[0]])
            starts = [tensor for tensor in tensors if tensor.data_ptr() <= plane.address]
            tensor = max(starts or tensors, key=lambda each: int(each.data_ptr()))
            dtype = getattr(torch, plane.dtype) if plane.dtype else tensor.dtype
            formats[plane] = cache_format(dtype, cache_dtype, plane)
    return formats


#: Arguments: what was pulled, what was computed, and the states that could not be pulled.
Compares: TypeAlias = Callable[[PullOrder, CanaryReference, frozenset[tuple[int, int]]], CanaryEnds]


@dataclass(slots=True)
class _Canary:
    order: PullOrder
    end: PullEnd | None = None  # of the pull
    reference: CanaryReference | None = None
    computed: Fence | None = None  # behind all that writes what the reference names; drafts come after a step's tokens
    verdict: Future[CanaryEnds] | None = None


class CanaryPulls(WorkerRole):
    """Owns the canaries of a worker. ``pulls`` are made with the geometry of the scratch memory."""

    def __init__(self, pulls: Pulls, compares: Compares, raise_fence: RaiseFence = no_fence) -> None:
        """``compares`` is called on a thread of this role, one canary at a time, behind a fence of the device."""
        self._pulls = pulls
        self._compares = compares
        self._raise_fence = raise_fence
        self._thread = ThreadPoolExecutor(1, "pd-canary")
        self._open: dict[str, _Canary] = {}  # by request

    def execute(self, orders: Orders) -> tuple[str, ...]:
        """Start pulls, and take what was computed of others. No request waits for either."""
        for order in orders.canaries:
            self._open[order.request_id] = _Canary(order)
        if orders.canaries or orders.model_changes:
            self._pulls.execute(Orders(pulls=orders.canaries, model_changes=orders.model_changes))
        for reference in orders.references:
            if (canary := self._open.get(reference.request_id)) is not None:  # its pull has not failed here
                canary.reference, canary.computed = reference, self._raise_fence()
        return ()

    def take_report(self) -> Report:
        """Return the canaries that have ended since the last call.

        Raises:
            UnsettledReadError: nothing proves that the reads of a pull write no more.
        """
        if not self._open:
            self._pulls.close_idle()  # a session that had not quite ended when its last canary did
            return Report()
        for end in self._pulls.take_ends():
            self._open[end.request_id].end = end
        ended = {request_id: ends for request_id, each in self._open.items() if (ends := self._ends(each)) is not None}
        for request_id in ended:
            del self._open[request_id]
        if not self._open:
            self._pulls.close_idle()
        return Report(canaries=ended)

    def _ends(self, canary: _Canary) -> CanaryEnds | None:
        """Return how a canary has ended, None if it has not; start the comparison if all is there."""
        if canary.end is None:
            return None
        if canary.end.failure:
            return CanaryEnds(1, cause=canary.end.cause, failure=canary.end.reason)
        if canary.verdict is not None:
            return self._verdict(canary) if canary.verdict.done() else None
        if canary.reference is None or (canary.computed is not None and not canary.computed.passed()):
            return None
        if not canary.reference.block_ids:
            return CanaryEnds(1)
        lacking = canary.end.lacking_states
        canary.verdict = self._begin(canary.order, canary.reference, lacking)
        return None

    def _begin(
        self, order: PullOrder, reference: CanaryReference, lacking: frozenset[tuple[int, int]]
    ) -> "Future[CanaryEnds]":
        try:
            return self._thread.submit(self._compares, order, reference, lacking)
        except RuntimeError as error:  # the system has no thread left
            failed = Future[CanaryEnds]()
            failed.set_exception(error)
            return failed

    def _verdict(self, canary: _Canary) -> CanaryEnds:
        assert canary.verdict is not None, "nothing was compared"
        try:
            return canary.verdict.result()
        except Exception as error:  # the request has been answered; nothing else depends on this
            logger.exception("PDConnector: the canary %s could not be compared", canary.order.request_id)
            return CanaryEnds(1, cause=Cause.INTERNAL, failure=f"{type(error).__name__}: {error}")

    def abandoned(self) -> Report:
        """Return the canaries that have not ended, as failed, after ``join``."""
        lost, self._open = self._open, {}
        ends = CanaryEnds(1, cause=Cause.INTERNAL, failure="the engine sleeps")
        return Report(canaries=dict.fromkeys(lost, ends))

    def close(self) -> None:
        """Start no more reads, and no more comparisons."""
        self._pulls.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait for the threads."""
        self._pulls.join()
        self._thread.shutdown(wait=True)

    def check_ended(self) -> None:
        """Raise RuntimeError if a thread still runs after ``join``."""
        self._pulls.check_ended()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        self._pulls.check_integrity()
        for canary in self._open.values():
            is_compared = canary.verdict is not None
            assert not is_compared or (canary.end is not None and canary.reference is not None), "compared too early"


def canary_pulls(
    context: PullContext,
    kv_caches: Mapping[str, Cache],
    tensors: Sequence[torch.Tensor],
    cost: CostModel,
    *,
    on_host: bool,
) -> CanaryPulls:
    """Return the role of canaries, whose scratch memory is registered with the transfer engine of ``context``.

    Args:
        context: of the pulls into ``kv_caches``.
        kv_caches: what the model runner passes, by layer.
        tensors: all memory of ``kv_caches``.
        cost: of reads.
        on_host: whether the CPU can read ``kv_caches``.

    Raises:
        MemoryError: the device has too little memory left.
        EngineStartError: the transfer engine refuses the memory.
    """
    caches = context.local
    over_devices = caches.transport == "ascend" and bool(tensors)  # which reads to no host memory
    scratch = Scratch.allocate(caches, tensors[0].device if over_devices else None)
    if tensors:  # else this pipeline stage has no layers: it pulls nothing, and has no device memory to register
        context.engine.register(scratch.geometry.regions)
    read = in_place if on_host or not tensors else DeviceReader(tensors)
    formats = plane_formats(caches, kv_caches, context.model.cache_dtype)
    # Whatever is scattered is read descriptor by descriptor: it is little, and read once in an engine's life.
    reads = RemoteReader(cost, scratch.geometry.regions)
    scratch_context = replace(
        context, engine=first_way(context.engine), local=scratch.geometry, reads=reads, verifier=None,
        raise_fence=no_fence, clear_tails=keep_tails, trace=None,
    )  # fmt: skip
    pulls = Pulls(scratch_context, _IDLE_S)
    comparison = Comparison(caches, read, scratch, formats, context.model.model_dtype)
    return CanaryPulls(pulls, comparison, fences(tensors[0].device) if tensors else no_fence)
