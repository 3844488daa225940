"""A simulated decode engine: pulls prompts, all at once or as P computes them, and decodes.

When a prompt may be pulled ahead, how long a lease is kept and when a request that waits for blocks is given up are the
connector's own rules. A request's blocks are those of its prompt and its answer, from the beginning.
"""

from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, cast

import simpy
from simpy.resources.resource import PriorityRequest

from benchmarks.fleet.constants import Constants
from benchmarks.fleet.links import Link, Links
from benchmarks.fleet.memory import Holding, HostMemory, Memory
from benchmarks.fleet.node import POLL_S, Job, Settings, Sleeper, blocks_of, blocks_per_id
from benchmarks.fleet.prefill import Prefill
from benchmarks.fleet.traces import BLOCK_TOKENS
from layout.cost import CostModel
from pd_connector.engine_limits import EngineLimits
from pd_connector.params import RemotePrefill
from pd_connector.scheduler.block_demand import BlockDemand
from pd_connector.scheduler.decode.pulls_ahead import PullsAhead
from pd_connector.scheduler.decode.renewals import Renewals
from pd_connector.vllm.cache_specs import Retention
from pd_connector.worker.remote_reader import RANGE_S
from pd_connector.worker.session import LANES
from transfer.control.messages import Cancel, Cancelled, Renew, Renewed, Reply, Request

_RENEWAL_S = 1.0  # how often the renewals look what is due
_MESSAGE_TIMEOUT_S = 10.0
_COMPLETE_FIRST, _AHEAD = 0, 1  # priorities of pulls


class _Direct:
    """Takes the renewals' messages to the simulated P of a port, at once."""

    def __init__(self, prefills: list[Prefill]) -> None:
        self._prefills = prefills

    def request(self, _host: str, port: int, message: Request, _timeout_s: float) -> Future[Reply]:
        """Return P's answer."""
        prefill = self._prefills[port - 1]
        answer: Future[Reply] = Future()
        match message:
            case Renew(lease_ids=lease_ids, reading=reading):
                answer.set_result(Renewed(prefill.leases.renew(lease_ids, reading)))
            case Cancel(lease_ids=lease_ids):
                prefill.cancel(lease_ids)
                answer.set_result(Cancelled())
            case _:
                raise AssertionError(f"renewals do not send {message}")
        return answer

    def close(self) -> None:
        """Do nothing: there is no connection."""


class Leg:
    """A request at D."""

    def __init__(self, job: Job, prefill: Prefill, env: simpy.Environment) -> None:
        self.job, self.prefill = job, prefill
        self.done = env.event()
        self.holding: Holding | None = None
        self.host_blocks = 0  # in which it lands or has landed
        self.is_kept = False  # its lease is renewed


