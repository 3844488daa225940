"""Sets of servers of models with states, as ``deployments`` has them of others."""

from dataclasses import replace

from tests.support.e2e.cluster import Role, ServerSpec
from tests.support.e2e.deployments import LEASE_TTL_S, PATIENT, Deployment, leases
from tests.support.e2e.models import ModelSpec


def _hybrid(
    role: Role,
    name: str,
    tensor_parallel: int,
    step: int,
    *arguments: str,
    dtype: str = "float32",
    block_size: int,
    kv_heads: int = 4,
) -> ServerSpec:
    """A server of a model with states, which computes at most ``step`` tokens at a time."""
    return ServerSpec(
        role, ModelSpec(kv_heads=kv_heads, hybrid=name), None, tensor_parallel, dtype, block_size=block_size,
        options=(*leases(LEASE_TTL_S), *PATIENT), arguments=("--max-num-batched-tokens", str(step), *arguments),
    )  # fmt: skip


def granite_server(role: Role, tensor_parallel: int, *arguments: str, name: str = "granite") -> ServerSpec:
    """A server that keeps one state of each request."""
    options = ("--no-enable-prefix-caching", *arguments)
    return _hybrid(role, name, tensor_parallel, GRANITE_STEP, *options, block_size=96)


#: So a prompt of a multiple of it and one is computed in equal parts where it is pulled and where it is not.
GRANITE_STEP = 333
#: One state of each request.
GRANITE = Deployment(
    "granite",
    (
        ("P1", granite_server("kv_producer", 1)),
        ("D1", granite_server("kv_consumer", 1)),
        ("P2", granite_server("kv_producer", 2)),
    ),
    slow=True,
)
GRANITE_TO_TWO = Deployment(
    "granite to TP 2", (*GRANITE.servers[::2], ("D2", granite_server("kv_consumer", 2))), slow=True
)

#: Sizes of which neither divides the other.
GRANITE_ODD = Deployment(
    "granite, three ranks",
    (
        ("P3", granite_server("kv_producer", 3, name="granite_6")),
        ("D1", granite_server("kv_consumer", 1, name="granite_6")),
        ("D2", granite_server("kv_consumer", 2, name="granite_6")),
    ),
    slow=True,
)

#: vLLM makes these blocks as large as a state, at both sizes.
GRANITE_BLOCK = 96


def _granite_with_borders(
    role: Role,
    tensor_parallel: int,
    *arguments: str,
    step: int = 4 * GRANITE_BLOCK,
    block_size: int = GRANITE_BLOCK,
    kv_heads: int = 4,
    options: tuple[tuple[str, object], ...] = (),
) -> ServerSpec:
    """Finds prefixes, and tells how much of a prompt it has found."""
    worker = "tests.support.e2e.bordered_worker.BorderedWorker"
    arguments = ("--enable-prefix-caching", "--worker-cls", worker, "--enable-prompt-tokens-details", *arguments)
    spec = _hybrid(role, "granite", tensor_parallel, step, *arguments, block_size=block_size, kv_heads=kv_heads)
    variables = (*spec.variables, ("VLLM_SERVER_DEV_MODE", "1"))  # to reset what is known
    return replace(spec, options=(*spec.options, ("verify", True), *options), variables=variables)


#: States at the borders of blocks, at pairs of tensor parallel sizes.
GRANITE_BORDERS = Deployment(
    "granite, borders",
    (
        ("P1", _granite_with_borders("kv_producer", 1)),
        ("D1", _granite_with_borders("kv_consumer", 1)),
        ("P2", _granite_with_borders("kv_producer", 2)),
    ),
    slow=True,
)


def _granite_without_borders(role: Role) -> ServerSpec:
    spec = granite_server(role, 1)
    return replace(spec, options=(*spec.options, ("verify", True)))


#: One server keeps one state of each request, the other states at borders, too.
GRANITE_MODES = Deployment(
    "granite, modes",
    (
        ("P none", _granite_without_borders("kv_producer")),
        ("P align", _granite_with_borders("kv_producer", 1)),
        ("D none", _granite_without_borders("kv_consumer")),
        ("D align", _granite_with_borders("kv_consumer", 1)),
    ),
    slow=True,
)

#: Of one KV head, which both ranks have, vLLM makes blocks of other sizes at TP 1 and TP 2: as large as a state of 160
#: tokens' keys and values, and of 288. The blocks of ``wide`` are larger than they must be.
GRANITE_BLOCKS = Deployment(
    "granite, block sizes",
    tuple(
        (name, _granite_with_borders("kv_both", ranks, step=640, block_size=size, kv_heads=1))
        for name, ranks, size in (("TP2", 2, 160), ("TP1", 1, 288), ("wide", 1, 320))
    ),
    slow=True,
)

FEW = "--num-gpu-blocks-override", "48"
TWO_AT_A_TIME = "--max-num-batched-tokens", "64", "--long-prefill-token-threshold", "32"
#: The same on devices that hold few requests. P takes many steps for a prompt, and computes two at a time.
GRANITE_SHORT_OF_BLOCKS = Deployment(
    "granite, few blocks",
    (
        ("P", granite_server("kv_producer", 1, *FEW, *TWO_AT_A_TIME)),
        ("D", granite_server("kv_consumer", 1, *FEW)),
    ),
    slow=True,
)


