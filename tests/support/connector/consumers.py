"""The parts of a decode engine's scheduler half, around a control client and a clock of the test's choice."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pd_connector.engine_limits import ENGINE_LIMITS, EngineLimits
from pd_connector.scheduler.block_demand import BlockDemand
from pd_connector.scheduler.decode.border_states import BorderStates
from pd_connector.scheduler.decode.canaries import Canaries
from pd_connector.scheduler.decode.pulls_ahead import PullsAhead
from pd_connector.scheduler.decode.renewals import Renewals
from pd_connector.scheduler.decode.subscriptions import FollowLimits, Subscriptions
from pd_connector.vllm.cache_specs import Retention
from pd_connector.vllm.device_blocks import DeviceBlocks
from pd_connector.vllm.engine_core import EngineLoop
from pd_connector.vllm.prompts import Prompts
from transfer.control.client import ControlClient

MESSAGE_TIMEOUT_S = 10.0
QUEUE_TIMEOUT_S = 120.0


class CountedBlocks(DeviceBlocks):
    """A device's blocks, as far as their number goes."""

    def __init__(self, total: int = 1000) -> None:
        super().__init__()
        self._total = total
        self.used = 0

    @property
    def free(self) -> int:
        return self._total - self.used

    @property
    def total(self) -> int:
        return self._total


class ConsumerParts(NamedTuple):
    """What ``Consumer`` is made of."""

    renewals: Renewals
    subscriptions: Subscriptions
    ahead: PullsAhead
    retentions: Sequence[Retention]
    layers: Sequence[tuple[str, ...]]
    canaries: Canaries
    prompts: Prompts
    borders: BorderStates


def layers_of(groups: int) -> tuple[tuple[str, ...], ...]:
    """A layer for each of so many cache groups, the same on both sides."""
    return tuple((f"layers.{group}",) for group in range(groups))


def consumer_parts(
    client: ControlClient,
    clock: Callable[[], float] = time.monotonic,
    retentions: Sequence[Retention] = (),
    demand: BlockDemand | None = None,
    limits: EngineLimits = ENGINE_LIMITS,
    engine: EngineLoop | None = None,
) -> ConsumerParts:
    """The parts of a consumer that sends its messages with ``client``; nothing has been started."""
    renewals = Renewals(client, MESSAGE_TIMEOUT_S, QUEUE_TIMEOUT_S, clock)
    follow_limits = FollowLimits(MESSAGE_TIMEOUT_S, QUEUE_TIMEOUT_S)
    subscriptions = Subscriptions(client, renewals, follow_limits, engine or EngineLoop(), clock)
    ahead = PullsAhead(limits, demand or BlockDemand(CountedBlocks(), retentions or [Retention(16)]))
    no_canaries, no_borders = Canaries(DeviceBlocks(), (), tries=False), BorderStates(DeviceBlocks(), ())
    layers = layers_of(len(retentions))
    return ConsumerParts(renewals, subscriptions, ahead, retentions, layers, no_canaries, Prompts(), no_borders)
