"""The prefill/decode recipes of vllm-ascend's model pages, with its own code for caches: served, and byte by byte.

Each recipe's options make real configurations, tiny models of its architecture and the caches of every rank of both
engines. No step runs. ``_OPTIONS_NOT_YET`` and ``_CACHES_NOT_YET`` name what is not served: such a test must fail, or
its line is to go.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.ascend.paths import ascend_release
from tests.support.ascend.recipe_process import RecipeProcess
from tests.support.ascend.recipes import Hardware, Recipe, all_recipes

pytestmark = pytest.mark.skipif(ascend_release() == "0.23", reason="the recipes are those of vllm-ascend 0.30")

RECIPES = all_recipes()
#: One of each form of cache. All are of one generation of devices, and so share a process.
SHORT = (
    "qwen3-235b-a3", "dsv31-a3", "dsv32-a3", "glm5-a3", "minimax-m3-a3", "qwen35-27b-a3", "dsv4-flash-a3-mtp",
    "dsv41-flash-a3", "glm53-flash-a3",
)  # fmt: skip
#: Beginnings of the names of recipes whose options are refused: all but those without settings for the connector.
_OPTIONS_NOT_YET = tuple(name for name in RECIPES if name != "glm53-flash-a3")
#: The same, of recipes whose caches have a form that is not served.
_CACHES_NOT_YET = ("minimax-m3", "dsv32", "dsv4", "glm5")
Run = Callable[[str, Recipe], Any]


def _each(not_yet: tuple[str, ...] = ()) -> list[Any]:
    def marks(name: str) -> list[pytest.MarkDecorator]:
        refused = [pytest.mark.xfail(reason="not yet", strict=True)] if name.startswith(not_yet) else []
        return refused + ([pytest.mark.ascend_short] if name in SHORT else [])

    return [pytest.param(recipe, id=name, marks=marks(name)) for name, recipe in RECIPES.items()]


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


@pytest.mark.parametrize("recipe", _each())
def test_the_caches_have_the_forms_that_the_recipe_names(run: Run, recipe: Recipe) -> None:
    assert run("forms", recipe) == recipe.forms


@pytest.mark.parametrize("recipe", _each())
def test_no_two_bytes_of_a_prompt_have_one_place(run: Run, recipe: Recipe) -> None:
    """As the oracle places them: caches that share an allocation are given different blocks."""
    assert all(size > 0 for size in run("own_places", recipe).values())


@pytest.mark.parametrize("recipe", _each(_OPTIONS_NOT_YET))
def test_the_options_are_accepted(run: Run, recipe: Recipe) -> None:
    run("options", recipe)


@pytest.mark.parametrize("recipe", _each(_CACHES_NOT_YET))
def test_the_caches_are_described(run: Run, recipe: Recipe) -> None:
    assert all(planes > 0 for planes in run("descriptions", recipe).values())


@pytest.mark.parametrize("recipe", _each(_CACHES_NOT_YET))
def test_a_prompt_arrives_byte_by_byte(run: Run, recipe: Recipe) -> None:
    """On every rank of D, from those of P, and nothing else of D's memory changes."""
    pulled = run("pull", recipe)
    assert pulled["bytes"] > 0, pulled
