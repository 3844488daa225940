"""What identifies a model: what it computes and holds, not how it was saved or where it lies."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from layout.geometry import ModelIdentity
from layout.layer_numbers import LayerNumbers
from pd_connector.vllm.model_identity import model_identity, of_engine
from tests.support.connector.vllm_engine import a_config

WEIGHTS = {
    f"model.layers.{layer}.self_attn.{name}_proj.weight": np.full(64, layer) for layer in (0, 1) for name in "qkv"
}
CONFIG = {"hidden_size": 128, "rope_theta": 1e4, "_name_or_path": "here", "torch_dtype": "float32"}


def write(directory: Path, **changes: object) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(WEIGHTS, directory / "model.safetensors")
    return directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


def identity(directory: Path, check: str = "weights", **changes: Any) -> ModelIdentity:
    config = a_config(directory)
    for name, value in changes.items():
        setattr(config.cache_config if name == "cache_dtype" else config.model_config, name, value)
    return model_identity(config, check)


def test_it_has_the_models_numbers_and_both_digests(directory: Path) -> None:
    found = identity(directory)
    assert found == ModelIdentity(
        "LlamaForCausalLM", found.config_digest, found.weights_digest, 2, 2, 64, "float32", "float32"
    )
    assert len({found.config_digest, found.weights_digest, ""}) == 3


def test_a_copy_is_the_same_model_wherever_it_lies(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "copy")
    assert identity(tmp_path / "copy") == identity(directory)


@pytest.mark.parametrize("key", ["_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"])
def test_how_it_was_saved_does_not_matter(directory: Path, tmp_path: Path, key: str) -> None:
    assert identity(write(tmp_path / "other", **{key: "something else"})) == identity(directory)


def test_another_configuration_is_another_model(directory: Path, tmp_path: Path) -> None:
    ours, theirs = identity(directory), identity(write(tmp_path / "other", rope_theta=1e6))
    assert theirs.config_digest != ours.config_digest
    assert replace(theirs, config_digest=ours.config_digest) == ours


def test_the_configuration_is_read_where_the_user_says(directory: Path, tmp_path: Path) -> None:
    plain, copy, other = (
        identity(directory, hf_config_path=path and str(write(tmp_path / path, rope_theta=theta)))
        for path, theta in (("", 1e4), ("copy", 1e4), ("other", 1e6))
    )
    assert copy == plain
    assert other.config_digest != plain.config_digest
    assert other.weights_digest == plain.weights_digest


def test_what_the_user_overrides_counts(directory: Path) -> None:
    plain, overridden = identity(directory), identity(directory, hf_overrides={"rope_theta": 5e5})
    assert overridden.config_digest != plain.config_digest
    assert overridden == identity(directory, hf_overrides={"rope_theta": 5e5})
    assert identity(directory, hf_overrides=dict).config_digest != plain.config_digest


def test_how_images_are_processed_counts_and_where_does_not(directory: Path) -> None:
    """By the engine's options: vLLM's hashes of images do not tell them."""

    def told(**options: object) -> ModelIdentity:
        return identity(directory, multimodal_config=SimpleNamespace(mm_processor_kwargs=options or None))

    assert told() == told(device="cuda") == identity(directory)
    assert told(do_rescale=False).config_digest not in (told().config_digest, told(do_rescale=True).config_digest)
    assert told(do_rescale=False, device="cuda") == told(do_rescale=False)


def test_other_weights_are_another_model(directory: Path) -> None:
    ours = identity(directory)
    save_file({**WEIGHTS, "model.layers.1.self_attn.k_proj.weight": np.full(64, 7)}, directory / "model.safetensors")
    theirs = identity(directory)
    assert theirs.weights_digest != ours.weights_digest
    assert replace(theirs, weights_digest=ours.weights_digest) == ours


def test_a_draft_with_files_of_its_own_is_told_apart_from_others(directory: Path, tmp_path: Path) -> None:
    def drafting(draft: Path, check: str = "weights") -> ModelIdentity:
        config = a_config(directory)
        config.speculative_config = SimpleNamespace(draft_model_config=SimpleNamespace(model=str(draft), revision=None))
        return model_identity(config, check)

    first, same, other = (write(tmp_path / name) for name in ("first", "same", "other"))
    save_file({"fc.weight": np.full(64, 7)}, other / "model.safetensors")
    plain, one = identity(directory), drafting(first)
    assert drafting(directory) == plain, "layers of the model itself"
    assert one == drafting(same) == replace(plain, draft_digest=one.draft_digest)
    assert len({one.draft_digest, drafting(other).draft_digest, ""}) == 3
    assert drafting(first, "config").draft_digest == ""
    assert of_engine([replace(one, draft_digest=""), one]) == one


def test_one_process_of_an_engine_reads_its_files(directory: Path) -> None:
    reader = identity(directory)
    others = [model_identity(a_config(directory), "weights", reads_weights=False) for _ in range(2)]
    assert [other.weights_digest for other in others] == ["", ""]
    assert of_engine([others[0], reader, others[1]]) == reader


def test_an_engine_has_the_numbers_of_all_of_its_workers(directory: Path) -> None:
    """Two stages of two ranks each."""
    whole = identity(directory)
    stages = [replace(whole, numbers=(LayerNumbers("k_scale", (f"l{stage}",), (0.5,)),)) for stage in (0, 0, 1, 1)]
    assert of_engine(stages).numbers == (LayerNumbers("k_scale", ("l0", "l1"), (0.5,)),)


def test_less_is_compared_where_the_user_asks_for_less(directory: Path) -> None:
    whole = identity(directory)
    assert identity(directory, "config") == replace(whole, weights_digest="")
    assert identity(directory, "off") == replace(whole, weights_digest="", config_digest="")


def test_weights_in_another_format_are_not_compared(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "model.bin")
    assert identity(directory).weights_digest == ""


def test_a_model_that_is_not_on_this_machine_is_known_by_what_transformers_made_of_its_configuration() -> None:
    class Loaded:
        def __init__(self, hidden_size: int) -> None:
            self.hidden_size = hidden_size

        def to_diff_dict(self) -> dict[str, object]:
            return {"hidden_size": self.hidden_size, "transformers_version": "1"}

    name = Path("nobody/no-such-model-of-these-tests")
    one, same, other = (identity(name, hf_config=Loaded(size)) for size in (128, 128, 256))
    assert one == same
    assert one.weights_digest == ""
    assert other.config_digest != one.config_digest


def test_the_cache_has_the_models_dtype_unless_it_is_said_otherwise(directory: Path) -> None:
    assert identity(directory, dtype=torch.bfloat16).cache_dtype == "bfloat16"
    found = identity(directory, dtype=torch.bfloat16, cache_dtype="fp8_e5m2")
    assert (found.model_dtype, found.cache_dtype) == ("bfloat16", "fp8_e5m2")


def test_a_checkpoints_own_name_of_fp8_is_that_of_the_option(directory: Path) -> None:
    """By a checkpoint, vLLM sets what ``auto`` is to ``fp8_e4m3`` or ``fp8``, and takes both for one."""
    assert identity(directory, cache_dtype="fp8") == identity(directory, cache_dtype="fp8_e4m3")


def test_a_latent_cache_has_one_head(directory: Path) -> None:
    assert identity(directory, use_mla=True).kv_heads == 1


@pytest.mark.parametrize(("load_format", "is_read"), [("auto", True), ("sharded_state", False), ("dummy", False)])
def test_files_that_are_cut_by_rank_are_not_compared(directory: Path, load_format: str, is_read: bool) -> None:
    """Engines of two sizes have other files of one model."""
    config = a_config(directory)
    config.load_config.load_format = load_format
    assert bool(model_identity(config, "weights").weights_digest) is is_read


def test_of_a_model_that_lies_there_twice_the_files_are_read_that_vllm_loads(tmp_path: Path) -> None:
    own, both = write(tmp_path / "own"), write(tmp_path / "both")
    (own / "model.safetensors").rename(own / "consolidated.safetensors")
    save_file({"of.another.format": np.zeros(4)}, both / "model-00001.safetensors")
    (both / "model.safetensors").rename(both / "consolidated.safetensors")
    (both / "model.safetensors.index.json").write_text(
        '{"weight_map": {"of.another.format": "model-00001.safetensors"}}'
    )
    assert identity(both) == identity(own)
    config = a_config(both)
    config.load_config.load_format = "safetensors"
    assert model_identity(config, "weights").weights_digest not in ("", identity(own).weights_digest)


def test_a_model_from_a_hub_is_read_where_it_was_downloaded_to(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By --download-dir. Nothing of it is where the hub's library looks, or only the configuration."""
    held = tmp_path / "downloads" / "models--nobody--model-of-these-tests"
    (held / "refs").mkdir(parents=True)
    (held / "refs" / "main").write_text("0" * 40)
    shutil.copytree(directory, held / "snapshots" / ("0" * 40))
    config = a_config(directory)
    config.model_config.hf_config_path = str(directory)
    config.model_config.model, config.load_config.download_dir = "nobody/model-of-these-tests", str(held.parent)
    assert model_identity(config, "weights").weights_digest == identity(directory).weights_digest
    assert not caplog.text
    config.load_config.download_dir = None
    assert model_identity(config, "weights").weights_digest == ""
    assert "the weights of nobody/model-of-these-tests are not compared" in caplog.text


def test_scales_are_those_of_weights(directory: Path) -> None:
    """An engine may be told to load others, and then restart with them."""
    names = ("k_scale", "softmax scale", "attention temperature attn_scale")
    numbers = tuple(LayerNumbers(name, ("l",), (0.5,)) for name in names)
    changed = replace(identity(directory), numbers=numbers).with_other_weights()
    assert (changed.weights_digest, changed.numbers) == ("", numbers[1:])
