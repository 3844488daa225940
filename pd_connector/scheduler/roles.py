"""The roles of an engine as the scheduler side asks them: prefilling for others, pulling from others, host memory."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pd_connector.orders import Orders, Report, WorkerHandshake
from pd_connector.stats import StatsRecorder

if TYPE_CHECKING:
    from pd_connector.vllm.types import KVCacheBlocks, KVCacheEvent, Request


class SchedulerRole:
    """Does one thing with KV caches for an engine's requests.

    All methods belong to the scheduler's thread, and none waits for a peer or a device.
    """

    def set_workers(self, handshakes: Sequence[WorkerHandshake]) -> None:
        """Take the workers' caches, in the order of the workers' numbers."""

    def add(self, request: "Request") -> None:
        """Take up a request that has arrived."""

    def free_blocks(self) -> None:
        """Give back device blocks that are needed no more. Called before vLLM looks for blocks, and in every step."""

    def missing_tokens(self, request: "Request", computed_tokens: int) -> int | None:
        """Return how many tokens behind the ``computed_tokens`` this role will bring; None if that is not known yet."""
        return 0

    def withdraw(self, request: "Request") -> None:
        """Forget what was just offered to a request, which is going to ask again."""

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> int:
        """Begin to bring tokens into a request's blocks; return how many of the ``external_tokens`` this role takes."""
        return 0

    def step_orders(self, scheduled: Mapping[str, int]) -> Orders:
        """Return what the workers have to do in a step that works on ``scheduled`` tokens of each request."""
        return Orders()

    def settled(self, request_ids: set[str], failed: set[str], report: Report) -> None:
        """Take what the workers say: these requests have ended their wait on all ranks, some of them have failed."""

    def finish(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """Let a request go that has ended; return the ``kv_transfer_params`` of its response, if it has any."""
        return None

    @property
    def wants_step(self) -> bool:
        """Whether the engine must step though it has no requests."""
        return False

    @property
    def frees_blocks_soon(self) -> bool:
        """Whether waiting a few steps for blocks is better than taking those of a request."""
        return False

    def loaded_tokens(self, request: "Request") -> int:
        """Return how many of the tokens that a request waits for come from host memory."""
        return 0

    def take_events(self) -> "Sequence[KVCacheEvent]":
        """Return the KV cache events since the last call."""
        return ()

    def update_stats(self, stats: StatsRecorder) -> None:
        """Add what has happened since the last call."""

    def reset(self) -> bool:
        """Forget all contents of the caches, which have lost their meaning; False if that is not possible now."""
        return True

    def close(self) -> None:
        """Stop answering and asking; join all threads."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
