"""The role of a prefill engine: leases the blocks of finished prompts, and serves the control channel."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pd_connector.orders import Orders, Report, WorkerHandshake
from pd_connector.params import RemotePrefill, is_prefill_leg, wants_prefixes_at
from pd_connector.scheduler.external_loads import ExternalLoads
from pd_connector.scheduler.host.prompt_slots import PromptSlots
from pd_connector.scheduler.prefill.announcer import Announcer
from pd_connector.scheduler.prefill.drain import Drain
from pd_connector.scheduler.prefill.lease_moves import LeaseMoves
from pd_connector.scheduler.prefill.lease_service import LeaseService
from pd_connector.scheduler.prefill.leased_states import LeasedStates
from pd_connector.scheduler.prefill.prefix_service import PrefixService
from pd_connector.scheduler.scheduler_role import SchedulerRole
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.block_hashes import BlockHashes
from pd_connector.vllm.block_pools import Leased, slot_of
from pd_connector.vllm.cache_specs import Retention
from pd_connector.vllm.device_blocks import DeviceBlocks, HeldBlocks
from pd_connector.vllm.engine_core import EngineLoop
from pd_connector.vllm.model_identity import of_engine
from pd_connector.vllm.requests import is_session, prefill_is_complete
from transfer.control.keys import ControlKeys
from transfer.control.server import ControlServer
from transfer.peers import Address

if TYPE_CHECKING:
    from pd_connector.vllm.types import KVCacheBlocks
    from pd_connector.vllm.types import Request as VllmRequest

logger = logging.getLogger(__name__)

#: How often leases are checked for expiry, besides with every message.
_EXPIRY_INTERVAL_S = 0.5
_CLOSE_TIMEOUT_S = 2.0
#: How old the metrics of an idle engine's leases become.
_UNTOLD_S = 30.0


class Producer(SchedulerRole):
    """Owns the leases and the control server of a prefill engine. Each lease holds a request's blocks.

    A thread wakes the engine when leases expire while no message arrives and the scheduler sleeps.
    """

    def __init__(
        self,
        service: LeaseService[Leased],
        host: str,
        port: int,
        blocks: DeviceBlocks,
        engine: EngineLoop,
        drain: Drain,
        external: ExternalLoads,
        states: LeasedStates,
        keys: ControlKeys | None = None,
        steps_in_flight: int = 2,
        moves: LeaseMoves | None = None,
        slots: PromptSlots | None = None,
        hashes: BlockHashes | None = None,
        groups: Sequence[Retention] = (),
        *,
        drafts_late: bool = False,
        wants_blocks: Callable[[], bool] = lambda: False,
        is_outdated: Callable[[], bool] = lambda: False,
    ) -> None:
        """Bind the control channel and start answering.

        Args:
            service: grants the leases.
            host: to bind, and to tell decode engines.
            port: to bind; 0 lets the system choose.
            blocks: of the device.
            engine: woken when blocks can be freed.
            drain: decides how long to stay up for leases when the engine is told to stop.
            external: knows what other connectors load.
            states: chooses what a lease holds of states.
            keys: of the control channel; None serves whoever can connect.
            steps_in_flight: how many steps vLLM schedules at most before the first of them has ended.
            moves: moves leases to host memory; None if they stay on the device.
            slots: lent to prompts that are loaded from host memory; None if peers cannot read it.
            hashes: name the blocks in which other engines find prefixes here; None if they may not.
            groups: what vLLM keeps of a request in every cache group.
            drafts_late: whether a step may have ended for vLLM before it has written all layers.
            wants_blocks: returns whether requests wait for blocks of the device.
            is_outdated: returns whether another model has computed what vLLM finds here.

        Raises:
            ControlStartError: host and port cannot be bound.
        """
        self._service, self._leases = service, service.leases
        self._host = host
        self._blocks = blocks
        self._engine = engine
        self._drain = drain
        self._moves = moves
        self._states = states
        self._server = ControlServer(service, host, port, keys=keys)
        self._slots = slots = slots or PromptSlots()
        self._external = external
        self._announcer = Announcer(
            service, blocks, self.counts, steps_in_flight, slots, external.unproven, drafts_late=drafts_late
        )
        self._workers = 0
        self._told = (0, 0.0)  # how many leases metrics know of, and how old the oldest was
        self._legs: dict[str, VllmRequest] = {}  # requests that other engines are to decode
        self._outdated: set[str] = set()  # those of them that another model has begun to compute
        service.notify = self._server.changed
        if hashes is not None:
            service.prefixes = PrefixService(
                blocks, hashes, groups, self._announcer.being_written, self._lend, engine.wake, self._server.changed,
                self.counts, wants_blocks=wants_blocks, is_outdated=is_outdated,
            )  # fmt: skip
        self._server.start()
        self._refusals_taken: Counter[str] = Counter()
        self._closing = threading.Event()
        self._expiry = threading.Thread(target=self._watch_expiry, name="pd-lease-expiry", daemon=True)
        self._expiry.start()
        logger.info(
            "PDConnector: prefill engine %s answers on the control channel at %s",
            service.engine_id, Address(host, self.port),
        )  # fmt: skip

    @property
    def port(self) -> int:
        """Port of the control channel."""
        return self._server.port

    @property
    def serves_prefixes_at(self) -> str:
        """Where other engines find prefixes here, ``host:port``; empty if they may not."""
        return str(Address(self._host, self.port)) if self._prefixes is not None else ""

    def set_workers(self, handshakes: Sequence[WorkerHandshake]) -> None:
        """Announce the workers' caches to peers."""
        known_as, self._workers = self._service.engine_id, len(handshakes)
        host = tuple(handshake.host for handshake in handshakes if handshake.host is not None)
        host = host if self._moves is not None and len(host) == len(handshakes) else ()
        models = [handshake.model for handshake in handshakes if handshake.model is not None]
        geometries = tuple(handshake.geometry for handshake in handshakes)
        self._service.set_workers(geometries, host, of_engine(models) if models else None)
        if self._prefixes is not None and self._moves is not None and host and not self._service.checksums.enabled:
            self._prefixes.use_host(self._moves.tier.pool, self._lend_in_host)
        if self._service.engine_id != known_as:
            logger.info(
                "PDConnector: the KV caches are registered anew, so prefill engine %s is now %s",
                known_as, self._service.engine_id,
            )  # fmt: skip

    def add(self, request: "VllmRequest") -> None:
        """Take up a new request: its prompt may be leased, and followed by name."""
        if is_prefill_leg(request.kv_transfer_params):
            self._legs[request.request_id] = request
        self._announcer.add(request)

    def tokens_to_pull(self, request_id: str) -> int | None:
        """Return how many tokens will be pulled of a request that has just ended; None if it is not to be leased."""
        request = self._legs.get(request_id)
        if request is None or not prefill_is_complete(request):
            return None
        return self._service.prompt_tokens(request) - 1

    def allocated(self, request: "VllmRequest", blocks: "KVCacheBlocks", external_tokens: int) -> int:
        """Bring nothing; note that a prompt may be loaded from host memory now."""
        self._announcer.allocated(request)
        return 0

    def free_blocks(self) -> None:
        """Free the blocks of ended leases."""
        for held in self._leases.collect():
            self._blocks.release(held.blocks)
            if held.hosts:
                assert self._moves is not None, "a lease holds blocks of host memory that nobody knows"
                self._moves.tier.loans.take_back(held.hosts)

    def step_orders(self, scheduled: Mapping[str, int]) -> Orders:
        """Return the leases whose checksums are to be taken, and the step's number if it is to be reported."""
        self._drain.must_stay(self._leases.active, busy=bool(scheduled))
        steps = self._announcer.schedule(scheduled)
        if self._prefixes is not None:
            self._prefixes.serve(self._service.engine_id)
        return Orders(checksums=self._service.checksums.take_orders(), steps=steps)

    def settled(self, request_ids: set[str], failed: set[str], report: Report) -> None:
        """Store the checksums that workers have reported, and announce what their steps have computed."""
        self._announcer.computed(report.steps, self._workers)
        for checksums in report.checksums:
            self._service.checksums.add(checksums)

    def finish(self, request: "VllmRequest", block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """Grant a lease over a finished prompt's blocks, to which it holds references of its own.

        Returns:
            The ``kv_transfer_params`` of the response: what to pull, or where a conversation can be found when it goes
            on, of a decode leg that wants to know; None if there is neither.
        """
        self._legs.pop(request.request_id, None)
        answer = self._grant(request, block_ids) if self._is_to_be_leased(request, block_ids) else None
        self._outdated.discard(request.request_id)
        self._announcer.finish(request, is_granted=answer is not None)
        if answer is None and self._prefixes is not None and wants_prefixes_at(request.kv_transfer_params):
            return {"prefixes_at": self.serves_prefixes_at}
        return answer

    @property
    def wants_step(self) -> bool:
        """Whether there is something to free, to take checksums of or to be written, or leases to stay up for."""
        active = self._leases.active
        if self._drain.must_stay(active) or self._service.checksums.wants_step or self._announcer.wants_step:
            return True
        if self._is_untold:
            return True
        if self._prefixes is not None and self._prefixes.is_asked:
            return True
        # An engine that cannot be woken must keep stepping.
        return self._leases.has_ended or (active > 0 and not self._engine.can_be_woken)

    def update_stats(self, stats: StatsRecorder) -> None:
        """Record the leases granted, alive and ended, and what the control channel refused."""
        self._told = active, age_s = self._leases.active, self._leases.oldest_age_s
        stats.gauge("leases_active", active)
        stats.gauge("lease_oldest_age_seconds", int(age_s))
        stats.gauge("leased_blocks", self._blocks.leased)
        super().update_stats(stats)
        for event, number in self._leases.take_counts().items():
            stats.count("leases", number, event)
        refusals = Counter(self._server.counters.refusals)
        for cause, number in (refusals - self._refusals_taken).items():
            stats.count("control_refusals", number, cause)
        self._refusals_taken = refusals

    def device_references(self) -> Counter[int]:
        """Return the number of references to each device block that leases hold, by block id."""
        return self._blocks.references

    def release_device_blocks(self) -> None:
        """End every lease."""
        self._leases.cancel_all()
        self.free_blocks()

    def reset(self) -> bool:
        """End every lease."""
        self.release_device_blocks()
        return True

    def model_changed(self) -> None:
        """Become another engine, so that decode engines prove it again. What is half computed is not leased."""
        self._outdated |= {each.request_id for each in self._legs.values() if each.num_computed_tokens}
        known_as = self._service.engine_id
        self._service.model_changed()
        logger.info("PDConnector: prefill engine %s is now %s", known_as, self._service.engine_id)

    def close(self) -> None:
        """Stop answering. Leases end with the process."""
        if outstanding := self._leases.active:
            logger.warning("PDConnector: shutting down with %d leases that were not released", outstanding)
        self._closing.set()
        self._server.close()
        self._expiry.join(_CLOSE_TIMEOUT_S)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance and, until ``close``, both threads run."""
        self._service.check_integrity()
        self._announcer.check_integrity()
        if self._prefixes is not None:
            self._prefixes.check_integrity()
        assert self._outdated <= self._legs.keys(), "a request is remembered that has left"
        assert self._closing.is_set() or self._expiry.is_alive(), "the expiry thread has died"

    def _is_to_be_leased(self, request: "VllmRequest", block_ids: Sequence[Sequence[int]]) -> bool:
        # What a lease says of a prompt is of that which came: a session's goes on, and its states are after all of it.
        is_computed = prefill_is_complete(request) and any(block_ids) and not is_session(request)
        is_wanted = not self._announcer.is_unwanted(request.request_id)
        is_spoilt = self._external.is_spoilt(request) or request.request_id in self._outdated
        is_right = not (is_spoilt or self._announcer.may_lack_tokens(request))
        return is_prefill_leg(request.kv_transfer_params) and is_computed and is_wanted and is_right

    def _grant(self, request: "VllmRequest", block_ids: Sequence[Sequence[int]]) -> dict[str, Any]:
        unfinished = partial(self._announcer.being_written, besides=request)
        block_ids, blocks = self._states.hold(request, block_ids, unfinished)
        held = Leased(blocks, self._slots.hand_over(request.request_id))
        transfer_id = self._announcer.transfer_id(request.request_id)
        step = self._announcer.unreported_step(request.request_id)
        params = self._service.grant(
            request, block_ids, held, (self._host, self.port), transfer_id, is_written=step is None
        )
        if step is not None:
            self._announcer.await_step(step, params["lease_id"])
        return params

    def _lend(self, held: HeldBlocks, block_ids: tuple[tuple[int, ...], ...], tokens: int) -> RemotePrefill:
        """Grant a lease over blocks that another engine has found."""
        self._blocks.keep(held)
        step = self._announcer.newest_unreported
        remote = self._service.lend(Leased(held), block_ids, tokens, (self._host, self.port), is_written=step is None)
        if step is not None:
            self._announcer.await_step(step, remote.lease_id)
        return remote

    def _lend_in_host(self, held: HeldBlocks, block_ids: tuple[tuple[int, ...], ...], tokens: int) -> RemotePrefill:
        """Grant a lease over blocks of host memory that another engine has found. Ids are those of the host pool."""
        assert self._moves is not None, "blocks were found in host memory that nobody knows"
        self._moves.tier.loans.lend(held, 0)
        slots = {int(block.block_id): slot_of(block) for block in held}
        address = self._host, self.port
        return self._service.lend(Leased(hosts=held), block_ids, tokens, address, slots, is_written=True)

    @property
    def _prefixes(self) -> PrefixService | None:
        return self._service.prefixes

    @property
    def _is_untold(self) -> bool:
        """Whether metrics, which are told in steps, are wrong or old."""
        active, age_s = self._told
        return self._leases.active < active or self._leases.oldest_age_s > age_s + _UNTOLD_S

    def _watch_expiry(self) -> None:
        while not self._closing.wait(min(_EXPIRY_INTERVAL_S, self._leases.ttl_s / 4)):
            if self._leases.has_ended or self._is_untold or (self._moves is not None and self._moves.is_due()):
                self._engine.wake()
