"""The roles of a decode engine to whose host memory prompts are pulled, and what each slot of it holds."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from pd_connector.orders import LoadOrder, PullOrder, RankEnds, Report
from pd_connector.scheduler.block_demand import BlockDemand
from pd_connector.scheduler.decode.consumer import Consumer
from pd_connector.scheduler.decode.landings import LandingMode, Landings
from pd_connector.scheduler.host.tier import HostTier
from pd_connector.stats import StatsRecorder, nothing
from pd_connector.vllm.cache_specs import Retention
from tests.support.connector.consumers import CountedBlocks, consumer_parts, layers_of
from tests.support.connector.requests import RecordingClient, a_prompt, a_remote, allocated
from tests.support.host_tier.setup import Setup, make_manager, make_pool, make_request
from tests.support.waiting import ManualClock


@dataclass(frozen=True)
class SlotContents:
    """Tokens of a prompt that lie in a slot: the first ``tokens`` of block ``number`` of a cache group."""

    seed: int  # of the prompt
    group: int
    number: int
    tokens: int


class LandingEngine:
    """The roles of a decode engine of two ranks that pulls to host memory."""

    def __init__(
        self,
        mode: LandingMode = "always",
        slots: int = 7,
        device_blocks: int = 100,
        *,
        groups: tuple[tuple[int, int], ...] = ((16, 0),),
    ) -> None:
        """``groups``: block tokens and window, or 0, of each cache group."""
        self.setup = Setup(groups, 40, slots, ranks=2)
        self.kept = [Retention(tokens, window) for tokens, window in groups]
        self.pool = make_pool(self.setup, make_manager(self.setup))
        self.tier = HostTier(self.pool, self.setup.ranks)
        self.device = CountedBlocks(device_blocks)
        demand = BlockDemand(self.device, self.kept)
        self.consumer = Consumer(*consumer_parts(RecordingClient(), ManualClock(), self.kept, demand))
        self.landings = Landings(mode, self.tier, self.consumer, demand, self.setup.ranks)
        self.roles = (self.landings, self.tier, self.consumer)
        self.requests: dict[str, Any] = {}
        self.under_way: list[str] = []
        self.loading: list[str] = []
        self.host: dict[int, SlotContents] = {}  # by slot; nothing of use in the others
        self._seeds: dict[str, int] = {}
        self._orders: dict[str, PullOrder] = {}  # of landings under way
        self._loads: list[LoadOrder] = []  # that nobody has taken
        self._given: dict[str, list[list[int]]] = {}  # device blocks, by cache group; 0 where a window has passed

    def arrive(self, name: str, seed: int = 0, tokens: int = 41, engine_id: str = "engine-p") -> Any:
        prompt = a_prompt(tokens, seed)
        request = self.requests[name] = make_request(self.setup, name, prompt)
        self._seeds[name] = seed
        theirs = [tuple(range(1, -(-tokens // kept.block_tokens) + 1)) for kept in self.kept]
        remote = a_remote(
            prompt,
            remote_engine_id=engine_id,
            lease_id=f"lease-of-{name}",
            remote_block_ids=tuple(theirs),
            remote_block_sizes=self.setup.sizes,
            remote_layers=layers_of(len(theirs)),
        )
        request.kv_transfer_params = remote.to_params()
        for role in self.roles:
            role.add(request)
        return request

    def ask(self, name: str, computed: int = 0) -> tuple[int, int] | None:
        """Tokens to load and to pull to the device; None if the request is to wait."""
        request = self.requests[name]
        if self.landings.must_wait(request, computed):
            self.step()
            return None
        loaded = self.tier.missing_tokens(request, computed)
        return loaded, self.consumer.missing_tokens(request, computed + loaded)

    def step(self, tokens: int = 0) -> None:
        """Begin landings. ``tokens``: what the step computes."""
        scheduled = {"a request": tokens} if tokens else {}
        for order in self.landings.step_orders(scheduled).landings:
            self.begin_landing(order)
        self._loads += self.tier.step_orders(scheduled).loads

    def settle(self) -> None:
        """Step until nothing wants to."""
        for _ in range(200):
            self.step()
            if not (self.landings.wants_step or self.tier.wants_step):
                return
        raise AssertionError("the engine steps forever")

    def begin_landing(self, order: PullOrder) -> None:
        """The workers begin to write to the slots of a landing."""
        self.under_way.append(order.request_id)
        self._orders[order.request_id] = order
        for _, _, slot in _written(order):
            self.host.pop(slot, None)

    def landing(self, name: str) -> PullOrder:
        """What was ordered of a landing under way."""
        return self._orders[name]

    def give_blocks(self, name: str, loaded: int, pulled: int, computed: int = 0) -> None:
        """VLLM gives a request blocks, as many as hold the prompt, numbered from 1 over all cache groups."""
        request, left = self.requests[name], loaded + pulled
        tables = self._device_tables(request.num_prompt_tokens, computed + left)
        self._given[name] = tables
        blocks = allocated(*tables)
        blocks.blocks = tuple([KVCacheBlock(number, is_null=not number) for number in table] for table in tables)
        for role in self.roles:
            left -= role.allocated(request, blocks, left)
        assert left == 0
        if loaded:
            self.loading.append(name)

    def take_load(self, name: str, loaded: int, computed: int = 0) -> LoadOrder | None:
        """The load that has been ordered for a request since the last step, if any: all that it needs, and right."""
        self.step()
        loads, self._loads = self._loads, []
        if not loads:
            return None
        (load,) = loads
        moves = zip(load.moves.groups.tolist(), load.moves.blocks.tolist(), load.moves.slots.tolist(), strict=True)
        slot_of_block = {(group, block): slot for group, block, slot in moves}
        seed, end, wanted = self._seeds[name], computed + loaded, set()
        for group, (kept, table) in enumerate(zip(self.kept, self._given[name], strict=True)):
            size = kept.block_tokens
            for number in range(computed // size, -(-end // size)):
                if not table[number]:
                    continue
                wanted.add((group, table[number]))
                held = self.host.get(slot_of_block[group, table[number]])
                assert held is not None, f"block {number} of group {group} is loaded from a slot that holds nothing"
                right = SlotContents(seed, group, number, held.tokens)
                assert held == right, f"block {number} of group {group} is loaded from a slot that holds {held}"
                assert held.tokens >= min(size, end - number * size), f"block {number} is loaded in part: {held}"
        assert slot_of_block.keys() == wanted, "more is loaded than is wanted"
        return load

    def end_landing(self, name: str, *, failed: bool = False) -> None:
        self.under_way.remove(name)
        order, seed = self._orders.pop(name), self._seeds[name]
        for group, number, slot in _written(order):
            size = self.kept[group].block_tokens
            tokens = min(size, order.end_token - number * size)
            assert order.first_token < order.end_token, "nothing is to land"
            assert number * size + tokens > order.first_token, "a block is written to that holds no token of these"
            if not failed:
                self.host[slot] = SlotContents(seed, group, number, tokens)
        for rank in range(self.setup.ranks):
            report = Report(landings={name: RankEnds(1, failed=failed and rank == 0)})
            for role in self.roles:
                role.settled(set(), set(), report)

    def end_load(self, name: str) -> None:
        self.loading.remove(name)
        for role in self.roles:
            role.settled({name}, set(), Report())

    def leave(self, name: str) -> None:
        request = self.requests.pop(name)
        self.landings.finish(request, ())
        self.tier._requests.pop(name, None)  # it has computed nothing, so there is nothing to store
        self.tier.finish(request, ())
        self.consumer.finish(request, ())

    def check(self) -> None:
        for role in self.roles:
            role.check_integrity()

    @property
    def lent(self) -> int:
        """What the engine tells of its host memory, in slots."""
        stats = StatsRecorder()
        self.tier.update_stats(stats)
        return int((stats.take() or nothing())["gauges"]["host_blocks_lent"])

    def counted(self) -> dict[str, int]:
        stats = StatsRecorder()
        for role in self.roles:
            role.update_stats(stats)
        return dict((stats.take() or {"counts": {}})["counts"])

    def _device_tables(self, tokens: int, end: int) -> list[list[int]]:
        """Block tables for ``tokens`` tokens, of which the first ``end`` are brought; 0 where a window has passed."""
        tables: list[list[int]] = []
        first = 1
        for kept in self.kept:
            number = -(-tokens // kept.block_tokens)
            passed = kept.first_token(end) // kept.block_tokens
            tables.append([0] * passed + list(range(first + passed, first + number)))
            first += number
        return tables


def _written(order: PullOrder) -> Iterable[tuple[int, int, int]]:
    """Cache group, number and slot of each block that a landing writes to."""
    return (
        (group, number, block - 1)
        for group, table in enumerate(order.local_block_ids)
        for number, block in enumerate(table)
        if block
    )
