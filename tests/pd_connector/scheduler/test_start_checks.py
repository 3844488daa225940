"""What is refused at the start of an engine whose model keeps states, or whose ranks share tokens.

And what recipes say that is not so.
"""

import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

from pd_connector.config import ConfigError, parse_config
from pd_connector.scheduler import start_checks
from pd_connector.scheduler.start_checks import (
    allow_connections,
    check_block_sizes,
    check_holds_a_prompt,
    check_prefix_unit,
    check_settings,
    say_if_prompts_only,
    unshared_prefixes,
)
from pd_connector.vllm.cache_specs import RING_TOKENS, Retention
from pd_connector.vllm.engine_config import EngineRole
from tests.support.connector.vllm_engine import a_config
from tests.support.releases import since
from tests.support.simulation.vllm_schedulers import EngineSim, World

TOKENS, STATES, WINDOW = Retention(96), Retention(96, states=True), Retention(96, 512)


def test_prefixes_of_a_model_with_states_end_at_borders_of_blocks() -> None:
    check_prefix_unit(96, [TOKENS, STATES], is_set=True)
    check_prefix_unit(32, [TOKENS], is_set=True)
    with pytest.raises(ConfigError, match=r"prefix_match_unit = 32: .* a block of 96 tokens.* set it to 96"):
        check_prefix_unit(32, [TOKENS, STATES], is_set=True)


def test_a_draft_with_smaller_blocks_is_named_if_nobody_has_set_where_prefixes_end() -> None:
    """The unit is then the greatest common divisor of the block sizes, and vLLM takes no other."""
    ring = Retention(RING_TOKENS, states=True)
    with pytest.raises(ConfigError, match=r"every 32 tokens, .* blocks of 64 and 96, .*FLASH_ATTN") as refused:
        check_prefix_unit(32, [STATES, Retention(64, 512), ring], is_set=False)
    assert "prefix_match_unit" not in str(refused.value)


def test_a_ring_has_no_borders_at_which_prefixes_end() -> None:
    check_prefix_unit(32, [TOKENS, Retention(RING_TOKENS, states=True)], is_set=False)


