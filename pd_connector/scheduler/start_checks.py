"""What is checked at the start of an engine, and when its workers are known: what cannot work."""

import logging
import resource
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pd_connector.config import READERS, ConfigError, ConnectorConfig, recipe_keys
from pd_connector.orders import WorkerHandshake
from pd_connector.secret import ENVIRONMENT
from pd_connector.vllm.cache_specs import RING_TOKENS, Retention
from pd_connector.vllm.device_blocks import DeviceBlocks
from pd_connector.vllm.engine_config import (
    EngineRole,
    check_one_engine_per_url,
    check_prefix_caching,
    context_parallel,
    drafts_keep_caches,
    extra_config,
    found_sizes,
    stop_timeout_s,
)

if TYPE_CHECKING:
    from pd_connector.vllm.types import VllmConfig

logger = logging.getLogger(__name__)

_FILES = 65536


def unshared_prefixes(vllm_config: "VllmConfig", retentions: Sequence[Retention]) -> str:
    """Return why this engine neither lends prefixes nor finds them at others; empty if it does."""
    states = [kept for kept in retentions if kept.states]
    if any(kept.block_tokens == RING_TOKENS for kept in states):
        return "a ring holds the last tokens of a request only, so that no prefix has one"
    if states and context_parallel(vllm_config)[0] > 1:
        return "with decode context parallelism, vLLM finds states inside of blocks as well"
    if drafts_keep_caches(vllm_config) and (states or any(kept.window for kept in retentions)):
        # vLLM leaves the last block of a hit to the draft, and then looks for a window or state that ends before it.
        return "with drafts and sliding windows or states, vLLM would not find a prefix that was pulled"
    return ""


def allow_connections() -> None:
    """Raise this process's soft limit of open files: each worker of each peer takes some.

    vLLM does that in its API server, of which an engine core on a headless node has none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def check_settings(config: ConnectorConfig, role: EngineRole, vllm_config: "VllmConfig", *, unshared: str = "") -> None:
    """Raise ConfigError if settings ask for what this engine cannot do; warn if a recipe's keys contradict it.

    ``unshared``: see ``unshared_prefixes``.
    """
    needed_by = {
        "cpu_bytes_to_use": config.cpu_bytes_to_use > 0,
        "serve_prefixes": config.serve_prefixes,
        "peers": config.peers is not None,
    }
    for setting, is_set in needed_by.items():
        if is_set:
            check_prefix_caching(vllm_config, setting)
    if (config.serve_prefixes or config.peers is not None or config.pool is not None) and unshared:
        logger.warning("PDConnector: serve_prefixes, peers and pool have no effect: %s", unshared)
    if READERS in (config.peers or ()) and not role.produces:
        raise ConfigError(
            f"peers has {READERS!r}: only an engine that prefills for others (kv_role kv_producer or kv_both) has "
            "readers; name engines as host:port"
        )
    if config.pool is not None and vllm_config.lora_config is not None:
        raise ConfigError(
            f"pool = {config.pool!r}: with LoRA (--enable-lora), vLLM names blocks by their adapter, and engines "
            "may have other adapters under one name; leave pool out"
        )
    if config.bootstrap_port and role.produces:
        check_one_engine_per_url(vllm_config)
    _warn_of_contradictions(role, vllm_config)
    _warn_of_idle_settings(config, role, vllm_config)


def say_if_prompts_only(interval: int | None, groups: Sequence[Retention]) -> None:
    """Log that answers are lent to nobody, if vLLM keeps what a prefix needs at the ends of prompts only.

    ``interval``: of the cache manager, which need not go by the option.
    """
    if interval == 0 and any(kept.states or kept.window for kept in groups):
        logger.info(
            "PDConnector: what is decoded here is not lent to peers, because vLLM keeps windows and states only at the "
            "ends of prompts; --prefix-cache-retention-interval None keeps those of answers, too"
        )


def _warn_of_idle_settings(config: ConnectorConfig, role: EngineRole, vllm_config: "VllmConfig") -> None:
    """Log a warning for each setting that was given and changes nothing here, where that may surprise."""
    for setting, is_idle, why in (
        ("allowed_peers", not role.reads, "this engine contacts nobody; it does not limit who may connect here"),
        ("bootstrap_port", not role.produces, "only engines of kv_role kv_producer or kv_both answer routers"),
        ("cpu_store", not config.cpu_bytes_to_use, "cpu_bytes_to_use is 0"),
        ("drain_timeout_s", not stop_timeout_s(vllm_config), "without --shutdown-timeout, vLLM stops at once"),
    ):
        if is_idle and setting in config.model_fields_set:
            logger.warning("PDConnector: %s has no effect: %s", setting, why)


def _warn_of_contradictions(role: EngineRole, vllm_config: "VllmConfig") -> None:
    """Log a warning if a recipe's keys say of this engine what it is not. An engine of both kinds could be either."""
    if role.produces == role.consumes:
        return
    keys = recipe_keys(extra_config(vllm_config))
    name, stated = ("prefill", keys.prefill) if role.produces else ("decode", keys.decode)
    if wrong := stated.contradictions(found_sizes(vllm_config)):
        logger.warning(
            "PDConnector: %s in kv_connector_extra_config says of this engine: %s. PDConnector goes by what it finds; "
            "check the command line, or correct the key", name, wrong,
        )  # fmt: skip


