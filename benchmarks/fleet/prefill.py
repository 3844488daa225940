"""A simulated prefill engine: computes prompts chunk by chunk, and keeps them under leases until D has read them.

A step computes the prompts that have begun, the oldest first, and begins others while it has tokens left and there are
blocks for a whole prompt. The leases are the connector's own, and so is which of them gives way.
"""

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, cast

import simpy

from benchmarks.fleet.constants import Constants
from benchmarks.fleet.links import Link
from benchmarks.fleet.memory import Holding, HostMemory, Memory
from benchmarks.fleet.node import POLL_S, Job, Settings, Sleeper, blocks_of, blocks_per_id
from benchmarks.fleet.traces import BLOCK_TOKENS
from pd_connector.scheduler.block_demand import BlockDemand
from pd_connector.scheduler.prefill.leases import LeaseTable
from pd_connector.scheduler.request_admission import AdmissionLimits, RequestAdmission
from pd_connector.vllm.cache_specs import Retention
from transfer.control.messages import Release

_FOR_D = {"do_remote_decode": True}


@dataclass(eq=False)
class Leased:
    """What a lease holds: blocks of the device, or of host memory."""

    holding: Holding | None
    blocks: int
    host_blocks: int = 0


@dataclass(eq=False)
class _Prompt:
    job: Job
    done: simpy.Event  # the prompt is computed
    holding: Holding | None = None


class Prefill:
    """One P."""

    def __init__(self, env: simpy.Environment, constants: Constants, settings: Settings, number: int) -> None:
        self.number = number
        self.in_flight = 0  # requests, as a router counts them
        self.last_chosen = 0
        self.link = Link()
        self._env, self._constants, self._settings = env, constants, settings
        self.memory = Memory(self._constants.cache.blocks, blocks_per_id(self._constants, settings))
        self.host = HostMemory(settings.host_blocks)
        self.leases: LeaseTable[Leased] = LeaseTable(
            settings.lease_ttl_s, lambda: self._env.now, settings.max_lease_age_s
        )
        limits = AdmissionLimits(settings.max_leased_fraction, settings.lease_ttl_s, settings.queue_timeout_s)
        groups = (Retention(self._constants.cache.block_tokens),)
        # Blocks are asked for three numbers and requests for three; both have them.
        self._demand = BlockDemand(cast("Any", self.memory), groups)
        self._admission = RequestAdmission(limits, self._demand, cast("Any", self.leases), clock=lambda: self._env.now)
        self._waiting: deque[_Prompt] = deque()
        self._running: list[_Prompt] = []
        self._sleeper = Sleeper(self._env)
        self.busy_s = 0.0
        self._env.process(self._run())

    def serve(self, job: Job) -> Generator[simpy.Event, Any, None]:
        """Compute a prompt, and answer."""
        yield self._env.timeout(self._constants.engine.request_s / 2)
        job.kv_transfer_params = _FOR_D
        prompt = _Prompt(job, self._env.event())
        self._waiting.append(prompt)
        self._sleeper.wake()
        yield prompt.done
        yield self._env.timeout(self._constants.engine.request_s / 2)
        job.prefilled_s = self._env.now

    def release(self, job: Job) -> str:
        """Take D's word that it has read a prompt; return why that was not valid, or nothing."""
        released = self.leases.release(Release("", job.lease_id, 0, 1, job.request_id, job.lease_id))
        self._sleeper.wake()
        return "" if released.valid else str(released.reason)

    def cancel(self, lease_ids: tuple[str, ...]) -> None:
        """Take D's word that it will not read prompts."""
        self.leases.cancel(lease_ids)
        self._sleeper.wake()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        self.memory.check_integrity()
        self.host.check_integrity()
        self.leases.check_integrity()
        self._admission.check_integrity()

    def _run(self) -> Generator[simpy.Event, Any, None]:
        while True:
            self._collect()
            chunks = self._schedule()
            self._demand.end_step()
            self._admission.step_orders({})
            if not chunks:
                yield self._sleeper.sleep(POLL_S if self._waiting else None)
                continue
            costs = self._constants.engine
            began = self._env.now
            yield self._env.timeout(costs.prefill_s((tokens, prompt.job.computed) for prompt, tokens in chunks))
            self.busy_s += self._env.now - began
            for prompt, tokens in chunks:
                self._computed(prompt, tokens)

    def _schedule(self) -> list[tuple[_Prompt, int]]:
        """Return the chunks of the next step."""
        chunks: list[tuple[_Prompt, int]] = []
        left = self._constants.chunk_tokens
        for prompt in self._running:
            if tokens := min(left, prompt.job.num_tokens - prompt.job.computed):
                chunks.append((prompt, tokens))
                left -= tokens
        while left and self._waiting and len(self._running) < self._settings.max_requests:
            prompt = self._waiting[0]
            if not self._begin(prompt):
                break
            self._running.append(self._waiting.popleft())
            tokens = min(left, prompt.job.num_tokens - prompt.job.computed)
            chunks.append((prompt, tokens))
            left -= tokens
        return chunks

    def _begin(self, prompt: _Prompt) -> bool:
        """Give a prompt its blocks, if there are enough."""
        job = prompt.job
        request, blocks = cast("Any", job), blocks_of(job.num_tokens, self._constants)
        self._demand.asked(request)
        # The last token of a prompt is always computed.
        ids = job.arrival.whole_ids[: (job.num_tokens - 1) // BLOCK_TOKENS]
        prompt.holding = self.memory.take(ids, blocks)
        if prompt.holding is None:
            return False
        self._demand.given()
        self._admission.allocated(request, cast("Any", None), 0)
        job.computed = len(prompt.holding.ids) * BLOCK_TOKENS
        if self._settings.legs == "together":
            self.leases.begin(job.lease_id)
            self._tell(job, complete=False)
        return True

    def _computed(self, prompt: _Prompt, tokens: int) -> None:
        job, holding = prompt.job, prompt.holding
        assert holding is not None, "a prompt is computed without blocks"
        job.computed += tokens
        complete = job.computed == job.num_tokens
        if complete:
            self._running.remove(prompt)
            self.memory.publish(holding)
            self._admission.finish(cast("Any", job), ())
            leased = Leased(holding, holding.total(self.memory.blocks_per_id))
            self.memory.leased += leased.blocks
            self.leases.grant(job.lease_id, leased, job.lease_id)
            if self.host.take(leased.blocks):
                leased.host_blocks = leased.blocks
                self._env.process(self._move(leased))
            prompt.done.succeed()
        if self._settings.legs == "together":
            self._tell(job, complete=complete)

    def _tell(self, job: Job, *, complete: bool) -> None:
        computed = job.computed
        timer = self._env.timeout(self._constants.pull.message_s / 2)
        timer.callbacks.append(lambda _: job.tell(computed, complete=complete))

    def _move(self, leased: Leased) -> Generator[simpy.Event, Any, None]:
        """Copy what is leased to host memory, and give the device's blocks back."""
        yield self._env.timeout(leased.blocks * self._constants.cache.block_bytes * self._settings.host_byte_s)
        self._free(leased)
        self._sleeper.wake()

    def _collect(self) -> None:
        for leased in self.leases.collect():
            self._free(leased)
            self.host.give_back(leased.host_blocks)

    def _free(self, leased: Leased) -> None:
        if leased.holding is not None:
            self.memory.give_back(leased.holding)
            self.memory.leased -= leased.blocks
            leased.holding = None
