"""An engine around ``HostTier``: vLLM's own cache manager and requests, its scheduler in short, and simulated ranks.

The scheduler does, in the order in which vLLM's does it, what the tier meets: blocks are hashed when they are
allocated, before they are computed; loads are asynchronous; requests are preempted; with ``ahead`` a step is planned
while the one before it is still running. What the model will say is known in advance, and so what every block must hold
is known from the tokens alone.
"""

from collections import Counter
from typing import Any

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.request import RequestStatus

from pd_connector.orders import LoadOrder, Orders
from pd_connector.scheduler.external_loads import ExternalLoads
from pd_connector.scheduler.host.tier import HostTier
from pd_connector.stats import StatsRecorder, nothing
from pd_connector.vllm.device_blocks import DeviceBlocks
from pd_connector.vllm.releases import installed
from tests.support.host_tier.ranks import Contents, Copy, End, HostTierRank, PullOrder, contents_of
from tests.support.host_tier.setup import Job, Setup, State, Step, Work, make_manager, make_pool, make_request
from tests.support.host_tier.sibling import load_from_sibling, take_back
from tests.support.host_tier.state_steps import compute_state, end_of_step
from tests.support.releases import INSTALLED


class HostTierEngine:
    """A scheduler process and its ranks."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.manager = make_manager(setup)
        self.blocks = DeviceBlocks()
        self.blocks.bind(self.manager, self._release_device_blocks)
        self.pool = make_pool(setup, self.manager)
        self.tier = HostTier(self.pool, setup.ranks, setup.mode)
        self.external = ExternalLoads(self.blocks, setup.sizes, steps_in_flight=2)
        self.ranks = [HostTierRank(setup.device_blocks, setup.slots, max(setup.sizes)) for _ in range(setup.ranks)]
        self.jobs: list[Job] = []
        self.running: list[Job] = []
        self.steps: list[Step] = []  # planned, their output not taken
        self.loaded_tokens = 0
        self.computed_tokens = 0
        self._counted: Counter[str] = Counter()
        self._weights = 0
        self._prefixes: dict[Any, tuple[int, int, tuple[int, ...]]] = {}  # by key: group, number of the block, tokens
        self._reported: dict[str, int] = {}  # ranks that have reported a request
        self._failed: set[str] = set()  # on some rank
        self._pulls: list[tuple[PullOrder, tuple[Contents, ...]]] = []  # to be ordered

    def counted(self) -> Counter[str]:
        """What the tier has counted since the start, and its gauges as they are."""
        recorder = StatsRecorder()
        self.tier.update_stats(recorder)
        data = recorder.take() or nothing()
        self._counted.update(data["counts"])
        return self._counted + Counter(data["gauges"])

    # Requests

    def arrive(self, request_id: str, tokens: tuple[int, ...], outputs: int = 1) -> Job:
        """A request whose last ``outputs`` tokens the model will say."""
        job = Job(make_request(self.setup, request_id, tokens[: len(tokens) - outputs], outputs), tokens)
        hashes = make_request(self.setup, "all of it", tokens).block_hashes
        for group, size in enumerate(self.setup.sizes):
            for number, value in enumerate(installed.current().block_hashes(hashes, self.setup.hash_tokens, size)):
                prefix = tokens[: (number + 1) * size]
                self._prefixes[make_block_hash_with_group_id(value, group)] = group, number, prefix
        self.jobs.append(job)
        self.external.add(job.request)
        self.tier.add(job.request)
        return job

    def in_state(self, *states: State) -> list[Job]:
        return [job for job in self.jobs if job.state in states]

    def admit(self, job: Job, budget: int = 8, *, pulls: bool = False, fate: str = "") -> Work | None:
        """The scheduler looks at a waiting request. ``fate``: "asked later", or "declined", as hits may be."""
        request, manager, tier = job.request, self.manager, self.tier
        hit, local, *boundary = manager.get_computed_blocks(request)
        if boundary:
            (request.shared_prefix_boundary,) = boundary
        self.external.missing_tokens(request, local)
        loaded = tier.missing_tokens(request, local)
        self.setup.check_offer(self.pool, job, local, loaded)
        if fate == "asked later":
            return None
        if fate in {"a sibling loads", "a sibling fails"}:
            return load_from_sibling(self, job, hit, local, budget, fails=fate == "a sibling fails")
        pulls = pulls and not job.was_pulled and not request.num_output_tokens
        external = (request.num_prompt_tokens - 1 - local if pulls else loaded) if fate != "declined" else 0
        new = 0 if external else self._fit(request, local, budget)
        if not (new or external):
            return None
        blocks = manager.allocate_slots(
            request,
            new,
            num_new_computed_tokens=local,
            new_computed_blocks=hit,
            num_external_computed_tokens=external,
            delay_cache_blocks=external > 0,
        )
        if blocks is None:
            return None
        self.external.allocated(request, manager.get_blocks(job.request_id), external)
        taken = tier.allocated(request, manager.get_blocks(job.request_id), external)
        assert taken == (loaded if external else 0)
        assert tier.loaded_tokens(job.request) == taken
        request.num_computed_tokens = local + external
        if not external:
            return self.run(job, new)
        job.state = State.LOADING
        self.loaded_tokens += taken
        if external > taken:
            job.was_pulled = True
            self._start_pull(job, local + taken, local + external)
        return None

    def abort(self, job: Job) -> None:
        """A request leaves, wherever it is; one that waits for blocks to arrive keeps them until then."""
        waits = job.state is State.LOADING and self._reported.get(job.request_id, 0) < self.setup.ranks
        self.finish(job, frees=not waits)

    def preempt(self, job: Job) -> None:
        request = job.request
        self.running.remove(job)
        self.manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = request.num_output_placeholders = 0
        request.num_preemptions += 1
        job.state = State.WAITING

    def reset(self, *, preempts: bool) -> bool:
        """The weights change: what was computed with the old ones must not be found."""
        self.run_all()
        while preempts and self.running:
            self.preempt(self.running[-1])
        is_reset = self.manager.reset_prefix_cache()
        is_reset = self.tier.reset() and is_reset
        for rank in self.ranks:
            rank.abandon_stores()
        assert self.pool.cached == 0, "something is found after a reset"
        if is_reset:
            self._weights += 1
        return bool(is_reset)

    def _release_device_blocks(self) -> None:
        """What the connector does before vLLM resets its prefix cache."""
        references = self.tier.device_references()
        if references and self.blocks.are_all_in_use(references):
            self.tier.release_device_blocks()
            for rank in self.ranks:
                rank.abandon_stores()

    # Steps

    def plan(self, budget: int = 8, *, pulls: bool = False, fate: str = "") -> None:
        """One call of the scheduler: what runs comes first, then what waits."""
        if self.setup.state_tokens:
            self.manager.new_step_starts()
        works, preempted = self._plan_running(budget)
        budget -= sum(work.end - work.first for work in works)
        for job in [] if preempted else self.in_state(State.READY, State.LOADING, State.WAITING):
            if job.state is State.LOADING:
                self._promote(job)
            if budget > 0 and job.state in {State.READY, State.WAITING}:
                is_ready = job.state is State.READY
                if work := self._resume(job, budget) if is_ready else self.admit(job, budget, pulls=pulls, fate=fate):
                    works.append(work)
                    budget -= work.end - work.first
        self._order(works)

    def execute(self) -> None:
        """The ranks run the oldest step that was planned, and begin what it orders."""
        step = next(step for step in self.steps if not step.executed)
        step.executed = True
        for rank, copies in zip(self.ranks, step.copies, strict=True):
            for copy in copies:
                rank.start(copy)
            for work in step.works:
                self._compute(rank, work)
        for rank in self.ranks:
            report = rank.take_report()
            step.report += report.report
            step.failed |= report.failed
            for request_id in report.finished:
                step.finished[request_id] = step.finished.get(request_id, 0) + 1

    def update(self) -> None:
        """The scheduler takes the output of the oldest step."""
        if not self.steps[0].executed:
            self.execute()
        step = self.steps.pop(0)
        taken_back = take_back(self, step)
        for work in step.works:
            self._take_output(work, is_wrong=work.job in taken_back)
        self._take_reports(step)

    def run_all(self) -> None:
        while self.steps:
            self.update()

    def step(self, budget: int = 8, **options: Any) -> None:
        """A step as vLLM takes it: the next one is planned before the output of this one is taken, or not."""
        self.plan(budget, **options)
        if not self.setup.ahead or len(self.steps) > 1:
            self.update()

    def settle(self) -> None:
        """All copies end well and are reported, without a request being worked on."""
        for _ in range(100):
            self._order([])
            self.run_all()
            self.end_copies()
            if not (self.tier.wants_step or any(rank.under_way for rank in self.ranks)):
                break
        assert not self.tier.wants_step, "the engine never comes to rest"
        self._order([])
        self.run_all()

    def end_copies(self, end: End = End.WELL) -> None:
        for rank in self.ranks:
            self.end_copies_of(rank, end)

    def end_copies_of(self, rank: HostTierRank, end: End) -> None:
        for copy in list(rank.under_way):
            rank.finish(copy, end)

    def serve(self, request_id: str, tokens: tuple[int, ...], outputs: int = 1) -> Job:
        """Serve one request, all copies ending well and at once; the engine is at rest after it."""
        job = self.arrive(request_id, tokens, outputs)
        self.go_on(100)
        assert job.state is State.GONE
        self.settle()
        return job

    def go_on(self, steps: int) -> None:
        """Steps in which all goes well, until there is nothing left to do.

        All copies end soon; in every step those of another rank are late.
        """
        for number in range(steps):
            if not (self.jobs or self.tier.wants_step):
                break
            self.step(20)
            self.check()
            for rank in self.ranks:
                if rank is not self.ranks[number % len(self.ranks)] or number % 3 == 2:
                    self.end_copies_of(rank, End.WELL)

    def other_requests_come(self, blocks: int) -> None:
        """They take free device blocks, write to them, and have left again."""
        self.run_all()
        pool = self.manager.block_pool
        taken = pool.get_new_blocks(min(blocks, pool.get_num_free_blocks()))
        for block in taken:
            for rank in self.ranks:
                for offset in range(max(self.setup.sizes)):
                    rank.compute(block.block_id, offset, 0)
        pool.free_blocks(taken)

    # What must hold

    def check(self) -> None:
        self.external.check_integrity()
        self.tier.check_integrity()
        for block in self.pool._pool.blocks:
            if block.block_hash is not None:
                _, contents = self.wanted_of(block.block_hash)
                for rank in self.ranks:
                    held = rank.host[block.block_id - 1][: len(contents)]
                    assert held == list(contents), "I7: a slot can be found that does not hold its block on every rank"

    def check_at_rest(self) -> None:
        """Nothing is in use by anybody."""
        self.check()
        assert not self.running
        in_use = [block.block_id for block in self.manager.block_pool.blocks if block.ref_cnt and not block.is_null]
        assert not in_use, f"device blocks {in_use} are in use for ever"
        assert self.manager.block_pool.get_num_free_blocks() == self.setup.device_blocks - 1
        lost = set.union(*(rank.runaway for rank in self.ranks))
        assert self.pool.references().keys() >= lost
        assert self.pool.references().keys() == self.tier.loans._lost, "slots are in use for ever"
        assert not self.tier._offers
        assert not self.tier._requests

    def wanted_of(self, key: Any) -> tuple[int, Contents]:
        """The cache group of a key, and what a block of it holds."""
        group, number, prefix = self._prefixes[key]
        return group, self.setup.held_in(group, number, contents_of(self._weights, group, prefix))

    # The scheduler's parts

    def _plan_running(self, budget: int) -> tuple[list[Work], bool]:
        works: list[Work] = []
        planned, preempted = 0, False
        while planned < len(self.running) and budget > 0:
            job = self.running[planned]
            request = job.request
            left = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
            if request.num_output_placeholders and request.num_computed_tokens + 1 >= len(job.tokens):
                left = 0
            if new := self._fit(request, request.num_computed_tokens, min(budget, left)):
                while self.manager.allocate_slots(request, new) is None:
                    if self.tier.frees_blocks_soon:
                        return works, preempted
                    self.preempt(self.running[-1])
                    preempted = True
                    if job.state is State.WAITING:
                        return works, preempted
                works.append(self._work(job, new))
                budget -= new
            planned += 1
        return works, preempted

    def _resume(self, job: Job, budget: int) -> Work | None:
        new = self._fit(job.request, job.request.num_computed_tokens, budget)
        if not new or self.manager.allocate_slots(job.request, new) is None:
            return None
        self.external.allocated(job.request, self.manager.get_blocks(job.request_id), 0)
        assert self.tier.allocated(job.request, self.manager.get_blocks(job.request_id), 0) == 0
        return self.run(job, new)

    def _fit(self, request: Any, first: int, most: int) -> int:
        """How many of ``most`` tokens from ``first`` on a step computes."""
        waiting = request.num_tokens + request.num_output_placeholders - first
        return end_of_step(self.setup, request, first, first + min(most, waiting)) - first

    def run(self, job: Job, new: int) -> Work:
        """A request that has its blocks runs, for ``new`` tokens at first."""
        job.state = State.RUNNING
        job.has_failed = False
        job.request.status = RequestStatus.RUNNING
        self.running.append(job)
        return self._work(job, new)

    def _work(self, job: Job, new: int) -> Work:
        request = job.request
        first = request.num_computed_tokens
        samples = first + new >= request.num_tokens + request.num_output_placeholders
        tables = self.manager.get_block_ids(job.request_id)
        return Work(job, first, first + new, tuple(map(tuple, tables)), request.num_preemptions, samples)

    def _promote(self, job: Job) -> None:
        request = job.request
        if self._reported.get(job.request_id, 0) < self.setup.ranks:
            return
        del self._reported[job.request_id]
        if request.num_computed_tokens:
            self.manager.cache_blocks(request, request.num_computed_tokens)
            job.state = State.READY
        else:
            self.manager.free(request)
            job.state = State.WAITING

    def _order(self, works: list[Work]) -> None:
        scheduled = {work.job.request_id: work.end - work.first for work in works}
        assert self.external.step_orders(scheduled) == Orders()
        orders = self.tier.step_orders(scheduled)
        assert orders == Orders(loads=orders.loads, stores=orders.stores)
        step = Step([[] for _ in self.ranks], works)
        for load in orders.loads:
            copy = load, self._wanted_of_load(load)
            for copies in step.copies:
                copies.append(Copy(*copy))
        for store in orders.stores:
            keys = [self.manager.block_pool.blocks[block].block_hash for block in store.moves.blocks.tolist()]
            wanted = [self.wanted_of(key) for key in keys]
            assert [group for group, _ in wanted] == store.moves.groups.tolist()
            for copies in step.copies:
                copies.append(Copy(store, tuple(contents for _, contents in wanted)))
        for copies in step.copies:
            copies += [Copy(pull, wanted) for pull, wanted in self._pulls]
        self._pulls = []
        for work in works:
            request = work.job.request
            request.num_computed_tokens += work.end - work.first
            request.num_in_flight_tokens += work.end - work.first
            request.num_output_placeholders += self.setup.ahead and work.samples
        self.steps.append(step)

    # Parts of a step

    def _start_pull(self, job: Job, first: int, end: int) -> None:
        """Tokens ``first`` to ``end`` come from a prefill engine."""
        blocks: list[int] = []
        wanted: list[Contents] = []
        for group, (size, table) in enumerate(zip(self.setup.sizes, self._tables(job), strict=True)):
            contents = contents_of(self._weights, group, job.tokens[:end])
            for number in range(first // size, len(table)):
                if table[number]:
                    blocks.append(table[number])
                    wanted.append(self.setup.held_in(group, number, contents))
        self._pulls.append((PullOrder(job.request_id, tuple(blocks)), tuple(wanted)))

    def _wanted_of_load(self, order: LoadOrder) -> tuple[Contents, ...]:
        """What the blocks of a load must hold; they are in the request's tables now, and nowhere else."""
        job = next(job for job in self.jobs if job.request_id == order.request_id)
        tables, wanted = self._tables(job), []
        for group, block in zip(order.moves.groups.tolist(), order.moves.blocks.tolist(), strict=True):
            size = self.setup.sizes[group]
            number = tables[group].index(block)
            contents = contents_of(self._weights, group, job.tokens[: (number + 1) * size])
            wanted.append(self.setup.held_in(group, number, contents))
            assert self.manager.block_pool.blocks[block].ref_cnt == 1, "a load writes to a block that others use"
        return tuple(wanted)

    def _compute(self, rank: HostTierRank, work: Work) -> None:
        """Attention reads what its window holds of the tokens before; everything that it reads must be right.

        But in a step in which a sibling fails: then what it computes is as wrong as that.
        """
        may_fail = any(each.fails for step in self.steps for each in step.works)
        for group, size in enumerate(self.setup.sizes):
            contents = contents_of(self._weights, group, work.job.tokens[: work.end])
            table = work.tables[group]
            if self.setup.holds_states(group):
                compute_state(rank, work, group, size, contents)
                continue
            for token in work.sibling:
                if table[token // size]:
                    value = rank.noise()[0] if work.fails else contents[token]
                    rank.compute(table[token // size], token % size, value)
            is_right = True
            for token in range(self.setup.first_seen(group, work.first), work.first):
                held = rank.device[table[token // size]][token % size]
                assert table[token // size], f"attention reads token {token} of cache group {group}, which has no block"
                is_right = held == contents[token] and is_right
                assert is_right or may_fail, f"attention reads garbage: token {token} of cache group {group}"
            for token in range(work.first, work.end):
                rank.compute(table[token // size], token % size, contents[token] if is_right else rank.noise()[0])

    def _take_output(self, work: Work, *, is_wrong: bool) -> None:
        job, request = work.job, work.job.request
        request.num_in_flight_tokens -= work.end - work.first
        self.computed_tokens += work.end - work.first
        is_dropped = is_wrong or job.state is State.GONE or request.num_preemptions != work.preemptions
        if is_dropped or not work.samples:
            return
        request.append_output_token_ids(job.tokens[request.num_tokens])
        if self.setup.ahead:
            request.num_output_placeholders -= 1
            self.manager.cache_blocks(request, request.num_computed_tokens - request.num_output_placeholders)
        if request.num_tokens == len(job.tokens):
            self.finish(job, frees=True)

    def _take_reports(self, step: Step) -> None:
        for request_id, ranks in step.finished.items():
            self._reported[request_id] = self._reported.get(request_id, 0) + ranks
        self._failed |= step.failed
        done = {request_id for request_id in step.finished if self._reported[request_id] == self.setup.ranks}
        failed, self._failed = done & self._failed, self._failed - done
        jobs = [job for job in self.jobs if job.request_id in done]
        for job in jobs:
            if job.request_id in failed and job.state is State.LOADING:
                job.has_failed = True
                job.request.num_computed_tokens = 0
        self.external.settled(done, failed, step.report)
        self.tier.settled(done, failed, step.report)
        for job in jobs:
            if job.state is State.GONE:
                del self._reported[job.request_id]
                self.manager.free(job.request)
                self.jobs.remove(job)

    def finish(self, job: Job, *, frees: bool) -> None:
        """A request ends."""
        request = job.request
        if job in self.running:
            self.running.remove(job)
        if INSTALLED >= (0, 30):
            processed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
            self.manager.remove_skipped_blocks(job.request_id, processed, request.num_prompt_tokens)
        else:
            self.manager.remove_skipped_blocks(job.request_id, request.num_computed_tokens)
        request.status = RequestStatus.FINISHED_ABORTED
        job.state = State.GONE
        self.external.finish(request, ())
        self.tier.finish(request, ())
        if frees:
            self._reported.pop(job.request_id, None)
            self.manager.free(request)
            self.jobs.remove(job)

    def _tables(self, job: Job) -> tuple[list[int], ...]:
        tables: tuple[list[int], ...] = self.manager.get_block_ids(job.request_id)
        return tables
