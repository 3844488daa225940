"""What two engines computed is compared: rounding is no difference, and every fault is one.

Keys and values are drawn at random; ``ROUNDING`` says by how much those of two sound engines differ. The tables of
rotary embeddings are vLLM's own.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torch and vLLM deprecate of each other is not ours
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

from layout.geometry import Plane
from pd_connector.worker.agreement import Disagreement, Sample, cache_format, compare, plane_samples
from tests.support.releases import since
from transfer.copies.checksums.values import PlaneValues

Numbers = npt.NDArray[np.float64]
LAYERS, TOKENS, HEADS, SIZE = 8, 200, 3, 32
FORMATS = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
#: Relative errors of sound engines: in the first layer, the second, the deepest. Measured: bfloat16 (the deepest in
#: a model of experts) and fp8_e4m3. The others are taken from the bits that these formats have more, or as fp8_e4m3.
ROUNDING = {"float32": (0.0001, 0.0001, 0.001), "float16": (0.0005, 0.003, 0.02), "bfloat16": (0.004, 0.02, 0.133)}
ROUNDING |= dict.fromkeys(("fp8_e4m3", "fp8_e5m2"), (0.004, 0.1, 0.2))


def encode(numbers: Numbers, form: str) -> npt.NDArray[np.uint8]:
    """[tokens, heads, items] as a cache holds them: [tokens, heads, bytes]."""
    return np.asarray(torch.tensor(numbers).to(FORMATS[form]).view(torch.uint8).numpy(), np.uint8)


class Model:
    """Keys and values of every layer of a prompt, and what a sound engine makes of them."""

    def __init__(self, form: str = "bfloat16", tokens: int = TOKENS, layers: int = LAYERS, seed: int = 0) -> None:
        self.form = form
        self.random = np.random.default_rng(seed)
        shape = (layers, 2, tokens, HEADS, SIZE)
        # Some places of K are a hundred times larger than the others, and about the same for all tokens.
        self.values = self.random.standard_normal(shape) * np.exp(
            self.random.normal(0, 0.5, (layers, 2, 1, HEADS, SIZE))
        )
        self.values[:, 0, :, :, ::16] += 60.0

    def computed(self, rounding: float = 1.0) -> Numbers:
        """The values with so many times the rounding of sound engines."""
        first, second, deepest = ROUNDING[self.form]
        usual = np.sqrt((self.values**2).mean(axis=2, keepdims=True))
        sizes = np.array([first, *np.linspace(second, deepest, len(self.values) - 1)])
        noise = self.random.standard_normal(self.values.shape) * usual
        return np.asarray(self.values + rounding * sizes[:, None, None, None, None] * noise)

    def other(self, *shape: int) -> Numbers:
        return np.asarray(self.random.standard_normal(shape or self.values.shape[2:]))

    def samples(self, computed: Numbers, pulled: Numbers) -> list[Sample]:
        return [
            Sample(f"layers.{layer}", layer, part, self.form, encode(computed[layer, i], self.form),
                   encode(pulled[layer, i], self.form))
            for layer in reversed(range(len(computed))) for i, part in enumerate("kv")
        ]  # fmt: skip

    def compare(self, fault: Callable[[Numbers], Numbers | None]) -> Disagreement | None:
        """Compare two sound engines, one of which then has ``fault``: values that it changes, or new ones."""
        pulled = self.computed()
        changed = fault(pulled)
        return compare(self.samples(self.computed(), pulled if changed is None else changed), self.form)


def found(difference: Disagreement | None) -> Disagreement:
    assert difference is not None
    return difference


# Sound engines


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tokens", [16, 300])
@pytest.mark.parametrize("seed", range(2))
def test_three_times_the_rounding_of_sound_engines_is_no_difference(form: str, tokens: int, seed: int) -> None:
    model = Model(form, tokens, seed=seed)
    assert compare(model.samples(model.computed(3.0), model.computed(0.0)), form) is None


@pytest.mark.parametrize(("model_dtype", "agree"), [("bfloat16", True), ("float32", False), ("float64", False)])
def test_what_is_kept_with_more_digits_than_the_model_computes_with_is_rounded_like_the_model(
    model_dtype: str, agree: bool
) -> None:
    """States in float32, of a model in bfloat16."""
    model = Model("float32")
    assert (compare(model.samples(model.computed(300.0), model.computed(0.0)), model_dtype) is None) is agree


@pytest.mark.parametrize("form", FORMATS)
def test_a_single_token_is_compared(form: str) -> None:
    model = Model(form, 1)
    assert compare(model.samples(model.computed(), model.computed()), form) is None
    assert compare(model.samples(model.computed(), model.other(*model.values.shape)), form)


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_rounding_of_the_states_of_a_few_heads_is_no_difference(heads: int, seed: int) -> None:
    """Each head counts as a token: what is near zero in the only one says little of the place.

    Rounding as measured between tensor parallel sizes, in three layers of a gated delta net.
    """
    random = np.random.default_rng(seed)
    states = random.standard_normal((3, heads, 1, 16 * 32))
    sound = states + np.array([0.0, 0.027, 0.050])[:, None, None, None] * random.standard_normal(states.shape)

    def difference(pulled: Numbers) -> Disagreement | None:
        sides = zip(sound, pulled, strict=True)
        return compare(
            [
                Sample(f"layers.{n}", n, "state", "float32", encode(here, "float32"), encode(there, "float32"))
                for n, (here, there) in enumerate(sides)
            ],
            "bfloat16",
        )

    assert difference(states) is None
    states[2] = random.standard_normal(states[2].shape)
    assert found(difference(states)).layer == "layers.2"


def test_other_experts_for_some_tokens_are_no_difference_in_deeper_layers() -> None:
    model = Model()

    def flip(values: Numbers) -> None:
        tokens = model.random.permutation(TOKENS)[: TOKENS * 4 // 10]
        values[1:, :, tokens] = model.other(LAYERS - 1, 2, len(tokens), HEADS, SIZE)

    assert model.compare(flip) is None


def test_the_first_layer_knows_no_experts() -> None:
    model = Model()

    def flip(values: Numbers) -> None:
        values[0, 0, -TOKENS // 5 :] = model.other(TOKENS // 5, HEADS, SIZE)

    assert found(model.compare(flip)).layer == "layers.0"


# Faults


def rotated(values: Numbers, rope: Any) -> Numbers:
    """Every layer's K, turned by vLLM's own rotary embedding."""
    turned = values.copy()
    positions = torch.arange(values.shape[2], device="cpu")
    for layer in range(len(values)):
        keys = torch.tensor(values[layer, 0], dtype=torch.float32).reshape(len(positions), -1)
        _, keys = rope(positions, keys.clone(), keys)
        turned[layer, 0] = keys.reshape(values.shape[2:]).numpy()
    return turned


def a_rope(parameters: dict[str, Any], max_model_len: int = 8192, max_position: int = 131072) -> Any:
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len),
        compilation_config=SimpleNamespace(
            custom_ops=["none"], enabled_custom_ops=Counter(), disabled_custom_ops=Counter()
        ),
    )
    with set_current_vllm_config(config):
        return get_rope(SIZE, max_position, rope_parameters={"rope_theta": 10000.0, **parameters}, dtype=torch.float32)


@pytest.mark.parametrize("tokens", [60, 300, 512])
def test_other_factors_of_longrope_are_noticed(tokens: int) -> None:
    """As vLLM chooses them by ``max_model_len``: up to 4,096 the short ones, and else the long ones."""
    parameters = {
        "rope_type": "longrope",
        "short_factor": [1.0] * (SIZE // 2),
        "long_factor": np.geomspace(1, 32, SIZE // 2).tolist(),
        "original_max_position_embeddings": 4096,
    }
    short, long = (a_rope(parameters | {"long": length}, length) for length in (4096, 8192))
    model = Model(tokens=tokens)
    model.values[:, 0, :, :, ::16] -= 60.0
    difference = found(
        compare(model.samples(rotated(model.computed(), short), rotated(model.computed(), long)), model.form)
    )
    assert (difference.layer, difference.part, difference.factor) == ("layers.0", "k", None)


@since((0, 30), "that parameter of YaRN")
def test_another_magnitude_of_yarn_is_noticed_and_named() -> None:
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192}
    one, other = a_rope(yarn), a_rope(yarn | {"attention_factor": 1.0})
    model = Model()
    difference = found(
        compare(model.samples(rotated(model.computed(), one), rotated(model.computed(), other)), model.form)
    )
    assert (difference.layer, difference.part) == ("layers.0", "k")
    assert difference.factor == pytest.approx(0.1 * np.log(16) + 1, rel=0.01)
    assert "1.27" in str(difference)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("part", "layers"), [("k", range(LAYERS)), ("v", range(LAYERS)), ("k", [7]), ("v", [7])])
def test_other_weights_are_noticed_in_one_deep_layer_too(form: str, part: str, layers: Sequence[int]) -> None:
    model = Model(form)

    def project(values: Numbers) -> None:
        for layer in layers:
            other = model.other() * np.sqrt((model.values[layer, "kv".index(part)] ** 2).mean(axis=0))
            values[layer, "kv".index(part)] = other

    difference = found(model.compare(project))
    assert (difference.layer, difference.part) == (f"layers.{layers[0]}", part)


def test_other_weights_are_noticed_beside_a_large_bias() -> None:
    """The places with a bias stay as they are, and have nearly all of K's length."""
    model = Model()

    def project(values: Numbers) -> None:
        bias = values[7, 0, :, :, ::16].copy()
        values[7, 0] = model.other()
        values[7, 0, :, :, ::16] = bias

    assert found(model.compare(project)).layer == "layers.7"


