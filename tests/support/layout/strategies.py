"""Strategies that draw models, engines that serve them, and requests, for tests over any two geometries."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.support.layout.oracle import Engine, Extra, Model, Table
from tests.support.layout.pulls import Request, table

KV_HEADS = (1, 2, 3, 4, 8, 12)
TP_SIZES = (1, 2, 3, 4, 6, 8, 16)
PP_SIZES = (1, 2, 4)
BLOCK_SIZES = (16, 32, 48, 64, 128)
TABLES = ("contiguous", "fragmented", "descending")
FORMS = (("fused", "fused"), ("views", "views"), ("views", "apart"), ("apart", "views"), ("apart", "apart"))
WINDOW_TOKENS = 40
SCALE = Extra("k_scale", content=1, item_size=4)
INDEXER = Extra("indexer", content=3, item_size=1, shared=True)

thorough = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
#: For tests of which each example takes long.
few = settings(thorough, max_examples=6)


def tp_sizes(kv_heads: int) -> list[int]:
    """The TP sizes that can share the heads."""
    return [size for size in TP_SIZES if kv_heads % size == 0 or size % kv_heads == 0]


def models(kv_heads: tuple[int, ...] = KV_HEADS) -> st.SearchStrategy[Model]:
    return st.builds(
        Model,
        kv_heads=st.sampled_from(kv_heads),
        contents=st.sampled_from([(1, 1), (2, 2), (3, 3), (3, 2), (4, 1)]),
        item_size=st.sampled_from([1, 2, 4]),
        groups=st.sampled_from([((0,),), ((0, 1),), ((0, 1, 2, 3),), ((0, 2), (1, 3)), ((3,), (0, 1, 2))]),
        windows=st.sampled_from([(0, 0), (0, WINDOW_TOKENS)]),
        extras=st.sampled_from([(), (), (SCALE,), (SCALE, INDEXER)]),
    )


@st.composite
def engines(draw: st.DrawFn, model: Model, layout: str, form: str, kernel_tokens: int = 0) -> Engine:
    """An engine that can serve ``model``; ``kernel_tokens`` fixes the kernel's block size."""
    fitting = [set(tp_sizes(heads)) for heads in (model.kv_heads, *(heads for _, heads in model.other_heads))]
    tp = draw(st.sampled_from(sorted(set.intersection(*fitting))))
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
