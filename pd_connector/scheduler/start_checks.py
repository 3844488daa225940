"""What is checked at the start of an engine, and when its workers are known: what cannot work, or changes nothing."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pd_connector.config import ConfigError, ConnectorConfig
from pd_connector.orders import WorkerHandshake
from pd_connector.secret import ENVIRONMENT
from pd_connector.vllm.cache_specs import Retention, blocks_for
from pd_connector.vllm.engine_config import EngineRole, check_one_engine_per_url, check_prefix_caching

if TYPE_CHECKING:
    from pd_connector.vllm.types import VllmConfig

logger = logging.getLogger(__name__)


def check_settings(config: ConnectorConfig, role: EngineRole, vllm_config: "VllmConfig") -> None:
    """Raise ConfigError if settings ask for what this engine cannot do; warn of those that change nothing in it."""
    if config.cpu_bytes_to_use:
        check_prefix_caching(vllm_config)
    if config.bootstrap_port and role.produces:
        check_one_engine_per_url(vllm_config)
    if config.host_transfers and not role.produces:
        logger.warning(
            "PDConnector: host_transfers = True has no effect with kv_role kv_consumer, whose memory nobody reads: "
            "set it on the engines that prefill, or to false"
        )
    if config.pull_to != "device" and not role.consumes:
        logger.warning(
            "PDConnector: pull_to = %r has no effect with kv_role kv_producer, which pulls nothing: set it on the "
            "engines that decode, or to 'device'", config.pull_to,
        )  # fmt: skip


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


def check_holds_a_prompt(
    slots: int, groups: Sequence[Retention], longest: int, cpu_bytes: int, setting: str, way_out: str
) -> None:
    """Raise ConfigError if host memory cannot hold a prompt of the greatest length, which a setting needs.

    Args:
        slots: blocks that host memory holds.
        groups: what vLLM keeps of a request in every cache group.
        longest: tokens of the longest prompt.
        cpu_bytes: size of host memory, of all workers.
        setting: that needs it, for the message.
        way_out: what to set otherwise.
    """
    needed = blocks_for(groups, longest)
    if needed > slots:
        # Workers round their number of slots down, so a slot takes them no more than its share of all bytes.
        enough = -(-cpu_bytes * needed // slots)
        raise ConfigError(
            f"{setting}: host memory of {slots} blocks cannot hold one prompt of max_model_len = {longest} "
            f"tokens, which takes {needed}; set cpu_bytes_to_use to at least {enough}, or {way_out}"
        )