@pytest.mark.parametrize(("change", "seen"), [(0.01, False), (0.1, True)])
def test_a_merged_adapter_is_told_from_rounding_if_it_changes_a_tenth(change: float, seen: bool) -> None:
    """By how much an adapter changes the keys and values of the first layer, relative to them."""
    model = Model()

    def merge(values: Numbers) -> Numbers:
        usual = np.sqrt((values**2).mean(axis=2, keepdims=True))
        return np.asarray(values + change * usual * model.other(*values.shape))

    assert (model.compare(merge) is not None) is seen


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("scale", [0.8, 1.25, 2.0])
def test_another_scale_is_noticed_and_named(form: str, scale: float) -> None:
    model = Model(form)

    def rescale(values: Numbers) -> None:
        values[0, 1] /= scale

    difference = found(model.compare(rescale))
    assert (difference.layer, difference.part) == ("layers.0", "v")
    assert difference.factor == pytest.approx(scale, rel=0.02)


FAULTS: dict[str, Callable[[Numbers], Numbers]] = {
    "K transposed in each block": lambda k: k.reshape(-1, 50, HEADS, SIZE).swapaxes(1, 3).reshape(k.shape),
    "heads in another order": lambda k: k[:, ::-1],
    "heads moved by one": lambda k: np.roll(k, 1, axis=1),
    "tokens moved by one": lambda k: np.roll(k, 1, axis=0),
    "halves of the content interleaved": lambda k: k.reshape(*k.shape[:2], 2, -1).swapaxes(2, 3).reshape(k.shape),
    "nothing arrived": np.zeros_like,
    "every value the same": np.ones_like,
    "the sign": lambda k: -k,
    "no numbers": lambda k: np.full_like(k, np.nan),
    "infinite": lambda k: np.full_like(k, np.inf),
}


