"""What an engine with a host tier is made of: vLLM's own cache manager, requests and pool of host blocks, and steps.

The model is small and exists only by its cache groups.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from pd_connector.orders import Report
from pd_connector.scheduler.host.tier import StoreMode
from pd_connector.vllm.block_pools import HostBlockPool
from pd_connector.vllm.releases.installed import current
from tests.support.host_tier.ranks import Contents, Copy
from tests.support.releases import INSTALLED

MAX_TOKENS = 64
STATES = -1  # in the place of a window: the group holds states at borders of blocks (vLLM's mode "align")

#: What a host pool reads of vLLM's configuration, in the names of all releases.
CONFIG: Any = SimpleNamespace(
    max_in_flight_tokens=MAX_TOKENS,
    num_prefill_lookahead_tokens=0,
    scheduler_config=SimpleNamespace(max_num_batched_tokens=MAX_TOKENS),
)

init_none_hash(sha256_cbor)


@dataclass(frozen=True)
class Setup:
    """A model's cache groups as (block tokens, window), and how its engine is run.

    In the place of a window: 0, ``STATES``, or tokens of a chunk as a negative number (chunked local attention).
    """

    groups: tuple[tuple[int, int], ...] = ((4, 0),)
    device_blocks: int = 12
    slots: int = 8
    ranks: int = 1
    mode: StoreMode = "eager"
    lookahead: int = 4
    ahead: bool = False  # a step is planned before the output of the one before it has come
    events: bool = False
    recomputes: bool = True  # what a sibling of MultiConnector has failed to load, whose requests fail otherwise

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of a block, per cache group."""
        return tuple(tokens for tokens, _ in self.groups)

    @property
    def state_tokens(self) -> int:
        """Tokens between two borders at which states are kept; 0 if none are."""
        return next((tokens for tokens, window in self.groups if window == STATES), 0)

    def holds_states(self, group: int) -> bool:
        """Whether a block of a cache group holds a state."""
        return self.groups[group][1] == STATES

    def first_seen(self, group: int, token: int) -> int:
        """The first token that the attention of a cache group sees from ``token``."""
        window = self.groups[group][1]
        if window < 0:
            return token // -window * -window
        return max(0, token - window + 1) if window else 0

    def held_in(self, group: int, number: int, contents: Contents) -> Contents:
        """What block ``number`` of a cache group holds of ``contents``, which has something for each token."""
        size = self.sizes[group]
        tokens = contents[number * size : (number + 1) * size]
        return tokens[-1:] if self.holds_states(group) else tokens

    @property
    def hash_tokens(self) -> int:
        """Tokens of which block hashes are made."""
        return math.gcd(*self.sizes)

    def check_offer(self, pool: HostBlockPool, job: "Job", local: int, loaded: int) -> None:
        """Raise AssertionError if a request with ``local`` tokens on the device is offered others than there are."""
        assert loaded == 0 or not job.has_failed, "who has waited in vain is to wait again"
        assert local + loaded < job.request.num_tokens, "no token is left to compute"
        if len(self.groups) > 1 or self.groups[0][1] or job.has_failed:
            return
        size = self.sizes[0]
        keys = [make_block_hash_with_group_id(value, 0) for value in job.request.block_hashes[local // size :]]
        most = (job.request.num_tokens - 1 - local) // size
        found = next((n for n, key in enumerate(islice(keys, most)) if not pool.holds(key)), min(most, len(keys)))
        assert loaded == found * size, f"{found} blocks are in host memory, and {loaded} tokens are offered"


def make_manager(
    setup: Setup, token_ranks: int = 1, *, drafts: bool = False, hash_tokens: int | None = None
) -> KVCacheManager:
    """vLLM's manager of the device's blocks.

    Args:
        setup: the groups and their blocks.
        token_ranks: that share the tokens of a block (context parallelism).
        drafts: whether the first group is that of drafts, too.
        hash_tokens: of which block hashes are made; None for those of the smallest block.
    """
    specs = [_spec(tokens, window) for tokens, window in setup.groups]
    groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
    groups[0].is_eagle_group = drafts
    current().hook()  # what vLLM does when it makes a scheduler
    in_flight = "max_in_flight_tokens" if INSTALLED >= (0, 30) else "max_num_batched_tokens"
    return KVCacheManager(
        KVCacheConfig(setup.device_blocks, [], groups),
        max_model_len=MAX_TOKENS,
        scheduler_block_size=token_ranks * math.lcm(*setup.sizes),
        hash_block_size=hash_tokens or token_ranks * setup.hash_tokens,
        dcp_world_size=token_ranks,
        enable_kv_cache_events=setup.events,
        use_eagle=drafts,
        **{in_flight: MAX_TOKENS},
    )


def _spec(tokens: int, window: int) -> Any:
    common = {"block_size": tokens, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    full = FullAttentionSpec(**common)
    if window == STATES:
        shapes: dict[str, Any] = {"shapes": ((3, 8), (2, 4, 2)), "dtypes": (torch.float32,) * 2}
        return MambaSpec(block_size=tokens, mamba_cache_mode="align", page_size_padded=full.page_size_bytes, **shapes)
    if window < 0:
        return ChunkedLocalAttentionSpec(attention_chunk_size=-window, **common)
    return SlidingWindowSpec(sliding_window=window, **common) if window else full


def make_pool(setup: Setup, manager: KVCacheManager) -> HostBlockPool:
    lookahead = setup.lookahead if setup.mode == "lazy" else 0
    return HostBlockPool(CONFIG, manager, setup.slots, lookahead)


@cache
def _hasher(tokens: int) -> Callable[[Request], list[Any]]:
    return get_request_block_hasher(tokens, sha256_cbor)  # type: ignore[no-any-return]  # vLLM is untyped here


def make_request(setup: Setup, request_id: str, prompt: Sequence[int], outputs: int = 1) -> Request:
    sampling = SamplingParams(max_tokens=outputs)
    request = Request(request_id, list(prompt), sampling, None, block_hasher=_hasher(setup.hash_tokens))
    request.num_in_flight_tokens = 0  # vLLM 0.23 does not count them
    return request


class State(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    READY = "ready"  # it has its blocks, and no step has worked on it
    RUNNING = "running"
    GONE = "gone"


@dataclass(eq=False)
class Job:
    """A request as vLLM's scheduler holds it; ``tokens`` are its prompt and all that the model will ever say to it."""

    request: Request
    tokens: tuple[int, ...]
    state: State = State.WAITING
    has_failed: bool = False  # it has waited for a load or a pull in vain, and has not run since
    was_pulled: bool = False

    @property
    def request_id(self) -> str:
        return str(self.request.request_id)


@dataclass(frozen=True)
class Work:
    """What a step computes of one request: tokens ``first`` to ``end``."""

    job: Job
    first: int
    end: int
    tables: tuple[tuple[int, ...], ...]
    preemptions: int
    samples: bool
    sibling: range = range(0)  # tokens that another connector loads before the step computes
    fails: bool = False  # and does not


@dataclass(eq=False)
class Step:
    copies: list[list[Copy]]  # for each rank
    works: list[Work]
    finished: dict[str, int] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    report: Report = field(default_factory=Report)
    executed: bool = False
