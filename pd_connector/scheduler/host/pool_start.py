"""Starts host memory, and the pool behind it, when the workers of an engine are known."""

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from layout.block_objects import object_forms
from layout.geometry import ModelIdentity
from pd_connector.config import ConfigError, ConnectorConfig
from pd_connector.orders import WorkerHandshake
from pd_connector.scheduler.compute_rate import ComputeRate
from pd_connector.scheduler.host.shared_pool import SharedPool
from pd_connector.scheduler.host.tier import HostTier
from pd_connector.vllm.block_hashes import BlockHashes
from pd_connector.vllm.block_pools import HostBlockPool
from pd_connector.vllm.cache_specs import Retention
from pd_connector.vllm.engine_config import max_blocks_per_step
from transfer.peers import parse_address
from transfer.store.interface import StoreFailed
from transfer.store.mooncake_store import MooncakeStore, load
from transfer.store.slot_objects import SEAL
from transfer.store.store_thread import StoreThread

if TYPE_CHECKING:
    from pd_connector.vllm.types import KVCacheManager, VllmConfig

logger = logging.getLogger(__name__)


def open_host_tier(
    config: ConnectorConfig,
    vllm_config: "VllmConfig",
    manager: "KVCacheManager",
    groups: Sequence[Retention],
    handshakes: Sequence[WorkerHandshake],
) -> HostTier:
    """Return the role of host memory, as large as the smallest of the workers' parts."""
    mode = config.cpu_store
    slots, device_blocks = min(handshake.host_slots for handshake in handshakes), manager.kv_cache_config.num_blocks
    # At most half of the device's blocks: storing them all would not be lazy.
    most = min(max_blocks_per_step(vllm_config, [kept.block_tokens for kept in groups]), device_blocks // 2)
    pool = HostBlockPool(vllm_config, manager, slots, most if mode == "lazy" else 0)
    logger.info("PDConnector: host memory keeps up to %d blocks (%s), the device %d", slots, mode, device_blocks)
    if mode == "eager" and slots <= device_blocks:
        logger.warning(
            "PDConnector: host memory is no larger than the device's KV cache, and eager stores fill it with what "
            "the device holds too, so it will be of little use. Set cpu_bytes_to_use to several times the size of "
            "the device's KV cache, or cpu_store to lazy"
        )
    return HostTier(pool, len(handshakes), mode)


def open_shared_pool(
    config: ConnectorConfig,
    tier: HostTier,
    groups: Sequence[Retention],
    handshakes: Sequence[WorkerHandshake],
    hashes: BlockHashes,
    rate: ComputeRate,
    clock: Callable[[], float] = time.monotonic,
) -> SharedPool:
    """Return the role of the pool behind host memory. It is connected when it is needed.

    Raises:
        ConfigError: blocks of these caches cannot be kept as objects, or Mooncake's store is not installed.
    """
    assert config.pool is not None, "there is no pool"
    first = handshakes[0]
    assert first.model is not None, "a worker tells what it has loaded"
    _check_model(config, first.model)
    try:
        load()
        forms = object_forms(first.geometry)
    except (ValueError, StoreFailed) as error:
        raise ConfigError(f"pool = {config.pool!r}: {error}; leave pool out") from error
    logger.info(
        "PDConnector: host memory is shared through the pool at %s, %d objects a block on this rank",
        config.pool, sum(form.shares for of_group in forms for form in of_group),
    )  # fmt: skip
    contents = contents_of(first)
    return SharedPool(
        tier, forms, groups, len(handshakes), lambda: f"{contents} {hashes.hashing}", rate,
        StoreThread("pd-pool-look-up", partial(MooncakeStore, parse_address(config.pool), 0), clock), clock,
    )  # fmt: skip


def _check_model(config: ConnectorConfig, model: ModelIdentity) -> None:
    """Raise ConfigError if other engines' blocks may be of another model under the same name."""
    if not model.weights_digest:
        raise ConfigError(
            f"pool = {config.pool!r}: the weights could not be read to tell this model from others of its shape "
            f"(model_check = {config.model_check!r}); set model_check to 'weights' and serve safetensors, or leave "
            "pool out"
        )


def contents_of(worker: WorkerHandshake) -> str:
    """Return a digest of all that must be equal for two engines' blocks of the same tokens to be alike."""
    model = worker.model
    assert model is not None, "a worker tells what it has loaded"
    # On one kind of device they are the same to the last bit. Others do not find each other's blocks.
    # Drafts are in objects of their own, which name their layers: engines without any share the rest.
    planes = (plane for group in worker.geometry.groups for plane in group.planes)
    drafts = {layer for plane in planes if plane.optional for layer in plane.layers}
    held = ((each, sorted({*each.layers} - drafts)) for each in model.numbers)
    numbers = sorted((each.name, layers, each.width, each.numbers) for each, layers in held if layers)
    said = repr((
        model.architecture, model.config_digest, model.weights_digest, model.layers, model.kv_heads, model.head_size,
        model.model_dtype, model.cache_dtype, numbers, worker.arithmetic,
        worker.secret, SEAL,  # with others, they would remove each other's
    ))  # fmt: skip
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()
