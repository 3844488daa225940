"""The prefill/decode recipes of vllm-ascend's model pages: what they start, and the options that vLLM takes of it.

``tests/ascend_sim/recipes`` has a file for each. Everything in one is as the page has it, in other words: an option
that a page does not set is absent. What a page gets wrong is corrected here.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tests.support.ascend.paths import ROOT_OF_PROJECT

EngineSide: TypeAlias = Literal["P", "D"]
#: A generation of devices, in vllm-ascend's words: a process has one, from its first import of vllm-ascend.
Hardware: TypeAlias = Literal["A2", "A3", "A5"]

RECIPES = ROOT_OF_PROJECT / "tests" / "ascend_sim" / "recipes"
_SWITCHES = {"on": True, "off": False}
#: Options that pages have at the top of ``additional_config``, where vllm-ascend refuses them, and where it reads them.
_MISPLACED = {"fuse_muls_add": "ascend_compilation_config"}

_TRANSFER_OPTIONS = (
    "kv_connector", "kv_role", "kv_port", "engine_id", "kv_load_failure_policy", "kv_buffer_device",
)  # fmt: skip
#: Options of P that a page leaves out, by recipe: P's caches and D's would have different types, or P so small blocks
#: that its windows begin behind those of D's, which then computes nearly all prompts itself.
_FORGOTTEN: dict[str, dict[str, Any]] = {"glm52-a3": {"kv_cache_dtype": "int8"}, "dsv4-pro-a2": {"block_size": 128}}


@dataclass(frozen=True)
class RecipeSide:
    """One engine of a recipe."""

    side: EngineSide
    options: dict[str, Any]

    @property
    def tp(self) -> int:
        return int(self.options["tensor_parallel"])

    @property
    def pp(self) -> int:
        return int(self.options["pipeline_parallel"])

    @property
    def dcp(self) -> int:
        return int(self.options.get("decode_context_parallel", 1))

    @property
    def partition(self) -> tuple[int, ...]:
        """Layers of each pipeline stage, as the recipe has them."""
        stages: str | None = self.options.get("pp_layer_partition")
        return tuple(map(int, stages.split(","))) if stages else ()

    @property
    def draft(self) -> dict[str, Any]:
        """The speculative configuration; empty without drafts."""
        return dict(self.options.get("speculative_config") or {})

    @property
    def is_v2(self) -> bool:
        """Whether vllm-ascend's second model runner is asked for."""
        return str(self.options["env"].get("VLLM_USE_V2_MODEL_RUNNER")) == "1"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that vLLM and vllm-ascend read before they make caches, those of this machine left out."""
        return {
            name: value
            for name, value in self.options["env"].items()
            if name.startswith(("VLLM_", "DYNAMIC_EPLB")) and name not in {"VLLM_HOST_IP", "VLLM_PP_LAYER_PARTITION"}
        }

    def engine_arguments(self) -> dict[str, Any]:
        """What vLLM's ``EngineArgs`` take of the options, all but the models and the connector."""
        given = self.options
        arguments: dict[str, Any] = {
            "tensor_parallel_size": self.tp,
            "pipeline_parallel_size": self.pp,
            "data_parallel_size": int(given["data_parallel"]),
            "enable_expert_parallel": bool(given["expert_parallel"]),
            "decode_context_parallel_size": self.dcp,
            "enforce_eager": bool(given["enforce_eager"]),
            "max_model_len": int(given["max_model_len"]),
            "max_num_seqs": int(given["max_num_seqs"]),
            "max_num_batched_tokens": int(given["max_num_batched_tokens"]),
            "additional_config": _corrected(given.get("additional_config") or {}),
        }
        same = (
            "quantization", "block_size", "kv_cache_dtype", "cp_kv_cache_interleave_size", "dtype", "hf_overrides",
            "long_prefill_token_threshold",
        )  # fmt: skip
        arguments |= {name: given[name] for name in same if name in given}
        switches = {
            "prefix_caching": "enable_prefix_caching",
            "chunked_prefill": "enable_chunked_prefill",
            "async_scheduling": "async_scheduling",
        }
        arguments |= {theirs: _SWITCHES[given[ours]] for ours, theirs in switches.items() if ours in given}
        if "indexer_kv_dtype" in given:
            arguments["attention_config"] = {"indexer_kv_dtype": given["indexer_kv_dtype"]}
        if "hybrid_kv_cache_manager" in given:
            arguments["disable_hybrid_kv_cache_manager"] = False
        if "--engram-config" in given.get("other_flags", {}):
            # The simulated runtime does not publish host memory to the device.
            arguments["engram_config"] = {"cpu_offload": False}
        if "compilation_config" in given:
            arguments["compilation_config"] = dict(given["compilation_config"])
        return arguments

    def transfer_config(self) -> dict[str, Any]:
        """The ``--kv-transfer-config``, with this project's connector where the recipe has one of vllm-ascend's.

        Also as the child of a MultiConnector; its siblings stay as they are.
        """
        return _with_our_connector(self.options["kv_transfer"])


