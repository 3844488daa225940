"""The sets of servers that the tests share. Each set is started once; no two are alive at the same time."""

import json
import os
from dataclasses import dataclass, replace

import pytest
from _pytest.mark.structures import ParameterSet

from tests.support.e2e.cluster import BLOCK_SIZE, Layout, LoadFailurePolicy, ServerSpec, Sibling
from tests.support.e2e.models import CHATS, DEFAULT_MODEL, ModelSpec
from tests.support.process import free_ports

#: Short enough for a test to wait for an expiry, long against everything that a request does on a busy machine.
LEASE_TTL_S = 20.0
_PULL_TIMEOUT_S = 20.0
#: Where no test waits for it: four servers on two cores can keep each other from running for ten seconds.
PATIENT = (("pull_timeout_s", 60.0),)


@dataclass(frozen=True, slots=True)
class Deployment:
    """Servers by the names that tests use for them. All tests on ``slow`` ones are slow tests."""

    name: str
    servers: tuple[tuple[str, ServerSpec], ...]
    slow: bool = False

    def __str__(self) -> str:
        return self.name


def on(*deployments: Deployment | ParameterSet) -> pytest.MarkDecorator:
    """The test runs on each of the deployments."""
    return pytest.mark.parametrize("deployment", deployments, indirect=True, ids=str)


def prefill(
    model: ModelSpec = DEFAULT_MODEL, layout: Layout = "BHLNC", tensor_parallel: int = 1, dtype: str = "float32"
) -> ServerSpec:
    """A prefill server."""
    return ServerSpec("kv_producer", model, layout, tensor_parallel, dtype, options=leases(LEASE_TTL_S))


def leases(seconds: float) -> tuple[tuple[str, object], ...]:
    """P keeps blocks for so long, whether a decode engine has asked for them or not."""
    return (("lease_ttl_s", seconds), ("claim_timeout_s", seconds))


def decode(
    policy: LoadFailurePolicy = "fail",
    layout: Layout = "BHLNC",
    tensor_parallel: int = 1,
    dtype: str = "float32",
    *,
    patient: bool = False,
) -> ServerSpec:
    """A decode server."""
    options = PATIENT if patient else (("pull_timeout_s", _PULL_TIMEOUT_S),)
    return ServerSpec("kv_consumer", DEFAULT_MODEL, layout, tensor_parallel, dtype, policy, options=options)


def peer(
    model: ModelSpec = DEFAULT_MODEL,
    layout: Layout | None = "BHLNC",
    tensor_parallel: int = 1,
    block_size: int = BLOCK_SIZE,
    policy: LoadFailurePolicy = "fail",
) -> ServerSpec:
    """A server of both roles: two of them that differ are pulled from in both directions."""
    options = (*leases(LEASE_TTL_S), *PATIENT)
    return ServerSpec(
        "kv_both", model, layout, tensor_parallel, load_failure_policy=policy, block_size=block_size, options=options
    )


def _both_sizes(layout: Layout) -> Deployment:
    """Both roles in one physical layout, at tensor parallel size 1 and 2."""
    return Deployment(
        layout,
        (
            ("P1", prefill(layout=layout)),
            ("D1", decode(layout=layout, patient=True)),
            ("P2", prefill(layout=layout, tensor_parallel=2)),
            ("D2", decode(layout=layout, tensor_parallel=2, patient=True)),
        ),
        slow=True,
    )


LBHNC = _both_sizes("LBHNC")
BLHNC = _both_sizes("BLHNC")
BHLNC = _both_sizes("BHLNC")


KV_BLOCK_BYTES = 4 * 4 * BLOCK_SIZE * 2 * 32 * 4  # layers, KV heads, tokens, K and V, head size, float32

#: A prefill server, whose blocks can all be overwritten in seconds, and a decode server of each failure policy.
_FEW_BLOCKS = replace(prefill(), kv_cache_bytes=160 * KV_BLOCK_BYTES)
FAULTS = Deployment("faults", (("P", _FEW_BLOCKS), ("D fail", decode("fail")), ("D recompute", decode("recompute"))))

#: One right decode server, prefill servers of models that look alike, and one whose KV blocks mean something else.
OTHER_MODELS = Deployment(
    "other models",
    (
        ("D fail", decode("fail")),
        ("P layers", prefill(ModelSpec(layers=3))),
        ("P kv_heads", prefill(ModelSpec(kv_heads=2))),
        ("P weights", prefill(ModelSpec(seed=21))),
        ("P bfloat16", prefill(dtype="bfloat16")),
    ),
    slow=True,
)


