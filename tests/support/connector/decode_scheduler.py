"""A decode engine's scheduler half with a scripted prefill engine, which answers what it asks about named prompts."""

from dataclasses import dataclass
from typing import Any

from pd_connector.engine_limits import EngineLimits
from pd_connector.orders import Orders, PullOrder, RefuseOrder, Report
from pd_connector.scheduler.block_demand import BlockDemand
from pd_connector.scheduler.decode.consumer import Consumer
from pd_connector.scheduler.decode.renewals import Renewals
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.cache_specs import Retention
from tests.support.connector.consumers import CountedBlocks, consumer_parts
from tests.support.connector.requests import FakeRequest, RecordingClient, allocated
from tests.support.waiting import ManualClock
from transfer.control.failures import PeerUnreachable
from transfer.control.messages import Cancel, Follow, Followed
from transfer.errors import TransferError

BLOCKS = ((3, 9, 4, 7, 5),)
LIMITS = EngineLimits(max_pulls_ahead=2, max_ahead_fraction=0.5)


@dataclass
class Decode:
    """A consumer, and vLLM's scheduler as far as it is needed here."""

    consumer: Consumer
    client: RecordingClient
    renewals: Renewals
    clock: ManualClock
    demand: BlockDemand
    blocks: CountedBlocks

    def add(self, *requests: FakeRequest) -> None:
        for request in requests:
            self.consumer.add(request)
            self.consumer.check_integrity()

    def answer(self, *answers: Followed | TransferError, transfer_id: str = "T") -> None:
        """The prefill engine answers the open question about a transfer, then the next one."""
        for answer in answers:
            self.clock.advance(0.1)
            (future,) = [
                future
                for (_, _, sent), future in zip(self.client.sent, self.client.futures, strict=True)
                if isinstance(sent, Follow) and sent.transfer_id == transfer_id and not future.done()
            ]
            if isinstance(answer, TransferError):
                future.set_exception(answer)
            else:
                future.set_result(answer)
            self.consumer.check_integrity()

    def asks(self, request: FakeRequest, computed: int = 0) -> int | None:
        """What vLLM learns when it looks at a waiting request: None, or how many tokens will be pulled."""
        waits = self.consumer.must_wait(request, computed)
        self.consumer.check_integrity()
        if waits:
            return None
        self.demand.asked(request)
        return self.consumer.missing_tokens(request, computed)

    def allocates(self, request: FakeRequest, tokens: int) -> None:
        self.demand.given()
        self.consumer.allocated(request, allocated(*BLOCKS), tokens)
        self.consumer.check_integrity()

    def schedules(self, request: FakeRequest, computed: int = 0) -> bool:
        """Look at a request, and give it blocks unless it must wait; return whether it got them."""
        missing = self.asks(request, computed)
        if missing is not None:
            self.allocates(request, missing)
        return missing is not None

    def step(self) -> Orders:
        """The orders of a step."""
        self.demand.end_step()
        return self.consumer.step_orders({})

    def order(self) -> PullOrder:
        """The only order of the step."""
        orders = self.step()
        (order,) = orders.pulls
        assert orders == Orders(pulls=(order,))
        return order

    def refusal(self, request: FakeRequest) -> RefuseOrder:
        """Why a request is refused, which is all that is ordered of it when it gets blocks."""
        assert self.schedules(request)
        orders = self.step()
        (refusal,) = orders.refusals
        assert orders == Orders(refusals=(refusal,))
        assert refusal.request_id == request.request_id
        return refusal

    def settle(self, request: FakeRequest, *, fails: bool = False) -> None:
        failed = {request.request_id} if fails else set()
        self.consumer.settled({request.request_id}, failed, Report())
        self.consumer.check_integrity()

    def leave(self, request: FakeRequest) -> None:
        self.consumer.finish(request, ())
        self.consumer.check_integrity()

    def cancels(self) -> list[Cancel]:
        return [sent for _, _, sent in self.client.sent if isinstance(sent, Cancel)]

    def counted(self) -> dict[str, Any]:
        """What the statistics of the step say of prompts and transfers, besides zeros."""
        stats = StatsRecorder()
        self.consumer.update_stats(stats)
        data = stats.take()
        return {name: number for name, number in (data["counts"] | data["gauges"]).items() if number} if data else {}


def a_decode_engine(limits: EngineLimits = LIMITS, **parts: Any) -> Decode:
    clock, client, blocks = ManualClock(), RecordingClient(), CountedBlocks(100)
    demand = BlockDemand(blocks, parts.get("retentions") or [Retention(16)])
    made = consumer_parts(client, clock, demand=demand, limits=limits, **parts)
    return Decode(Consumer(*made), client, made.renewals, clock, demand, blocks)


def unreachable() -> TransferError:
    return PeerUnreachable(host="10.0.0.5", port=8998, request_type="follow", tried_s=15.0, attempts=3)
