"""What the scheduler side says at start: of host memory that is too small, and of settings that change nothing.

Covers: pd_connector.scheduler.scheduler, pd_connector.scheduler.start_checks.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest

from layout.geometry import WorkerGeometry
from pd_connector.config import ConfigError
from pd_connector.orders import WorkerHandshake
from pd_connector.scheduler.decode.peer_prefixes import PeerPrefixes
from pd_connector.scheduler.prefill.producer import Producer
from pd_connector.scheduler.scheduler import ConnectorScheduler
from pd_connector.vllm.block_pools import Leased
from pd_connector.vllm.cache_specs import Retention
from tests.support.connector.vllm_engine import BLOCK_TOKENS
from tests.support.host_tier.setup import Setup, make_manager

Open = Callable[..., ConnectorScheduler]
SLOT_BYTES, RANKS = 100_003, 3
PROMPT_BLOCKS = 5


@pytest.fixture
def start(side_of: Open) -> Callable[..., None]:
    """Starts an engine of three workers with so many bytes of host memory and prompts of up to five blocks."""

    def configure(config: Any) -> None:
        config.parallel_config.tensor_parallel_size = RANKS
        config.model_config.max_model_len = (PROMPT_BLOCKS - 1) * BLOCK_TOKENS + 1

    def start(kv_role: str, size: int, **settings: Any) -> None:
        side = side_of(kv_role, configure, cpu_bytes_to_use=size, **settings)
        side.bind_cache_manager(make_manager(Setup()))
        slots = size // RANKS // SLOT_BYTES  # as a worker counts them
        ranks = [WorkerGeometry(rank, RANKS, 0, 1, "10.0.0.5:15000", (), ()) for rank in range(RANKS)]
        side.set_workers({(0, rank.tp_rank): WorkerHandshake(rank, slots) for rank in ranks})

    return start


TOO_SMALL = [("kv_producer", "auto"), ("kv_consumer", "auto"), ("kv_consumer", "always"), ("kv_both", "auto")]


@pytest.mark.parametrize("slots", range(1, PROMPT_BLOCKS))
@pytest.mark.parametrize("over", [0, RANKS * SLOT_BYTES - 1])
@pytest.mark.parametrize(("kv_role", "transfers"), TOO_SMALL)
def test_host_memory_that_cannot_hold_one_prompt_is_refused_and_the_size_that_the_error_names_is_enough(
    start: Callable[..., None], kv_role: str, transfers: str, over: int, slots: int
) -> None:
    """``over``: bytes that are there and hold no further slot."""
    longest = (PROMPT_BLOCKS - 1) * BLOCK_TOKENS + 1
    words = (
        f"^host_transfers = '{transfers}': host memory of {slots} blocks cannot hold one prompt of "
        rf"max_model_len = {longest} tokens, which takes {PROMPT_BLOCKS}; "
        r"set cpu_bytes_to_use to at least (\d+), or host_transfers to 'off'$"
    )
    with pytest.raises(ConfigError, match=words) as refusal:
        start(kv_role, slots * RANKS * SLOT_BYTES + over, host_transfers=transfers)
    named_size = re.search(words, str(refusal.value))
    assert named_size is not None
    start(kv_role, int(named_size[1]), host_transfers=transfers)


@pytest.mark.parametrize(("kv_role", "transfers"), TOO_SMALL)
def test_host_memory_for_one_prompt_of_the_greatest_length_is_enough(
    start: Callable[..., None], kv_role: str, transfers: str
) -> None:
    start(kv_role, PROMPT_BLOCKS * RANKS * SLOT_BYTES, host_transfers=transfers)


@pytest.mark.parametrize("kv_role", ["kv_consumer", "kv_producer", "kv_both"])
def test_host_memory_that_takes_part_in_no_transfer_may_be_small(start: Callable[..., None], kv_role: str) -> None:
    start(kv_role, RANKS * SLOT_BYTES)


@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_no_lease_lasts_for_ever_however_often_it_is_renewed(
    side_of: Callable[..., ConnectorScheduler], role: str
) -> None:
    (producer,) = [each for each in side_of(role)._roles if isinstance(each, Producer)]
    leases, now = producer._leases, [0.0]
    leases._clock = lambda: now[0]
    leases.grant("lease", Leased(), "", ())
    for _ in range(70):
        now[0] += 10.0
        leases.renew(["lease"])
    assert not leases.still_valid(["lease"])
    assert leases.take_counts()["expired"] == 1


@pytest.mark.parametrize("reason", ["", "as told"], ids=["shared", "unshared"])
def test_prefixes_that_are_not_shared_are_neither_lent_nor_asked_for(
    side_of: Open, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_connector.scheduler.scheduler.unshared_prefixes", lambda config, groups: reason)
    side = side_of("kv_both", serve_prefixes=True, peers=["127.0.0.1:1"])
    producer = next(role for role in side._roles if isinstance(role, Producer))
    asks = any(isinstance(role, PeerPrefixes) for role in side._roles)
    assert (not asks, not producer.serves_prefixes_at) == (bool(reason), bool(reason))


@pytest.mark.parametrize(
    ("role", "kept", "asks"),
    [
        ("kv_producer", Retention(BLOCK_TOKENS, window=32), True),
        ("kv_both", Retention(BLOCK_TOKENS, chunk=32), True),
        ("kv_producer", Retention(BLOCK_TOKENS), False),
        ("kv_consumer", Retention(BLOCK_TOKENS, window=32), False),
    ],
)
def test_vllm_asks_before_it_frees_blocks_only_where_a_lease_would_lose_some(
    side_of: Open, role: str, kept: Retention, asks: bool
) -> None:
    """It asks for every request in every step."""
    side, manager = side_of(role, lambda _: None), make_manager(Setup())
    side._retentions = (kept,)
    remove = manager.coordinator.remove_skipped_blocks
    side.bind_cache_manager(manager)
    assert (manager.coordinator.remove_skipped_blocks != remove) is asks
