"""The prefill/decode recipes of vllm-ascend's model pages, with its own code for caches: served, and byte by byte.

Each recipe's options make real configurations, tiny models of its architecture and the caches of every rank of both
engines. No step runs.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.ascend.paths import ascend_release
from tests.support.ascend.recipe_page import FOR_PROMPTS
from tests.support.ascend.recipe_process import RecipeProcess
from tests.support.ascend.recipes import Hardware, Recipe, all_recipes

#: Those whose models vllm-ascend 0.23 has, in forms of caches that are served with it. Without dsv31-950: that release
#: remembers P's FlashComm for D, which cannot have it, in one process.
OF_0_23 = (
    "dsv31-a3", "glm4x-a3", "kimi-k25-a3", "kimi-k26-a3", "minimax-m2-a3", "qwen3-235b-a3", "qwen3-vl-235b",
)  # fmt: skip
IS_OLD = ascend_release() == "0.23"
not_on_0_23 = pytest.mark.skipif(IS_OLD, reason="vllm-ascend 0.23 has no such caches")

RECIPES = {name: recipe for name, recipe in all_recipes().items() if name in OF_0_23 or not IS_OLD}
#: One of each form of cache. All but the last are of one generation of devices, and so share a process.
SHORT = (
    "qwen3-235b-a3", "dsv31-a3", "dsv32-a3", "glm5-a3", "minimax-m3-a3", "qwen35-27b-a3", "dsv4-flash-a3-mtp",
    "dsv41-flash-a3", "glm53-flash-a3", "minimax-m3-950",
)  # fmt: skip
#: Of two forms that differ most in what canaries and host memory do with them.
SHORT_OF_WORKERS = ("qwen3-vl-235b", "dsv41-flash-a3")
Run = Callable[[str, Recipe], Any]


EACH = [
    pytest.param(recipe, id=name, marks=[pytest.mark.ascend_short] if name in SHORT else [])
    for name, recipe in RECIPES.items()
]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a task of ``recipe_tasks`` in the process for a recipe's generation of devices."""
    processes: dict[Hardware, RecipeProcess] = {}

    def task(name: str, recipe: Recipe) -> Any:
        if recipe.hardware not in processes:
            processes[recipe.hardware] = RecipeProcess(recipe.hardware)
        return processes[recipe.hardware].run(name, recipe)

    yield task
    for process in processes.values():
        process.close()


@pytest.mark.parametrize("recipe", EACH)
def test_the_options_are_accepted_and_make_the_forms_that_the_recipe_names(run: Run, recipe: Recipe) -> None:
    assert run("make_engines", recipe) == recipe.forms


@pytest.mark.parametrize("recipe", EACH)
def test_two_turns_arrive_byte_by_byte(run: Run, recipe: Recipe) -> None:
    """On every rank of D, from those of P, and nothing else of D's memory changes.

    Through the schedulers of both engines. Prompts end inside of blocks, and the second one begins with the first.
    """
    held = run("hold_two_turns", recipe)
    assert held["bytes"] > 0, held
    if "S" not in recipe.forms["P"]:  # states are kept at few borders, and the draft takes one
        assert [tokens > 0 for tokens in held["found"]] == held["caching"], held


WORKERS = [
    pytest.param(recipe, id=name, marks=[pytest.mark.ascend_short] if name in SHORT_OF_WORKERS else [])
    for name, recipe in RECIPES.items()
]


@pytest.mark.parametrize("recipe", WORKERS)
def test_workers_start_on_all_ranks_and_notice_what_is_wrong(run: Run, recipe: Recipe) -> None:
    """They pull a verified prompt, prove the prefill engine, and keep blocks in host memory.

    A byte that is not what was leased, and a layer of other values, are named.
    """
    worked = run("run_workers", recipe)
    assert (worked["p_ranks"], worked["d_ranks"]) == (recipe.p.tp * recipe.p.pp, recipe.d.tp * recipe.d.pp)
    assert worked["compared"] > 0, worked
    assert worked["moved"] > 0, worked


@not_on_0_23
def test_a_checkpoint_that_quantises_some_indexers_only_is_served(run: Run) -> None:
    """In one cache group, keys in int8 with scales lie beside others as they are."""
    done = run("mixed_indexers", RECIPES["glm52-a2-pool"])
    assert min(done["bytes"], done["compared"], done["moved"]) > 0, done


@not_on_0_23
def test_a_prefill_engine_without_the_option_that_its_page_leaves_out_is_refused_with_that_option(run: Run) -> None:
    """The page of glm52-a3 gives D alone a cache in int8."""
    refused = run("refusal_as_printed", RECIPES["glm52-a3"])
    assert "cache_dtype is 'int8' here and 'bfloat16' there" in refused, refused
    assert "start both with the same --kv-cache-dtype" in refused


#: vllm-ascend 0.23 cannot keep weights, and fuses only what is quantised statically.
FOR_PROMPTS_ON_0_23 = {
    "dsv31-a3": ("enable_prefill_mc2", "enable_mlapo"),
    "kimi-k25-a3": ("enable_prefill_mc2",),
}
DATA_PARALLEL = [
    pytest.param(recipe, id=name, marks=[pytest.mark.ascend_short] if name in ("dsv31-a3", "glm5-a3") else [])
    for name, recipe in RECIPES.items()
    if int(recipe.d.options["data_parallel"]) > 1
]


@pytest.mark.parametrize("recipe", DATA_PARALLEL)
def test_options_that_decode_engines_lack_to_compute_prompts_are_named(run: Run, recipe: Recipe) -> None:
    """By what vllm-ascend does with the weights of attention once they are loaded, and its choice of how experts
    communicate. There is one process, and no step.
    """
    lacking = FOR_PROMPTS_ON_0_23 if IS_OLD else FOR_PROMPTS
    assert run("options_for_prompts", recipe) == list(lacking.get(recipe.name, ()))