@pytest.mark.parametrize(
    ("fault", "form", "layer"),
    [
        *product(FAULTS, ["bfloat16"], [5]),
        *product(FAULTS, ["fp8_e4m3"], [0]),
        *product(["tokens moved by one", "nothing arrived", "infinite"], ["float32", "float16", "fp8_e5m2"], [0, 5]),
    ],
)
def test_a_fault_is_noticed(fault: str, form: str, layer: int) -> None:
    model = Model(form)
    model.values[:, 0, :, :, ::16] -= 60.0

    def spoil(values: Numbers) -> None:
        values[layer, 0] = FAULTS[fault](values[layer, 0])

    difference = found(model.compare(spoil))
    assert (difference.layer, difference.part) == (f"layers.{layer}", "k")


def test_k_and_v_exchanged_are_noticed() -> None:
    assert Model().compare(lambda values: values[:, ::-1])


def test_the_first_layer_that_differs_is_named_whatever_the_order() -> None:
    model = Model()

    def spoil(values: Numbers) -> None:
        values[4:, 1] *= 3

    difference = found(model.compare(spoil))
    assert (difference.layer, difference.part, difference.tokens) == ("layers.4", "v", TOKENS)
    assert difference.error > difference.allowed


# What is no ordinary number


def test_equal_caches_agree_whatever_is_in_them() -> None:
    random = np.random.default_rng(0)
    for form in [*FORMATS, "int8", "bytes"]:
        data = random.integers(0, 256, (40, 2, 64), np.uint8)
        assert compare([Sample("l", depth, "k", form, data, data.copy()) for depth in range(2)], form) is None