class Decode:
    """One D."""

    def __init__(
        self, env: simpy.Environment, constants: Constants, settings: Settings, prefills: list[Prefill], links: Links
    ) -> None:
        self.in_flight = 0  # requests, as a router counts them
        self.last_chosen = 0
        self.link = Link()
        self._env, self._constants, self._settings, self._links = env, constants, settings, links
        cache = self._constants.cache
        self.memory = Memory(cache.blocks, blocks_per_id(self._constants, settings))
        self.host = HostMemory(settings.host_blocks)
        limits = EngineLimits(max_pulls_ahead=settings.max_pulls_ahead, max_ahead_fraction=settings.max_ahead_fraction)
        self._demand = BlockDemand(cast("Any", self.memory), (Retention(cache.block_tokens),))
        self._ahead = PullsAhead(limits, self._demand)
        self._renewals = Renewals(
            cast("Any", _Direct(prefills)), _MESSAGE_TIMEOUT_S, settings.queue_timeout_s, lambda: self._env.now
        )
        self._lanes = {prefill: simpy.PriorityResource(self._env, LANES) for prefill in prefills}
        self._least_tokens = RANGE_S / CostModel.of_protocol(self._constants.protocol).beta / cache.token_bytes
        self._waiting: list[Leg] = []
        self._landed: list[Leg] = []  # in host memory, and they wait for blocks
        self._pulling = 0
        self._running: list[Leg] = []
        self._sleeper = Sleeper(self._env)
        self.busy_s = 0.0
        self._env.process(self._run())
        self._env.process(self._renew())

    def serve(self, job: Job, prefill: Prefill) -> Generator[simpy.Event, Any, None]:
        """Pull a prompt and answer it."""
        yield self._env.timeout(self._constants.engine.request_s / 2)
        leg = Leg(job, prefill, self._env)
        job.watchers.append(self._sleeper.wake)
        self._waiting.append(leg)
        self._sleeper.wake()
        yield leg.done
        yield self._env.timeout(self._constants.engine.request_s / 2)
        job.ended_s = self._env.now

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        self.memory.check_integrity()
        self.host.check_integrity()
        self._ahead.check_integrity()
        self._renewals.check_integrity()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, is pulled or runs."""
        return not (self._waiting or self._landed or self._pulling or self._running or len(self._ahead))

    def _run(self) -> Generator[simpy.Event, Any, None]:
        while True:
            self._keep_leases()
            self._give_up()
            self._admit_landed()
            self._admit()
            if not self._running:
                yield self._sleeper.sleep(POLL_S if self._waiting or self._landed else None)
                continue
            batch, began = list(self._running), self._env.now
            contexts = (leg.job.num_tokens + leg.job.generated for leg in batch)
            yield self._env.timeout(self._constants.engine.decode_s(contexts))
            self.busy_s += self._env.now - began
            for leg in batch:
                self._generated(leg)

    def _generated(self, leg: Leg) -> None:
        job = leg.job
        job.generated += 1
        if job.generated == 1:
            job.first_token_s = self._env.now + self._constants.engine.request_s / 2
        if job.generated == job.arrival.output_tokens:
            self._running.remove(leg)
            self._end(leg)

    def _admit(self) -> None:
        """Give blocks to requests in their order, and begin their pulls; the first that finds none ends it."""
        for leg in list(self._waiting):
            job = leg.job
            if not leg.is_kept:
                continue
            if not job.is_complete and not self._ahead.has_room(cast("Any", job)):
                continue
            if self._pulling + len(self._running) + len(self._landed) >= self._settings.max_requests:
                break
            self._demand.asked(cast("Any", job))
            # What has landed comes first: nobody takes the blocks that it waits for.
            leg.holding = None if self._landed else self._take(job)
            if leg.holding is None and not self._land(leg):
                break
            self._demand.given()
            self._waiting.remove(leg)
            self._pulling += 1
            if not job.is_complete:
                self._ahead.start(cast("Any", job))
            self._renewals.start_reading(job.request_id)
            self._env.process(self._pull(leg))
        self._demand.end_step()

    def _take(self, job: Job) -> Holding | None:
        ids = job.arrival.whole_ids[: (job.num_tokens - 1) // BLOCK_TOKENS]
        return self.memory.take(ids, blocks_of(job.num_tokens + job.arrival.output_tokens, self._constants))

    def _land(self, leg: Leg) -> bool:
        """Let a prompt land in host memory that finds no blocks, if there is room."""
        blocks = blocks_of(leg.job.num_tokens, self._constants)
        if self._settings.host_blocks and self.host.take(blocks):
            leg.host_blocks = blocks
            return True
        return False

    def _admit_landed(self) -> None:
        while self._landed:
            leg = self._landed[0]
            leg.holding = self._take(leg.job)
            if leg.holding is None:
                return
            self._landed.pop(0)
            self._pulling += 1
            self._env.process(self._load(leg))

    def _load(self, leg: Leg) -> Generator[simpy.Event, Any, None]:
        """Copy a prompt from host memory to the device."""
        yield self._env.timeout(leg.host_blocks * self._constants.cache.block_bytes * self._settings.host_byte_s)
        self.host.give_back(leg.host_blocks)
        leg.host_blocks = 0
        self._pulling -= 1
        self._arrive(leg)

    def _pull(self, leg: Leg) -> Generator[simpy.Event, Any, None]:
        """Read what P has computed, again and again, and have P confirm it."""
        job, block = leg.job, self._constants.cache.block_tokens
        read = len(leg.holding.ids) * BLOCK_TOKENS if leg.holding is not None else 0
        last = job.num_tokens - 1
        lanes, news = self._lanes[leg.prefill], Sleeper(self._env)
        job.watchers.append(news.wake)
        while read < last or not job.is_complete:
            if not self._has_range(job, read):
                yield news.sleep()
                continue
            with lanes.request(priority=_COMPLETE_FIRST if job.is_complete else _AHEAD) as lane:
                yield cast(PriorityRequest, lane)
                end = last if job.is_complete else min(job.told, last) // block * block
                yield from self._read(leg, read, end)
                read = end
        job.watchers.remove(news.wake)
        yield self._env.timeout(self._constants.pull.fixed_s)
        yield self._env.timeout(self._constants.pull.message_s)
        self._confirm(leg)

    def _has_range(self, job: Job, read: int) -> bool:
        last, block = job.num_tokens - 1, self._constants.cache.block_tokens
        if job.is_complete:
            return read < last
        return min(job.told, last) // block * block - read >= max(self._least_tokens, 1)

    def _read(self, leg: Leg, first: int, end: int) -> Generator[simpy.Event, Any, None]:
        """Read whole blocks, of which all layers lie together."""
        cache = self._constants.cache
        size = (blocks_of(end, self._constants) - first // cache.block_tokens) * cache.block_bytes
        yield self._links.read(self._constants.pull.byte_s * size, leg.prefill.link, self.link)
        leg.job.reads += 1
        leg.job.bytes += size
        leg.job.pulled_tokens += end - first

    def _confirm(self, leg: Leg) -> None:
        job = leg.job
        invalid = leg.prefill.release(job)
        self._pulling -= 1
        self._drop(leg)
        if invalid:
            self._fail(leg, f"lease: {invalid}")
        elif leg.holding is None:
            self._landed.append(leg)
            self._sleeper.wake()
        else:
            self._arrive(leg)

    def _arrive(self, leg: Leg) -> None:
        assert leg.holding is not None, "a prompt has arrived nowhere"
        self.memory.publish(leg.holding)
        self._running.append(leg)
        self._sleeper.wake()

    def _keep_leases(self) -> None:
        """Renew the leases of all prompts that P has begun, from now on."""
        for leg in self._waiting:
            if not leg.is_kept and (leg.job.is_begun or leg.job.is_complete):
                leg.is_kept = True
                number = leg.prefill.number
                remote = RemotePrefill(
                    f"P{number}", "simulated", number + 1, ((1,),), leg.job.num_tokens, leg.job.lease_id,
                    self._settings.lease_ttl_s, "",
                )  # fmt: skip
                self._renewals.keep(leg.job.request_id, remote)

    def _drop(self, leg: Leg) -> None:
        self._renewals.drop(leg.job.request_id)
        self._ahead.end(leg.job.request_id)

    def _give_up(self) -> None:
        """End requests whose leases have ended while they waited."""
        for leg in list(self._waiting):
            if leg.is_kept and (lost := self._renewals.lost(leg.job.request_id)) is not None:
                self._waiting.remove(leg)
                self._drop(leg)
                self._fail(leg, str(lost.cause))

    def _fail(self, leg: Leg, reason: str) -> None:
        leg.job.failed = reason
        self._end(leg)

    def _end(self, leg: Leg) -> None:
        if leg.holding is not None:
            self.memory.give_back(leg.holding)
            leg.holding = None
        self.host.give_back(leg.host_blocks)
        leg.host_blocks = 0
        leg.done.succeed()
        self._sleeper.wake()

    def _renew(self) -> Generator[simpy.Event, Any, None]:
        while True:
            yield self._env.timeout(_RENEWAL_S)
            if self._renewals.request_ids:
                self._renewals.send_due()
                self._sleeper.wake()
