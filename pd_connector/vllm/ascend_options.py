"""What of vllm-ascend's options and connectors the connector cannot serve, and which of its releases are tested.

Read from vLLM's configuration and from package metadata. Must not import vllm_ascend.
"""

import logging
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from pd_connector.vllm.engine_config import UnsupportedError
from pd_connector.vllm.layout_switch import CONNECTOR
from pd_connector.vllm.platform import device_type
from pd_connector.vllm.releases.installed import TESTED_ASCEND

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: A child of vLLM's logger, so that vLLM's handlers and level apply.
logger = logging.getLogger(f"vllm.{__name__}")

#: Types of KV caches that hold what they say. vllm-ascend keeps scales of the others where no connector sees them.
_PLAIN_CACHES = frozenset({"auto", "float16", "half", "bfloat16", "float32", "float"})

#: Options in ``additional_config`` that change what a KV cache holds or how it is laid out.
_CACHE_OPTIONS: Mapping[str, str] = {
    "enable_kv_nz": "it keeps KV caches in a private format of the device",
    "enable_hamming_sparse": (
        "it looks keys up by hashes that it makes when keys are written, and blocks that are pulled or loaded have none"
    ),
    **dict.fromkeys(
        ("enable_sparse_sfa_c8", "enable_sparse_sfa_turboquant", "enable_sparse_li_c8", "enable_sparse_li_c4"),
        "it quantises caches, and keeps the scales where this connector does not see them",
    ),
}

#: Types of the sparse indexer's cache that hold what they say; "auto" is one of them for what is served.
_PLAIN_INDEXERS = frozenset({"auto", "bf16"})

_OWN_CONNECTORS = (
    "AscendStoreConnector", "LMCacheAscendConnector", "Mooncake", "OffloadingConnector", "PreemptOffloadConnector",
    "RecomputeCPUOffloadConnector", "SfaRemoteD2HConnector", "SimpleCPUOffloadConnector", "UCMConnector",
)  # fmt: skip


def check_ascend_options(vllm_config: "VllmConfig") -> None:
    """Raise if an option of vllm-ascend is on that cannot be served, or a connector of its own is beside this one.

    Raises:
        UnsupportedError: naming the option or connector and the way out.
    """
    from vllm.config import get_current_vllm_config_or_none  # noqa: PLC0415  what MultiConnector was given, in workers

    if reason := unsupported_ascend_option(vllm_config) or unsupported_sibling(get_current_vllm_config_or_none()):
        raise UnsupportedError(reason)


def unsupported_ascend_option(vllm_config: "VllmConfig") -> str:
    """Return why an option of vllm-ascend cannot be served, and the way out; "" if all can, or on other platforms."""
    if device_type() != "npu":
        return ""
    return next(_reasons(vllm_config), "")


def unsupported_sibling(vllm_config: "VllmConfig | None") -> str:
    """Return why a connector beside this one cannot be there, and the way out; "" if there is none such.

    Args:
        vllm_config: the engine's own, not the one that MultiConnector makes for a child; None if it is not known.
    """
    transfer = vllm_config.kv_transfer_config if vllm_config is not None else None
    if transfer is None or transfer.kv_connector != "MultiConnector" or device_type() != "npu":
        return ""
    children = (transfer.kv_connector_extra_config or {}).get("connectors", ())
    names = [str(child.get("kv_connector")) for child in children if isinstance(child, Mapping)]
    for name in names:
        if name != CONNECTOR and name.startswith(_OWN_CONNECTORS):
            return (
                f"{name} beside PDConnector: a process on an NPU can have one transfer engine and one owner of host "
                f"memory; take {name} out of MultiConnector's connectors (cpu_bytes_to_use gives host memory here)"
            )
    return ""


def log_ascend_release() -> None:
    """Log a warning if the installed vllm-ascend is not one that the connector is tested with."""
    if device_type() != "npu":
        return
    try:
        installed = version("vllm-ascend")
    except PackageNotFoundError:
        installed = "of an unknown version"
    if installed.partition("+")[0] not in TESTED_ASCEND:
        logger.warning(
            "PDConnector: vllm-ascend %s is not among the releases that this connector is tested with: %s. If it "
            "fails, install one of these", installed, ", ".join(TESTED_ASCEND),
        )  # fmt: skip


def _reasons(vllm_config: "VllmConfig") -> Iterator[str]:
    given = vllm_config.additional_config
    options: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    scheduler = str(vllm_config.scheduler_config.scheduler_cls)
    if "recompute_scheduler" in scheduler:
        yield (
            "recompute_scheduler_enable: vllm-ascend's recompute scheduler ends a preempted request with a part of its "
            "answer, for its own router to send again; without it vLLM continues such requests. Turn it off"
        )
    for name, effect in _CACHE_OPTIONS.items():
        if options.get(name):
            yield f"{name}: {effect}; start without it"
    offload = options.get("sparse_kv_offload_config")
    if isinstance(offload, Mapping) and offload.get("enabled"):
        yield (
            "sparse_kv_offload_config.enabled: it keeps KV caches in host memory of its own, where this connector does "
            "not see them; start without it (cpu_bytes_to_use gives host memory here)"
        )
    indexer = str(getattr(getattr(vllm_config, "attention_config", None), "indexer_kv_dtype", "auto"))
    if indexer not in _PLAIN_INDEXERS:
        yield (
            f"attention_config.indexer_kv_dtype = {indexer}: vllm-ascend quantises the cache of the sparse indexer, "
            "and keeps the scales where this connector does not see them; use auto or bf16"
        )
    dtype = str(vllm_config.cache_config.cache_dtype)
    if dtype not in _PLAIN_CACHES:
        yield (
            f"kv_cache_dtype = {dtype}: vllm-ascend keeps the scales of quantised KV caches where this connector does "
            "not see them; use auto, float16 or bfloat16"
        )
    if getattr(vllm_config.quant_config, "enable_c8_quant", False) is True:
        yield (
            "enable_c8_quant: the checkpoint quantises KV caches to int8, with scales that this connector does not "
            "see; serve a checkpoint without C8 KV quantisation"
        )