def test_nothing_on_both_sides_agrees() -> None:
    for shape in ((40, 2, 64), (0, 2, 64), (40, 0, 64)):
        empty = np.zeros(shape, np.uint8)
        assert (
            compare([Sample("l", depth, "k", form, empty, empty) for depth in range(2) for form in FORMATS], "") is None
        )


def test_what_is_infinite_on_both_sides_does_not_hide_the_rest() -> None:
    model = Model("float16")
    sides = model.computed(), model.computed()
    for side in sides:
        side[:, :, 3, 1, 5] = np.inf
    assert compare(model.samples(*sides), model.form) is None
    sides[1][6, 1] = model.other()
    assert found(compare(model.samples(*sides), model.form)).layer == "layers.6"


def test_one_value_that_overflows_on_one_side_is_no_difference() -> None:
    model = Model("float16")
    sides = model.computed(), model.computed()
    sides[0][:, :, 3, 1, 5], sides[1][:, :, 3, 1, 5] = 65504, np.inf
    assert compare(model.samples(*sides), model.form) is None


@pytest.mark.parametrize(
    ("share", "depth", "differs"), [(0.55, 0, False), (0.96, 3, False), (0.9, 0, True), (0.99, 3, True)]
)
def test_bytes_of_unknown_meaning_are_counted(share: float, depth: int, differs: bool) -> None:
    random = np.random.default_rng(1)
    computed = random.integers(0, 256, (64, 1, 132), np.uint8)
    pulled = computed ^ (random.random(computed.shape) < share)
    difference = compare([Sample("l", depth, "kv", "bytes", computed, np.asarray(pulled, np.uint8))], "")
    assert (difference is not None) is differs
    assert not differs or f"{share:.0%}"[0] in str(difference)


# Formats, and the samples of a plane


