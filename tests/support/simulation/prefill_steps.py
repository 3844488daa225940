"""The steps of a simulated prefill engine, which compute named prompts chunk by chunk, as vLLM's scheduler makes them.

Up to two steps are under way. They write to memory when they end, in the order in which they began, also to blocks that
their requests have lost since. The next prompt may find what a step has yet to fill, as in vLLM's prefix cache.
"""

import itertools
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from pd_connector.scheduler.prefill.announcer import Announcer
from pd_connector.vllm.device_blocks import DeviceBlocks
from tests.support.connector.requests import FakeRequest
from tests.support.simulation.network import Network
from tests.support.simulation.prefill import TOKENS_PER_BLOCK, PrefillSim, Prompt, Stamp
from transfer.control.messages import TransferState

_STEPS_IN_FLIGHT = 2


@dataclass
class PromptRequest(FakeRequest):
    """A prefill leg, as vLLM's scheduler knows it."""

    num_in_flight_tokens: int = 0


@dataclass(eq=False)
class PromptJob:
    """A prefill leg and its blocks."""

    request: PromptRequest
    prompt: Prompt
    lease_id: str  # empty if it has no name
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Chunk:
    job: PromptJob
    preemptions: int  # of the request, when the step began
    tokens: int
    end: int  # of the prompt's tokens


@dataclass(frozen=True)
class _StepUnderWay:
    chunks: tuple[_Chunk, ...]
    writes: dict[int, Stamp]  # by block
    numbers: tuple[int, ...]  # that the workers return


class _Tables(DeviceBlocks):
    """The block tables of the named prompts."""

    def __init__(self, steps: "PrefillSteps") -> None:
        super().__init__()
        self._steps = steps

    def table(self, request_id: str) -> Any:
        return ([self._steps.pool[block] for block in self._steps.jobs[request_id].blocks],)


