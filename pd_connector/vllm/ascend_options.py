"""What of vllm-ascend's options and connectors the connector cannot serve, and which of its releases are tested.

Read from vLLM's configuration and from package metadata. Must not import vllm_ascend.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from pd_connector.vllm.devices import device_type
from pd_connector.vllm.engine_config import UnsupportedError
from pd_connector.vllm.layout_switch import CONNECTOR
from pd_connector.vllm.releases.installed import TESTED_ASCEND

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: A child of vLLM's logger, so that vLLM's handlers and level apply.
logger = logging.getLogger(f"vllm.{__name__}")

_PLAIN_CACHES = frozenset({"auto", "float16", "half", "bfloat16", "float32", "float"})

#: Quantised KV caches of vllm-ascend 0.30 that are whole where connectors see them: scales made for a token lie
#: in its row or in its page, and others come with the weights. 0.23 has none by these names.
_QUANTISED_CACHES = frozenset({"int8", "fp8", "fp8_e4m3"})

#: Options in ``additional_config`` that change what a KV cache holds or how it is laid out.
_CACHE_OPTIONS: Mapping[str, str] = {
    "enable_kv_nz": "it keeps KV caches in a private format of the device",
    "enable_hamming_sparse": (
        "it looks keys up by hashes that it makes when keys are written, and blocks that are pulled or loaded have none"
    ),
    **dict.fromkeys(
        ("enable_sparse_sfa_c8", "enable_sparse_sfa_turboquant", "enable_sparse_li_c8", "enable_sparse_li_c4"),
        "vllm-ascend 0.23 quantises caches by it in a form that this connector does not know, and 0.30 by "
        "kv_cache_dtype and attention_config.indexer_kv_dtype",
    ),
}

#: Types of the sparse indexer's cache whose scales, if it has any, are a tensor beside it or in its page.
_INDEXERS = frozenset({"auto", "bf16", "int8", "fp8"})

#: vllm-ascend's pool of KV blocks. Its worker takes the process's transfer engine, which ``lent_engine`` takes too.
ASCEND_STORE = "AscendStoreConnector"

#: A setting of its layer by layer mode.
_SHARED_BUFFERS = "layerwise_num_shared_buffers"

#: Sizes in ``finegrained_tp_config`` above 1 with which a preempted request must not be computed again.
_OFFLOADED_ONLY = ("oproj_tensor_parallel_size", "mlp_tensor_parallel_size")

#: Why a decode engine must be able to compute prompts.
_COMPUTES = (
    "PDConnector has an engine compute the first prompt of each prefill engine (canary), preempted ones, and those "
    "whose pull fails"
)

_OWN_CONNECTORS = (
    "LMCacheAscendConnector", "Mooncake", "OffloadingConnector", "PreemptOffloadConnector",
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
    for name, options in _children(vllm_config):
        if name != CONNECTOR and name.startswith(_OWN_CONNECTORS):
            return (
                f"{name} beside PDConnector: a process on an NPU can have one transfer engine and one owner of host "
                f"memory; take {name} out of MultiConnector's connectors (cpu_bytes_to_use gives host memory here, "
                f"{ASCEND_STORE} may stay)"
            )
        if name == ASCEND_STORE and options.get("use_layerwise") and (buffers := options.get(_SHARED_BUFFERS)):
            return (
                f"{_SHARED_BUFFERS} = {buffers} of {ASCEND_STORE}: its layers take turns in so many buffers, so only "
                f"the last of them is there when PDConnector reads; leave {_SHARED_BUFFERS} out"
            )
    return ""


def check_computes_prompts(vllm_config: "VllmConfig") -> None:
    """Raise if a loaded model of vllm-ascend cannot compute prompts.

    It may have dropped the weights for that, keep a cache that prompts are not written to, or its data-parallel ranks
    would wait for each other.

    Raises:
        UnsupportedError: naming the layer or the option, and the ways out.
    """
    if reason := _ranks_apart(vllm_config):
        raise UnsupportedError(reason)
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        impl: Any = getattr(layer, "impl", None)  # other implementations compute prompts without these weights
        # vllm-ascend 0.23 has no such attribute: it takes FP8 where that would be true, and INT8 elsewhere.
        has_fp8 = getattr(impl, "support_fp8_attention", str(getattr(impl, "dtype", "")) != "torch.int8")
        if getattr(impl, "fa_quant_layer", False) is True and not has_fp8:
            raise UnsupportedError(
                f"--kv-cache-dtype {vllm_config.cache_config.cache_dtype}: on this device, vllm-ascend quantises the "
                f"cache of {name} on decode engines only, and in an order (NZ) in which it writes no prompts. "
                f"{_COMPUTES}. Start both sides without --kv-cache-dtype; with vllm-ascend 0.23, serve a checkpoint "
                "without fa_quant_type"
            )
        if type(impl).__name__ == "AscendMLAImpl" and getattr(getattr(impl, "q_proj", None), "weight", impl) is None:
            raise UnsupportedError(
                f"enable_mlapo: vllm-ascend has dropped weights of {name} with which prompts are computed, as it does "
                f"on decode engines of at most 1024 max_num_batched_tokens. {_COMPUTES}: it would end. Add {_keeping()}"
            )


def _keeping() -> str:
    """Return the options with which the loaded vllm-ascend drops no weights."""
    options = getattr(sys.modules.get("vllm_ascend.ascend_config"), "AscendConfig", None)
    if hasattr(options, "mlapo_keep_prefill_weights"):  # since vllm-ascend 0.30
        return "'mlapo_keep_prefill_weights': true to additional_config, which takes memory, or 'enable_mlapo': false"
    return "'enable_mlapo': false to additional_config"


def _ranks_apart(vllm_config: "VllmConfig") -> str:
    """Return why data-parallel ranks would wait for each other while one computes a prompt, and the ways out.

    Where vllm-ascend expects that decode engines compute no prompts, its ranks do not tell each other how many tokens
    they work on. Each chooses by its own number how experts communicate, and those that choose otherwise do not meet.
    """
    loaded: list[Any] = [sys.modules.get(f"vllm_ascend.{name}") for name in ("utils", "ascend_forward_context")]
    utils, context = loaded
    asks_nobody = getattr(utils, "should_skip_allreduce_across_dp_group", None)
    choose = getattr(context, "select_moe_comm_method", None)
    if vllm_config.parallel_config.data_parallel_size <= 1 or asks_nobody is None or choose is None:
        return ""
    most = vllm_config.scheduler_config.max_num_batched_tokens
    try:
        ways = [getattr(way, "name", "none") for way in (choose(1, vllm_config), choose(most, vllm_config))]
        if ways[0] == ways[1] or not asks_nobody(vllm_config):
            return ""
        fits = context.get_mc2_tokens_capacity()
    except Exception as error:  # these are vllm-ascend's own, of which a release may have others
        logger.warning("PDConnector: cannot tell whether data-parallel ranks go on beside a prompt: %r", error)
        return ""
    return (
        f"recompute_scheduler_enable: with it, vllm-ascend's data-parallel ranks choose by themselves how experts "
        f"communicate: {ways[0]}, and {ways[1]} where one computes a prompt of more than {fits} tokens a step. "
        f"{_COMPUTES}: all ranks would stand still. Add 'enable_prefill_mc2': true to additional_config "
        f"(HCCL_BUFFSIZE may have to grow), set max_num_batched_tokens ({most}) to {fits}, or leave "
        "recompute_scheduler_enable out"
    )


def has_ascend_store() -> bool:
    """Return whether vllm-ascend's pool of KV blocks is beside the connector that is being made."""
    from vllm.config import get_current_vllm_config_or_none  # noqa: PLC0415  as above

    return ASCEND_STORE in dict(_children(get_current_vllm_config_or_none()))


