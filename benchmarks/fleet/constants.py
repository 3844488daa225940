"""What engines and transfers cost, as data: measured by ``calibrate``, or assumed for what is not here.

Seconds are those of an engine that has a machine of its own.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from benchmarks import record

#: The results' file that ``calibrate`` writes.
MEASURED = "fleet_calibration"


class Cache(msgspec.Struct, frozen=True):
    """A model's KV cache, whole (one rank), and how vLLM divides it."""

    layers: int
    kv_heads: int
    head_size: int
    item_bytes: int
    block_tokens: int
    blocks: int  # of an engine

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token in all layers."""
        return self.layers * self.kv_heads * self.head_size * 2 * self.item_bytes

    @property
    def block_bytes(self) -> int:
        """Of one block over all layers."""
        return self.token_bytes * self.block_tokens


class EngineCosts(msgspec.Struct, frozen=True):
    """How long an engine's steps take."""

    prefill_step_s: float  # of a step that computes prompts, whatever it computes
    prefill_token_s: float  # for each token of a prompt in it
    prefill_pair_s: float  # for each token of a prompt, and each token before it that it attends to
    decode_step_s: float  # of a step that decodes
    decode_request_s: float  # for each request in it
    decode_context_s: float  # for each token that a request in it attends to
    request_s: float  # of the server's other work for a request: HTTP, scheduling, the answer

    def prefill_s(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Return how long a step takes that computes ``(tokens, tokens before them)`` of prompts."""
        seconds = self.prefill_step_s
        for tokens, before in chunks:
            seconds += self.prefill_token_s * tokens + self.prefill_pair_s * tokens * (before + tokens / 2)
        return seconds

    def prompt_s(self, tokens: int, chunk_tokens: int) -> float:
        """Return how long an engine computes a prompt that is alone there."""
        starts = range(0, tokens, chunk_tokens)
        return sum(self.prefill_s([(min(chunk_tokens, tokens - start), start)]) for start in starts)

    def decode_s(self, contexts: Iterable[int]) -> float:
        """Return how long a step takes that computes a token for requests with so many tokens before it."""
        seconds = self.decode_step_s
        for context in contexts:
            seconds += self.decode_request_s + self.decode_context_s * context
        return seconds


class PullCosts(msgspec.Struct, frozen=True):
    """How long a pull takes that is alone."""

    fixed_s: float  # whatever it reads: planning, and D's steps that begin and end it
    message_s: float  # a control message and its answer
    byte_s: float


class Constants(msgspec.Struct, frozen=True):
    """All that a simulation wants to know of one kind of engine."""

    cache: Cache
    engine: EngineCosts
    pull: PullCosts
    chunk_tokens: int  # of all prompts in a step together
    protocol: str = "tcp"  # of the transfer engine: its prices decide which ranges are worth reading

    def prompt_s(self, tokens: int) -> float:
        """Return how long P takes to answer a prompt that is alone there."""
        return self.engine.request_s + self.engine.prompt_s(tokens, self.chunk_tokens)


def measured() -> Constants:
    """Return what ``calibrate`` has measured.

    Raises:
        FileNotFoundError: it has not; the message says how.
    """
    try:
        figures: dict[str, Any] = record.read(MEASURED)["figures"]
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no benchmarks/results/{MEASURED}.json: python -m benchmarks.fleet calibrate"
        ) from None
    return msgspec.convert(figures["constants"], Constants)


def slowed(constants: Constants, factor: float) -> Constants:
    """Return constants of a machine on which everything takes ``factor`` times as long."""

    def scaled(costs: Any) -> Any:
        return type(costs)(**{name: factor * seconds for name, seconds in msgspec.structs.asdict(costs).items()})

    return msgspec.structs.replace(constants, engine=scaled(constants.engine), pull=scaled(constants.pull))


def linked(constants: Constants, gigabits_per_s: float) -> Constants:
    """Return constants with links of that rate, which one pull alone can fill."""
    pull = msgspec.structs.replace(constants.pull, byte_s=8 / (gigabits_per_s * 1e9))
    return msgspec.structs.replace(constants, pull=pull)


def with_blocks(constants: Constants, blocks: int) -> Constants:
    """Return constants with engines of so many blocks."""
    return msgspec.structs.replace(constants, cache=msgspec.structs.replace(constants.cache, blocks=blocks))