HALF_PRECISION = Deployment(
    "half precision",
    (("P bfloat16", prefill(dtype="bfloat16")), ("D bfloat16", decode(dtype="bfloat16"))),
    slow=True,
)

SECRET = "a secret of the end-to-end tests"


def _careful(layout: Layout, block_size: int = BLOCK_SIZE, tensor_parallel: int = 1) -> ServerSpec:
    """A server of both roles with a secret, which verifies what it pulls, and serves and finds prefixes if it is told
    where.
    """
    server = peer(layout=layout, block_size=block_size, tensor_parallel=tensor_parallel)
    options = (*server.options, ("verify", True), ("serve_prefixes", True), ("peers", ()))
    return replace(server, secret=SECRET, options=options)


#: The two physical layouts that differ most, and two block sizes. Their control channels are encrypted, every pull is
#: verified.
THREE_FORMS = Deployment(
    "forms",
    (
        ("LBHNC", _careful("LBHNC")),
        ("BHLNC", _careful("BHLNC")),
        ("BHLNC 64", _careful("BHLNC", 64)),
    ),
    slow=True,
)

#: Tensor parallel sizes up to one rank for every KV head. Seven workers: slow on two cores.
FOUR_RANKS = Deployment("four ranks", tuple((f"TP{size}", peer(tensor_parallel=size)) for size in (1, 2, 4)), slow=True)


def _two_sizes(name: str, model: ModelSpec, slow: bool = False) -> Deployment:
    """A model at tensor parallel size 1 and 2, in the physical layout that its servers choose, one for each policy."""
    servers = (("TP1", peer(model, None)), ("TP2", peer(model, None, tensor_parallel=2, policy="recompute")))
    return Deployment(name, servers, slow)


#: Both ranks of TP2 hold the model's only KV head.
ONE_KV_HEAD = _two_sizes("one KV head", ModelSpec(kv_heads=1), slow=True)
#: One latent vector a token, the same on all ranks; blocks of 16 tokens, no prefix cache.
MLA = _two_sizes("MLA", ModelSpec(architecture="deepseek_v2"), slow=True)

#: Blocks of the default model that the servers below keep on the device and in host memory, in all their workers.
DEVICE_BLOCKS, HOST_BLOCKS = 80, 256
_HOST = ("cpu_bytes_to_use", HOST_BLOCKS * KV_BLOCK_BYTES)
WINDOWED_BLOCKS = 110  # with windows, where vLLM counts a whole prompt for each of the three cache groups
SHORT = ("--max-model-len", "2048")  # vLLM wants a device cache for one prompt at least

#: Where P publishes its KV cache events: a name of Linux, not a file.
EVENTS_ENDPOINT = f"ipc://@pd-connector-events-{os.getpid()}"
_EVENTS = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": EVENTS_ENDPOINT}


def with_host_memory(spec: ServerSpec, *options: tuple[str, object], device_blocks: int = DEVICE_BLOCKS) -> ServerSpec:
    """The server with a device cache of ``device_blocks`` of the default model's blocks, and host memory for more."""
    return replace(
        spec,
        kv_cache_bytes=device_blocks * KV_BLOCK_BYTES // spec.tensor_parallel,
        arguments=SHORT,
        variables=(("VLLM_SERVER_DEV_MODE", "1"),),
        options=(*spec.options, _HOST, *options),
    )


_PUBLISHING = ("--kv-events-config", json.dumps(_EVENTS))


def _in_chunks(spec: ServerSpec, *arguments: str, **changes: object) -> ServerSpec:
    """A server that computes prompts in chunks of 256 tokens, and so takes a dozen steps for a long one."""
    options = (*spec.options, *changes.items())
    arguments = (*spec.arguments, "--max-num-batched-tokens", "256", *arguments)
    return replace(spec, arguments=arguments, options=options)


def _careful_with_host_memory(layout: Layout, block_size: int, tensor_parallel: int, *arguments: str) -> ServerSpec:
    """Such a server that also has host memory, and a device cache for one long prompt, which it computes in chunks."""
    return _in_chunks(with_host_memory(_careful(layout, block_size, tensor_parallel)), *arguments)


