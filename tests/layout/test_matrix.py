"""Any geometry to any geometry: every byte of every rank, over pairs of engines.

Each case builds both engines in memory, plans, copies and compares all of the memory (see ``oracle``). What is cheap
is run exhaustively; the combinations of everything are generated.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layout.compatibility import IncompatibleCachesError
from tests.layout.oracle import LAYOUTS, Engine, Extra, Model, Table
from tests.layout.pulls import Request, plain, pull, table

KV_HEADS = (1, 2, 3, 4, 8, 12)
TP_SIZES = (1, 2, 3, 4, 6, 8, 16)
PP_SIZES = (1, 2, 4)
BLOCK_SIZES = (16, 32, 48, 64, 128)
WHOLE_HEADS = tuple(layout for layout in LAYOUTS if layout.endswith("NC"))  # a head of a block is one run
TABLES = ("contiguous", "fragmented", "descending")
FORMS = (("fused", "fused"), ("views", "views"), ("views", "apart"), ("apart", "views"), ("apart", "apart"))
LAYOUT_PAIRS = (*product(LAYOUTS, LAYOUTS),)
WINDOW = 40
SCALE = Extra("k_scale", content=1, item_size=4)
INDEXER = Extra("indexer", content=3, item_size=1, shared=True)

thorough = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def tp_sizes(kv_heads: int) -> list[int]:
    """The TP sizes that can share the heads."""
    return [size for size in TP_SIZES if kv_heads % size == 0 or size % kv_heads == 0]


# Exhaustive: who holds what, and in blocks of what size.


def tensor_and_pipeline_sizes() -> Iterator[tuple[int, int, int]]:
    for kv_heads in KV_HEADS:
        for local_tp, remote_tp in product(tp_sizes(kv_heads), repeat=2):
            yield kv_heads, local_tp, remote_tp


@pytest.mark.thorough
@pytest.mark.parametrize(("kv_heads", "local_tp", "remote_tp"), [*tensor_and_pipeline_sizes()])
def test_every_pair_of_tensor_and_pipeline_sizes(
    kv_heads: int, local_tp: int, remote_tp: int, cases: Counter[str]
) -> None:
    """Two tokens of four layers; the layouts take turns, so that each meets many pairs of sizes."""
    model = Model(kv_heads, (1, 1), 1, ((0, 1, 2, 3),), (0,))
    for number, (local_pp, remote_pp) in enumerate(product(PP_SIZES, repeat=2)):
        layouts = LAYOUT_PAIRS[(kv_heads * 5 + local_tp * 11 + remote_tp * 7 + number * 13) % len(LAYOUT_PAIRS)]
        local = Engine(layouts[0], tp=local_tp, pp=local_pp, blocks=2)
        remote = Engine(layouts[1], tp=remote_tp, pp=remote_pp, blocks=2)
        pull(model, local, remote, plain(2, local, remote, "descending"))
        cases["parallel sizes"] += 1


@pytest.mark.parametrize(("local_layout", "remote_layout"), LAYOUT_PAIRS)
def test_every_pair_of_block_sizes_in_every_pair_of_layouts(
    local_layout: str, remote_layout: str, cases: Counter[str]
) -> None:
    """130 tokens fill no number of blocks of any size, so the last block is partly filled."""
    model = Model(2, (2, 1), 2, ((0, 1),), (0,))
    for number, (local_tokens, remote_tokens) in enumerate(product(BLOCK_SIZES, repeat=2)):
        local = Engine(local_layout, block_tokens=local_tokens, blocks=-(-130 // local_tokens) + 1)
        remote = Engine(remote_layout, tp=2, block_tokens=remote_tokens, blocks=-(-130 // remote_tokens) + 1)
        pull(model, local, remote, plain(130, local, remote, TABLES[number % 3]))
        cases["block sizes"] += 1


@pytest.mark.parametrize(("local_layout", "remote_layout"), LAYOUT_PAIRS)
def test_every_pair_of_layouts_between_sizes_of_which_neither_divides_the_other(
    local_layout: str, remote_layout: str, cases: Counter[str]
) -> None:
    model = Model(12, (2, 1), 1, ((0, 1),), (0,))
    for local_tp, remote_tp in ((2, 3), (3, 2), (4, 6), (6, 4), (3, 4), (4, 3)):
        local, remote = Engine(local_layout, tp=local_tp, blocks=3), Engine(remote_layout, tp=remote_tp, blocks=3)
        pull(model, local, remote, plain(20, local, remote, "descending"))
        cases["indivisible sizes"] += 1


@pytest.mark.parametrize(("local_layout", "remote_layout"), [*product(WHOLE_HEADS, WHOLE_HEADS)])
def test_packed_heads_between_every_pair_of_block_sizes(
    local_layout: str, remote_layout: str, cases: Counter[str]
) -> None:
    """Equal kernel blocks arrive whole; unequal ones are refused with both sizes."""
    model = Model(2, (2, 2), 2, ((0, 1),), (0,))
    for local_tokens, remote_tokens, tp in product(BLOCK_SIZES, BLOCK_SIZES, (1, 2)):
        local = Engine(local_layout, "packed", tp=tp, block_tokens=local_tokens, blocks=3)
        remote = Engine(remote_layout, "packed", tp=3 - tp, block_tokens=remote_tokens, blocks=3)
        request = plain(min(local_tokens, remote_tokens) + 3, local, remote)
        if local_tokens == remote_tokens:
            pull(model, local, remote, request)
        else:
            message = f"block size is {local_tokens} tokens here and {remote_tokens} on the remote engine"
            with pytest.raises(IncompatibleCachesError, match=message):
                pull(model, local, remote, request)
        cases["packed sizes"] += 1


# Generated: everything at once.


def models(kv_heads: tuple[int, ...] = KV_HEADS) -> st.SearchStrategy[Model]:
    return st.builds(
        Model,
        kv_heads=st.sampled_from(kv_heads),
        contents=st.sampled_from([(1, 1), (2, 2), (3, 3), (3, 2), (4, 1)]),
        item_size=st.sampled_from([1, 2, 4]),
        groups=st.sampled_from([((0,),), ((0, 1),), ((0, 1, 2, 3),), ((0, 2), (1, 3)), ((3,), (0, 1, 2))]),
        windows=st.sampled_from([(0, 0), (0, WINDOW)]),
        extras=st.sampled_from([(), (), (SCALE,), (SCALE, INDEXER)]),
    )


@st.composite
def engines(draw: st.DrawFn, model: Model, layout: str, form: str, kernel_tokens: int = 0) -> Engine:
    """An engine that can serve ``model``; ``kernel_tokens`` fixes the kernel's block size."""
    tp = draw(st.sampled_from(tp_sizes(model.kv_heads)))
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
        group_factors=() if kernel_tokens else draw(st.sampled_from([(), (), (1, 2), (2, 1)])),
    )