@pytest.mark.parametrize(
    ("tensor", "setting", "packing", "form"),
    [
        (torch.bfloat16, "auto", "", "bfloat16"),
        (torch.float16, "auto", "cpu-1234", "float16"),
        (torch.float32, "fp8", "", "float32"),  # a layer that is left out of the quantization
        (torch.uint8, "fp8", "", "fp8_e4m3"),
        (torch.uint8, "fp8_e4m3", "cpu-1234", "fp8_e4m3"),
        (torch.uint8, "fp8_e5m2", "", "fp8_e5m2"),
        (torch.float8_e4m3fn, "fp8_inc", "", "fp8_e4m3"),
        (torch.int8, "auto", "", "int8"),
        (torch.int8, "int8_per_token_head", "", "int8_scaled"),
        (torch.bfloat16, "int8_per_token_head", "", "bfloat16"),  # likewise left out
        (torch.uint8, "fp8_ds_mla", "", "bytes"),
        (torch.uint8, "nvfp4", "", "bytes"),
        (torch.uint8, "auto", "", "bytes"),
        (torch.uint8, "fp8_per_token_head", "", "fp8_e4m3_scaled"),
        (torch.uint8, "int4_per_token_head", "", "bytes"),
        (torch.uint8, "fp8", "sparse_indexer", "bytes"),
        (torch.bfloat16, "auto", "sparse_indexer", "bfloat16"),  # MiniMax-M3's, without scales
        (torch.float8_e4m3fn, "auto", "sparse_indexer", "fp8_e4m3"),
        (torch.bfloat16, "auto", "deepseek_v4", "bytes"),
    ],
)
def test_the_format_of_a_cache(tensor: torch.dtype, setting: str, packing: str, form: str) -> None:
    assert cache_format(tensor, setting, a_plane("kv", packing)) == form


def a_plane(part: str, packing: str = "") -> Plane:
    return Plane(
        part=part, layers=("b", "a"), head_start=0, heads=2, block_tokens=4, content=6, item_size=2, blocks=9,
        address=0, layer_stride=0, block_stride=0, head_stride=0, token_stride=12, content_stride=2, packing=packing,
    )  # fmt: skip


def test_the_tokens_that_both_sides_hold_are_compared() -> None:
    data = np.arange(2 * 8 * 2 * 12, dtype=np.uint8).reshape(2, 8, 2, 12)
    ours = PlaneValues(data, np.array([True] * 5 + [False] * 3))
    theirs = PlaneValues(255 - data, np.array([False] + [True] * 6 + [False]))
    samples = list(plane_samples(a_plane("v"), "bfloat16", {"a": 0, "b": 1}, ours, theirs))
    assert [(sample.layer, sample.depth, sample.part) for sample in samples] == [("b", 1, "v"), ("a", 0, "v")]
    for number, sample in enumerate(samples):
        np.testing.assert_array_equal(sample.computed, data[number, 1:5])
        np.testing.assert_array_equal(sample.pulled, 255 - data[number, 1:5])


def test_k_and_v_of_a_kernels_own_order_are_compared_apart() -> None:
    """K fills the first half of a head's block, V the second, in whatever order."""
    blocks = np.zeros((2, 2, 2, 48), np.uint8)  # layer, block, head, byte
    blocks[..., :24], blocks[..., 24:] = 7, 9
    blocks += np.arange(2, dtype=np.uint8)[:, None, None] * 16 + np.arange(2, dtype=np.uint8)[:, None] * 32
    rows = blocks.reshape(2, 2, 2, 4, 12).transpose(0, 1, 3, 2, 4).reshape(2, 8, 2, 12)
    values = PlaneValues(rows, np.ones(8, np.bool_))
    samples = list(plane_samples(a_plane("kv", "cpu-1234"), "bfloat16", {"a": 0, "b": 1}, values, values))
    assert [(sample.layer, sample.part, sample.computed.shape) for sample in samples] == [
        (layer, part, (8, 2, 6)) for layer in "ba" for part in "kv"
    ]
    for sample in samples:
        value = 7 if sample.part == "k" else 9
        expected = value + np.arange(2)[:, None, None] * 16 + np.arange(2)[:, None] * 32
        np.testing.assert_array_equal(
            sample.computed.reshape(2, 4, 2, 6), np.broadcast_to(expected[:, None], (2, 4, 2, 6))
        )


def test_what_nobody_knows_is_left_whole() -> None:
    values = PlaneValues(np.zeros((2, 8, 2, 12), np.uint8), np.ones(8, np.bool_))
    samples = list(plane_samples(a_plane("kv", "sparse_indexer"), "bytes", {"a": 0, "b": 1}, values, values))
    assert [(sample.part, sample.computed.shape) for sample in samples] == 2 * [("kv", (8, 2, 12))]
