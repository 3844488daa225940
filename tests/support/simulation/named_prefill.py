"""A prefill engine whose named prompts are followed: vLLM's own scheduler, the connector's scheduler side, one thread.

Simulated are the workers, which write to memory when a step ends and not before, and the control channel. To and from
host memory, they copy when a step ends, too. After every event, what is announced is compared with what memory holds,
and so is what is leased, when it is leased. A step that computes from anything else than what its prompt is to hold
writes nothing of use; ``misread`` names its requests.

If it drafts, what a step writes to the draft layer is there when the test lets the device end it, and the workers
report the step then.

With a sibling, the connector is in MultiConnector behind one that loads while a step computes (``loading_sibling``).
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from layout.geometry import CacheGroup, WorkerGeometry
from pd_connector.orders import LoadOrder, Report, StoreEnds, StoreOrder, WorkerHandshake
from pd_connector.scheduler.prefill.announcer import Announcer
from pd_connector.scheduler.prefill.lease_service import LeaseService
from pd_connector.scheduler.prefill.producer import Producer
from pd_connector.scheduler.scheduler import ConnectorScheduler
from pd_connector.vllm.metadata import HandshakeMetadata, ReportMetadata, StepMetadata
from pd_connector.worker.device_fence import StepEnds
from pd_connector.worker.worker_role import FailedBlocks
from tests.support.connector.loading_sibling import LoadingSibling
from tests.support.connector.vllm_calls import NAMES_FAILED_REQUESTS
from tests.support.releases import INSTALLED
from tests.support.simulation.engine_config import simulated_config
from tests.support.simulation.prefill_works import PAGE_TOKENS, PrefillWork, StepUnderWay, stamps_of
from tests.support.simulation.vllm_schedulers import OUTPUT_TOKEN
from transfer.control.messages import (
    Error,
    ErrorCode,
    Follow,
    Followed,
    Locate,
    Located,
    SlotRange,
    TransferState,
)
from transfer.control.server import ServerCounters
from transfer.control.waiting_requests import NotYet

CHUNK_TOKENS = 64  # in a step
REACH_TOKENS = 32  # the sliding window of the second cache group, if there is one

_NOTHING = -1  # in the place of a stamp

#: How many slots there are is told by the workers.
_HOST_MEMORY: dict[str, Any] = {"cpu_bytes_to_use": 1 << 20, "host_transfers": "auto"}

init_none_hash(sha256_cbor)
_hasher = get_request_block_hasher(PAGE_TOKENS, sha256_cbor)


class _Server:
    """What ``ControlServer`` is to the producer; remembers of which topics there was news."""

    def __init__(self, handler: Any, host: str, port: int, keys: Any = None) -> None:
        self.port = 1
        self.counters = ServerCounters()
        self.changes: list[str] = []
        self.wakes = 0

    def start(self) -> None:
        """Nobody asks."""

    def changed(self, *topics: str) -> None:
        self.changes += topics
        self.wakes += 1

    def close(self) -> None:
        """Nothing to close."""


class NamedPrefill:
    """A prefill engine, step by step. Any number of its steps may be under way."""

    def __init__(
        self,
        blocks: int = 64,
        *,
        ranks: int = 1,
        asynchronous: bool = False,
        with_window: bool = False,
        knows_workers: bool = True,
        max_tokens: int = 512,
        chunk_tokens: int = CHUNK_TOKENS,
        checked: bool = True,
        host_slots: int = 0,
        with_sibling: bool = False,
        drafts: bool = False,
        policy: str = "recompute",
        host_settings: Mapping[str, Any] = _HOST_MEMORY,
    ) -> None:
        self.ranks = ranks
        self.fails_sibling = False
        self.draft_memory: dict[tuple[int, int], int] = {}
        self._drafting: list[tuple[threading.Event, StepUnderWay]] = []
        self._step_ends = StepEnds(self._raise_fence if drafts else None)
        self._drafts = drafts
        self.misread: list[str] = []
        self._policy, self._with_sibling = policy, with_sibling
        self._host_settings = host_settings
        self.memory: dict[tuple[int, int], int] = {}
        self.host_memory: dict[tuple[int, int], int] = {}  # the same, by slot
        self._launched: list[Sequence[LoadOrder]] = []  # the loads of each step under way
        self.loads: list[LoadOrder] = []  # of steps that have ended, and not carried out
        self.holds_loads = False
        self.fails_loads = False
        self._failures = FailedBlocks()
        self._host_slots = host_slots
        self.answers: dict[str, dict[str, Any] | None] = {}  # kv_transfer_params of the responses
        self.ended: dict[str, str] = {}  # how, by request
        self._windows = (0, REACH_TOKENS) if with_window else (0,)
        self._checked = checked
        self.scheduler = self._make_scheduler(blocks, max_tokens, chunk_tokens, asynchronous=asynchronous)
        children = self._children
        connector: Any = children[-1]
        if with_sibling:
            self.sibling: LoadingSibling = children[0]
        self.side: ConnectorScheduler = connector._scheduler
        (self.producer,) = (role for role in self.side._roles if isinstance(role, Producer))
        self.service: LeaseService[Any] = self.producer._service
        self.announcer: Announcer = self.producer._announcer
        if knows_workers:
            self.tell_workers()

    def tell_workers(self) -> None:
        """Hand over the workers' handshakes, as vLLM does at start."""
        groups = tuple(CacheGroup(PAGE_TOKENS, window, ()) for window in self._windows)
        geometries = [
            WorkerGeometry(rank, self.ranks, 0, 1, f"127.0.0.1:{15000 + rank}", groups, ())
            for rank in range(self.ranks)
        ]
        self._children[-1].set_xfer_handshake_metadata_pp_aware(
            {
                (0, rank): HandshakeMetadata(
                    WorkerHandshake(geometry, self._host_slots, geometry if self._host_slots else None)
                )
                for rank, geometry in enumerate(geometries)
            }
        )

    @property
    def _children(self) -> list[Any]:
        """The sibling, if there is one, and our connector."""
        connector: Any = self.scheduler.connector
        if not self._with_sibling:
            return [connector]
        return list(connector.sub_connectors if INSTALLED >= (0, 30) else connector._connectors)

    @property
    def changes(self) -> list[str]:
        server: Any = self.producer._server
        return list(server.changes)

    @property
    def wakes(self) -> int:
        """How often the control channel's thread was woken by news."""
        server: Any = self.producer._server
        return int(server.wakes)

    def ask(self, name: str, prompt: list[int], transfer_id: object = None, **params: Any) -> Request:
        """A prefill leg arrives. ``transfer_id``: None for none."""
        given = {"do_remote_decode": True, **params}
        if transfer_id is not None:
            given["transfer_id"] = transfer_id
        sampling = SamplingParams(max_tokens=1, ignore_eos=True, extra_args={"kv_transfer_params": given})
        request = Request(name, list(prompt), sampling, None, block_hasher=_hasher)
        self.scheduler.add_request(request)
        return request

    def go_on(self, session: str, tokens: list[int]) -> None:
        """More tokens of a streaming session arrive, which begins with the first."""
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        self.scheduler.add_request(Request(session, list(tokens), sampling, None, block_hasher=_hasher, resumable=True))

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.check()

    def schedule(self) -> StepUnderWay:
        """Schedule a step, whose workers begin."""
        seen: dict[str, int] = {}
        build = self.scheduler._build_kv_connector_meta

        def noted(connector: Any, output: SchedulerOutput) -> Any:
            seen.update(
                {each: self.scheduler.requests[each].num_computed_tokens for each in output.num_scheduled_tokens}
            )
            return build(connector, output)

        with patch.object(self.scheduler, "_build_kv_connector_meta", noted):
            output = self.scheduler.schedule()
        metadata, loads = output.kv_connector_metadata, ()
        if self._with_sibling:
            theirs, metadata = metadata.metadata
            loads = tuple(theirs.loads)
        assert isinstance(metadata, StepMetadata)
        orders = metadata.orders
        ids = list(output.num_scheduled_tokens)
        sampled, works = [], []
        for request_id, number in output.num_scheduled_tokens.items():
            request: Request = self.scheduler.requests[request_id]
            end = request.num_computed_tokens
            assert seen[request_id] == end - number, "the connector is asked when the step's tokens are counted already"
            if self._checked:
                stamps = stamps_of([*request.all_token_ids, OUTPUT_TOKEN, OUTPUT_TOKEN])
                tables = tuple(map(tuple, self.scheduler.kv_cache_manager.get_block_ids(request_id)))
                works.append(PrefillWork(request_id, end - number, end, stamps, tables))
            sampled.append([OUTPUT_TOKEN] if end >= request.num_tokens else [])
        self._launched.append(orders.loads)
        self._failures.expect(orders.destinations)
        result = ModelRunnerOutput(ids, {each: index for index, each in enumerate(ids)}, sampled)
        self.check()
        return StepUnderWay(output, result, tuple(works), orders.steps, loads, orders.stores)

    def end(self, step: StepUnderWay, ranks: int | None = None) -> None:
        """Let a step end: its workers have written, and ``ranks`` of them, all unless it is given, report it."""
        stored = self._store(step.stores)
        self.loads += self._launched.pop(0)  # not those of a later step: copies wait for what was launched before them
        loaded = self._load()
        invalid = self._load_sibling(step)
        self._compute(step)
        self._step_ends.begin(step.numbers)
        steps = dict.fromkeys(self._step_ends.take(), self.ranks if ranks is None else ranks)
        if self._drafts:
            self._drafting.append((threading.Event(), step))
        failed = loaded if self.fails_loads else set[str]()
        self._failures.settle(loaded, failed)
        report = Report(stores=stored, steps=steps, failed=self._failures.take_requests())
        result = copy(step.result)
        reported: Any = ReportMetadata(report)
        if self._with_sibling:
            reported = MultiKVConnectorWorkerMetadata((None, reported))
        result.kv_connector_output = KVConnectorOutput(finished_recving=loaded, kv_connector_worker_meta=reported)
        if NAMES_FAILED_REQUESTS:
            result.kv_connector_output.failed_recving = failed
        result.kv_connector_output.invalid_block_ids = self._failures.take_blocks() | invalid
        for outputs in self.scheduler.update_from_output(step.output, result).values():
            for each in outputs.outputs:
                if each.finish_reason is not None:
                    self.answers[each.request_id] = each.kv_transfer_params
                    self.ended[each.request_id] = str(each.finish_reason)
                    self._check_leased(each.request_id, step)
        self.check()

    def step(self) -> StepUnderWay:
        """A step from its beginning to its end."""
        step = self.schedule()
        self.end(step)
        return step

    def run(self, most: int = 50) -> None:
        """Step until all requests have ended."""
        for _ in range(most):
            if not self.scheduler.has_unfinished_requests():
                return
            self.step()
        raise AssertionError(f"requests have not ended within {most} steps: {sorted(self.scheduler.requests)}")

    def settle(self, most: int = 50) -> None:
        """End all leases, and step until the connector has nothing left to do."""
        self.service.leases.cancel_all()
        for _ in range(most):
            if not self.side.wants_step():
                return
            self.step()
        raise AssertionError(f"the engine still wants to step after {most} steps")

    def end_drafts(self) -> None:
        """The device ends what it has been given."""
        for done, step in self._drafting:
            self.draft_memory |= step.writes
            done.set()
        self._drafting.clear()

    def locate(self, lease_id: str) -> Located | None:
        """Where a lease lies, and what is read then is right; None if it cannot be read yet."""
        reply = self.service.handle(Locate(self.service.engine_id, lease_id))
        if isinstance(reply, NotYet):
            assert isinstance(reply.reply, Error)
            assert reply.reply.code == ErrorCode.NOT_READY
            return None
        assert isinstance(reply, Located)
        return reply

    def told(self, transfer_id: str, attempt: int = -1, tokens: int = 0, host_tokens: int = -1) -> Followed:
        """What somebody is told who knows so much."""
        reply = self.service.handle(Follow("", transfer_id, attempt, tokens, host_tokens=host_tokens))
        reply = reply.reply if isinstance(reply, NotYet) else reply
        assert isinstance(reply, Followed)
        return reply

    def state(self, transfer_id: str) -> tuple[TransferState, int, int]:
        """How far a prompt is said to be: its state, attempt, and complete tokens."""
        told = self.told(transfer_id)
        return TransferState(told.state), told.attempt, told.tokens

    def preempt(self, request: Request) -> None:
        """What vLLM does when another request needs the blocks."""
        self.scheduler.running.remove(request)
        if INSTALLED >= (0, 30):
            self.scheduler._preempt_request(request, 0.0, True)
            return
        self.scheduler._preempt_request(request, 0.0)
        # The rest is what vLLM 0.23 does where a request may run again in the next step, in its reset.
        request.async_tokens_to_discard = request.num_output_placeholders
        request.num_output_placeholders = 0
        self.scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

    def check(self) -> None:
        """Raise AssertionError if something is announced that memory does not hold."""
        if not self._checked:
            return
        self.side.check_integrity()
        for named in self.announcer._named.values() if self.service.block_tokens else ():
            told = self.told(named.transfer_id, host_tokens=0)
            if told.state != TransferState.COMPUTING or not self._has_its_blocks(named):
                continue
            stamps = stamps_of(list(named.request.all_token_ids))
            tables = self.scheduler.kv_cache_manager.get_block_ids(named.request.request_id)
            for announced, table in zip(told.block_ids, tables, strict=True):
                for token in range(told.tokens):
                    block = table[token // PAGE_TOKENS]
                    if not block:
                        continue  # a window has passed it
                    assert announced[token // PAGE_TOKENS] == block, "another block is announced than the request has"
                    held = self.memory.get((block, token % PAGE_TOKENS))
                    assert held == stamps[token], f"token {token} of {told.tokens} is announced and not there"
                    if self._drafts:
                        held = self.draft_memory.get((block, token % PAGE_TOKENS))
                        assert held == stamps[token], f"token {token} is announced and not in the draft layer"
            if told.in_host is not None:
                self._check_slots(told.in_host, stamps)

    def _check_slots(self, told: SlotRange, stamps: list[int]) -> None:
        for first, slots in zip(told.first_blocks, told.slots, strict=True):
            assert first == told.first_token // PAGE_TOKENS
            assert len(slots) == -(-told.end_token // PAGE_TOKENS) - first
            for number, slot in enumerate(slots, first):
                for token in range(number * PAGE_TOKENS, (number + 1) * PAGE_TOKENS) if slot >= 0 else ():
                    held = self.host_memory.get((slot, token % PAGE_TOKENS))
                    assert held == stamps[token], f"token {token} is announced in host memory and not there"

    def _load(self) -> set[str]:
        """Carry out the loads; the requests that are told so."""
        if self.holds_loads:
            return set()
        loads, self.loads = self.loads, []
        for load in () if self.fails_loads else loads:
            for block, slot in zip(load.moves.blocks.tolist(), load.moves.slots.tolist(), strict=True):
                for offset in range(PAGE_TOKENS):
                    self.memory[block, offset] = self.host_memory[slot, offset]
        return {load.request_id for load in loads}

    def _raise_fence(self) -> Any:
        return SimpleNamespace(passed=self._drafting[-1][0].is_set) if self._drafting else None

    def _load_sibling(self, step: StepUnderWay) -> set[int]:
        """Carry out what the sibling loads in a step, or fail; return the blocks that it then reports."""
        invalid: set[int] = set()
        for load in step.loads:
            (work,) = (each for each in step.works if each.request_id == load.request_id)
            if self.fails_sibling:
                first, end = load.tokens.start // PAGE_TOKENS, -(-load.tokens.stop // PAGE_TOKENS)
                invalid.update(block for table in load.tables for block in table[first:end] if block)
                self.memory |= dict.fromkeys((place for place, _ in work.places(*_ends(load.tokens))), _NOTHING)
            else:
                self.memory |= dict(work.places(*_ends(load.tokens)))
        return invalid

    def _compute(self, step: StepUnderWay) -> None:
        """Write what a step computes: nothing of use for a request whose tokens before are not what they must be."""
        for work in step.works:
            is_right = all(self.memory.get(place) == stamp for place, stamp in work.places(0, work.first))
            if not is_right:
                self.misread.append(work.request_id)
            self.memory |= {place: stamp if is_right else _NOTHING for place, stamp in work.writes()}

    def _check_leased(self, request_id: str, step: StepUnderWay) -> None:
        """Raise AssertionError if something is leased that memory does not hold."""
        if not self._checked or not (params := self.answers[request_id]):
            return
        (work,) = (each for each in step.works if each.request_id == request_id)
        leased = replace(work, tables=tuple(map(tuple, params["remote_block_ids"])))
        for place, stamp in leased.places(0, params["remote_num_tokens"]):
            assert self.memory.get(place) == stamp, f"{request_id} is leased, and block {place[0]} is not right"

    def _store(self, stores: Sequence[StoreOrder]) -> dict[int, StoreEnds]:
        """Carry out the stores of a step, which read what earlier steps have written."""
        for store in stores:
            for block, slot in zip(store.moves.blocks.tolist(), store.moves.slots.tolist(), strict=True):
                for offset in range(PAGE_TOKENS):
                    if (block, offset) in self.memory:
                        self.host_memory[slot, offset] = self.memory[block, offset]
        return {store.store_id: StoreEnds(self.ranks) for store in stores}

    def _has_its_blocks(self, named: Any) -> bool:
        """False from a preemption, or a load that failed, to the step in which the followers are told."""
        tables = self.scheduler.kv_cache_manager.get_block_ids(named.request.request_id)
        return bool(named.request.num_preemptions == named.preemptions and any(tables))

    def close(self) -> None:
        self.scheduler.shutdown()

    def _make_scheduler(self, blocks: int, max_tokens: int, chunk_tokens: int, *, asynchronous: bool) -> Scheduler:
        config = copy(simulated_config(max_tokens, chunk_tokens, PAGE_TOKENS))
        config.cache_config = copy(config.cache_config)
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config = copy(config.scheduler_config)
        config.scheduler_config.async_scheduling = asynchronous
        ours: dict[str, Any] = {
            "kv_connector": "PDConnector",
            "kv_connector_module_path": "pd_connector",
            "kv_role": "kv_producer",
            "kv_load_failure_policy": self._policy,
            "kv_connector_extra_config": {
                "host": "127.0.0.1", **(self._host_settings if self._host_slots else {}),
            },
        }  # fmt: skip
        sibling = {"kv_connector": "LoadingSibling", "kv_role": "kv_producer", "kv_load_failure_policy": self._policy}
        both = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_producer",
            "kv_load_failure_policy": self._policy,
            "kv_connector_extra_config": {"connectors": [sibling, ours]},
        }
        config.kv_transfer_config = KVTransferConfig(**(both if self._with_sibling else ours))
        config.parallel_config = copy(config.parallel_config)
        config.parallel_config.tensor_parallel_size = self.ranks
        with ExitStack() as patches:
            patches.enter_context(patch("pd_connector.scheduler.prefill.producer.ControlServer", _Server))
            patches.enter_context(patch("pd_connector.scheduler.scheduler.drafts_late", lambda config: self._drafts))
            kind = AsyncScheduler if asynchronous else Scheduler
            return kind(config, self._caches(blocks), StructuredOutputManager(config), PAGE_TOKENS)

    def _caches(self, blocks: int) -> KVCacheConfig:
        def groups() -> Iterator[KVCacheGroupSpec]:
            shape: dict[str, Any] = {"block_size": PAGE_TOKENS, "num_kv_heads": 4, "head_size": 16}
            for number, window in enumerate(self._windows):
                spec: Any = FullAttentionSpec(**shape, dtype=torch.float32)
                if window:
                    spec = SlidingWindowSpec(**shape, dtype=torch.float32, sliding_window=window)
                yield KVCacheGroupSpec([f"layer{number}"], spec)

        return KVCacheConfig(blocks, [], list(groups()))


def _ends(tokens: range) -> tuple[int, int]:
    return tokens.start, tokens.stop


#: What the fixture ``start_prefill`` is: the arguments of ``NamedPrefill``.
StartPrefill = Callable[..., NamedPrefill]