#: Servers that differ in all that may differ, with everything on that a deployment may have: most tests are on these.
MIXED = Deployment(
    "mixed",
    (
        ("TP2", _careful_with_host_memory("BHLNC", BLOCK_SIZE, 2)),
        ("TP1", _careful_with_host_memory("LBHNC", 2 * BLOCK_SIZE, 1, *_PUBLISHING)),
    ),
)

_HOST_P = with_host_memory(prefill(layout="LBHNC"))

#: Device caches too small for what is asked of them, and host memory for the rest. D has two workers; W has cache
#: groups with a sliding window, and stores what it is about to evict.
HOST_TIER = Deployment(
    "host tier",
    (
        ("P", replace(_HOST_P, arguments=(*_HOST_P.arguments, *_PUBLISHING))),
        ("D", with_host_memory(decode(layout="BHLNC", tensor_parallel=2, patient=True))),
        (
            "W",
            with_host_memory(
                peer(ModelSpec(layers=6, architecture="gemma3"), None),
                ("cpu_store", "lazy"),
                device_blocks=WINDOWED_BLOCKS,
            ),
        ),
    ),
    slow=True,
)

_THREE_GROUPS = peer(ModelSpec(layers=6, architecture="gemma3"), None)
#: Three KV cache groups: two of layers that keep a window, one of layers that keep all tokens. TP1 stores in host
#: memory what it is about to evict, from a device cache that has room for prompts of any length.
SLIDING_WINDOW = Deployment(
    "sliding window",
    (
        (
            "TP1",
            replace(
                with_host_memory(_THREE_GROUPS, ("cpu_store", "lazy"), device_blocks=2 * WINDOWED_BLOCKS), arguments=()
            ),
        ),
        ("TP2", replace(_THREE_GROUPS, tensor_parallel=2, load_failure_policy="recompute")),
    ),
)

#: P's leases move to its host memory, which D reads; every pull is compared with what was leased.
MOVING_LEASES = Deployment(
    "moving leases",
    (
        ("P", with_host_memory(prefill(layout="LBHNC"), ("host_transfers", "auto"), ("verify", True))),
        ("D", replace(decode(layout="BHLNC", patient=True), options=(*PATIENT, ("verify", True)))),
    ),
    slow=True,
)

_LANDING_HOST = ("cpu_bytes_to_use", 4 * HOST_BLOCKS * KV_BLOCK_BYTES)

#: Prompts that find no room on a decode server's device land in its host memory, or all of them do.
LANDINGS = Deployment(
    "landings",
    (
        ("P", prefill(layout="LBHNC")),
        (
            "D auto",
            with_host_memory(
                decode(layout="BHLNC", patient=True), ("host_transfers", "auto"), ("peers", ()), _LANDING_HOST
            ),
        ),
        (
            "D host",
            with_host_memory(decode(layout="LBHNC", tensor_parallel=2, patient=True), ("host_transfers", "always")),
        ),
        (
            "B",  # both roles, with blocks for eleven of the prompts that it is given at once
            with_host_memory(peer(layout="LBHNC"), ("host_transfers", "auto"), ("serve_prefixes", True), _LANDING_HOST),
        ),
    ),
    slow=True,
)


def _windowed(tensor_parallel: int, *options: tuple[str, object]) -> ServerSpec:
    spec = peer(ModelSpec(layers=6, architecture="gemma3"), None, tensor_parallel=tensor_parallel)
    return with_host_memory(spec, *options, ("verify", True), device_blocks=WINDOWED_BLOCKS)


#: Both at once with windows: leases move when nobody reads them, and every prompt lands.
HOST_WINDOWS = Deployment(
    "host windows",
    (("P", _windowed(1, ("host_transfers", "auto"))), ("D", _windowed(2, ("host_transfers", "always")))),
    slow=True,
)

_GREETING = Sibling("GreetingConnector", "tests.support.connector.greeting")

#: This connector is a child of vLLM's MultiConnector, before the other child or behind it.
MULTI_CONNECTOR = Deployment(
    "MultiConnector",
    (
        ("first", replace(with_host_memory(peer()), sibling=_GREETING)),
        ("last", replace(with_host_memory(peer()), sibling=replace(_GREETING, is_first=True))),
    ),
    slow=True,
)

#: In which a decode server of ``LEGS`` wants to hear of a transfer, and that a prompt gets further than before: long
#: enough for those in the queue of the prefill server, short enough for a test to wait for it.
LEGS_QUEUE_TIMEOUT_S = 30.0