@pytest.mark.parametrize(
    ("groups", "drafts", "reason"),
    [
        ([TOKENS], "eagle", ""),
        ([TOKENS, WINDOW], "", ""),
        ([TOKENS, WINDOW], "ngram", ""),
        ([TOKENS, WINDOW], "eagle", "drafts and sliding windows or states"),
        ([TOKENS, STATES], "", ""),
        ([TOKENS, STATES], "ngram", ""),
        ([TOKENS, STATES], "eagle", "drafts and sliding windows or states"),
        ([TOKENS, Retention(RING_TOKENS, states=True)], "", "a ring holds"),
    ],
    ids=[
        "drafts",
        "windows",
        "windows and n-grams",
        "windows and drafts",
        "states",
        "states and n-grams",
        "states and drafts",
        "a ring",
    ],
)
def test_prefixes_that_vllm_would_not_find_are_not_shared(
    groups: list[Retention], drafts: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = a_config(Path("model"), "kv_both")
    made.cache_config.enable_prefix_caching = True
    made.speculative_config = SimpleNamespace(method=drafts) if drafts else None
    unshared = unshared_prefixes(made, groups)
    assert (reason in unshared) if reason else not unshared
    config = parse_config({"peers": ["p:1"]})
    check_settings(config, EngineRole.of(made, asks_peers=True), made, unshared=unshared)
    assert ("serve_prefixes, peers and pool have no effect" in caplog.text) is bool(reason)


def test_states_that_vllm_finds_inside_of_blocks_are_not_shared() -> None:
    made = a_config(Path("model"), "kv_both")
    made.parallel_config.decode_context_parallel_size = 2
    assert unshared_prefixes(made, [TOKENS]) == ""
    assert "decode context parallelism" in unshared_prefixes(made, [TOKENS, STATES])


@pytest.mark.parametrize(
    ("groups", "interval", "says"),
    [
        ([TOKENS, STATES], 0, True),
        ([TOKENS, WINDOW], 0, True),
        ([TOKENS, STATES], None, False),
        ([TOKENS, STATES], 96, False),
        ([TOKENS], 0, False),
    ],
)
def test_an_engine_that_lends_prompts_only_says_how_it_lends_answers(
    groups: list[Retention], interval: int | None, says: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    say_if_prompts_only(interval, groups)
    assert ("--prefix-cache-retention-interval None keeps those of answers" in caplog.text) is says


def test_host_memory_holds_a_prompts_states_and_none_of_drafts() -> None:
    groups = [TOKENS, replace(STATES, earlier_states=2, draft_states=4)]
    config = parse_config({"cpu_bytes_to_use": 7000, "host_transfers": "auto"})
    check_holds_a_prompt(8, groups, 5 * 96, config)
    with pytest.raises(ConfigError, match=r"of 7 blocks cannot hold .* which takes 8; .* at least 8000"):
        check_holds_a_prompt(7, groups, 5 * 96, config)


@since((0, 30), "states of recurrent layers")
@pytest.mark.parametrize("interval", [0, None])
def test_it_goes_by_the_cache_manager_which_need_not_go_by_the_option(
    interval: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm-ascend's coordinator of several cache groups keeps all, whatever the option says."""
    made, messages = KVCacheCoordinator.__init__, list[str]()

    def with_interval(coordinator: Any, *args: Any, **named: Any) -> None:
        made(coordinator, *args, **named)
        coordinator.retention_interval = interval

    monkeypatch.setattr(KVCacheCoordinator, "__init__", with_interval)
    monkeypatch.setattr(start_checks.logger, "info", lambda message, *_: messages.append(message))
    world = World()
    EngineSim(world, "kv_consumer", 40, states="align", serve_prefixes=True)
    world.close()
    assert any("what is decoded here is not lent" in each for each in messages) is (interval == 0)


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [(1024, 4096, 4096), (1024, 1 << 20, 65536), (1024, -1, 65536), (100_000, 1 << 20, None), (-1, -1, None)],
)
def test_an_engine_core_may_have_as_many_connections_as_the_hard_limit_allows(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int | None
) -> None:
    """On a node without an API server, which raises the soft limit, nobody else does."""
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, to: limits.append(to))
    allow_connections()
    assert limits == ([] if raised is None else [(raised, hard)])


def engine(role: str, *, tp: int, pp: int, dp: int = 1, **stated: Any) -> Any:
    config = a_config(Path("model"), role, **stated)
    parallel = config.parallel_config
    parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_size = tp, pp, dp
    return config


GLM: dict[str, Any] = {
    "prefill": {"dp_size": 1, "pp_size": 2, "tp_size": 16, "pp_layer_partition": "41,37"},
    "decode": {"dp_size": 8, "tp_size": 4},
}


@pytest.mark.parametrize(
    ("config", "partition", "says"),
    [
        (engine("kv_producer", tp=16, pp=2, **GLM), "41, 37", ""),
        (engine("kv_producer", tp=16, pp=2, **GLM), None, ""),
        (engine("kv_producer", tp=8, pp=2, **GLM), None, "prefill in .*: tp_size 16 (found: 8). PDConnector goes"),
        (engine("kv_producer", tp=16, pp=2, **GLM), "40,38", "prefill .*: pp_layer_partition 41,37 (found: 40,38)."),
        (engine("kv_consumer", tp=4, pp=1, **GLM), None, ""),
        (engine("kv_consumer", tp=4, pp=1, dp=4, **GLM), None, "decode in .*: dp_size 8 (found: 4)."),
        (engine("kv_both", tp=1, pp=1, **GLM), None, ""),
        (engine("kv_producer", tp=1, pp=1), None, ""),
    ],
)
def test_what_a_recipe_says_of_an_engine_and_is_not_so_is_one_warning(
    config: Any, partition: str | None, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_PP_LAYER_PARTITION", partition, raising=False)
    settings = parse_config(config.kv_transfer_config.kv_connector_extra_config)
    check_settings(settings, EngineRole.of(config), config)
    assert len(caplog.messages) == bool(says)
    for message, expected in zip(caplog.messages, [says] if says else [], strict=True):
        begin, end = expected.split(".*", 1)
        assert message.startswith(f"PDConnector: {begin}")
        assert end in message


@pytest.mark.parametrize(
    ("role", "setting", "says"),
    [
        ("kv_producer", {"allowed_peers": ["10.0.0.2"]}, "allowed_peers has no effect: this engine contacts nobody"),
        ("kv_consumer", {"allowed_peers": ["10.0.0.2"]}, ""),
        (
            "kv_consumer",
            {"bootstrap_port": 9998, "port": 8998},
            "bootstrap_port has no effect: only engines",
        ),
        ("kv_both", {"bootstrap_port": 9998, "port": 8998}, ""),
        ("kv_both", {"cpu_store": "lazy"}, "cpu_store has no effect: cpu_bytes_to_use is 0"),
        ("kv_producer", {"drain_timeout_s": 60}, "drain_timeout_s has no effect: without --shutdown-timeout"),
    ],
)
def test_a_setting_that_changes_nothing_is_one_warning(
    role: str, setting: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = engine(role, tp=1, pp=1)
    config.shutdown_timeout = 0
    check_settings(parse_config(setting), EngineRole.of(config), config)
    assert len(caplog.messages) == bool(says)
    assert all(message.startswith(f"PDConnector: {says}") for message in caplog.messages)


def test_a_pool_is_refused_beside_adapters(tmp_path: Path) -> None:
    config = a_config(tmp_path)
    config.cache_config.enable_prefix_caching, config.lora_config = True, object()
    settings = parse_config({"pool": "127.0.0.1:50052", "cpu_bytes_to_use": 1 << 30})
    with pytest.raises(ConfigError, match=r"pool = '127\.0\.0\.1:50052': with LoRA .* leave pool out"):
        check_settings(settings, EngineRole.of(config), config)


def test_blocks_of_shared_tokens_have_as_many_as_vllm_takes_them_to_have() -> None:
    check_block_sizes((96, 96), [TOKENS, STATES])
    message = r"blocks of \(48, 96\) tokens in its cache groups, which PDConnector takes for \(96, 96\)"
    with pytest.raises(ConfigError, match=message):
        check_block_sizes((48, 96), [TOKENS, STATES])
