"""Sets of servers whose layers are spread over pipeline stages, as ``deployments`` has them of others."""

from dataclasses import replace

from tests.support.e2e.cluster import Layout, ServerSpec
from tests.support.e2e.deployments import KV_BLOCK_BYTES, Deployment, peer
from tests.support.e2e.models import DEFAULT_MODEL

#: Of the model's four layers, so that no stage of one server holds the same as one of another.
_UNEQUAL_STAGES = (3, 1)
#: For two long prompts.
_FEW_BLOCKS = 180


def _server(layout: Layout, tensor_parallel: int, stages: tuple[int, ...]) -> ServerSpec:
    """A server of both roles, which computes long prompts in chunks."""
    spec = peer(layout=layout, tensor_parallel=tensor_parallel)
    return replace(spec, stages=stages, arguments=("--max-num-batched-tokens", "256"))


def _few_blocks(spec: ServerSpec) -> ServerSpec:
    """The same with blocks for two long prompts: in the stage with the most layers, which all stages keep to."""
    most = max(spec.stages) * KV_BLOCK_BYTES // DEFAULT_MODEL.layers // spec.tensor_parallel
    arguments = (*spec.arguments, "--no-scheduler-reserve-full-isl")
    return replace(spec, kv_cache_bytes=_FEW_BLOCKS * most, arguments=arguments)


#: Two stages, the second of which holds one layer, and a server without stages.
PIPELINE = Deployment(
    "pipeline",
    (("PP2", _few_blocks(_server("BHLNC", 1, _UNEQUAL_STAGES))), ("PP1", _server("LBHNC", 1, ()))),
    slow=True,
)

#: Each of the stages has two workers. Five workers on two cores: they get more time.
PIPELINE_OF_TWO_RANKS = Deployment(
    "pipeline of two ranks",
    (("TP2 PP2", _server("BHLNC", 2, _UNEQUAL_STAGES)), ("TP1", _server("LBHNC", 1, ()))),
    slow=True,
)
