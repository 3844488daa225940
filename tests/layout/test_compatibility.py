"""What is refused before a byte moves: the message names the field and both values."""

from dataclasses import replace
from typing import Any

import pytest

from layout.compatibility import IncompatibleCachesError, check_models, check_planes, check_transports, check_windows
from layout.geometry import CacheGroup, ModelIdentity, Plane, WorkerGeometry
from layout.layer_numbers import LayerNumbers
from tests.support.layout.oracle import Engine, Model, build
from tests.support.layout.pulls import LOCAL_BASE, REMOTE_BASE, plans_of

IDENTITY = ModelIdentity("LlamaForCausalLM", "c0ffee", "beef", 24, 8, 128, "bfloat16", "bfloat16")
MODEL = Model(2, (2, 2), 2, ((0, 1),), (0,))


def worker_with(transport: str, tp_rank: int = 0) -> WorkerGeometry:
    return WorkerGeometry(tp_rank, 2, 0, 1, "10.0.0.5:15000", (), (), transport)


@pytest.mark.parametrize(("ours", "theirs"), [("tcp", "tcp"), ("tcp", ""), ("", "rdma"), ("", "")])
def test_equal_and_unknown_transports_are_accepted(ours: str, theirs: str) -> None:
    check_transports(worker_with(ours), [worker_with(theirs)])


def test_a_transport_that_differs_is_named_with_both_values_and_the_rank() -> None:
    remotes = [worker_with("rdma"), worker_with("tcp", tp_rank=1)]
    with pytest.raises(
        IncompatibleCachesError,
        match=r"protocol is 'rdma' here and 'tcp' on the remote engine \(TP rank 1, PP rank 0\); start both "
        "with the same protocol .*: auto takes what suits each machine",
    ):
        check_transports(worker_with("rdma"), remotes)


def compile_between(local: Engine, remote: Engine, remote_model: Model = MODEL, ours: Model = MODEL) -> None:
    (rank,) = build(ours, local, 1, LOCAL_BASE)
    plans_of(rank.geometry, [peer.geometry for peer in build(remote_model, remote, 2, REMOTE_BASE)])


def test_equal_models_are_accepted() -> None:
    check_models(IDENTITY, replace(IDENTITY))


def test_another_draft_is_no_other_model() -> None:
    check_models(replace(IDENTITY, draft_digest="one"), replace(IDENTITY, draft_digest="other"))


@pytest.mark.parametrize(
    ("field", "theirs", "message"),
    [
        ("architecture", "Qwen3ForCausalLM", "architecture is 'LlamaForCausalLM' here and 'Qwen3ForCausalLM' there"),
        ("config_digest", "dead", "config_digest is .*different models or revisions, .* set model_check to off"),
        ("weights_digest", "dead", "weights_digest is 'beef' here and 'dead' there .*different weights"),
        ("layers", 25, "layers is 24 here and 25 there"),
        ("kv_heads", 4, "kv_heads is 8 here and 4 there"),
        ("head_size", 64, "head_size is 128 here and 64 there"),
        ("model_dtype", "float16", "model_dtype is 'bfloat16' here and 'float16' there .*same --dtype"),
        ("cache_dtype", "fp8", "cache_dtype is 'bfloat16' here and 'fp8' there .*same --kv-cache-dtype"),
    ],
)
def test_a_field_of_the_model_that_differs_is_named_with_both_values(
    field: str, theirs: str | int, message: str
) -> None:
    values: dict[str, Any] = {field: theirs}
    with pytest.raises(IncompatibleCachesError, match=message):
        check_models(IDENTITY, replace(IDENTITY, **values))


def test_every_field_that_differs_is_named() -> None:
    with pytest.raises(
        IncompatibleCachesError, match=r"layers is 24 here and 1 there; .*kv_heads is 8 here and 2 there"
    ):
        check_models(IDENTITY, replace(IDENTITY, layers=1, kv_heads=2))


def test_numbers_that_differ_are_named_beside_fields_and_not_every_layer() -> None:
    ours, theirs = (
        replace(
            IDENTITY,
            weights_digest=str(side),
            numbers=tuple(LayerNumbers("k_scale", (f"l{layer}",), (layer + side,)) for layer in range(1, 41)),
        )
        for side in (0.0, 0.5)
    )
    with pytest.raises(IncompatibleCachesError) as refused:
        check_models(ours, theirs)
    text = str(refused.value)
    assert "weights_digest is '0.0' here and '0.5' there; the k_scale of layer 'l1' has 1 here and 1.5 there; " in text
    assert "of layer 'l7'" in text
    assert "; and 33 more (" in text
    assert "of layer 'l8'" not in text


