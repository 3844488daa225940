"""A decode engine's scheduler half that proves where it pulls from, and vLLM's scheduler as far as it is needed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool

from pd_connector.orders import CanaryEnds, CanaryReference, CanaryRoom, Orders, PullOrder, Report
from pd_connector.scheduler.decode.canaries import Canaries
from pd_connector.scheduler.decode.consumer import Consumer
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.cache_specs import Retention
from pd_connector.vllm.device_blocks import DeviceBlocks
from tests.support.connector.consumers import consumer_parts
from tests.support.connector.requests import (
    FakeRequest,
    RecordingClient,
    a_decode_request,
    allocated,
    cache_manager,
)
from tests.support.waiting import ManualClock

PROVING_BLOCKS = [1, 2, 3, 4, 5]
PROVING_RANKS = 2
_WHOLE, _ROOM = Retention(16), CanaryRoom(512, 2, 16, 16)


@dataclass
class ProvingDecode:
    """The roles that take part, asked in their order. Their books are checked after every call."""

    refuses: bool = True
    retention: Retention = _WHOLE
    room: CanaryRoom = _ROOM
    ranks: int = PROVING_RANKS
    spoilt: set[str] = field(default_factory=set)  # requests that another connector's load has failed
    clock: ManualClock = field(default_factory=ManualClock)
    client: RecordingClient = field(default_factory=RecordingClient)
    tables: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = BlockPool(64, enable_caching=True, hash_block_size=16)
        blocks = DeviceBlocks()
        blocks.bind(cache_manager(self.pool, self.tables))
        self.canaries = Canaries(
            blocks, [self.retention], lambda request: request.request_id in self.spoilt,
            refuses=self.refuses, clock=self.clock,
        )  # fmt: skip
        self.parts = consumer_parts(self.client, self.clock, [self.retention])
        self.consumer = Consumer(*self.parts._replace(canaries=self.canaries))
        handshakes: Any = [SimpleNamespace(canary=self.room)] * self.ranks
        self.canaries.set_workers(handshakes)

    def add(self, request_id: str, tokens: int = 70, engine: str = "P", **changes: Any) -> FakeRequest:
        request = a_decode_request(
            request_id, tokens, remote_engine_id=engine, lease_id=f"lease-of-{request_id}", **changes
        )
        self.consumer.add(request)
        return request

    def asks(self, request: FakeRequest, computed: int = 0) -> int | None:
        """What vLLM learns of a waiting request: None, or how many tokens will be pulled."""
        if self.consumer.must_wait(request, computed):
            self.check()
            return None
        return self.consumer.missing_tokens(request, computed)

    def schedules(self, request: FakeRequest, computed: int = 0, blocks: Sequence[int] = PROVING_BLOCKS) -> int | None:
        """Give a request its blocks unless it must wait; returns how many tokens it pulls."""
        missing = self.asks(request, computed)
        if missing is not None:
            self.tables[request.request_id] = list(blocks)
            self.consumer.allocated(request, allocated(blocks), missing)
            self.check()
        return missing

    def step(self) -> Orders:
        orders = self.canaries.step_orders({}) + self.consumer.step_orders({})
        self.check()
        return orders

    def becomes_canary(self, request: FakeRequest, computed: int = 0) -> PullOrder:
        assert self.schedules(request, computed) == 0
        (order,) = self.step().canaries
        assert order.request_id == request.request_id
        return order

    def computes(self, request: FakeRequest) -> CanaryReference:
        """The request samples its first token."""
        request.num_output_tokens = 1
        (reference,) = self.step().references
        return reference

    def report(self, request: FakeRequest, **ends: Any) -> None:
        """All ranks report the end of a canary, one after the other."""
        for _ in range(self.ranks):
            end = CanaryEnds(1, **({"samples": 4} | ends))
            self.settle(Report(canaries={request.request_id: end}))

    def settle(self, report: Report) -> None:
        for role in (self.canaries, self.consumer):
            role.settled(set(), set(), report)
        self.check()

    def leave(self, request: FakeRequest) -> None:
        for role in (self.canaries, self.consumer):
            role.finish(request, ([],))
        self.check()

    def check(self) -> None:
        self.canaries.check_integrity()
        self.consumer.check_integrity()

    def proves(self, request: FakeRequest, **ends: Any) -> None:
        self.becomes_canary(request)
        self.computes(request)
        self.report(request, **ends)

    @property
    def held(self) -> list[int]:
        return [block.block_id for block in self.pool.blocks if block.ref_cnt and not block.is_null]

    def counted(self) -> dict[str, Any]:
        stats = StatsRecorder()
        self.canaries.update_stats(stats)
        self.consumer.update_stats(stats)
        data = stats.take()
        return {name: number for name, number in (data["counts"] | data["gauges"]).items() if number} if data else {}