def bootstrap_port(spec: ServerSpec) -> int:
    """The port at which a prefill server of ``ROUTED`` can be asked."""
    return int(str(dict(spec.options)["bootstrap_port"]))


#: Both legs of a request at once. The first prefill server has blocks for two long prompts.
LEGS = Deployment(
    "legs",
    (
        (
            "P",
            replace(_in_chunks(prefill(), "--no-scheduler-reserve-full-isl"), kv_cache_bytes=180 * KV_BLOCK_BYTES),
        ),
        ("D fail", _in_chunks(decode("fail"), queue_timeout_s=LEGS_QUEUE_TIMEOUT_S)),
        ("D recompute", _in_chunks(decode("recompute"), queue_timeout_s=LEGS_QUEUE_TIMEOUT_S)),
    ),
    slow=True,
)

_CONTROL_PORT, _BOOTSTRAP_PORT = free_ports(2)

#: What routers have behind them. Of two prefill servers, the first can be asked for its control channel.
ROUTED = Deployment(
    "routed",
    (
        ("P", _in_chunks(prefill(), *CHATS, port=_CONTROL_PORT, bootstrap_port=_BOOTSTRAP_PORT)),
        ("P other", _in_chunks(prefill(), *CHATS)),
        ("D", _in_chunks(decode("fail"), "--enable-prompt-tokens-details", *CHATS)),
    ),
    slow=True,
)

#: The same between unequal servers, where what has arrived is reshaped chunk by chunk.
UNEQUAL_LEGS = Deployment(
    "unequal legs",
    (
        ("P1", _in_chunks(prefill())),
        ("D1", _in_chunks(decode(layout="LBHNC", patient=True))),
        ("P2", _in_chunks(prefill(tensor_parallel=2))),
        ("D2", _in_chunks(decode(layout="LBHNC", tensor_parallel=2, patient=True))),
    ),
    slow=True,
)

#: The same with windows, which move while the prompt is computed, and other block sizes on D.
WINDOW_LEGS = Deployment(
    "window legs",
    (
        ("P", _in_chunks(peer(ModelSpec(layers=6, architecture="gemma3"), None))),
        ("D", _in_chunks(peer(ModelSpec(layers=6, architecture="gemma3"), None))),
        ("P small", _in_chunks(peer())),
        ("D large", _in_chunks(peer(block_size=2 * BLOCK_SIZE))),
    ),
    slow=True,
)

#: The same with MLA: a latent vector a token, which all ranks hold.
MLA_LEGS = Deployment(
    "MLA legs",
    tuple(
        (f"TP{size}", _in_chunks(peer(ModelSpec(architecture="deepseek_v2"), None, tensor_parallel=size)))
        for size in (1, 2)
    ),
    slow=True,
)

#: The same with host memory at both ends, of which D reads P's, and device caches too small for what is asked of them.
#: A prompt that takes more than half of D's is pulled when it is complete.
HOST_LEGS = Deployment(
    "host legs",
    (
        ("P", _in_chunks(_HOST_P, host_transfers="auto")),
        ("D", _in_chunks(with_host_memory(decode(layout="BHLNC", patient=True)))),
    ),
    slow=True,
)

CHAOS_LEASE_TTL_S = 10.0
CHAOS_PULL_TIMEOUT_S = 20.0
_CHAOS_OPTIONS = (*leases(CHAOS_LEASE_TTL_S), ("pull_timeout_s", CHAOS_PULL_TIMEOUT_S))
#: For a decode server that may wait for a leg that never comes.
_CHAOS_PATIENCE = (*_CHAOS_OPTIONS, ("queue_timeout_s", CHAOS_PULL_TIMEOUT_S))

#: What processes do that die, stop and come back, with either failure policy.
CHAOS = Deployment(
    "chaos",
    (
        ("P", replace(prefill(), options=_CHAOS_OPTIONS)),
        ("D fail", replace(decode("fail"), options=_CHAOS_OPTIONS)),
        ("D recompute", replace(decode("recompute"), options=_CHAOS_OPTIONS)),
    ),
)

#: The same for prompts that are pulled while they are computed.
CHAOS_LEGS = Deployment(
    "chaos legs",
    (
        ("P", replace(_in_chunks(prefill()), options=_CHAOS_OPTIONS)),
        ("D fail", _in_chunks(replace(decode("fail"), options=_CHAOS_PATIENCE))),
        ("D recompute", _in_chunks(replace(decode("recompute"), options=_CHAOS_PATIENCE))),
    ),
    slow=True,
)

