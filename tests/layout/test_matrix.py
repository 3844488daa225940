"""Any geometry to any geometry: every byte of every rank, over generated pairs of engines.

Each case builds both engines in memory, plans, copies and compares all of the memory (see ``oracle``).
"""

from collections import Counter
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.layout.oracle import LAYOUTS, Engine, Model, Table
from tests.layout.pulls import Request, pull, table

KV_HEADS = (1, 2, 3, 4, 8, 12)
TP_SIZES = (1, 2, 3, 4, 6, 8, 16)
PP_SIZES = (1, 2, 4)
BLOCK_SIZES = (16, 32, 48, 64, 128)
WHOLE_HEADS = tuple(layout for layout in LAYOUTS if layout.endswith("NC"))  # a head of a block is one run
TABLES = ("contiguous", "fragmented", "descending")
FORMS = (("fused", "fused"), ("views", "views"), ("views", "apart"), ("apart", "views"), ("apart", "apart"))
WINDOW = 40

thorough = settings(
    max_examples=16,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def models(kv_heads: tuple[int, ...] = KV_HEADS) -> st.SearchStrategy[Model]:
    return st.builds(
        Model,
        kv_heads=st.sampled_from(kv_heads),
        contents=st.sampled_from([(1, 1), (2, 2), (3, 3), (3, 2), (4, 1)]),
        item_size=st.sampled_from([1, 2, 4]),
        groups=st.sampled_from([((0,),), ((0, 1),), ((0, 1, 2, 3),), ((0, 2), (1, 3)), ((3,), (0, 1, 2))]),
        windows=st.sampled_from([(0, 0), (0, WINDOW)]),
    )


@st.composite
def engines(draw: st.DrawFn, model: Model, layout: str, form: str, kernel_tokens: int = 0) -> Engine:
    """An engine that can serve ``model``; ``kernel_tokens`` fixes the kernel's block size."""
    sizes = [size for size in TP_SIZES if model.kv_heads % size == 0 or size % model.kv_heads == 0]
    tp = draw(st.sampled_from(sizes))
    pp = draw(st.sampled_from([size for size in PP_SIZES if size <= model.layers and size * tp <= 16]))
    if kernel_tokens:
        kernel_blocks = draw(st.sampled_from([1, 2, 3]))
        block_tokens = kernel_tokens * kernel_blocks
    else:
        block_tokens = draw(st.sampled_from(BLOCK_SIZES))
        kernel_blocks = draw(st.sampled_from([1, 1, 2, block_tokens // 16]))
    return Engine(
        layout,
        form,
        tp,
        pp,
        block_tokens,
        kernel_blocks,
        blocks=-(-320 // block_tokens) + 2,
        offset_items=draw(st.sampled_from([0, 0, 3, 64])),
        layers_apart=draw(st.booleans()),
        groups_reversed=draw(st.booleans()),
    )


@st.composite
def requests(draw: st.DrawFn, model: Model, local: Engine, remote: Engine) -> Request:
    """A prefix hit of up to two local blocks, then up to 150 tokens; windowed groups begin with holes."""
    hit_blocks = draw(st.integers(0, 2 if local.block_tokens < 128 else 1))
    first = hit_blocks * local.block_tokens
    end = first + draw(st.integers(1, 150))
    skipped = [max(0, end - window) if window else 0 for window in model.windows[: len(model.groups)]]
    kept_from = [skip // local.block_tokens * local.block_tokens for skip in skipped]  # the first token wanted

    def side(engine: Engine, earliest: int) -> tuple[Table, ...]:
        first_block = draw(st.integers(0, earliest // engine.block_tokens))
        count = -(-end // engine.block_tokens) - first_block + draw(st.integers(0, 1))
        kind, seed = draw(st.sampled_from(TABLES)), draw(st.integers(0, 99))
        return tuple(
            table(
                kind,
                engine.blocks,
                count,
                holes=max(0, kept // engine.block_tokens - first_block),
                first_block=first_block,
                seed=seed + group,
            )
            for group, kept in enumerate(kept_from)
        )

    return Request(first, end, side(local, first), side(remote, first))


def _one_case(
    data: st.DataObject, model: Model, layouts: tuple[str, str], forms: tuple[str, str], kernel_tokens: int = 0
) -> None:
    local = data.draw(engines(model, layouts[0], forms[0], kernel_tokens), "local")
    remote = data.draw(engines(model, layouts[1], forms[1], kernel_tokens), "remote")
    pull(model, local, remote, data.draw(requests(model, local, remote), "request"))


@pytest.mark.parametrize(("local", "remote"), [*product(LAYOUTS, LAYOUTS)])
@thorough
@given(data=st.data())
def test_every_byte_arrives_between_any_two_layouts(
    local: str, remote: str, data: st.DataObject, cases: Counter[str]
) -> None:
    forms = data.draw(st.sampled_from(FORMS))
    _one_case(data, data.draw(models()), (local, remote), forms)
    cases["strided"] += 1


@pytest.mark.parametrize(("local", "remote"), [*product(WHOLE_HEADS, WHOLE_HEADS)])
@thorough
@given(data=st.data())
def test_heads_packed_by_the_kernel_arrive_whole(
    local: str, remote: str, data: st.DataObject, cases: Counter[str]
) -> None:
    kernel_tokens = data.draw(st.sampled_from([16, 32]))
    _one_case(data, data.draw(models()), (local, remote), ("packed", "packed"), kernel_tokens)
    cases["packed"] += 1


@pytest.mark.parametrize("local", LAYOUTS)
@thorough
@given(data=st.data())
def test_the_unequal_parts_of_mla_arrive_from_one_of_the_replicas(
    local: str, data: st.DataObject, cases: Counter[str]
) -> None:
    model = Model(1, (8, 1), 2, ((0, 1, 2),), (0,))
    _one_case(data, model, (local, data.draw(st.sampled_from(LAYOUTS))), ("apart", "apart"))
    cases["mla"] += 1