def check_cache_manager(vllm_config: "VllmConfig", blocks: DeviceBlocks, groups: Sequence[Retention]) -> None:
    """Raise ConfigError if vLLM's cache manager, which ``blocks`` are bound to, is not as this connector takes it.

    ``groups``: what vLLM keeps of a request in every cache group.
    """
    if any(kept.states for kept in groups) and blocks.finds_prefixes:
        is_set = getattr(vllm_config.cache_config, "prefix_match_unit", None) is not None  # vLLM 0.23 has none
        check_prefix_unit(blocks.hash_tokens, groups, is_set=is_set)
    if context_parallel(vllm_config)[0] > 1:
        check_block_sizes(blocks.block_tokens, groups)


def check_prefix_unit(unit: int, groups: Sequence[Retention], *, is_set: bool) -> None:
    """Raise ConfigError if vLLM finds prefixes of a model with states that end inside a block.

    Args:
        unit: tokens of which vLLM makes a hash.
        groups: what vLLM keeps of a request in every cache group.
        is_set: whether it is the option's, and not what vLLM makes of the block sizes.
    """
    groups = [kept for kept in groups if kept.block_tokens != RING_TOKENS]
    sizes = {kept.block_tokens for kept in groups if kept.states}
    if not sizes or unit >= min(sizes):
        return
    inside = f"inside a block of {min(sizes)} tokens, from which PDConnector cannot pull on"
    if is_set:
        raise ConfigError(
            f"prefix_match_unit = {unit}: vLLM then finds prefixes that end {inside}; leave it out, or set it to "
            f"{min(sizes)}"
        )
    blocks = " and ".join(str(size) for size in sorted({kept.block_tokens for kept in groups}))
    raise ConfigError(
        f"vLLM finds prefixes every {unit} tokens, because cache groups have blocks of {blocks}, and so {inside}; "
        "choose an --attention-backend that takes blocks of one size (FLASH_ATTN), a draft without sliding windows, or "
        "--no-enable-prefix-caching"
    )


def check_block_sizes(sizes: Sequence[int], groups: Sequence[Retention]) -> None:
    """Raise ConfigError unless blocks have as many tokens for vLLM as this connector takes them to have.

    Args:
        sizes: tokens of a block of vLLM's cache manager, in every cache group.
        groups: what vLLM keeps of a request in every cache group.
    """
    taken = tuple(kept.block_tokens for kept in groups)
    if tuple(sizes) != taken:
        raise ConfigError(
            f"with context parallelism, this vLLM has blocks of {tuple(sizes)} tokens in its cache groups, which "
            f"PDConnector takes for {taken}: it does not know which ranks share the tokens of which layers; set "
            "decode_context_parallel_size to 1"
        )


def check_secrets(handshakes: Sequence[WorkerHandshake], secret: str) -> None:
    """Raise ConfigError unless every worker has this process's secret: with another, all its pulls would fail.

    ``secret``: its fingerprint; empty if there is none.
    """
    for number, handshake in enumerate(handshakes):
        if handshake.secret != secret:
            theirs = "another secret" if handshake.secret else "no secret"
            raise ConfigError(
                f"worker {number} of {len(handshakes)} has {theirs}, and the engine core has "
                f"{'one' if secret else 'none'}: give all processes of an engine the same on every node, by "
                f"secret_file or by the environment variable {ENVIRONMENT}"
            )


def check_holds_a_prompt(slots: int, groups: Sequence[Retention], longest: int, config: ConnectorConfig) -> None:
    """Raise ConfigError if host memory cannot hold a prompt of the greatest length, which transfers there need.

    Args:
        slots: blocks that host memory holds.
        groups: what vLLM keeps of a request in every cache group.
        longest: tokens of the longest prompt.
        config: the settings, for the size of host memory of all workers.
    """
    needed = sum(kept.most_blocks(longest) for kept in groups)  # states after drafts are not transferred
    if needed > slots:
        # Workers round their number of slots down, so a slot takes them no more than its share of all bytes.
        enough = -(-config.cpu_bytes_to_use * needed // slots)
        raise ConfigError(
            f"host_transfers = {config.host_transfers!r}: host memory of {slots} blocks cannot hold one prompt of "
            f"max_model_len = {longest} tokens, which takes {needed}; set cpu_bytes_to_use to at least {enough}, or "
            "host_transfers to 'off'"
        )