class PrefillSteps:
    """Owns the named prompts of one life of a prefill engine, and its steps."""

    def __init__(self, engine: PrefillSim, network: Network) -> None:
        self.engine = engine
        self.pool = [SimpleNamespace(block_id=block, is_null=not block) for block in range(len(engine.memory))]
        self.jobs: dict[str, PromptJob] = {}
        self._under_way: deque[_StepUnderWay] = deque()
        self._numbers = itertools.count()
        service: Any = engine.service  # over promises, not over vLLM's blocks
        self._announcer = Announcer(service, _Tables(self), Counter(), _STEPS_IN_FLIGHT)
        engine.service.notify = network.changed

    @property
    def is_busy(self) -> bool:
        """Whether a step is under way."""
        return bool(self._under_way)

    def add(self, prompt: Prompt, transfer_id: str) -> None:
        """A prefill leg arrives."""
        params = {"do_remote_decode": True, "transfer_id": transfer_id}
        request = PromptRequest(f"p{next(self._numbers)}", prompt.token_ids, params)
        self._announcer.add(request)
        lease_id = ""
        if self._announcer.transfer_id(request.request_id):
            begun = self.engine.service.transfers.begun(transfer_id)
            assert begun is not None
            lease_id = begun.prompt.lease_id
            self.engine.promise_begins(transfer_id, lease_id)
        self.jobs[request.request_id] = PromptJob(request, prompt, lease_id)

    def begin(self, tokens: int, most: int) -> None:
        """A step begins: up to ``tokens`` tokens of each of up to ``most`` prompts, as far as there are blocks."""
        if len(self._under_way) >= _STEPS_IN_FLIGHT:
            self.end()
        ready = [job for job in self.jobs.values() if job.request.num_computed_tokens < job.prompt.tokens]
        attempts = [job.request.num_preemptions for job in ready]
        chunks = [
            _Chunk(job, attempt, end - job.request.num_computed_tokens, end)
            for job, attempt in zip(ready[:most], attempts, strict=False)
            if job.request.num_preemptions == attempt and (end := self._allocate(job, tokens)) is not None
        ]
        numbers = self._announcer.schedule({chunk.job.request.request_id: chunk.tokens for chunk in chunks})
        writes: dict[int, Stamp] = {}
        for chunk in chunks:
            writes |= self._writes(chunk)
            chunk.job.request.num_computed_tokens = chunk.end
            chunk.job.request.num_in_flight_tokens += chunk.tokens
        self._under_way.append(_StepUnderWay(tuple(chunks), writes, numbers))
        self.check()

    def end(self) -> None:
        """The oldest step ends, if one is under way: its workers have written, and report it."""
        if not self._under_way:
            return
        step = self._under_way.popleft()
        for block, stamp in step.writes.items():
            self.engine.write(block, stamp)
        for chunk in step.chunks:
            job, request = chunk.job, chunk.job.request
            request.num_in_flight_tokens -= chunk.tokens
            is_its_own = request.request_id in self.jobs and request.num_preemptions == chunk.preemptions
            if is_its_own and chunk.end == job.prompt.tokens:
                self._finish(job)
        self._announcer.computed(dict.fromkeys(step.numbers, 1), 1)
        self.check()

    def end_all(self) -> None:
        """All steps under way end."""
        while self._under_way:
            self.end()

    def preempt(self, job: PromptJob) -> None:
        """Another request needs the blocks."""
        self.engine.give_back(job.blocks)
        job.blocks = ()
        job.request.num_computed_tokens = 0
        job.request.num_preemptions += 1

    def abort(self, job: PromptJob) -> None:
        """The client has left the prefill engine."""
        self._leave(job, "FINISHED_ABORTED", is_granted=False)
        self.check()

    def check(self) -> None:
        """Raise AssertionError if something is announced that memory does not hold."""
        self._announcer.check_integrity()
        self.engine.service.check_integrity()
        named = self._announcer._named
        for request_id, job in self.jobs.items():
            if request_id not in named or job.request.num_preemptions != named[request_id].preemptions:
                continue  # from a preemption to the next step, what is announced is void, and nobody is told yet
            told = self.engine.told(named[request_id].transfer_id)
            if told.state == TransferState.COMPUTING:
                (ids,) = told.block_ids
                assert ids == job.blocks[: len(ids)], "I2: another block is announced than the request has"
                for number in range(told.tokens // TOKENS_PER_BLOCK):
                    assert self.engine.memory[ids[number]] == job.prompt.stamp(number), (
                        "I2: a block is announced that is not written yet"
                    )

    def _allocate(self, job: PromptJob, tokens: int) -> int | None:
        """Give a prompt blocks for its next tokens; return how far it gets, None if there are too few blocks."""
        engine, request = self.engine, job.request
        if not job.blocks:
            for block in list(self._found(job.prompt)):
                engine.take(block)
                job.blocks += (block,)
            request.num_computed_tokens = len(job.blocks) * TOKENS_PER_BLOCK
        end = min(request.num_computed_tokens + tokens, job.prompt.tokens)
        missing = -(-end // TOKENS_PER_BLOCK) - len(job.blocks)
        while len(engine.free) < missing:
            newest = itertools.takewhile(lambda each: each is not job, reversed(self.jobs.values()))
            victim = next((each for each in newest if each.blocks), None)
            if victim is None:
                self._leave_out(job)
                return None
            self.preempt(victim)
        job.blocks += tuple(engine.allocate() for _ in range(missing))
        for number in range(end // TOKENS_PER_BLOCK):
            engine.hashes.setdefault(job.prompt.stamp(number), job.blocks[number])
        return end

    def _leave_out(self, job: PromptJob) -> None:
        """A prompt is not in this step. One that has not begun gives back what it has found."""
        if job.request.request_id not in self._announcer._begun:
            self.engine.give_back(job.blocks)
            job.blocks, job.request.num_computed_tokens = (), 0

    def _found(self, prompt: Prompt) -> Iterator[int]:
        """What the prefix cache has of a prompt, less its last token: also what steps under way will write."""
        for number in range((prompt.tokens - 1) // TOKENS_PER_BLOCK):
            block = self.engine.hashes.get(prompt.stamp(number))
            if block is None:
                return
            yield block

    @staticmethod
    def _writes(chunk: _Chunk) -> dict[int, Stamp]:
        job, writes = chunk.job, {}
        for number in range((chunk.end - chunk.tokens) // TOKENS_PER_BLOCK, -(-chunk.end // TOKENS_PER_BLOCK)):
            is_written = chunk.end >= min((number + 1) * TOKENS_PER_BLOCK, job.prompt.tokens)
            writes[job.blocks[number]] = job.prompt.stamp(number) if is_written else ("a block's beginning", number)
        return writes

    def _finish(self, job: PromptJob) -> None:
        """A prompt is computed: what ``Producer`` does then."""
        request_id = job.request.request_id
        is_wanted = not self._announcer.is_unwanted(request_id)
        if is_wanted:
            name = self._announcer.transfer_id(request_id)
            self.engine.promise(job.request, job.blocks, name, job.lease_id)
        self._leave(job, "FINISHED_LENGTH_CAPPED", is_granted=is_wanted)

    def _leave(self, job: PromptJob, status: str, *, is_granted: bool) -> None:
        job.request.status = SimpleNamespace(name=status)
        self._announcer.finish(job.request, is_granted=is_granted)
        if job.lease_id and not is_granted:
            self.engine.promise_ends(job.lease_id)
        self.engine.give_back(job.blocks)
        del self.jobs[job.request.request_id]
