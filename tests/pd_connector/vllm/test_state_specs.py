"""States that are not known are refused with their type, their shapes and the way out.

What is known of the others: ``tests/pd_connector/worker/test_state_caches.py``.
"""

import re
from typing import Any

import pytest

from tests.support.releases import INSTALLED, module_needs

if INSTALLED < (0, 30):
    module_needs((0, 30), "states of recurrent layers")

import torch
from vllm.config.mamba import MambaBackendEnum
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.kv_cache_interface import MambaSpec

from pd_connector.vllm.engine_config import UnsupportedError
from pd_connector.vllm.state_specs import state_spec
from tests.support.connector.state_caches import GDN, KDA, MAMBA2
from tests.support.connector.stated import model_config

WITHOUT = "serve this model without PDConnector"


def refusal(kind: Kind, shapes: Any, **options: bool) -> str:
    spec = MambaSpec(block_size=16, shapes=shapes, dtypes=(torch.float32,) * len(shapes), mamba_type=kind)
    config = model_config()
    vars(config.cache_config).update(options)
    known = (
        rf"^the states of layer 'l' are of type {kind.name} with shapes {re.escape(str(shapes))}, which .* not know: "
    )
    with pytest.raises(UnsupportedError, match=known) as refused:
        state_spec(config, "l", spec)
    return str(refused.value)


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        (Kind.SHORT_CONV, MAMBA2.shapes(1, 0)),
        (Kind.LINEAR, ((4, 4),)),
        (Kind.MAMBA1, ((3, 40), (48, 5))),
        (Kind.MAMBA2, ((3, 97), (24, 4, 6))),
        (Kind.GDN_ATTN, (*GDN.shapes(1, 0), (4, 4))),
        (Kind.CUSTOM, GDN.shapes(1, 0)),
    ],
    ids=lambda value: value.name if isinstance(value, Kind) else "",
)
def test_shapes_of_another_type_and_types_that_are_not_known_are_refused(kind: Kind, shapes: Any) -> None:
    assert refusal(kind, shapes).endswith(WITHOUT)


@pytest.mark.parametrize("replays", [False, True])
def test_tensors_that_replay_or_recover_a_state_are_refused_with_the_option_to_leave_out(replays: bool) -> None:
    ring = Shapes.append_replayssm_ring(MAMBA2.shapes(1, 0), 1, 1, 16, MambaBackendEnum.TRITON)
    records = Shapes.append_kda_recoverssm_record(KDA.shapes(1, 1), 24, 4, 1, 2)
    for kind, shapes in ((Kind.MAMBA2, ring), (Kind.GDN_ATTN, records)):
        way_out = "start without --use-replayssm" if replays else WITHOUT
        assert refusal(kind, shapes, use_replayssm=replays).endswith(way_out)
