"""What simulated P and D have in common: settings, a request's two legs, waiting."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import simpy

from benchmarks.fleet.constants import Constants
from benchmarks.fleet.traces import BLOCK_TOKENS, Arrival
from pd_connector.config import ConnectorConfig
from pd_connector.engine_limits import ENGINE_LIMITS

Legs = Literal["in turn", "together"]
_DEFAULTS = ConnectorConfig()
POLL_S = 0.02  # of an engine on which requests wait for blocks and nothing runs


@dataclass(frozen=True)
class Settings:
    """Settings and limits of the connector, by default as it has them, and settings of vLLM."""

    legs: Legs = "together"
    lease_ttl_s: float = _DEFAULTS.lease_ttl_s
    max_lease_age_s: float = ENGINE_LIMITS.max_lease_age_s
    max_leased_fraction: float = 1.0
    queue_timeout_s: float = _DEFAULTS.queue_timeout_s
    max_pulls_ahead: int = ENGINE_LIMITS.max_pulls_ahead
    max_ahead_fraction: float = ENGINE_LIMITS.max_ahead_fraction
    max_requests: int = 256  # that run on an engine at once
    prefix_cache: bool = True
    host_blocks: int = 0  # at each engine, of the modelled rule of ``HostMemory``
    host_byte_s: float = 0.0  # of a copy between device and host memory


@dataclass(eq=False)
class Job:
    """A request, as its two engines know it. It has what the connector's bounds ask of vLLM's requests."""

    number: int
    arrival: Arrival
    computed: int = 0  # tokens of the prompt at P
    told: int = 0  # of these, what D has been told
    is_begun: bool = False  # as D has been told
    is_complete: bool = False  # likewise
    generated: int = 0
    watchers: list[Callable[[], None]] = field(default_factory=list)  # called when D is told something
    prefilled_s: float = 0.0  # when the client has P's answer
    first_token_s: float = 0.0
    ended_s: float = 0.0
    failed: str = ""
    reads: int = 0
    bytes: int = 0
    pulled_tokens: int = 0
    kv_transfer_params: Any = None
    status: object = None  # never that of a request which has blocks, and of which the connector is not told

    @property
    def request_id(self) -> str:
        """As the connector's books have it."""
        return str(self.number)

    @property
    def lease_id(self) -> str:
        """Of the lease over the prompt's blocks."""
        return f"lease-{self.number}"

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.arrival.input_tokens

    def tell(self, tokens: int, *, complete: bool) -> None:
        """Tell D how much of the prompt is computed."""
        self.is_begun = True
        self.told = max(self.told, tokens)
        self.is_complete |= complete
        for watcher in list(self.watchers):
            watcher()


class Sleeper:
    """Lets an engine that has nothing to do wait until somebody wakes it."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._event = env.event()

    def wake(self) -> None:
        """Wake the engine, now or when it next wants to sleep."""
        if not self._event.triggered:
            self._event.succeed()

    def sleep(self, longest_s: float | None = None) -> simpy.Event:
        """Return an event that comes when somebody wakes it, or after that time."""
        if self._event.processed:
            self._event = self._env.event()
        return self._event if longest_s is None else self._event | self._env.timeout(longest_s)


def blocks_per_id(constants: Constants, settings: Settings) -> int:
    """Return how many of an engine's blocks an id of a trace names; 0 if nothing is to be found."""
    return BLOCK_TOKENS // constants.cache.block_tokens if settings.prefix_cache else 0


def blocks_of(tokens: int, constants: Constants) -> int:
    """Return how many blocks hold so many tokens."""
    return -(-tokens // constants.cache.block_tokens)
