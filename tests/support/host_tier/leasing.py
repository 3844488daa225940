"""The roles of a prefill engine whose leases may move to host memory, with every byte that is copied."""

from collections import Counter
from typing import Any

from pd_connector.orders import Orders, Report, StoreEnds
from pd_connector.scheduler.checksum_table import ChecksumTable
from pd_connector.scheduler.host_tier import HostTier
from pd_connector.scheduler.lease_moves import LeaseMoves
from pd_connector.scheduler.leases import LeaseTable
from pd_connector.stats import StatsRecorder, nothing
from pd_connector.vllm.block_pools import DeviceBlocks, HostBlocks, Leased
from tests.support.host_tier.setup import Setup, make_manager, make_pool, make_request
from tests.support.waiting import ManualClock
from transfer.control.messages import Place

TTL_S, TOKENS, BLOCKS = 8.0, 10, 3  # of a prompt: two full blocks, and a tail
CONTENTS = "the prompt's"
SETUP = Setup(groups=((4, 0),), device_blocks=16, slots=7, ranks=2)


class LeasingEngine:
    """The roles of a prefill engine whose leases may move, with the bytes of its device and of its host memory.

    A byte is the prompt of which it holds a block, and which.
    """

    def __init__(self, most_leased: float = 0.0, slots: int = SETUP.slots) -> None:
        self.clock, self.manager = ManualClock(), make_manager(SETUP)
        self.pool = make_pool(Setup(SETUP.groups, SETUP.device_blocks, slots), self.manager)
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
        self.device: dict[int, tuple[int, int]] = {}
        self.host: dict[int, tuple[int, int]] = {}
        self.tables: dict[str, tuple[int, ...]] = {}  # of device blocks, by lease
        self.prompts: dict[str, int] = {}
        self.under_way: list[int] = []  # stores

    def prefill(self, name: str, prompt: int, tokens: int = TOKENS) -> bool:
        """Compute a prompt and lease it; False if the device has no blocks for it."""
        request: Any = make_request(SETUP, name, [prompt * 100 + token for token in range(tokens)])
        if self.manager.allocate_slots(request, tokens) is None:
            return False
        held = self.blocks.hold(name)
        self.manager.free(request)
        self.tables[name] = tuple(block.block_id for block in held)
        self.prompts[name] = prompt
        for number, block_id in enumerate(self.tables[name]):
            self.device[block_id] = (prompt, number)
        self.leases.grant(name, held, CONTENTS, (self.tables[name],))
        return True

    def step(self) -> None:
        """What is ordered is copied at once, and reported later."""
        self.collect()
        orders: Orders = self.moves.step_orders({})
        for store in orders.stores:
            for block, slot in zip(store.moves.blocks.tolist(), store.moves.slots.tolist(), strict=True):
                self.host[slot] = self.device[block]
            self.under_way.append(store.store_id)
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

    def read(self, name: str) -> list[tuple[int, int]] | None:
        """What a reader finds where it is told that a lease lies; None if it has ended."""
        located = self.leases.locate(name)
        if located.place == Place.HOST:
            return [self.host[slot] for slot in located.slots[0]]
        return [self.device[block] for block in self.tables[name]] if located.place == Place.DEVICE else None

    def release(self, name: str) -> None:
        """Read a lease, let the engine go on, and release it: what was read is right if that is valid."""
        if (found := self.read(name)) is not None:
            place = self.leases.locate(name).place
            answer = self.leases.release(name, 0, 1, "pull", CONTENTS, place)
            assert answer.valid, answer.reason
            assert found == [(self.prompts[name], number) for number in range(BLOCKS)], "a valid read, and wrong"

    def collect(self) -> None:
        for held in self.leases.collect():
            if isinstance(held, HostBlocks):
                self.moves.release(held)
            else:
                assert isinstance(held, tuple)
                self.blocks.release(held)

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
