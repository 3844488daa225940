"""The KV caches of each rank of a recipe's engine, made by vllm-ascend's own code, without weights or a step.

Everything between the options and the tensors is real: vLLM's configuration, vllm-ascend's model on the meta device
(whose layers state their caches), its model runner's ``get_kv_cache_spec``, the planner that vllm-ascend has put in the
place of vLLM's, and the runner's allocation.
"""

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.config import vllm as config_module
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from tests.support.ascend.recipe_models import TinyModels, write_models
from tests.support.ascend.recipe_releases import choose_layout, record_layout
from tests.support.ascend.recipe_runner import Worker
from tests.support.ascend.recipes import EngineSide, Recipe, RecipeSide

#: Bytes that a device is said to have for caches.
_ROOM = 1 << 40


@dataclass(frozen=True)
class RankCaches:
    """What a worker hands over to a connector."""

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    kv_caches: dict[str, Any]
    tp_rank: int
    pp_rank: int
    model: torch.nn.Module  # without weights


def make_ranks(
    recipe: Recipe, side: EngineSide, directory: Path, *, first_of_stage: bool = False, room: int = 1
) -> Iterator[RankCaches]:
    """Make the caches of an engine's ranks, one rank after another, TP ranks of the first pipeline stage first.

    Args:
        recipe: of vllm-ascend's pages.
        side: which of its engines.
        directory: for the tiny models.
        first_of_stage: only of the first rank of each pipeline stage.
        room: how many prompts the blocks are enough for.
    """
    load_general_plugins()
    current_platform.pre_register_and_update()
    _inspect_models_here()
    config_module.HAS_TRITON = True  # which the second model runner's kernels need, none of which is called
    engine = recipe.side(side)
    models = write_models(directory / side, recipe, engine)
    models = replace(models, blocks=models.blocks * room)
    partition = {"VLLM_PP_LAYER_PARTITION": models.partition} if models.partition else {}
    # The tiny models' embeddings do not reach as far as a recipe's prompts.
    _become_environment(engine.environment | partition | {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})
    firsts = [Worker(engine_config(engine, models), 0, pp_rank) for pp_rank in range(engine.pp)]
    plans, layout = _plan(firsts)
    for pp_rank, first in enumerate(firsts):
        for tp_rank in range(1 if first_of_stage else engine.tp):
            worker = Worker(engine_config(engine, models), tp_rank, pp_rank)
            assert worker.specs() == first.specs(), "the ranks of a stage state other caches"
            plan = copy.deepcopy(plans[pp_rank])
            record_layout(worker.vllm_config, layout)
            yield RankCaches(worker.vllm_config, plan, worker.allocate(plan), tp_rank, pp_rank, worker.model[0])


def _plan(workers: list[Worker]) -> tuple[list[KVCacheConfig], str]:
    """Plan the caches of each pipeline stage as vLLM's engine core does, and choose their layout."""
    config = workers[0].vllm_config
    register_all_kvcache_specs(config)
    specs: list[dict[str, KVCacheSpec]] = [worker.specs() for worker in workers]
    layouts = [worker.layouts() for worker in workers]
    layout = choose_layout(config, layouts, [spec for each in specs for spec in each.values()])
    for worker in workers:
        record_layout(worker.vllm_config, layout)
    # The pool is far too small for a prompt of max_model_len.
    kv_cache_utils._check_enough_kv_cache_memory = lambda *_: None
    plans: list[KVCacheConfig] = kv_cache_utils.get_kv_cache_configs(config, specs, [_ROOM] * len(workers))
    for plan in plans:
        plan.kv_cache_layout = layout
    return plans, layout


def engine_config(engine: RecipeSide, models: TinyModels) -> VllmConfig:
    """vLLM's configuration of a recipe's engine."""
    arguments = engine.engine_arguments()
    draft = engine.draft
    if draft:
        arguments["speculative_config"] = draft | ({"model": str(models.draft)} if models.draft else {})
    return EngineArgs(
        model=str(models.target),
        skip_tokenizer_init=True,
        load_format="dummy",
        language_model_only=True,  # what reads images has no KV cache
        kv_transfer_config=engine.transfer_config(),
        num_gpu_blocks_override=models.blocks,
        **arguments,
    ).create_engine_config()


def our_config(config: VllmConfig) -> VllmConfig:
    """As MultiConnector has it for its child, if there is one."""
    given = config.kv_transfer_config
    if given.kv_connector == "PDConnector":
        return config
    children = given.kv_connector_extra_config["connectors"]
    (child,) = (each for each in children if each["kv_connector"] == "PDConnector")
    ours = copy.copy(config)
    ours.kv_transfer_config = KVTransferConfig(**({"engine_id": given.engine_id} | child))
    return ours


def _inspect_models_here() -> None:
    """Have vLLM look at the classes of models in this process, which is fresh, and not in one of its own for each."""

    def inspect(model: Any) -> Any:
        return registry._ModelInfo.from_model_cls(model.load_model_cls())

    registry._LazyRegisteredModel.inspect_model_cls = inspect


_set_by_us: set[str] = set()


def _become_environment(variables: dict[str, str]) -> None:
    """Set the variables of an engine, and unset those of the engine before."""
    for name in _set_by_us:
        os.environ.pop(name, None)
    _set_by_us.update(variables)
    os.environ.update(variables)
