"""The sets of servers that the tests share. Each set is started once; no two are alive at the same time."""

from dataclasses import dataclass

from tests.e2e.cluster import Layout, LoadFailurePolicy, ServerSpec
from tests.e2e.models import DEFAULT_MODEL, ModelSpec

#: Short enough for a test to wait for an expiry, long against everything that a request does on a busy machine.
LEASE_TTL_S = 20.0
#: Short enough for a test to wait for a peer that does not answer.
HANDSHAKE_TIMEOUT_S = 4.0
PULL_TIMEOUT_S = 20.0
#: Where no test waits for them: four servers on two cores can keep each other from running for ten seconds.
PATIENT = (("handshake_timeout_s", 40.0), ("pull_timeout_s", 60.0))


@dataclass(frozen=True, slots=True)
class Deployment:
    """Servers by the names that tests use for them."""

    name: str
    servers: tuple[tuple[str, ServerSpec], ...]


def prefill(
    model: ModelSpec = DEFAULT_MODEL, layout: Layout = "BHLNC", tensor_parallel: int = 1, dtype: str = "float32"
) -> ServerSpec:
    """A prefill server."""
    options = (("lease_ttl_s", LEASE_TTL_S),)
    return ServerSpec("kv_producer", model, layout, tensor_parallel, dtype, options=options)


def decode(
    policy: LoadFailurePolicy = "fail",
    layout: Layout = "BHLNC",
    tensor_parallel: int = 1,
    dtype: str = "float32",
    *,
    patient: bool = False,
) -> ServerSpec:
    """A decode server."""
    options = (("handshake_timeout_s", HANDSHAKE_TIMEOUT_S), ("pull_timeout_s", PULL_TIMEOUT_S))
    options = PATIENT if patient else options
    return ServerSpec("kv_consumer", DEFAULT_MODEL, layout, tensor_parallel, dtype, policy, options)


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
    )


LBHNC = _both_sizes("LBHNC")
BLHNC = _both_sizes("BLHNC")
BHLNC = _both_sizes("BHLNC")

#: A decode server of each failure policy, a right prefill server and one whose KV blocks mean something else.
FAULTS = Deployment(
    "faults",
    (
        ("P", prefill()),
        ("P bfloat16", prefill(dtype="bfloat16")),
        ("D fail", decode("fail")),
        ("D recompute", decode("recompute")),
    ),
)

#: One right decode server and prefill servers of models that look alike.
OTHER_MODELS = Deployment(
    "other models",
    (
        ("D fail", decode("fail")),
        ("P layers", prefill(ModelSpec(layers=3))),
        ("P kv_heads", prefill(ModelSpec(kv_heads=2))),
        ("P weights", prefill(ModelSpec(seed=21))),
    ),
)

#: The two physical layouts that differ most, on either side, and half precision.
MIXED = Deployment(
    "mixed",
    (
        ("P LBHNC", prefill(layout="LBHNC")),
        ("D BHLNC", decode(layout="BHLNC")),
        ("P bfloat16", prefill(dtype="bfloat16")),
        ("D bfloat16", decode(dtype="bfloat16")),
    ),
)
