"""What engines must have in common to find each other's blocks in a pool."""

from dataclasses import replace
from typing import Any

import pytest

from layout.geometry import CacheGroup, ModelIdentity, Plane, WorkerGeometry
from layout.layer_numbers import LayerNumbers
from pd_connector.config import ConfigError, parse_config
from pd_connector.orders import WorkerHandshake
from pd_connector.scheduler.host.pool_start import _check_model, contents_of

ROTARY = LayerNumbers("rotary table", ("a.1", "a.0"), (0.5, 0.25), 2)
MODEL = ModelIdentity("A", "config", "weights", 2, 4, 64, "float32", "auto", numbers=(ROTARY,))
WORKER = WorkerHandshake(WorkerGeometry(0, 1, 0, 1, "", (), ()), model=MODEL, arithmetic="fp8 on 9.0", secret="one")


@pytest.mark.parametrize(
    "change",
    [
        {"architecture": "B"},
        {"config_digest": "other"},
        {"weights_digest": "other"},
        {"layers": 3},
        {"kv_heads": 8},
        {"head_size": 128},
        {"model_dtype": "bfloat16"},
        {"cache_dtype": "fp8"},
        {"numbers": ()},
        {"numbers": (replace(ROTARY, numbers=(0.5, 0.26)),)},
    ],
)
def test_engines_that_compute_something_else_share_nothing(change: dict[str, Any]) -> None:
    assert contents_of(replace(WORKER, model=replace(MODEL, **change))) != contents_of(WORKER)


@pytest.mark.parametrize("change", [{"arithmetic": "fp8 on 12.0"}, {"secret": "two"}])
def test_engines_that_compute_in_other_ways_or_do_not_trust_each_other_share_nothing(change: dict[str, Any]) -> None:
    assert contents_of(replace(WORKER, **change)) != contents_of(WORKER)


def test_engines_that_seal_in_other_ways_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would remove each other's objects."""
    ours = contents_of(WORKER)
    monkeypatch.setattr("pd_connector.scheduler.host.pool_start.SEAL", b"pdobj\0\0\1")
    assert contents_of(WORKER) != ours


def test_the_order_in_which_layers_are_told_does_not_matter() -> None:
    scale = LayerNumbers("k_scale", ("a.0",), (1.0,))
    one = replace(MODEL, numbers=(ROTARY, scale))
    other = replace(MODEL, numbers=(scale, replace(ROTARY, layers=("a.0", "a.1"))))
    assert contents_of(replace(WORKER, model=one)) == contents_of(replace(WORKER, model=other))


def test_what_drafts_compute_with_does_not_keep_engines_without_them_from_sharing_the_rest() -> None:
    scale = LayerNumbers("softmax scale", ("a.0",), (0.125,))
    both, alone = replace(scale, layers=("a.0", "d.0")), LayerNumbers("k_scale", ("d.0",), (1.0,))
    planes = tuple(
        Plane("kv", (layer,), 0, 1, 16, 8, 2, 4, 0, 256, 256, 256, 16, 2, optional=layer == "d.0")
        for layer in ("a.0", "d.0")
    )
    drafting = WorkerGeometry(0, 1, 0, 1, "", (CacheGroup(16, 0, planes),), ())
    one = replace(WORKER, model=replace(MODEL, numbers=(scale,)))
    other = replace(WORKER, model=replace(MODEL, numbers=(both, alone)), geometry=drafting)
    assert contents_of(one) == contents_of(other)


def test_a_model_whose_blocks_cannot_be_told_from_others_is_refused() -> None:
    config = parse_config({"pool": "127.0.0.1:50052", "cpu_bytes_to_use": 1 << 30})
    _check_model(config, MODEL)
    with pytest.raises(ConfigError, match=r"the weights could not be read .* set model_check to 'weights'"):
        _check_model(config, replace(MODEL, weights_digest=""))