def _children(vllm_config: "VllmConfig | None") -> list[tuple[str, Mapping[str, Any]]]:
    """Return names and settings of the connectors in vLLM's MultiConnector on an NPU; empty if there is none."""
    transfer = vllm_config.kv_transfer_config if vllm_config is not None else None
    if transfer is None or transfer.kv_connector != "MultiConnector" or device_type() != "npu":
        return []
    children = (transfer.kv_connector_extra_config or {}).get("connectors", ())
    return [
        (str(child.get("kv_connector")), child.get("kv_connector_extra_config") or {})
        for child in children
        if isinstance(child, Mapping)
    ]


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
    yield from _reasons_of_schedulers(vllm_config, options)
    for name, effect in _CACHE_OPTIONS.items():
        if options.get(name):
            yield f"{name}: {effect}; start without it"
    offload = options.get("sparse_kv_offload_config")
    if isinstance(offload, Mapping) and offload.get("enabled"):
        yield (
            "sparse_kv_offload_config.enabled: it keeps KV caches in host memory of its own, where this connector does "
            "not see them; start without it (cpu_bytes_to_use gives host memory here)"
        )
    indexer = getattr(getattr(vllm_config, "attention_config", None), "indexer_kv_dtype", None)  # since vLLM 0.30
    if indexer is not None and str(indexer) not in _INDEXERS:
        yield (
            f"attention_config.indexer_kv_dtype = {indexer}: this connector does not know how vllm-ascend keeps such a "
            "cache of the sparse indexer; use auto, bf16, int8 or fp8"
        )
    dtype = str(vllm_config.cache_config.cache_dtype)
    if dtype not in _PLAIN_CACHES | (_QUANTISED_CACHES if indexer is not None else frozenset()):
        yield (
            f"kv_cache_dtype = {dtype}: this connector does not know how vllm-ascend keeps such KV caches and their "
            "scales; use auto, float16 or bfloat16, or with vllm-ascend 0.30 int8 or fp8"
        )
    if getattr(vllm_config.quant_config, "enable_c8_quant", False) is True:
        yield (
            "enable_c8_quant: the checkpoint quantises KV caches to int8, with scales that this connector does not "
            "see; serve a checkpoint without C8 KV quantisation"
        )


def _reasons_of_schedulers(vllm_config: "VllmConfig", options: Mapping[str, Any]) -> Iterator[str]:
    sizes = options.get("finegrained_tp_config")
    if "recompute_scheduler" in str(vllm_config.scheduler_config.scheduler_cls) and isinstance(sizes, Mapping):
        for name in _OFFLOADED_ONLY:
            if int(sizes.get(name) or 0) > 1:
                yield (
                    f"finegrained_tp_config.{name} = {sizes[name]}: vllm-ascend's recompute scheduler then needs "
                    "PreemptOffloadConnector, because a preempted request must not be computed again, as it is with "
                    "PDConnector; leave it out, or set it to 1"
                )
    nested = options.get("scheduler_config")
    scheduling = {**options, **(nested if isinstance(nested, Mapping) else {})}
    balances = scheduling.get("enable_balance_scheduling")
    if balances and vllm_config.model_config.is_hybrid and vllm_config.cache_config.enable_prefix_caching:
        yield (
            "enable_balance_scheduling: beside a connector, vllm-ascend's balance scheduler takes the prefix that "
            "attention layers hold for computed, also where the states of this hybrid model are not kept; leave it "
            "out, or start with --no-enable-prefix-caching"
        )
