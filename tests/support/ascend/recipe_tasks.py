"""What is asked of a recipe's engines, in a process of their own (``recipe_process``); all returns are JSON."""

import importlib
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm_ascend import ascend_forward_context, utils
from vllm_ascend.utils import adapt_patch

from layout import staging
from layout.geometry import Plane
from pd_connector.config import parse_config
from pd_connector.vllm.ascend_options import check_ascend_options, check_computes_prompts
from pd_connector.vllm.engine_config import UnsupportedError, check_supported
from tests.support.ascend.recipe_forms import forms_of
from tests.support.ascend.recipe_memory import RankMemory
from tests.support.ascend.recipe_oracle import RecipePrompt, block_tables, prompt_tokens
from tests.support.ascend.recipe_pulls import hold_conversation
from tests.support.ascend.recipe_ranks import RankCaches, make_ranks
from tests.support.ascend.recipe_workers import refusal, run_prompt
from tests.support.ascend.recipes import EngineSide, Recipe, as_printed, our_settings
from transfer.copies.checksums import block_checksums
from transfer.copies.reshape import reshape

SIDES: tuple[EngineSide, ...] = ("P", "D")


def prepare() -> None:
    """Import and patch what every task needs, before the process is forked; must not use the device."""
    load_general_plugins()
    current_platform.pre_register_and_update()
    adapt_patch()
    importlib.import_module("vllm_ascend.worker.model_runner_v1")
    # What every task would otherwise compile for itself.
    staging.warm_up()
    reshape.warm_up()
    sizes = (1, 2, 4)  # of the words that are summed
    block_checksums.warm_up([Plane("k", ("a",), 0, 1, 1, 1, size, 1, 0, 0, 0, 0, 0, 0) for size in sizes])


def make_engines(recipe: Recipe, directory: Path) -> dict[str, list[str]]:
    """Make both engines with the recipe's options, which the connector checks as its constructor does.

    Asserts that the oracle gives no two bytes of a prompt one place. Returns the forms of the caches on each side.
    """
    found: dict[str, list[str]] = {}
    for side in SIDES:
        parse_config(our_settings(recipe.side(side)))
        forms = set[str]()
        for rank in make_ranks(recipe, side, directory, first_of_stage=True):
            with set_current_vllm_config(rank.vllm_config):
                check_supported(rank.vllm_config)
                check_ascend_options(rank.vllm_config)
            _check_places(rank)
            _check_quantised(rank)
            forms |= set(forms_of(rank))
        found[side] = sorted(forms)
    return found


def mixed_indexers(recipe: Recipe, directory: Path) -> dict[str, Any]:
    """The same of a checkpoint that leaves the indexers of two layers as they are: what is held and done with both."""
    mixed = replace(recipe, whole_indexers=frozenset({1, 3}))
    for side in SIDES:
        for rank in make_ranks(mixed, side, directory, first_of_stage=True):
            assert forms_of(rank) == {"I", "I+s", "P"}, forms_of(rank)
    return asdict(hold_conversation(mixed, directory)) | asdict(run_prompt(mixed, directory))


def options_for_prompts(recipe: Recipe, directory: Path) -> list[str]:
    """The options that D lacks to compute prompts, one after another, each as the connector names it."""
    added: dict[str, bool] = {}
    while refusal := _refusal(_with_option(recipe, added), directory):
        named = re.search(r"'(\w+)': (true|false)", refusal)
        assert named is not None, refusal
        assert named[1] not in added, refusal
        added[named[1]] = named[2] == "true"
    return list(added)


def _with_option(recipe: Recipe, more: Mapping[str, Any]) -> Recipe:
    given = recipe.d.options
    return replace(
        recipe,
        d=replace(recipe.d, options={**given, "additional_config": {**(given.get("additional_config") or {}), **more}}),
    )


def _refusal(recipe: Recipe, directory: Path) -> str:
    """What the connector says of a loaded model, with the numbers that vllm-ascend's model runner has set before."""
    rank = next(make_ranks(recipe, "D", directory, first_of_stage=True))
    config = rank.vllm_config
    experts = SimpleNamespace(world_size=config.parallel_config.world_size_across_dp)
    ascend_forward_context.get_ep_group = lambda: experts  # there is one process
    drafts = config.speculative_config.num_speculative_tokens if config.speculative_config else 0
    ascend_forward_context._mc2_tokens_capacity = None  # of the engine before
    with set_current_vllm_config(config):
        ascend_forward_context.set_mc2_tokens_capacity(config, config.scheduler_config.max_num_seqs, 1 + drafts)
        utils.set_potential_max_tokens(config)
        for name, module in rank.model.named_modules():
            if name.endswith(".self_attn"):
                process_weights_after_loading(module, config.model_config, torch.device("npu:0"))
        try:
            check_computes_prompts(config)
        except UnsupportedError as error:
            return str(error)
    return ""


def hold_two_turns(recipe: Recipe, directory: Path) -> dict[str, Any]:
    """Pull two prompts, the second of which goes on from the first, from every rank of P into every rank of D."""
    return asdict(hold_conversation(recipe, directory))


def run_workers(recipe: Recipe, directory: Path) -> dict[str, int]:
    """Start the connector's workers on all ranks of both engines; what they do with the caches is checked."""
    return asdict(run_prompt(recipe, directory))


def refusal_as_printed(recipe: Recipe, directory: Path) -> str:
    """What D logs when it is to pull from P, which lacks what the recipe's page leaves out."""
    return refusal(as_printed(recipe), directory)


def _check_quantised(rank: RankCaches) -> None:
    """Linear layers are quantised, and all experts: the description has the names that vllm-ascend looks up."""
    methods = {type(getattr(module, "quant_method", None)).__name__ for module in rank.model.modules()}
    assert "AscendLinearMethod" in methods, methods
    assert "AscendUnquantizedFusedMoEMethod" not in methods, methods


def _check_places(rank: RankCaches) -> None:
    tokens = prompt_tokens([rank])
    prompt, memory = RecipePrompt(tokens, block_tables(rank, tokens, seed=1)), RankMemory(rank.kv_caches)
    memory.clear()
    for place, _ in prompt.places(rank, memory):
        assert not place.any(), "a byte of the prompt where another is"
        place[...] = 1
