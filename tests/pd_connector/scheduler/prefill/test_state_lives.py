"""Leases of a model with states, in any order of steps, preemptions and ends, against what the device has written."""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.request import Request

from pd_connector.scheduler.prefill.announcer import Announcer
from pd_connector.scheduler.prefill.leased_states import LeasedStates
from pd_connector.vllm.device_blocks import HeldBlocks
from tests.support.connector.prompts_with_states import BLOCK, StateEngine
from tests.support.releases import INSTALLED, module_needs

if INSTALLED < (0, 30):
    module_needs((0, 30), "states of recurrent layers")

SHARED = 10  # tokens that all prompts begin with
STEPS_IN_FLIGHT = 2
Content = tuple[int, int, int]  # cache group, number of the prompt, tokens


def content(group: int, prompt: int, tokens: int) -> Content:
    return group, prompt if tokens > SHARED else 0, tokens


@dataclass(eq=False)
class _Job:
    request: Request
    prompt: int
    scheduled: int = 0  # tokens
    has_blocks: bool = False

    @property
    def next_ends(self) -> list[int]:
        """Where its next step may end: at a border, and after the last border at the end."""
        tokens = self.request.num_prompt_tokens
        borders = [end for end in range(BLOCK, tokens, BLOCK) if end > self.scheduled]
        return borders or [tokens]


@dataclass
class _Step:
    ends: dict[_Job, int] = field(default_factory=dict)  # tokens
    tokens: dict[str, int] = field(default_factory=dict)  # how many of them it computes
    writes: dict[int, Content] = field(default_factory=dict)  # by block


@dataclass(frozen=True)
class _Lease:
    held: HeldBlocks
    promised: dict[int, Content]


class StateLives(RuleBasedStateMachine):
    """Two steps may be under way: the second is scheduled before the first has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = StateEngine(blocks=22)
        service: Any = SimpleNamespace(block_tokens=(BLOCK,) * 3, transfers=None)
        self.announcer = Announcer(service, self.engine.blocks, Counter(), STEPS_IN_FLIGHT)
        self.leased = LeasedStates(self.engine.blocks, self.engine.retentions, self.engine.prompts)
        self.jobs: list[_Job] = []
        self.steps: list[_Step] = []
        self.leases: list[_Lease] = []
        self.device: dict[int, Content] = {}
        self.requests = 0

    @rule(prompt=st.sampled_from([1, 2]), tokens=st.integers(2, 24))
    def come(self, prompt: int, tokens: int) -> None:
        self.requests += 1
        request = self.engine.request(f"r{self.requests}", tokens, is_cut=True, differs=(SHARED, prompt))
        self.announcer.add(request)
        self.jobs.append(_Job(request, prompt))

    @precondition(lambda self: self.jobs and len(self.steps) < STEPS_IN_FLIGHT)
    @rule(data=st.data())
    def schedule(self, data: st.DataObject) -> None:
        step = _Step()
        self.engine.manager.new_step_starts()
        for job in self.jobs:
            if job.scheduled == job.request.num_prompt_tokens:
                continue
            end = data.draw(st.sampled_from(job.next_ends)) if job.has_blocks else 0
            if not self.give_blocks(job, end, step, data):
                if job.has_blocks:
                    self.preempt(job)
                break
        self.announcer.schedule(step.tokens)
        for job, end in step.ends.items():
            job.request.num_computed_tokens = job.scheduled = end
            job.request.num_in_flight_tokens += step.tokens[job.request.request_id]
        self.steps.append(step)

    def give_blocks(self, job: _Job, end: int, step: _Step, data: st.DataObject) -> bool:
        request, manager = job.request, self.engine.manager
        found: dict[str, Any] = {}
        if not job.has_blocks:
            blocks, tokens, *_ = manager.get_computed_blocks(request)
            found = {"num_new_computed_tokens": tokens, "new_computed_blocks": blocks} if tokens else {}
            job.scheduled = tokens
            end = data.draw(st.sampled_from(job.next_ends))
        began = job.scheduled
        if manager.allocate_slots(request, end - began, **found) is None:
            return False
        job.has_blocks, request.num_computed_tokens = True, began
        step.ends[job], step.tokens[request.request_id] = end, end - began
        attention, *states = self.engine.tables(request)
        for entry in range(began // BLOCK, -(-end // BLOCK)):
            step.writes[attention[entry]] = content(0, job.prompt, min((entry + 1) * BLOCK, end))
        for group, table in enumerate(states, 1):
            step.writes[table[-(-end // BLOCK) - 1]] = content(group, job.prompt, end)
        return True

    def preempt(self, job: _Job) -> None:
        self.engine.manager.free(job.request)
        job.request.num_computed_tokens = job.scheduled = 0
        job.request.num_preemptions += 1
        job.has_blocks = False

    @precondition(lambda self: self.steps)
    @rule()
    def end_step(self) -> None:
        step = self.steps.pop(0)
        self.device |= step.writes
        for job in step.ends:
            request = job.request
            request.num_in_flight_tokens -= step.tokens[request.request_id]
            if job in self.jobs and job.scheduled == request.num_prompt_tokens and not request.num_in_flight_tokens:
                self.lease(job)

    def lease(self, job: _Job) -> None:
        request, tokens = job.request, job.request.num_prompt_tokens
        unfinished = partial(self.announcer.being_written, besides=request)
        tables, held = self.leased.hold(request, self.engine.tables(request), unfinished)
        promised = {
            block: content(group, job.prompt, min((entry + 1) * BLOCK, tokens))
            for group, table in enumerate(tables)
            for entry, block in enumerate(table)
            if block
        }
        assert all(table[-1] for table in tables)
        assert {block.block_id for block in held} == promised.keys()
        self.leases.append(_Lease(held, promised))
        self.leave(job)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.sampled_from(self.jobs)))

    def leave(self, job: _Job) -> None:
        self.announcer.finish(job.request, is_granted=False)
        self.engine.manager.free(job.request)
        self.engine.prompts.forget(job.request.request_id)
        self.jobs.remove(job)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        self.engine.blocks.release(lease.held)

    @invariant()
    def leases_hold_what_they_promise(self) -> None:
        for lease in self.leases:
            assert {block: self.device.get(block) for block in lease.promised} == lease.promised

    def teardown(self) -> None:
        for lease in self.leases:
            self.engine.blocks.release(lease.held)
        for job in self.jobs:
            self.engine.manager.free(job.request)
        pool = self.engine.manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


TestStateLives = StateLives.TestCase
TestStateLives.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
