"""Sets of servers on simulated NPUs that draft tokens by layers of their own. Nothing is verified.

A model's drafts are right often: ``tests.support.e2e.draft_layers``.
"""

import json
from collections.abc import Callable
from dataclasses import replace

from tests.support.ascend.servers import (
    LONGEST,
    NPU_STATE_BLOCK,
    compressing,
    on_npu,
    pooling,
    quantised,
    unverified,
)
from tests.support.e2e.architectures import Name
from tests.support.e2e.cluster import MODEL_DIRECTORY, ServerSpec
from tests.support.e2e.deployments import Deployment, peer, prefill
from tests.support.e2e.draft_layers import EAGLE3
from tests.support.e2e.models import ModelSpec

#: vllm-ascend 0.30 reads the token behind a part of a prompt from memory that its next step overwrites, so that on a
#: slow device the draft gets none (-1). With asynchronous scheduling, nothing makes that step wait.
_IN_STEP = ("--no-async-scheduling",)
_AT_ONCE = ("--max-num-batched-tokens", str(LONGEST))


def _also(spec: ServerSpec, *arguments: str) -> ServerSpec:
    """The server with more arguments."""
    return replace(spec, arguments=(*spec.arguments, *arguments))


def _speculative(model: ModelSpec, drafts: int) -> tuple[str, ...]:
    """Arguments for so many drafts a step; none for 0."""
    method = {"method": "mtp"}
    if model.drafts == "eagle3":
        method = {"method": "eagle3", "model": f"{MODEL_DIRECTORY}/{EAGLE3}"}
    config = {**method, "num_speculative_tokens": drafts}
    return ("--speculative-config", json.dumps(config)) if drafts else ()


def _drafting(spec: ServerSpec, drafts: int) -> ServerSpec:
    return unverified(on_npu(replace(spec, arguments=_speculative(spec.model, drafts)), device_blocks=96))


def _drafting_states(spec: ServerSpec, drafts: int) -> ServerSpec:
    # A request has a state for each of its drafts, and as recipes have it none at borders of blocks.
    return _also(_drafting_bordered_states(spec, drafts), "--no-enable-prefix-caching")


def _drafting_bordered_states(spec: ServerSpec, drafts: int) -> ServerSpec:
    return replace(_drafting(spec, drafts), block_size=NPU_STATE_BLOCK, kv_cache_bytes=128 << 20)


def _drafting_deployment(name: str, model: ModelSpec, drafting: Callable[[ServerSpec, int], ServerSpec]) -> Deployment:
    """Prefill servers with fewer drafts than D, or none."""
    return Deployment(
        name,
        (
            ("P TP1", _also(drafting(prefill(model), 1), *_IN_STEP)),
            ("P TP2", _also(drafting(prefill(model, tensor_parallel=2), 1), *_IN_STEP)),
            ("P without", drafting(peer(model, None), 0)),
            ("D", _also(drafting(replace(peer(model, None), role="kv_consumer"), 3), *_AT_ONCE)),
        ),
    )


def _drafting_pair(
    name: str, model: ModelSpec, drafting: Callable[[ServerSpec, int], ServerSpec], drafts: int, *decode: str
) -> Deployment:
    """One prefill server, with so many drafts. ``decode``: more arguments of D."""
    return Deployment(
        name,
        (
            ("P TP2", _also(drafting(prefill(model, tensor_parallel=2), drafts), *_IN_STEP)),
            ("D", _also(drafting(replace(peer(model, None), role="kv_consumer"), 3), *decode)),
        ),
    )


def _with_draft(architecture: Name) -> ModelSpec:
    return ModelSpec(layers=3, architecture=architecture, drafts="mtp")


def _drafting_quantised(spec: ServerSpec, drafts: int) -> ServerSpec:
    return _also(quantised(spec), *_speculative(spec.model, drafts))


#: Latent vectors and an indexer's keys.
NPU_DRAFTS = _drafting_deployment("drafts", _with_draft("deepseek_v32"), _drafting)

#: The same in int8.
NPU_DRAFTS_QUANTISED = _drafting_deployment("drafts, quantised", _with_draft("glm_moe_dsa"), _drafting_quantised)

#: Keys and values, by a checkpoint of its own (EAGLE-3).
NPU_DRAFTS_EAGLE3 = _drafting_deployment("drafts, EAGLE-3", ModelSpec(architecture="llama", drafts="eagle3"), _drafting)

#: The same beside latent vectors of the model.
NPU_DRAFTS_EAGLE3_MLA = _drafting_deployment(
    "drafts, EAGLE-3 beside MLA",
    ModelSpec(architecture="deepseek_v2", drafts="eagle3"),
    lambda spec, drafts: replace(_drafting(spec, drafts), kv_cache_bytes=192 << 20),
)

#: Keys and values beside states of gated delta net, which are wider with more drafts.
NPU_DRAFTS_BESIDE_STATES = _drafting_deployment(
    "drafts beside states", ModelSpec(hybrid="qwen3_5_mtp"), _drafting_states
)


#: The same with states at borders of blocks, too.
NPU_DRAFTS_BESIDE_BORDERED_STATES = _drafting_pair(
    "drafts beside states at borders", ModelSpec(hybrid="qwen3_5_mtp"), _drafting_bordered_states, 1, *_AT_ONCE
)


def _drafting_beside_compressed(spec: ServerSpec, drafts: int) -> ServerSpec:
    return _also(compressing(spec), *_speculative(spec.model, drafts))


#: A window beside compressed caches. In bfloat16, in which numbers depend on where steps end: D's end as P's do.
NPU_DRAFTS_COMPRESSED = _drafting_pair(
    "drafts beside compressed caches",
    ModelSpec(architecture="deepseek_v4", drafts="mtp"),
    _drafting_beside_compressed, 1, *_IN_STEP,
)  # fmt: skip


def _drafting_by_pools(spec: ServerSpec, drafts: int) -> ServerSpec:
    # vllm-ascend 0.30 tells the layer that drafts of half of a block table; kernels of the device read all of it.
    arguments = ("--max-model-len", str(2 * LONGEST), *_speculative(spec.model, drafts))
    return replace(_also(pooling(spec), *arguments), kv_cache_bytes=128 << 20)


#: Latent vectors, keys of pools and a ring, beside states. The same, and as many drafts, for rings of equal sizes.
NPU_DRAFTS_BY_POOLS = _drafting_pair(
    "drafts by pools", ModelSpec(layers=5, architecture="glm5_next", drafts="mtp"), _drafting_by_pools, 3, *_IN_STEP
)
