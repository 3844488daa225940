"""Sets of servers on simulated NPUs, like those of ``tests.support.e2e.deployments`` on the CPU.

P and D verify what is pulled. Mooncake's TCP transport plays the NIC, so the servers may reach device memory.
"""

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.support.ascend.faults import FaultSwitch
from tests.support.ascend.kernel_build import library_path
from tests.support.ascend.paths import ROOT_OF_PROJECT, vllm_cache_directory
from tests.support.e2e.architectures import MAX_POSITIONS
from tests.support.e2e.cluster import START_TIMEOUT_S, ServerSpec
from tests.support.e2e.deployments import PATIENT, Deployment, peer, prefill
from tests.support.e2e.models import DEFAULT_MODEL, ModelSpec

#: vllm-ascend's own choice, and nearly the only one that its kernels take.
NPU_BLOCK_SIZE = 128
#: Tokens that one step computes at most: longer prompts are prefilled in chunks.
STEP_TOKENS = 512
#: Tokens of a prompt with its answer.
LONGEST = 2048
GEMMA3 = ModelSpec(layers=6, architecture="gemma3")
DEEPSEEK_V2 = ModelSpec(architecture="deepseek_v2")
DEEPSEEK_V32 = ModelSpec(layers=3, architecture="deepseek_v32")
GLM = ModelSpec(layers=5, architecture="glm_moe_dsa")
DEEPSEEK_V4 = ModelSpec(architecture="deepseek_v4")
DEEPSEEK_V41 = ModelSpec(layers=6, architecture="deepseek_v41")
MINIMAX_M3 = ModelSpec(layers=3, architecture="minimax_m3")
GATED_DELTA = ModelSpec(hybrid="qwen3_5")
GLM_FLASH = ModelSpec(layers=8, architecture="glm5_next")
#: Bytes that models with one latent vector for all heads keep of a token in each layer, at most: in float32, with an
#: indexer's key if there is one; in int8, packed with a rotary key in bfloat16 and scales, beside a key with its own.
_LATENT_BYTES = {"deepseek_v2": 576 * 4, "deepseek_v32": (576 + 128) * 4, "glm_moe_dsa": 656 + 130}

_LEASE_TTL_S = 30.0
_OPTIONS = (("protocol", "tcp"), ("verify", True), ("lease_ttl_s", _LEASE_TTL_S), *PATIENT)
_START_TIMEOUT_S = max(START_TIMEOUT_S, 600.0)  # importing torch_npu and vllm-ascend takes long on busy cores