#: The same where neither device has room for what is asked of it at once: leases move, and prompts land. The second
#: decode server has another layout and larger blocks.
CHAOS_HOST = Deployment(
    "chaos host",
    (
        ("P", _in_chunks(with_host_memory(replace(prefill(), options=_CHAOS_OPTIONS), ("host_transfers", "auto")))),
        (
            "D auto fail",
            with_host_memory(
                replace(decode("fail"), options=_CHAOS_PATIENCE),
                ("host_transfers", "auto"), _LANDING_HOST,
            ),
        ),
        (
            "D host recompute",
            with_host_memory(
                replace(decode("recompute", "LBHNC"), block_size=2 * BLOCK_SIZE, options=_CHAOS_PATIENCE),
                ("host_transfers", "always"),
            ),
        ),
    ),
    slow=True,
)  # fmt: skip

_POINT_BLOCKS = 40  # of the device of a decode server: for one prompt of the tests of chosen points


def _at_points(spec: ServerSpec, *options: tuple[str, object]) -> ServerSpec:
    """The server with gates, and the timeouts of ``CHAOS``. In another module, the connector asks for no layout."""
    return replace(spec, is_gated=True, layout=None, options=(*_CHAOS_OPTIONS, *options))


def _decode_at_points(policy: LoadFailurePolicy, *options: tuple[str, object], ranks: int = 1) -> ServerSpec:
    spec = _at_points(decode(policy, tensor_parallel=ranks), *options)
    return replace(spec, kv_cache_bytes=_POINT_BLOCKS * KV_BLOCK_BYTES // ranks, arguments=("--max-model-len", "1024"))


def _prefill_at_points(*options: tuple[str, object], ranks: int = 1) -> ServerSpec:
    """It stores what it is about to evict, so that what a lease holds is copied when the lease moves."""
    spec = _at_points(prefill(tensor_parallel=ranks))
    return with_host_memory(spec, ("host_transfers", "auto"), ("cpu_store", "lazy"), *options)


_AUTO = (_LANDING_HOST, ("host_transfers", "auto"))
#: Processes that die and stop at chosen points of a landing, and of the move of a lease. P comes back on its port.
POINTS = Deployment(
    "points",
    (
        ("P", _prefill_at_points(("port", free_ports(1)[0]))),
        ("D auto fail", _decode_at_points("fail", *_AUTO)),
        ("D auto recompute", _decode_at_points("recompute", *_AUTO)),
        ("D fail", _decode_at_points("fail")),
        ("D recompute", _decode_at_points("recompute")),
    ),
    slow=True,
)

#: The same where one of two workers dies or stops.
POINTS_OF_RANKS = Deployment(
    "points of ranks",
    (
        ("P", _prefill_at_points(ranks=2)),
        ("D", _decode_at_points("fail", _LANDING_HOST, ("host_transfers", "always"), ranks=2)),
    ),
    slow=True,
)


def drained_at_points(drain_timeout_s: float) -> ServerSpec:
    """A prefill server for those of ``POINTS``, whose leases last until it has been told to stop and has stayed."""
    spec = _prefill_at_points(("drain_timeout_s", drain_timeout_s), *leases(4 * drain_timeout_s))
    return replace(spec, arguments=(*spec.arguments, "--shutdown-timeout", "60"))


def _in_trouble(layout: Layout, tensor_parallel: int, policy: LoadFailurePolicy) -> ServerSpec:
    """A server of both roles, whose leases move and to which prompts land."""
    spec = with_host_memory(peer(layout=layout, tensor_parallel=tensor_parallel, policy=policy))
    times = {"pull_timeout_s": 2 * CHAOS_PULL_TIMEOUT_S, "queue_timeout_s": 2 * CHAOS_PULL_TIMEOUT_S}
    return _in_chunks(spec, host_transfers="auto", **times)


#: The same between servers of both roles that are unequal in tensor parallel size and layout. A copy to host memory has
#: ended when both ranks of TP2 have made it. Three workers on two cores: they get more time.
CHAOS_HOST_RANKS = Deployment(
    "chaos host ranks",
    (("TP1", _in_trouble("LBHNC", 1, "fail")), ("TP2", _in_trouble("BHLNC", 2, "recompute"))),
    slow=True,
)
