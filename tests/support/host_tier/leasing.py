"""The roles of a prefill engine whose leases may move to host memory, with every byte that is copied."""

from collections import Counter
from typing import Any

from pd_connector.orders import Orders, Report, StoreEnds
from pd_connector.scheduler.host.tier import HostTier
from pd_connector.scheduler.prefill.checksum_table import ChecksumTable
from pd_connector.scheduler.prefill.lease_moves import LeaseMoves
from pd_connector.scheduler.prefill.leases import LeaseTable, Tables
from pd_connector.stats import StatsRecorder, nothing
from pd_connector.vllm.block_pools import Leased
from pd_connector.vllm.device_blocks import DeviceBlocks
from tests.support.host_tier.setup import Setup, make_manager, make_pool, make_request
from tests.support.releases import INSTALLED
from tests.support.waiting import ManualClock
from transfer.control.messages import Place, Release

TTL_S, TOKENS, BLOCKS = 8.0, 10, 3  # of a prompt: two full blocks, and a tail
CONTENTS = "the prompt's"
SETUP = Setup(groups=((4, 0),), device_blocks=16, slots=7, ranks=2)
_OF_GROUP = 100  # added to the numbers of the blocks of each further cache group

BlockMark = tuple[int, int]


class LeasingEngine:
    """The roles of a prefill engine whose leases may move, with the bytes of its device and of its host memory.

    A byte is the prompt of which it holds a block, and which.
    """

    def __init__(
        self,
        most_leased: float = 0.0,
        slots: int = SETUP.slots,
        groups: tuple[tuple[int, int], ...] = SETUP.groups,
    ) -> None:
        """``groups``: block tokens and window, or 0, of each cache group."""
        self.setup = Setup(groups, SETUP.device_blocks * len(groups), slots)
        self.clock, self.manager = ManualClock(), make_manager(self.setup)
        self.pool = make_pool(self.setup, self.manager)
        self.tier = HostTier(self.pool, SETUP.ranks)
        self.blocks = DeviceBlocks()
        self.blocks.bind(self.manager)
        self.leases: LeaseTable[Leased] = LeaseTable(TTL_S, self.clock)
        self.checksums = ChecksumTable(self.leases.still_valid, enabled=False)
        self.is_short = False
        self.moves = LeaseMoves(
            self.leases, self.checksums, self.blocks, lambda: self.is_short, most_leased, self.clock
        )
        self.moves.use(self.tier, SETUP.ranks)
        self.device: dict[int, BlockMark] = {}
        self.host: dict[int, BlockMark] = {}
        self.tables: dict[str, Tables] = {}  # of device blocks, by lease; 0 where a window has passed
        self.prompts: dict[str, int] = {}
        self.under_way: list[int] = []  # stores
        self.ordered: list[int] = []  # blocks of each store

    def prefill(self, name: str, prompt: int, tokens: int = TOKENS) -> bool:
        """Compute a prompt and lease it; False if the device has no blocks for it."""
        request: Any = make_request(self.setup, name, [prompt * 100 + token for token in range(tokens)])
        if self.manager.allocate_slots(request, tokens) is None:
            return False
        in_flight = (tokens,) if INSTALLED >= (0, 30) else ()
        self.manager.remove_skipped_blocks(name, tokens, *in_flight)
        held = self.blocks.hold(name)
        self.tables[name] = tuple(map(tuple, self.manager.get_block_ids(name)))
        self.manager.free(request)
        self.prompts[name] = prompt
        for group, table in enumerate(self.tables[name]):
            for number, block in enumerate(table):
                if block:
                    self.device[block] = (prompt, _OF_GROUP * group + number)
        self.leases.grant(name, Leased(held), CONTENTS, self.tables[name])
        return True

    def step(self, tokens: int = 0) -> None:
        """What is ordered is copied at once, and reported later. ``tokens``: what the step computes."""
        self.collect()
        orders: Orders = self.moves.step_orders({"a request": tokens} if tokens else {})
        for store in orders.stores:
            moves = zip(
                *(each.tolist() for each in (store.moves.groups, store.moves.blocks, store.moves.slots)), strict=True
            )
            for group, block, slot in moves:
                assert self.device[block][1] // _OF_GROUP == group, "a block is copied as one of another cache group"
                self.host[slot] = self.device[block]
            self.under_way.append(store.store_id)
            self.ordered.append(len(store.moves))
        self.check()

    def end_store(self, store_id: int, *, failed: bool = False, unsettled: bool = False) -> None:
        self.under_way.remove(store_id)
        for rank in range(SETUP.ranks):
            bad = failed and rank == 0
            self.end_on_a_rank(store_id, StoreEnds(1, failed=bad, unsettled=bad and unsettled))

    def end_on_a_rank(self, store_id: int, ends: StoreEnds) -> None:
        self.report({store_id: ends})

    def report(self, stores: dict[int, StoreEnds]) -> None:
        for role in (self.tier, self.moves):
            role.settled(set(), set(), Report(stores))
        self.check()

    def right(self, name: str) -> list[BlockMark]:
        """What a reader of a lease must find: one cache group after the other, without what windows have passed."""
        tables = enumerate(self.tables[name])
        numbers = [_OF_GROUP * group + number for group, table in tables for number, id_ in enumerate(table) if id_]
        return [(self.prompts[name], number) for number in numbers]

    def on_device(self, name: str) -> list[BlockMark]:
        """What lies where a lease began."""
        return [self.device[block] for table in self.tables[name] for block in table if block]

    def read(self, name: str) -> list[BlockMark] | None:
        """What a reader finds where it is told that a lease lies; None if it has ended."""
        located = self.leases.locate(name)
        if located.place == Place.HOST:
            holes = [[slot < 0 for slot in slots] for slots in located.slots]
            assert holes == [[not block for block in table] for table in self.tables[name]]
            return [self.host[slot] for slots in located.slots for slot in slots if slot >= 0]
        return self.on_device(name) if located.place == Place.DEVICE else None

    def release(self, name: str) -> None:
        """Read a lease, let the engine go on, and release it: what was read is right if that is valid."""
        if (found := self.read(name)) is not None:
            place = self.leases.locate(name).place
            answer = self.leases.release(Release("", name, 0, 1, "pull", CONTENTS, place))
            assert answer.valid, answer.reason
            assert found == self.right(name), "a valid read, and wrong"

    def collect(self) -> None:
        for held in self.leases.collect():
            assert not (held.blocks and held.hosts)
            self.blocks.release(held.blocks)
            self.tier.loans.take_back(held.hosts)

    def reset(self) -> None:
        """What happens when vLLM drops its prefix cache, as when weights have changed."""
        self.leases.cancel_all()
        self.collect()
        self.moves.release_device_blocks()
        self.manager.reset_prefix_cache()
        self.tier.reset()
        self.moves.reset()

    def check(self) -> None:
        for role in (self.tier, self.moves):
            role.check_integrity()
        self.leases.check_integrity()

    @property
    def lent(self) -> int:
        """What the engine tells of its host memory, in slots."""
        stats = StatsRecorder()
        self.tier.update_stats(stats)
        return int((stats.take() or nothing())["gauges"]["host_blocks_lent"])

    def counted(self) -> Counter[str]:
        stats = StatsRecorder()
        self.moves.update_stats(stats)
        return Counter((stats.take() or {"counts": {}})["counts"])
