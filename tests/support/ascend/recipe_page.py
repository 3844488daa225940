"""The table of docs/npu_recipes.md, made of the recipes' files; run as a program, it writes it."""

from collections.abc import Iterator

from tests.support.ascend.paths import ROOT_OF_PROJECT
from tests.support.ascend.recipes import Recipe, RecipeSide, all_recipes

PAGE = ROOT_OF_PROJECT / "docs" / "npu_recipes.md"
BEGIN, END = "<!-- recipes -->\n", "<!-- end of recipes -->"
#: Forms of caches with which servers on simulated devices give right tokens: ``test_pulls``, ``test_cache_kinds``,
#: ``test_hybrids``, ``test_pooled_indexers`` and ``test_compressed_caches``.
_TOKENS = (
    ["G"], ["M"], ["I", "M"], ["I+s", "P"], ["G", "I"], ["G", "G(fp8)", "I(fp8)"], ["G", "S"],
    ["K", "M", "S", "T"], ["V4"], ["V41"],
)  # fmt: skip
#: Those of them with which tokens are right that a layer of the model's own drafts (MTP): ``test_drafts``.
_DRAFTS = (["I", "M"], ["I+s", "P"], ["G", "S"], ["K", "M", "S", "T"], ["V4"])
#: Those of models for which a checkpoint of its own drafts (EAGLE-3), by keys and values of heads, on both sides.
_DRAFTS_EAGLE3 = (["G"], ["M"])
_KEPT, _ALIKE = "mlapo_keep_prefill_weights", "enable_prefill_mc2"
#: Options of vllm-ascend that D lacks on the page of a recipe to compute prompts, in the order in which it is told
#: (dsv31-950: without cann_ops_transformer). ``test_recipes`` holds them to what vllm-ascend does.
FOR_PROMPTS = {
    "kimi-k26-a3": (_KEPT,),
    **dict.fromkeys(("dsv31-a3", "kimi-k25-a3"), (_ALIKE, _KEPT)),
    **dict.fromkeys(("dsv31-950", "dsv4-flash-a3-dspark", "dsv4-pro-a3-dspark", "dsv41-flash-a3"), (_ALIKE,)),
}
#: What else a page lacks, whichever the connector.
_ALSO = {"glm52-a3": "P: `--kv-cache-dtype int8`", "dsv4-pro-a2": "P: `--block-size 128`"}
_MOVED = "move `fuse_muls_add`"


def recipe_table() -> str:
    """The table: a row for each recipe, or for those that differ in their names only."""
    head = "| recipe | model | P→D | caches | change also | tokens |"
    names: dict[str, list[str]] = {}
    for recipe in sorted(all_recipes().values(), key=lambda recipe: recipe.name):
        names.setdefault(_cells(recipe), []).append(recipe.name)
    rows = (f"| {', '.join(alike)} | {cells} |" for cells, alike in names.items())
    return "\n".join((head, "|---" * 6 + "|", *rows, ""))


def written(page: str) -> str:
    """A page with the table as it should be."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + recipe_table() + END + rest.split(END, 1)[1]


def _cells(recipe: Recipe) -> str:
    """A row but for its name."""
    caches = " ".join(recipe.forms["P"]) if recipe.forms["P"] == recipe.forms["D"] else str(recipe.forms)
    tokens = ("✓ +d" if _drafts(recipe) else "✓") if recipe.forms["P"] in _TOKENS else ""
    also = ", ".join(_also(recipe))
    return " | ".join((recipe.model, f"{_shape(recipe.p)}→{_shape(recipe.d)}", caches, also, tokens))


def _drafts(recipe: Recipe) -> bool:
    """Whether servers gave right tokens with drafts like the recipe's: none of several stages, with DCP or in fp8."""
    sides = (recipe.p, recipe.d)
    if any(side.pp > 1 or side.dcp > 1 or side.options.get("kv_cache_dtype") == "fp8" for side in sides):
        return False
    methods = {str(side.draft.get("method", "")) for side in sides}
    if methods == {"eagle3"}:
        return recipe.forms["P"] in _DRAFTS_EAGLE3
    return recipe.forms["P"] in _DRAFTS and all(method.endswith("mtp") for method in methods)


def _shape(side: RecipeSide) -> str:
    stages = f" PP{side.pp} ({','.join(map(str, side.partition))})" if side.pp > 1 else ""
    return f"TP{side.tp}{stages}" + (f" DCP{side.dcp}" if side.dcp > 1 else "")


def _also(recipe: Recipe) -> Iterator[str]:
    if recipe.name in _ALSO:
        yield _ALSO[recipe.name]
    if lacking := sorted(FOR_PROMPTS.get(recipe.name, ()), reverse=True):
        yield "D: " + ", ".join(f"`{name}`" for name in lacking)
    if any("fuse_muls_add" in (side.options.get("additional_config") or {}) for side in (recipe.p, recipe.d)):
        yield _MOVED


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
