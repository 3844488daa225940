"""What is read off a loaded model: rotary tables as vLLM's own classes build them, scales, choices of the engine."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.rotary_embedding import get_rope

from layout.compatibility import IncompatibleCachesError, check_models
from layout.geometry import ModelIdentity
from layout.layer_numbers import ROTARY, TEMPERATURE, LayerNumbers
from pd_connector.vllm.model_numbers import layer_numbers
from tests.support.releases import since

HEAD_SIZE = 96
LAYER = "model.layers.{}.self_attn.attn"
SHORT = [1.0 + 0.01 * pair for pair in range(HEAD_SIZE // 2)]
LONG = [1.0 + 0.8 * pair for pair in range(HEAD_SIZE // 2)]
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": 4096,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture(autouse=True)
def _no_rotary_modules_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps them by their arguments, to which max_model_len does not belong."""
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})


def rope(
    max_model_len: int = 4096, dtype: torch.dtype = torch.bfloat16, positions: int = 8192, **parameters: Any
) -> Any:
    """A rotary module as a model gets it from vLLM."""
    rotary_embedding._ROPE_DICT.clear()
    config = VllmConfig(device_config=DeviceConfig("cpu"))
    object.__setattr__(config, "model_config", SimpleNamespace(max_model_len=max_model_len))
    with set_current_vllm_config(config):
        return get_rope(HEAD_SIZE, positions, True, {"rope_theta": 1e4, **parameters}, dtype)


class Attention(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """An attention layer of vLLM, as far as its scales go, which are vLLM's own attributes."""

    def __init__(self, k_scale: float = 1.0, kv_cache_dtype: str = "auto", heads: int = 1) -> None:
        super().__init__()
        set_default_quant_scales(self, register_buffer=True)
        self._k_scale = torch.full((heads,), k_scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.impl = SimpleNamespace(scale=HEAD_SIZE**-0.5)


class Runner:
    """A model runner that hands its caches over."""

    def __init__(self, layers: dict[int, torch.nn.Module], attention: dict[int, torch.nn.Module] | None = None) -> None:
        self.model = torch.nn.Module()
        self.model.model = torch.nn.Module()
        self.model.model.layers = torch.nn.ModuleDict(
            {str(number): torch.nn.ModuleDict({"self_attn": module}) for number, module in layers.items()}
        )
        context = {LAYER.format(number): module for number, module in (attention or {}).items()}
        self.config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))

    def get_model(self) -> torch.nn.Module:
        return self.model

    def hand_over(self, *layers: int) -> tuple[LayerNumbers, ...]:
        """What is read of these layers."""
        return self._register([LAYER.format(layer) for layer in layers])

    def _register(self, names: list[str]) -> tuple[LayerNumbers, ...]:
        return layer_numbers(self.config, names)


def self_attention(module: torch.nn.Module | None, **attributes: Any) -> torch.nn.Module:
    attention = torch.nn.Module()
    attention.rotary_emb = module
    for name, value in attributes.items():
        setattr(attention, name, value)
    return attention


def with_rope(module: torch.nn.Module) -> tuple[LayerNumbers, ...]:
    return Runner({0: self_attention(module)}).hand_over(0)


def identity(numbers: tuple[LayerNumbers, ...]) -> ModelIdentity:
    return ModelIdentity("Phi3ForCausalLM", "c0ffee", "beef", 2, 4, HEAD_SIZE, "bfloat16", "fp8", numbers=numbers)


def refusals(ours: tuple[LayerNumbers, ...], theirs: tuple[LayerNumbers, ...]) -> Iterator[str]:
    for one, other in ((ours, theirs), (theirs, ours)):
        with pytest.raises(IncompatibleCachesError) as refused:
            check_models(identity(one), identity(other))
        yield str(refused.value)


def test_longrope_is_compared_by_the_factors_that_max_model_len_has_chosen() -> None:
    short, long = with_rope(rope(4096, **LONGROPE)), with_rope(rope(8192, **LONGROPE))
    for message in refusals(short, long):
        assert "the rotary table rotary_emb of layer 'model.layers.0.self_attn.attn' has " in message
        assert "start both engines with the same --max-model-len" in message
    check_models(identity(short), identity(with_rope(rope(2048, **LONGROPE))))
    check_models(identity(long), identity(with_rope(rope(131072, **LONGROPE))))


@since((0, 30), "these parameters of YaRN")
@pytest.mark.parametrize("other", [{"mscale": 1.0, "mscale_all_dim": 1.0}, {"attention_factor": 1.0}])
def test_yarn_is_compared_by_the_factor_that_the_release_gives_it(other: dict[str, Any]) -> None:
    """vLLM 0.23 leaves these parameters out, and multiplies by what the length asks for."""
    for message in refusals(with_rope(rope(**YARN)), with_rope(rope(**YARN, **other))):
        assert "at position 1 = " in message
        assert "YaRN in 0.23" in message