@st.composite
def requests(draw: st.DrawFn, model: Model, local: Engine, remote: Engine) -> Request:
    """A prefix hit of up to two local blocks, then up to 150 tokens; windowed groups begin with holes."""
    groups = range(len(model.groups))
    hit_tokens = max(local.tokens_of(group) for group in groups)
    first = draw(st.integers(0, max(1, min(2, 128 // hit_tokens)))) * hit_tokens
    end = first + draw(st.integers(1, 150))

    def side(engine: Engine, earliest: int) -> tuple[Table, ...]:
        kind, seed = draw(st.sampled_from(TABLES)), draw(st.integers(0, 99))
        return tuple(draw(_tables(engine, group, (earliest, end), model, (local, kind, seed))) for group in groups)

    return Request(first, end, side(local, first), side(remote, first))


@st.composite
def _tables(
    draw: st.DrawFn, engine: Engine, group: int, span: tuple[int, int], model: Model, chosen: tuple[Engine, str, int]
) -> Table:
    """A group's table on one side; its holes end where the first token lies that the local side wants."""
    (earliest, end), (local, kind, seed) = span, chosen
    window = model.windows[group]
    skipped = max(0, end - window) if window else 0
    wanted_from = skipped // local.tokens_of(group) * local.tokens_of(group)
    tokens = engine.tokens_of(group)
    first_block = draw(st.integers(0, earliest // tokens))
    return table(
        kind,
        engine.blocks,
        -(-end // tokens) - first_block + draw(st.integers(0, 1)),
        holes=max(0, wanted_from // tokens - first_block),
        first_block=first_block,
        seed=seed + group,
    )


def _one_case(
    data: st.DataObject, model: Model, layouts: tuple[str, str], forms: tuple[str, str], kernel_tokens: int = 0
) -> None:
    local = data.draw(engines(model, layouts[0], forms[0], kernel_tokens), "local")
    remote = data.draw(engines(model, layouts[1], forms[1], kernel_tokens), "remote")
    pull(model, local, remote, data.draw(requests(model, local, remote), "request"))


@pytest.mark.parametrize(("local", "remote"), LAYOUT_PAIRS)
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
    extras = data.draw(st.sampled_from([(), (INDEXER,), (INDEXER, SCALE)]))
    model = Model(1, (8, 1), 2, ((0, 1, 2),), (0,), extras)
    _one_case(data, model, (local, data.draw(st.sampled_from(LAYOUTS))), ("apart", "apart"))
    cases["mla"] += 1
