"""Sets of servers of models with states, as ``deployments`` has them of others."""

from tests.support.e2e.cluster import Role, ServerSpec
from tests.support.e2e.deployments import LEASE_TTL_S, PATIENT, Deployment, leases
from tests.support.e2e.models import ModelSpec


def _hybrid(
    role: Role, name: str, tensor_parallel: int, step: int, *arguments: str, dtype: str = "float32", block_size: int
) -> ServerSpec:
    """A server of a model with states, which computes at most ``step`` tokens at a time."""
    return ServerSpec(
        role, ModelSpec(hybrid=name), None, tensor_parallel, dtype, block_size=block_size,
        options=(*leases(LEASE_TTL_S), *PATIENT), arguments=("--max-num-batched-tokens", str(step), *arguments),
    )  # fmt: skip


_ROLES: tuple[tuple[str, Role], ...] = (("P", "kv_producer"), ("D", "kv_consumer"))


def _granite(role: Role, tensor_parallel: int, *arguments: str) -> ServerSpec:
    options = ("--no-enable-prefix-caching", *arguments)
    return _hybrid(role, "granite", tensor_parallel, GRANITE_STEP, *options, block_size=96)


#: So a prompt of a multiple of it and one is computed in equal parts where it is pulled and where it is not.
GRANITE_STEP = 333
#: One state of each request.
GRANITE = Deployment(
    "granite",
    (
        ("P1", _granite("kv_producer", 1)),
        ("D1", _granite("kv_consumer", 1)),
        ("P2", _granite("kv_producer", 2)),
        ("D2", _granite("kv_consumer", 2)),
    ),
)

#: vLLM makes these blocks as large as a state.
QWEN3_NEXT_BLOCK = 288
#: States at the borders of blocks, so that prefixes are found. Its kernels know bfloat16 only.
QWEN3_NEXT = Deployment(
    "qwen3_next",
    tuple(
        (name, _hybrid(role, "qwen3_next", 1, QWEN3_NEXT_BLOCK, "--enable-prefix-caching", dtype="bfloat16",
                       block_size=QWEN3_NEXT_BLOCK))
        for name, role in _ROLES
    ),
)  # fmt: skip