def _corrected(additional: dict[str, Any]) -> dict[str, Any]:
    """Put misplaced options where vllm-ascend reads them; without, its start ends there, whatever the connector."""
    corrected = {name: value for name, value in additional.items() if name not in _MISPLACED}
    for name, section in _MISPLACED.items():
        if name in additional:
            corrected[section] = dict(corrected.get(section) or {}) | {name: additional[name]}
    return corrected


def _with_our_connector(given: dict[str, Any]) -> dict[str, Any]:
    known: dict[str, Any] = {name: given[name] for name in _TRANSFER_OPTIONS if name in given}
    extra = dict(given.get("extra_config") or {})
    if given["kv_connector"] == "MultiConnector":
        extra["connectors"] = [_with_our_connector(child) for child in given["children"]]
    elif given["kv_connector"].startswith("Mooncake"):
        known |= {"kv_connector": "PDConnector", "kv_connector_module_path": "pd_connector"}
    return known | {"kv_connector_extra_config": extra}


@dataclass(frozen=True)
class Recipe:
    """A deployment that vllm-ascend's pages describe."""

    name: str
    model: str
    hardware: Hardware
    forms: dict[EngineSide, list[str]]  # of each side's caches, in the letters of ``recipe_forms``
    p: RecipeSide
    d: RecipeSide
    whole_indexers: frozenset[int] = frozenset()  # layers whose indexer the checkpoint does not quantise

    def side(self, side: EngineSide) -> RecipeSide:
        """One of its engines."""
        return self.p if side == "P" else self.d


def load_recipe(path: Path) -> Recipe:
    """Read a recipe from its file."""
    given = json.loads(path.read_text())
    hardware: Hardware = "A5" if "950" in given["hardware"] else "A2" if " A2 " in given["hardware"] else "A3"
    given["P"] |= _FORGOTTEN.get(given["id"], {})
    p, d = RecipeSide("P", given["P"]), RecipeSide("D", given["D"])
    return Recipe(given["id"], given["model"], hardware, given["forms"], p, d)


def as_printed(recipe: Recipe) -> Recipe:
    """The recipe without the options that its page leaves out."""
    forgotten = _FORGOTTEN.get(recipe.name, {})
    options = {name: value for name, value in recipe.p.options.items() if name not in forgotten}
    return replace(recipe, p=replace(recipe.p, options=options))


def all_recipes() -> dict[str, Recipe]:
    """All recipes, by name."""
    return {path.stem: load_recipe(path) for path in sorted(RECIPES.glob("*.json"))}


def our_settings(side: RecipeSide) -> dict[str, Any]:
    """The ``kv_connector_extra_config`` that this project's connector is given."""
    transfer = side.transfer_config()
    given = transfer["kv_connector_extra_config"]
    for child in given.get("connectors", [transfer]):
        if child["kv_connector"] == "PDConnector":
            return dict(child["kv_connector_extra_config"])
    raise AssertionError("no connector of this project")