def simulated_environment(devices: int = 1) -> tuple[tuple[str, str], ...]:
    """The variables with which a process of the environment finds simulated devices."""
    return (
        ("LD_LIBRARY_PATH", library_path()),
        # What vLLM keeps of a model's class is of one release: others would overwrite it, and each would look again.
        ("VLLM_CACHE_ROOT", str(vllm_cache_directory())),
        ("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT_OF_PROJECT), os.environ.get("PYTHONPATH", ""))))),
        ("SIMACL_DEVICES", str(devices)),
        ("SIMACL_NIC", "1"),
    )


def block_bytes(model: ModelSpec) -> int:
    """Bytes of a block of that model in all layers and on all ranks, as vllm-ascend counts them."""
    return model.layers * NPU_BLOCK_SIZE * _LATENT_BYTES.get(model.architecture, 2 * model.kv_heads * 32 * 4)


def worker_block_bytes(spec: ServerSpec) -> int:
    """Bytes of a block on one worker: of its own heads, or of a latent vector, which all workers hold."""
    ranks = 1 if spec.model.architecture in _LATENT_BYTES else spec.tensor_parallel
    return block_bytes(spec.model) // ranks


#: Every process that is spawned imports vLLM, torch_npu and vllm-ascend for itself, which is most of a server's start.
_FORKED = ("VLLM_WORKER_MULTIPROC_METHOD", "fork")


def on_npu(spec: ServerSpec, *, device_blocks: int = 64, host_blocks: int = 0, forked: bool = True) -> ServerSpec:
    """The server on simulated NPUs.

    Args:
        device_blocks: how many of its model's blocks the device holds.
        host_blocks: how many of them host memory holds.
        forked: whether its processes are forked from the API server's; else ``vllm serve`` starts it, and spawns them.
    """
    whole = block_bytes(spec.model)
    host = (("cpu_bytes_to_use", host_blocks * whole),) if host_blocks else ()
    return replace(
        spec,
        platform="npu",
        by_command=not forked,
        layout=None,
        block_size=NPU_BLOCK_SIZE,
        kv_cache_bytes=device_blocks * worker_block_bytes(spec),
        arguments=(
            *("--max-model-len", str(LONGEST), "--max-num-seqs", "8"),
            *("--max-num-batched-tokens", str(STEP_TOKENS), *spec.arguments),
        ),
        variables=(
            *simulated_environment(spec.ranks),
            *((_FORKED,) if forked else ()),
            *spec.variables,
        ),
        options=(*(option for option in spec.options if option[0] not in dict(_OPTIONS)), *_OPTIONS, *host),
        start_timeout_s=_START_TIMEOUT_S,
    )


def unverified(spec: ServerSpec) -> ServerSpec:
    """The server without checksums, so that wrong bytes come to use."""
    return replace(spec, options=tuple((name, name != "verify" and value) for name, value in spec.options))


def _peer(model: ModelSpec = DEFAULT_MODEL, tensor_parallel: int = 1) -> ServerSpec:
    return peer(model, None, tensor_parallel)


#: Started as users do it, by ``vllm serve``. One worker each, in processes that are spawned; D has host memory, and a
#: device for little more than one prompt.
ONE_RANK = Deployment(
    "one rank",
    (
        ("P", on_npu(prefill(), forked=False)),
        ("D", on_npu(replace(_peer(), role="kv_consumer"), device_blocks=20, host_blocks=64, forked=False)),
    ),
)

#: As docs/npu.md has it: D computes a prompt itself whose pull fails.
RECOMPUTE = Deployment(
    "recompute",
    (
        ("P", on_npu(prefill())),
        ("D", on_npu(replace(_peer(), role="kv_consumer", load_failure_policy="recompute"))),
    ),
)


def _finds_prefixes(spec: ServerSpec) -> ServerSpec:
    """The server, which serves prefixes, and finds those of others if it is told where."""
    return replace(spec, options=(*spec.options, ("serve_prefixes", True), ("peers", ())))


#: Sides that differ in tensor parallel size, and two of the same, 2.
SEVERAL_RANKS = Deployment(
    "ranks",
    (
        ("TP1", _finds_prefixes(on_npu(_peer()))),
        ("TP2", _finds_prefixes(on_npu(_peer(tensor_parallel=2)))),
        ("other TP2", on_npu(_peer(tensor_parallel=2))),
    ),
)


def _heads_first(spec: ServerSpec) -> ServerSpec:
    return replace(spec, variables=(*spec.variables, ("VLLM_KV_CACHE_LAYOUT", "LBHNC")))


#: Caches [blocks, heads, tokens, size], HND in vLLM's older words, and one NHD as others are.
HEADS_FIRST = Deployment(
    "heads first",
    (
        ("HND", _heads_first(on_npu(_peer()))),
        ("HND TP2", _heads_first(on_npu(_peer(tensor_parallel=2)))),
        ("NHD", on_npu(_peer())),
    ),
)

#: Three KV cache groups: two of layers that keep a window, one of layers that keep all tokens.
NPU_SLIDING_WINDOW = Deployment(
    "sliding window",
    (("TP1", on_npu(_peer(GEMMA3), device_blocks=96)), ("TP2", on_npu(_peer(GEMMA3, 2), device_blocks=96))),
)

#: One latent vector a token, the same on all ranks.
NPU_MLA = Deployment("MLA", (("TP1", on_npu(_peer(DEEPSEEK_V2))), ("TP2", on_npu(_peer(DEEPSEEK_V2, 2)))))

#: More than a device of 96 blocks holds.
_HOST_BLOCKS = 192
#: For prompts that are longer than what an indexer selects.
_LONG = ("--max-model-len", str(MAX_POSITIONS))


def _indexing(tensor_parallel: int = 1, host_blocks: int = 0) -> ServerSpec:
    spec = replace(_peer(DEEPSEEK_V32, tensor_parallel), arguments=_LONG)
    return unverified(on_npu(spec, device_blocks=96, host_blocks=host_blocks))


#: One latent vector a token, and a key by which an indexer selects the tokens that are attended to, the same on all
#: ranks. Nothing is verified, so that wrong bytes come to use. TP1 has host memory.
NPU_INDEXER = Deployment(
    "indexer",
    (("TP1", _indexing(host_blocks=_HOST_BLOCKS)), ("TP2", _indexing(2)), ("other TP2", _indexing(2))),
)

#: Of the layers, 1, 2 and 4 have an indexer, and each other one takes what the one before it selected.
_SHARED_SELECTION = json.dumps({"use_index_cache": True, "index_topk_freq": 2})
_IN_INT8 = ("--kv-cache-dtype", "int8", "--attention-config", json.dumps({"indexer_kv_dtype": "int8"}))


def quantised(spec: ServerSpec, host_blocks: int = 0) -> ServerSpec:
    """The server with caches in int8, of a model whose layers share what an indexer selects."""
    arguments = (*_LONG, *_IN_INT8, "--hf-overrides", _SHARED_SELECTION)
    spec = replace(spec, dtype="bfloat16", arguments=arguments)
    return unverified(on_npu(spec, device_blocks=96, host_blocks=host_blocks))


#: Latent vectors packed with their scales, and an indexer's keys beside theirs, in int8. Nothing is verified, as above.
#: D has host memory.
NPU_QUANTISED = Deployment(
    "quantised",
    (
        ("P TP1", quantised(prefill(GLM))),
        ("P TP2", quantised(prefill(GLM, tensor_parallel=2))),
        ("D", quantised(replace(_peer(GLM), role="kv_consumer"), host_blocks=_HOST_BLOCKS)),
        ("D TP2", quantised(replace(_peer(GLM, 2), role="kv_consumer"))),
    ),
)


_ON_FP8_DEVICES = "tests.support.ascend.device_generation"


def _in_fp8(spec: ServerSpec) -> ServerSpec:
    arguments = ("--kv-cache-dtype", "fp8", "--attention-config", json.dumps({"indexer_kv_dtype": "fp8"}))
    return replace(spec, module=_ON_FP8_DEVICES, arguments=(*spec.arguments, *arguments))


#: The same in fp8, on devices that know it.
NPU_FP8 = Deployment(
    "fp8",
    (
        ("P", _in_fp8(quantised(prefill(GLM)))),
        ("D", _in_fp8(quantised(replace(_peer(GLM), role="kv_consumer")))),
    ),
)


def _from_stages(name: str, prefill_name: str, tensor_parallel: int) -> Deployment:
    """The same in int8 from two pipeline stages of unequal length, the second of which begins with an indexer."""
    stages = replace(prefill(GLM, tensor_parallel=tensor_parallel), stages=(3, 2))
    decode = replace(_peer(GLM), role="kv_consumer")
    return Deployment(name, ((prefill_name, quantised(stages)), ("D", quantised(decode))))


NPU_STAGES = _from_stages("stages", "P PP2", 1)
NPU_STAGES_OF_TWO_RANKS = _from_stages("stages of two ranks", "P TP2 PP2", 2)


def _sharing_tokens(spec: ServerSpec) -> ServerSpec:
    """The server with decode context parallelism over all of its ranks, which take turns with each block's tokens."""
    size, turn = str(spec.tensor_parallel), str(spec.block_size)
    arguments = ("--decode-context-parallel-size", size, "--cp-kv-cache-interleave-size", turn)
    return replace(spec, arguments=(*spec.arguments, *arguments))


#: The same with latent vectors of every second block on either rank, and an indexer's keys of all blocks on both.
NPU_SHARED_TOKENS = Deployment(
    "shared tokens",
    (
        ("P DCP2", _sharing_tokens(quantised(prefill(GLM, tensor_parallel=2)))),
        ("D", quantised(replace(_peer(GLM), role="kv_consumer"))),
        ("D DCP2", _sharing_tokens(quantised(replace(_peer(GLM, 2), role="kv_consumer")))),
    ),
)


def _selecting_blocks(tensor_parallel: int = 1, stages: tuple[int, ...] = ()) -> ServerSpec:
    spec = unverified(on_npu(replace(_peer(MINIMAX_M3, tensor_parallel), stages=stages)))
    # Its heads are larger than those that others' blocks are counted by.
    return replace(spec, kv_cache_bytes=64 << 20)


#: Keys and values by head, and one key for all heads by which an indexer selects blocks. Nothing is verified, as above.
#: The second pipeline stage is the last layer.
NPU_BLOCK_INDEXER = Deployment(
    "block indexer",
    (
        ("TP1", _selecting_blocks()),
        ("TP2", _selecting_blocks(2)),
        ("PP2", _selecting_blocks(stages=(2, 1))),
    ),
)


def _selecting_blocks_in_fp8(step_tokens: int = STEP_TOKENS) -> ServerSpec:
    spec = replace(_selecting_blocks(), dtype="bfloat16", module=_ON_FP8_DEVICES)
    arguments = ("--kv-cache-dtype", "fp8", "--max-num-batched-tokens", str(step_tokens))
    return replace(spec, arguments=(*spec.arguments, *arguments))


#: The same in fp8, but for the layer without an indexer. For steps of more than 512 tokens, vllm-ascend calls others of
#: its kernels.
NPU_BLOCK_FP8 = Deployment(
    "block indexer in fp8",
    (("P", _selecting_blocks_in_fp8(2 * STEP_TOKENS)), ("D", _selecting_blocks_in_fp8())),
)

#: Else a single worker shares its configuration with the engine core, which writes the smallest block size of all cache
#: groups into it, and vllm-ascend 0.30 does not start: ``KeyError: 8``.
_WORKER_APART = ("--distributed-executor-backend", "mp")


def compressing(spec: ServerSpec, *arguments: str) -> ServerSpec:
    """The server for compressed caches."""
    spec = replace(spec, dtype="bfloat16", arguments=(*_LONG, *_WORKER_APART, *arguments))
    # All its cache groups take blocks of one pool, most of them for few tokens.
    return replace(unverified(on_npu(spec)), kv_cache_bytes=512 << 20)


def _compressing_deployment(name: str, model: ModelSpec, *arguments: str) -> Deployment:
    return Deployment(
        name,
        (
            ("P TP1", compressing(prefill(model), *arguments)),
            ("P TP2", compressing(prefill(model, tensor_parallel=2), *arguments)),
            ("D", compressing(replace(_peer(model), role="kv_consumer"), *arguments)),
        ),
    )


#: Windows, compressed caches, an indexer's keys in int8 with scales behind them, and compressors' states, in pages of
#: one pool. Nothing is verified, as above.
NPU_COMPRESSED = _compressing_deployment("compressed", DEEPSEEK_V4)

#: The same of V4.1: compressed caches that several layers read, and rings. Its table is in the device's memory: the
#: simulated runtime does not publish host memory to the device. It reads no images.
NPU_RINGS = _compressing_deployment(
    "rings",
    DEEPSEEK_V41,
    *("--limit-mm-per-prompt", json.dumps({"image": 0}), "--engram-config", json.dumps({"cpu_offload": False})),
)

#: vLLM makes these blocks as large as a state, at both sizes.
NPU_STATE_BLOCK = 256


def _gated_delta(tensor_parallel: int = 1, *arguments: str, host_blocks: int = 0) -> ServerSpec:
    spec = on_npu(replace(_peer(GATED_DELTA, tensor_parallel), arguments=arguments), host_blocks=host_blocks)
    return unverified(replace(spec, block_size=NPU_STATE_BLOCK))


#: States of gated delta net, also at borders of blocks, beside keys and values. Nothing is verified, as above. "other
#: TP1" has host memory.
NPU_GATED_DELTA = Deployment(
    "gated delta net",
    (("TP1", _gated_delta()), ("other TP1", _gated_delta(host_blocks=_HOST_BLOCKS)), ("TP2", _gated_delta(2))),
)

#: D's steps end inside blocks.
NPU_SHORT_STEPS = Deployment(
    "gated delta net, short steps",
    (("P", _gated_delta()), ("D", _gated_delta(1, "--max-num-batched-tokens", "200"))),
    slow=True,
)

#: The same as recipes have it: one state of each request, equal sizes.
NPU_ONE_STATE = Deployment(
    "gated delta net, one state",
    tuple((name, _gated_delta(2, "--no-enable-prefix-caching")) for name in ("TP2", "other TP2")),
)


def pooling(spec: ServerSpec) -> ServerSpec:
    """The server for GLM-5.3-Flash."""
    spec = unverified(on_npu(replace(spec, dtype="bfloat16")))
    # Its blocks are those of several groups of layers, which share memory.
    return replace(spec, block_size=NPU_STATE_BLOCK, kv_cache_bytes=64 << 20)


#: States of Kimi delta attention, also at borders of blocks, latent vectors, an indexer's keys that stand for a pool of
#: tokens, and a ring of the others. Nothing is verified, as above.
NPU_POOLED_INDEXER = Deployment(
    "pooled indexer",
    (
        ("TP1", pooling(_peer(GLM_FLASH))),
        ("other TP1", pooling(_peer(GLM_FLASH))),
        ("TP2", pooling(_peer(GLM_FLASH, 2))),
    ),
)

#: Stores what it is about to evict, from layers with and without a sliding window. Host memory has room for what
#: the test computes, up to 27 blocks of each of 15 prompts: else the first one, which is stored first, would give way.
LAZY_HOST = Deployment(
    "lazy host",
    (
        (
            "W",
            on_npu(
                replace(_peer(GEMMA3), options=(*_peer(GEMMA3).options, ("cpu_store", "lazy"))),
                device_blocks=48,
                host_blocks=192,
            ),
        ),
    ),
)


#: D stores what it is about to evict of what it computes and pulls.
LAZY_PULLS = Deployment(
    "lazy pulls",
    (
        ("P", on_npu(prefill())),
        (
            "D",
            on_npu(
                replace(_peer(), role="kv_consumer", options=(*_peer().options, ("cpu_store", "lazy"))),
                device_blocks=20, host_blocks=64,
            ),
        ),
    ),
)  # fmt: skip


def additional_config(**options: object) -> tuple[str, str]:
    """Arguments that set options of vllm-ascend."""
    return "--additional-config", json.dumps(options)


def _recomputing(*arguments: str, host_blocks: int = 0) -> ServerSpec:
    arguments = (*additional_config(recompute_scheduler_enable=True), *arguments)
    spec = replace(_peer(), role="kv_consumer", arguments=arguments)
    return on_npu(spec, device_blocks=20, host_blocks=host_blocks)


#: Schedulers of vllm-ascend take the place of vLLM's own in decode servers. Those with the one that recomputes have a
#: device for little more than one prompt; recipes have it without prefix caching.
SCHEDULERS = Deployment(
    "schedulers",
    (
        ("P", on_npu(prefill())),
        ("D balance", on_npu(replace(_peer(), arguments=additional_config(enable_balance_scheduling=True)))),
        ("D recompute", _recomputing(host_blocks=64)),
        ("D recompute, no prefixes", _recomputing("--no-enable-prefix-caching")),
    ),
)

#: By which tests slow down the kernels of D below, and leave out its waits.
D_FAULTS = FaultSwitch(Path(tempfile.gettempdir()) / f"ascend-sim-faults-{os.getpid()}.json")

_D = on_npu(replace(_peer(), role="kv_consumer", arguments=("--async-scheduling",)), device_blocks=20, host_blocks=64)

#: Pulls through staging, because P has two ranks; nothing is verified, so that wrong bytes come to use.
WAITS = Deployment(
    "waits",
    (
        ("P", unverified(on_npu(prefill(tensor_parallel=2)))),
        ("D", unverified(replace(_D, variables=(*_D.variables, *D_FAULTS.variables)))),
    ),
)

_P_SMALL = on_npu(prefill(tensor_parallel=2), device_blocks=20, host_blocks=64)

#: Leases leave P's device, and every prompt lands in D's host memory, where the heads of P's two ranks come together.
#: Nothing is verified, as above.
HOST_TRANSFERS = Deployment(
    "host transfers",
    (
        ("P", unverified(replace(_P_SMALL, options=(*_P_SMALL.options, ("host_transfers", "auto"))))),
        (
            "D",
            unverified(
                replace(
                    _D,
                    variables=(*_D.variables, *D_FAULTS.variables),
                    options=(*_D.options, ("host_transfers", "always")),
                )
            ),
        ),
    ),
)
