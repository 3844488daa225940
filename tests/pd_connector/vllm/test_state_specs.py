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
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.kv_cache_interface import MambaSpec

from pd_connector.vllm.engine_config import UnsupportedError
from pd_connector.vllm.state_specs import RECURRENCE, state_spec
from tests.support.connector.state_caches import GDN, KDA, KERNEL, MAMBA2
from tests.support.connector.stated import model_config

WITHOUT = "serve this model without PDConnector"


def refusal(kind: Kind, shapes: Any) -> str:
    spec = MambaSpec(block_size=16, shapes=shapes, dtypes=(torch.float32,) * len(shapes), mamba_type=kind)
    known = (
        rf"^the states of layer 'l' are of type {kind.name} with shapes {re.escape(str(shapes))}, which .* not know: "
    )
    with pytest.raises(UnsupportedError, match=known) as refused:
        state_spec(model_config(), "l", spec)
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


@pytest.mark.parametrize(("blocks", "tokens"), [(0, 0), (3, 3), (0, 3)])
def test_room_for_drafts_is_none_of_a_convolutions_inputs_if_drafts_have_no_blocks(blocks: int, tokens: int) -> None:
    """As with RecoverSSM, which keeps what it verifies outside of the cache."""
    spec = MambaSpec(
        block_size=16, shapes=KDA.shapes(1, tokens), dtypes=(torch.bfloat16, torch.float32),
        mamba_type=Kind.GDN_ATTN, num_speculative_blocks=blocks,
    )  # fmt: skip
    config = model_config(text={"linear_attn_config": {"short_conv_kernel_size": KERNEL}})
    config.num_speculative_tokens = tokens
    stated = state_spec(config, "l", spec)
    assert stated.shapes[0][0] == KERNEL - 1 + tokens
    assert {part.rows for part in stated.parts if part.name != RECURRENCE} == {KERNEL - 1}