@pytest.mark.parametrize("unsampled", ["local", "remote"])
def test_weights_that_were_not_sampled_are_not_compared(unsampled: str) -> None:
    empty = replace(IDENTITY, weights_digest="")
    check_models(*((empty, IDENTITY) if unsampled == "local" else (IDENTITY, empty)))


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (replace(MODEL, item_size=4), "'item_size' of part 'kv', layer 'model.layers.0' is 2 here and 4 on the remote"),
        (
            replace(MODEL, contents=(4, 4)),
            "'content' of part 'kv', layer 'model.layers.0' is 4 here and 8 on the remote",
        ),
        (
            replace(MODEL, windows=(64,)),
            "attention of layer 'model.layers.0' sees all tokens here and a window of 64 tokens on the remote",
        ),
    ],
)
def test_planes_that_hold_other_elements_are_refused(theirs: Model, message: str) -> None:
    with pytest.raises(IncompatibleCachesError, match=message):
        compile_between(Engine(), Engine(), theirs)


#: Beside latent vectors: the sparse indexer's keys, and the ring of tokens that it has not pooled.
INDEX = Plane("index", ("model.layers.0.indexer",), 0, 1, 128, 128, 1, 4, 0, 0, 0, 0, 0, 0, total_heads=1)
RING = replace(INDEX, part="state", block_tokens=1, content=2304, item_size=4, dtype="float32")


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (INDEX, replace(INDEX, item_size=2), "'item_size' of part 'index', .* is 1 here and 2 .*same indexer_kv_dtype"),
        (
            RING,
            replace(RING, content=2048),
            "'content' .* is 2304 here and 2048 .*num_speculative_tokens .*--block-size",
        ),
        (
            replace(INDEX, part="k", optional=True),
            replace(INDEX, part="k", content=64),
            "'content' of part 'k', .* is 128 here and 64 .*the layer drafts tokens: start both .*--speculative-config",
        ),
        (RING, replace(RING, dtype="bfloat16"), "'dtype' .* is 'float32' here .*--mamba-ssm-cache-dtype"),
    ],
)
def test_the_option_that_makes_planes_equal_is_named(ours: Plane, theirs: Plane, message: str) -> None:
    with pytest.raises(IncompatibleCachesError, match=message):
        check_planes(ours, theirs)


def test_a_window_is_the_layers_not_its_groups() -> None:
    """Without its hybrid cache manager, an engine keeps all of layers that see a window."""
    apart = Model(2, (2, 2), 2, ((0,), (1,)), (0, 64))
    together = Model(2, (2, 2), 2, ((0, 1),), (0,), seen=((1, 64),))
    compile_between(Engine(), Engine(), together, ours=apart)
    compile_between(Engine(), Engine(), apart, ours=together)
    with pytest.raises(IncompatibleCachesError, match=r"'model\.layers\.1' sees a window of 64 tokens here and all"):
        compile_between(Engine(), Engine(), replace(together, seen=()), ours=apart)


def test_windows_that_one_side_does_not_tell_are_not_compared() -> None:
    """It has no layer that says so, or its connector is older."""
    check_windows(CacheGroup(16, 0, (), seen_tokens={"a": 64, "b": 0}), CacheGroup(16, 64, ()), ["a", "b"])


def test_layers_whose_heads_are_counted_otherwise_are_refused_with_the_way_out() -> None:
    """A rank's only head may be its own or one of several replicas; engines that disagree would read another head."""
    with pytest.raises(
        IncompatibleCachesError, match=r"'model\.layers\.0' has 2 KV heads over all ranks here and 8 on"
    ):
        compile_between(Engine(), Engine(tp=4), replace(MODEL, kv_heads=8))


def test_packings_of_different_kernels_are_refused() -> None:
    told = r"'packing' .* is 'k_transposed' here and 'amx' on the remote .*run the same release of vLLM"
    with pytest.raises(IncompatibleCachesError, match=told):
        compile_between(Engine(form="packed"), Engine(form="packed", packing="amx"))
    with pytest.raises(IncompatibleCachesError, match=r"'packing' .* is '' here and 'k_transposed' on the remote"):
        compile_between(Engine(form="fused"), Engine(form="packed"))


def test_packed_blocks_of_unequal_size_are_refused_with_the_way_out() -> None:
    with pytest.raises(IncompatibleCachesError, match=r"block size is 16 tokens here and 32 .*same --block-size"):
        compile_between(Engine(form="packed"), Engine(form="packed", block_tokens=32))