@pytest.mark.parametrize("parameters", [{}, YARN, LONGROPE, LLAMA3, {"mrope_section": [16, 16, 16]}])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_same_table_of_another_type_is_accepted(parameters: dict[str, Any], dtype: torch.dtype) -> None:
    """Some releases and kernels keep tables in float32 where others have the model's type."""
    ours, theirs = with_rope(rope(**parameters)), with_rope(rope(dtype=dtype, **parameters))
    assert [part.name for part in ours] == [f"{ROTARY} rotary_emb"]
    check_models(identity(ours), identity(theirs))


@pytest.mark.parametrize("positions", [512, 2048, 131072])
def test_the_same_table_of_another_length_is_accepted(positions: int) -> None:
    check_models(identity(with_rope(rope())), identity(with_rope(rope(positions=positions))))


@pytest.mark.parametrize("other", [{"rope_theta": 2e4}, {"rope_type": "linear", "factor": 4.0}, YARN, LLAMA3])
def test_other_parameters_are_refused(other: dict[str, Any]) -> None:
    assert len(list(refusals(with_rope(rope()), with_rope(rope(**other))))) == 2


def test_a_layer_without_a_rotary_module_and_a_module_of_unknown_form_have_no_table() -> None:
    assert Runner({0: self_attention(None)}).hand_over(0) == ()
    assert with_rope(torch.nn.Linear(2, 2)) == ()


def test_layers_of_one_table_share_it_and_those_of_another_do_not() -> None:
    local, global_ = rope(rope_theta=1e4), rope(rope_theta=1e6)
    modules = {0: self_attention(local), 1: self_attention(local), 2: self_attention(global_)}
    first, second = Runner(modules).hand_over(0, 1, 2)
    assert (first.layers, second.layers) == ((LAYER.format(0), LAYER.format(1)), (LAYER.format(2),))


def test_a_stage_has_the_numbers_of_its_own_layers() -> None:
    runner = Runner({4: self_attention(rope())})
    assert [part.layers for part in runner.hand_over(4)] == [(LAYER.format(4),)]
    check_models(identity(runner.hand_over(4)), identity(Runner({0: self_attention(rope(**YARN))}).hand_over(0)))


def test_layers_of_a_draft_model_are_not_those_of_the_model() -> None:
    assert Runner({0: self_attention(rope())}).hand_over(30) == ()


def test_llama_4_is_compared_by_its_choice_of_attention_temperature() -> None:
    """Llama4Attention's attributes; vLLM decides the first by max_model_len and the generation config."""
    attributes = {"floor_scale": 8192.0, "attn_scale": 0.1}
    on, off = (
        Runner({0: self_attention(None, attn_temperature_tuning=choice, **attributes)}).hand_over(0)
        for choice in (True, False)
    )
    for message in refusals(on, off):
        assert f"the {TEMPERATURE} of layer 'model.layers.0.self_attn.attn' has " in message
        assert "--max-model-len (above 32768)" in message
    check_models(identity(on), identity(on))


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2", "int8_per_token_head"])
def test_scales_of_a_quantised_cache_are_compared(kv_cache_dtype: str) -> None:
    ours, theirs = (Runner({}, {0: Attention(scale, kv_cache_dtype)}).hand_over(0) for scale in (0.031, 0.0625))
    assert {part.name for part in ours} == {"softmax scale", "k_scale", "v_scale", "q_scale", "prob_scale"}
    for message in refusals(ours, theirs):
        assert "the k_scale of layer 'model.layers.0.self_attn.attn' has " in message
        assert "0.031" in message
        assert "0.0625" in message


def test_scales_of_a_cache_that_is_not_quantised_and_those_of_a_ranks_heads_are_not() -> None:
    plain = Runner({}, {0: Attention(0.5)}).hand_over(0)
    assert [part.name for part in plain] == ["softmax scale"]
    by_head = Runner({}, {0: Attention(0.5, "fp8", heads=2)}).hand_over(0)
    assert "k_scale" not in {part.name for part in by_head}


def test_another_factor_on_attentions_logits_is_refused() -> None:
    ours, theirs = Attention(), Attention()
    theirs.impl.scale *= 1.2773**2
    for message in refusals(Runner({}, {0: ours}).hand_over(0), Runner({}, {0: theirs}).hand_over(0)):
        assert "the softmax scale of layer" in message


def test_a_model_that_cannot_be_reached_is_said_and_its_scales_are_compared(caplog: pytest.LogCaptureFixture) -> None:
    runner = Runner({0: self_attention(rope())}, {0: Attention(0.5, "fp8")})
    numbers = layer_numbers(runner.config, [LAYER.format(0)])
    assert {part.name for part in numbers} >= {"softmax scale", "k_scale"}
    assert f"{ROTARY} rotary_emb" not in {part.name for part in numbers}
    assert "the loaded model cannot be reached" in caplog.text


def test_a_process_without_layers_asks_for_no_model(caplog: pytest.LogCaptureFixture) -> None:
    """The engine core has none."""
    assert layer_numbers(Runner({}).config, ()) == ()
    assert not caplog.text
