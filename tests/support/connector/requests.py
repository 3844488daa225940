"""Requests as vLLM's scheduler hands them over, params of a prefill, and a control client that sends nothing."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from pd_connector.params import RemotePrefill, prompt_digest
from transfer.control.client import ControlClient
from transfer.control.messages import Cancel, Renew, Reply, Request

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


@dataclass
class FakeRequest:
    """As much of a vLLM request as the connector looks at."""

    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    status: Any = None
    abort_immediately: bool = False
    trace_headers: dict[str, str] | None = None
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    sampling_params: Any = None
    skip_reading_prefix_cache: bool = False
    resumable: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids or ())

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens


def _block(number: int) -> Any:
    return SimpleNamespace(block_id=number, block_hash=None, is_null=not number)


def allocated(*tables: Sequence[int]) -> Any:
    """vLLM's ``KVCacheBlocks``, as far as a consumer looks at them: the block table of each cache group."""
    return SimpleNamespace(
        get_block_ids=lambda: tuple(list(ids) for ids in tables),
        blocks=tuple([_block(number) for number in ids] for ids in tables),
    )


def cache_manager(pool: "BlockPool", tables: Mapping[str, Sequence[int]]) -> Any:
    """vLLM's cache manager, as far as the connector uses it, around vLLM's own block pool."""

    def get_blocks(request_id: str) -> Any:
        return SimpleNamespace(blocks=([pool.blocks[block] for block in tables[request_id]],))

    coordinator = SimpleNamespace(remove_skipped_blocks=lambda request_id, tokens: None)
    return SimpleNamespace(
        block_pool=pool,
        get_blocks=get_blocks,
        reset_prefix_cache=pool.reset_prefix_cache,
        coordinator=coordinator,
        free=lambda _: None,
        get_computed_blocks=lambda _: None,
    )


class RecordingClient(ControlClient):
    """Sends nothing: remembers what it was asked to send, and where to."""

    def __init__(self) -> None:  # no thread
        self.sent: list[tuple[str, int, Request]] = []
        self.futures: list[Future[Reply]] = []
        self.timeouts: list[float] = []

    def request(self, host: str, port: int, message: Any, timeout_s: float) -> Future[Any]:
        assert timeout_s > 0
        self.sent.append((host, port, message))
        self.timeouts.append(timeout_s)
        self.futures.append(Future())
        return self.futures[-1]

    def close(self) -> None:
        """Nothing to close."""

    def cancelled(self) -> list[str]:
        """Lease ids, in the order of their cancels."""
        return [lease for _, _, sent in self.sent if isinstance(sent, Cancel) for lease in sent.lease_ids]

    def take_renewed(self) -> list[str]:
        """Lease ids of the renewals since the last call."""
        return [lease for renew in self.take_renewals() for lease in renew.lease_ids]

    def take_renewals(self) -> list[Renew]:
        renewals = [sent for _, _, sent in self.sent if isinstance(sent, Renew)]
        self.sent = [entry for entry in self.sent if not isinstance(entry[2], Renew)]
        return renewals


def a_prompt(tokens: int, seed: int = 0) -> list[int]:
    return [(seed * 7919 + position) % 512 for position in range(tokens)]


def a_remote(prompt: list[int], **changes: Any) -> RemotePrefill:
    """What a prefill engine with 16 tokens a block answers for ``prompt``."""
    remote = RemotePrefill(
        remote_engine_id="engine-p",
        remote_request_id="cmpl-1-at-p",
        remote_host="10.0.0.5",
        remote_port=8998,
        remote_block_ids=(tuple(range(1, -(-len(prompt) // 16) + 1)),),
        remote_num_tokens=len(prompt),
        tp_size=1,
        lease_id="lease-1",
        lease_ttl_s=30.0,
        prompt_digest=prompt_digest(prompt, ()),
    )
    return msgspec.structs.replace(remote, **changes)


def a_decode_request(request_id: str, tokens: int = 70, **changes: Any) -> FakeRequest:
    """The decode leg of a request; ``changes`` are those of ``a_remote``."""
    prompt = a_prompt(tokens)
    return FakeRequest(request_id, prompt, a_remote(prompt, **changes).to_params())