def _short_of_blocks(name: str, *options: tuple[str, object]) -> Deployment:
    """The same with states at borders, which take blocks of their own. P computes a block in a step."""
    few = (*FEW, "--max-model-len", "3500")
    step = GRANITE_BLOCK + GRANITE_BLOCK // 2  # beside the tokens of answers
    return Deployment(
        name,
        (
            ("P", _granite_with_borders("kv_producer", 1, *few, step=step, options=options)),
            ("D", _granite_with_borders("kv_consumer", 1, *few, options=options)),
        ),
        slow=True,
    )


#: Without host memory, and with as much as one or two prompts take, to which leases move and where prompts land.
GRANITE_BORDERS_SHORT_OF_BLOCKS = (
    _short_of_blocks("granite, borders, few blocks"),
    _short_of_blocks("granite, borders, host memory", ("cpu_bytes_to_use", 12 << 20), ("host_transfers", "auto")),
)

#: vLLM makes these blocks as large as a state.
QWEN3_NEXT_BLOCK = 288


def qwen3_next_server(
    role: Role,
    *options: tuple[str, object],
    keeps_answers: bool = False,
    tensor_parallel: int = 1,
    arguments: tuple[str, ...] = (),
) -> ServerSpec:
    """Finds prefixes. Its kernels know bfloat16 only. The device holds a dozen prompts."""
    retention = ("--prefix-cache-retention-interval", "None") if keeps_answers else ()
    spec = _hybrid(
        role, "qwen3_next", tensor_parallel, QWEN3_NEXT_BLOCK, "--enable-prefix-caching",
        "--num-gpu-blocks-override", "90", *retention, *arguments, dtype="bfloat16", block_size=QWEN3_NEXT_BLOCK,
    )  # fmt: skip
    return replace(spec, options=(*spec.options, ("cpu_bytes_to_use", 64 << 20), *options))


#: States at the borders of blocks, also in host memory, and checksums of every pull. P lends prefixes to D.
QWEN3_NEXT = Deployment(
    "qwen3_next",
    (
        ("P", qwen3_next_server("kv_producer", ("verify", True), ("serve_prefixes", True), keeps_answers=True)),
        ("D", qwen3_next_server("kv_consumer", ("verify", True), ("peers", ()), ("cpu_store", "lazy"))),
    ),
)

#: Prompts that land in host memory, and leases that move there as soon as they are granted.
QWEN3_NEXT_TRANSFERS = Deployment(
    "qwen3_next transfers",
    (
        ("P", qwen3_next_server("kv_producer", ("verify", True), ("host_transfers", "auto"))),
        ("D", qwen3_next_server("kv_consumer", ("verify", True), ("host_transfers", "always"))),
    ),
    slow=True,
)

#: The same between two ranks and one or two. To the host memory of one, every prompt is pulled.
QWEN3_NEXT_RANKS = Deployment(
    "qwen3_next ranks",
    (
        ("P1", qwen3_next_server("kv_producer", ("verify", True))),
        ("P2", qwen3_next_server("kv_producer", ("verify", True), tensor_parallel=2)),
        ("D2", qwen3_next_server("kv_consumer", ("verify", True), tensor_parallel=2)),
        ("D1", qwen3_next_server("kv_consumer", ("verify", True), ("host_transfers", "always"))),
    ),
    slow=True,
)


def _with_states_in(dtype: str, role: Role) -> ServerSpec:
    return qwen3_next_server(role, ("verify", True), arguments=("--mamba-ssm-cache-dtype", dtype))


#: What the recurrence knows is kept in another precision than all else, or not.
QWEN3_NEXT_PRECISIONS = Deployment(
    "qwen3_next precisions",
    (
        ("P float32", _with_states_in("float32", "kv_producer")),
        ("D float32", _with_states_in("float32", "kv_consumer")),
        ("P bfloat16", _with_states_in("bfloat16", "kv_producer")),
    ),
    slow=True,
)


def _other(name: str, *arguments: str, block_size: int = 96) -> Deployment:
    """Keeps columns of a convolution together on P, and its rows on D and on a P of two ranks."""

    def server(role: Role, order: str, tensor_parallel: int = 1) -> ServerSpec:
        spec = _hybrid(role, name, tensor_parallel, 512, *arguments, block_size=block_size)
        return replace(spec, variables=(("VLLM_SSM_CONV_STATE_LAYOUT", order),))

    one, decode, two = server("kv_producer", "DS"), server("kv_consumer", "SD"), server("kv_producer", "SD", 2)
    return Deployment(name, (("P", one), ("D", decode), ("P2", two)), slow=True)


OTHER_HYBRIDS = (
    _other("granite", "--no-enable-prefix-caching"),
    _other("falcon_h1", "--no-enable-prefix-caching"),
    _other("nemotron_h", "--no-enable-prefix-caching"),
)
#: On one rank only: vLLM's rms_norm for CPUs takes other rows than its own of the strided keys and queries that LFM2
#: gives it; which, depends on the heads of a rank. The canary finds that the keys of one and two ranks differ.
LFM2 = _other("lfm2", "--enable-prefix-caching")
