"""docs/npu_recipes.md has a row for each recipe of vllm-ascend that is tested."""

from tests.support.ascend.recipe_page import PAGE, written
from tests.support.ascend.recipes import all_recipes


def test_the_table_is_that_of_the_recipes() -> None:
    page = PAGE.read_text()
    assert page == written(page), "python -m tests.support.ascend.recipe_page writes it"
    assert len(all_recipes()) == 34
