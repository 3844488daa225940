"""The pairs of servers of ``tests/cuda``: both on the one GPU, or on the CPU for a dry run without one.

Caches hold what the GPU's attention backends want: bfloat16, blocks of 16 tokens and of 64. Prompts are computed in
chunks, and both sides of a pair in the same ones, so that D alone computes what P computes, bit by bit.
"""

from dataclasses import replace

from tests.support.e2e.cluster import Platform, Role, ServerSpec
from tests.support.e2e.deployments import PATIENT, SECRET, Deployment, leases
from tests.support.e2e.hybrid_deployments import QWEN3_NEXT_BLOCK, qwen3_next_server
from tests.support.e2e.models import ModelSpec
from tests.support.gpu_machine import is_on_cpu

PLATFORM: Platform = "cpu" if is_on_cpu() else "cuda"
IS_CPU = PLATFORM == "cpu"
DTYPE = "float32" if IS_CPU else "bfloat16"
#: The CPU's attention kernel takes multiples of 32 only.
SMALL_BLOCK, LARGE_BLOCK = (32, 64) if IS_CPU else (16, 64)
#: What ``exact_prompt`` makes whole multiples of, and one token more.
UNIT = LARGE_BLOCK
CHUNK = 512
#: Of the default model's cache: layers, KV heads, K and V, head size, bytes an item.
TOKEN_BYTES = 4 * 4 * 2 * 32 * (4 if IS_CPU else 2)
#: Tokens that the device of the pair's prefill server holds: fewer than its leases are of, so that these move.
DEVICE_TOKENS = 5120
HOST_TOKENS = 8 * DEVICE_TOKENS
CUDA_PULL_TIMEOUT_S = 20.0
#: What both logs say of a model that is not on the stream that Mooncake's copies go by.
OWN_STREAM = "the model computes on a stream of its own"
#: What P's log says, and what no log does, unless something has been done in a slower way, which changes no bit.
TOGETHER = "keeps all layers of a block together"
FALLBACKS = (
    "cross-layer KV blocks are off",
    "caches are reshaped by operators",
    "the driver copies over CUDA IPC",
    "the driver copies from mapped memory",
    "the installed library has no",
    "is not supported by this driver or chip",
)
#: Both may read the other's memory on any machine; what another transport changes is not these tests' matter.
_OPTIONS = (("protocol", "tcp"), *leases(60.0), ("verify", True))
_CUDA_GRAPHS = (
    *("--no-enforce-eager", "--async-scheduling", "--compilation-config"),
    '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}',
)
#: The sampler that FlashInfer compiles at start wants a CUDA toolkit.
_VARIABLES = () if IS_CPU else (("VLLM_USE_FLASHINFER_SAMPLER", "0"),)


def fallbacks(log: str) -> list[str]:
    """The lines of a server's log that say that something is done in a slower way."""
    return [line for line in log.splitlines() if any(words in line for words in FALLBACKS)]


def _server(role: Role, model: ModelSpec, block_size: int, *options: tuple[str, object]) -> ServerSpec:
    patience = PATIENT if role == "kv_consumer" else ()
    return ServerSpec(
        role,
        model,
        None,
        dtype=DTYPE,
        block_size=block_size,
        kv_cache_bytes=256 << 20,
        arguments=("--max-num-batched-tokens", str(CHUNK)),
        variables=_VARIABLES,
        options=(*_OPTIONS, *patience, *options),
        platform=PLATFORM,
    )


def _pair(name: str, model: ModelSpec, block_size: int, *arguments: str) -> Deployment:
    """Two servers that are alike."""
    sides = {"P": _server("kv_producer", model, block_size), "D": _server("kv_consumer", model, block_size)}
    return Deployment(
        name, tuple((each, replace(spec, arguments=(*spec.arguments, *arguments))) for each, spec in sides.items())
    )


def _with_graphs(spec: ServerSpec) -> ServerSpec:
    return spec if IS_CPU else replace(spec, arguments=(*spec.arguments, *_CUDA_GRAPHS))


_MODEL = ModelSpec()
_MOVING = (("cpu_bytes_to_use", HOST_TOKENS * TOKEN_BYTES), ("host_transfers", "auto"))
_SMALL_P = replace(_server("kv_producer", _MODEL, SMALL_BLOCK, *_MOVING), kv_cache_bytes=DEVICE_TOKENS * TOKEN_BYTES)
_APART = _server(
    "kv_consumer", _MODEL, LARGE_BLOCK, ("cross_layer_blocks", False), ("pull_timeout_s", CUDA_PULL_TIMEOUT_S)
)
#: Sides that differ in block size and layout: P keeps all layers of a block together, D keeps them apart. Both have
#: CUDA graphs and async scheduling. P has host memory, to which its leases move; D has none.
CUDA_UNEQUAL = Deployment(
    "unequal on CUDA",
    (("P", _with_graphs(_SMALL_P)), ("D", _with_graphs(replace(_APART, load_failure_policy="recompute")))),
)
#: More than all else that P takes of the GPU: as long as D has it mapped, it shows that a dead P left it.
SAME_HOST_CACHE_BYTES = 2 << 30


def _on_one_host(spec: ServerSpec) -> ServerSpec:
    """The server, which maps the other's memory or has its own mapped."""
    return _with_graphs(replace(spec, secret=SECRET, options=(*spec.options, ("protocol", "auto"))))


#: Sides that differ as those before do, so that what is read in mapped memory is staged. Neither has host memory.
CUDA_SAME_HOST = Deployment(
    "same host on CUDA",
    (
        ("P", replace(_on_one_host(_server("kv_producer", _MODEL, SMALL_BLOCK)), kv_cache_bytes=SAME_HOST_CACHE_BYTES)),
        ("D", replace(_on_one_host(_APART), load_failure_policy="recompute")),
    ),
)
CUDA_WINDOWS = _pair("windows on CUDA", ModelSpec(layers=6, architecture="gemma3"), SMALL_BLOCK)
#: The CPU's kernel of MLA takes blocks of 16 tokens, Hopper's take 64.
CUDA_MLA = _pair("MLA on CUDA", ModelSpec(architecture="deepseek_v2"), 16 if IS_CPU else 64)
CUDA_FP8 = _pair("fp8 on CUDA", _MODEL, SMALL_BLOCK, "--kv-cache-dtype", "fp8")


def _with_states(role: Role) -> ServerSpec:
    spec = qwen3_next_server(role, *_OPTIONS, ("cpu_bytes_to_use", 0))
    return _with_graphs(replace(spec, variables=_VARIABLES, kv_cache_bytes=256 << 20, platform=PLATFORM))


#: A step computes a block, so that D alone computes what P computes.
STATES_UNIT = QWEN3_NEXT_BLOCK
CUDA_STATES = Deployment("states on CUDA", (("P", _with_states("kv_producer")), ("D", _with_states("kv_consumer"))))
