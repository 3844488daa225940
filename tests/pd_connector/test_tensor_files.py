"""The digest of weights: some bytes of every tensor, whatever files they are in."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pd_connector.tensor_files import model_directory, tensors_digest, weight_files

NAMES = [f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in range(30) for name in ("q", "k", "v")]


def weights(seed: int = 0, size: int = 5000) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(size).astype(np.float32) for name in NAMES}


def digest(directory: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> str:
    save_file(tensors, directory / "model.safetensors")
    return tensors_digest(weight_files(directory))


def test_a_directory_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "adapter").mkdir()
    assert model_directory("~/adapter") == tmp_path / "adapter"


def test_any_tensor_that_differs_is_noticed(tmp_path: Path) -> None:
    """Merging an adapter adds a product of two small matrices to some of the tensors."""
    ours = weights()
    digests = [digest(tmp_path, {**ours, name: ours[name] + 0.001}) for name in NAMES]
    assert len({digest(tmp_path, ours), *digests}) == 1 + len(NAMES)


def test_a_single_number_is_noticed(tmp_path: Path) -> None:
    ours = {**weights(), "model.layers.0.self_attn.k_scale": np.array([0.5], np.float32)}
    theirs = {**ours, "model.layers.0.self_attn.k_scale": np.array([0.25], np.float32)}
    assert digest(tmp_path, ours) != digest(tmp_path, theirs)


@pytest.mark.parametrize(
    "change",
    [
        lambda all_: {**all_, "one.more": np.zeros(1, np.float32)},
        lambda all_: dict(list(all_.items())[1:]),
        lambda all_: {**all_, NAMES[0]: all_[NAMES[1]], NAMES[1]: all_[NAMES[0]]},
        lambda all_: {**all_, NAMES[0]: all_[NAMES[0]].reshape(50, 100)},
        lambda all_: {**all_, NAMES[0]: all_[NAMES[0]].view(np.int32)},
    ],
    ids=["one more", "one less", "swapped", "another shape", "another type"],
)
def test_names_shapes_and_types_count(
    tmp_path: Path, change: Callable[[dict[str, np.ndarray[Any, Any]]], dict[str, np.ndarray[Any, Any]]]
) -> None:
    assert digest(tmp_path, weights()) != digest(tmp_path, change(weights()))


def test_how_tensors_are_spread_over_files_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    ours = weights()
    whole = digest(tmp_path / "one", ours)
    save_file({name: ours[name] for name in NAMES[40:]}, tmp_path / "two" / "model-00001-of-00002.safetensors")
    save_file(
        {name: ours[name] for name in NAMES[:40]},
        tmp_path / "two" / "model-00002-of-00002.safetensors",
        metadata={"format": "pt"},
    )
    assert tensors_digest(weight_files(tmp_path / "two")) == whole


def test_files_that_the_index_does_not_name_do_not_count(tmp_path: Path) -> None:
    """vLLM does not load them."""
    whole = digest(tmp_path, weights())
    save_file(weights(seed=1), tmp_path / "other.safetensors")
    assert tensors_digest(weight_files(tmp_path)) != whole
    index = {"weight_map": dict.fromkeys(NAMES, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert tensors_digest(weight_files(tmp_path)) == whole


@pytest.mark.parametrize(("load_format", "of_its_maker"), [("auto", True), ("mistral", True), ("safetensors", False)])
def test_of_a_model_in_two_forms_the_one_counts_that_vllm_loads(
    tmp_path: Path, load_format: str, of_its_maker: bool
) -> None:
    """As Mistral's, which lie there in the form of their maker as well."""
    whole = digest(tmp_path, weights())
    save_file(weights(seed=1), tmp_path / "consolidated.safetensors")
    index = {"weight_map": dict.fromkeys(NAMES, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (tensors_digest(weight_files(tmp_path, load_format)) != whole) is of_its_maker


def test_nothing_to_read_is_not_compared(tmp_path: Path) -> None:
    assert weight_files(tmp_path) == ()
    assert tensors_digest(()) == ""


def test_files_that_take_too_long_are_left_out_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    now = iter(float(second) for second in range(1000))
    assert tensors_digest(weight_files(tmp_path), read_s=1.5, clock=lambda: next(now)) == ""
    assert "took longer than 1.5 s" in caplog.text


@pytest.mark.parametrize(
    "content",
    [b"", b"short", bytes(range(256)), (2).to_bytes(8, "little") + b"[]", (9).to_bytes(8, "little") + b'{"a":"b"}'],
)
def test_a_file_in_another_format_is_not_compared_and_the_log_names_it(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    (tmp_path / "other.safetensors").write_bytes(content)
    assert tensors_digest(weight_files(tmp_path)) == ""
    assert f"{tmp_path}/other.safetensors has no header of safetensors" in caplog.text


def test_a_file_that_is_gone_is_not_compared_and_the_log_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert tensors_digest([tmp_path / "model.safetensors"]) == ""
    assert "model.safetensors" in caplog.text
