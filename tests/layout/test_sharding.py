"""Who reads which heads and layers from whom."""

from collections import Counter
from dataclasses import replace
from itertools import product
from math import ceil

import pytest

from layout.compatibility import IncompatibleCachesError
from layout.geometry import WorkerGeometry
from layout.sharding import choose_sources, held_heads
from tests.support.layout.oracle import Engine, Model, build, heads_of
from tests.support.layout.pulls import LOCAL_BASE, REMOTE_BASE, plain, pull

Shares = dict[int, list[tuple[int, int]]]


def model(kv_heads: int, layers: int = 1) -> Model:
    return Model(kv_heads, (1, 1), 2, (tuple(range(layers)),), (0,))


def geometries(model: Model, engine: Engine, base: int = REMOTE_BASE) -> list[WorkerGeometry]:
    return [rank.geometry for rank in build(model, engine, 1, base)]


def heads_read(kv_heads: int, local_tp: int, remote_tp: int) -> list[Shares]:
    """For each local rank: the head ranges that it reads from each remote rank."""
    remotes = geometries(model(kv_heads), Engine(tp=remote_tp))
    return [
        {
            source.remote: [(share.head_start, share.head_end) for share in source.shares]
            for source in choose_sources(local, remotes)
        }
        for local in geometries(model(kv_heads), Engine(tp=local_tp), LOCAL_BASE)
    ]


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8, 12])
@pytest.mark.parametrize("tp_size", [1, 2, 3, 4, 6, 8, 16])
def test_heads_are_dealt_out_as_in_vllm(kv_heads: int, tp_size: int) -> None:
    if kv_heads % tp_size and tp_size % kv_heads:
        with pytest.raises(ValueError, match=f"{kv_heads} KV heads cannot be shared among {tp_size} tensor-parallel"):
            held_heads(kv_heads, tp_size, 0)
    else:
        held = [tuple(range(*held_heads(kv_heads, tp_size, rank))) for rank in range(tp_size)]
        assert held == [heads_of(kv_heads, tp_size, rank) for rank in range(tp_size)]


def test_equal_sizes_read_rank_from_rank() -> None:
    assert heads_read(8, 2, 2) == [{0: [(0, 4)]}, {1: [(4, 8)]}]


def test_a_larger_rank_reads_from_several_smaller_ones() -> None:
    assert heads_read(8, 1, 2) == [{0: [(0, 4)], 1: [(4, 8)]}]


def test_smaller_ranks_read_slices_of_a_larger_one() -> None:
    assert heads_read(8, 4, 2) == [{0: [(0, 2)]}, {0: [(2, 4)]}, {1: [(4, 6)]}, {1: [(6, 8)]}]


def test_sizes_of_which_neither_divides_the_other_share_ranks() -> None:
    assert heads_read(12, 4, 3) == [
        {0: [(0, 3)]},
        {0: [(3, 4)], 1: [(4, 6)]},
        {1: [(6, 8)], 2: [(8, 9)]},
        {2: [(9, 12)]},
    ]
    local, remote = Engine("BHLNC", tp=4), Engine("LBNHC", tp=3)
    pull(model(12, 2), local, remote, plain(40, local, remote))


def test_replicas_are_spread_over_their_readers() -> None:
    """TP 8 holds each of 4 heads twice; 8 readers use all 8 ranks."""
    remotes = Counter(remote for shares in heads_read(4, 8, 8) for remote in shares)
    assert remotes == Counter(range(8))
    assert len({remote for shares in heads_read(1, 4, 16) for remote in shares}) == 4


def test_a_replica_is_one_that_holds_the_head() -> None:
    assert heads_read(4, 2, 8) == [{0: [(0, 1)], 2: [(1, 2)]}, {5: [(2, 3)], 7: [(3, 4)]}]


def readings(model: Model, local: Engine, remote: Engine) -> list[tuple[int, int, str]]:
    """(remote rank, head, layer) of everything that all local ranks read."""
    remotes = geometries(model, remote)
    return [
        (source.remote, head, layer)
        for rank in geometries(model, local, LOCAL_BASE)
        for source in choose_sources(rank, remotes)
        for share in source.shares
        for head in range(share.head_start, share.head_end)
        for layer in share.layers
    ]


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8, 12])
def test_no_replica_serves_more_than_its_share_of_a_heads_readers(kv_heads: int, cases: Counter[str]) -> None:
    """For every pair of sizes: each (head, layer) goes to each rank that wants it, from replicas that take turns."""
    served_by_two = model(kv_heads, 2)
    sizes = [size for size in (1, 2, 3, 4, 6, 8, 16) if kv_heads % size == 0 or size % kv_heads == 0]
    for (local_tp, remote_tp), (local_pp, remote_pp) in product(product(sizes, sizes), ((1, 1), (1, 2), (2, 1))):
        local, remote = Engine(tp=local_tp, pp=local_pp), Engine(tp=remote_tp, pp=remote_pp)
        read = readings(served_by_two, local, remote)
        readers, replicas = max(1, local_tp // kv_heads), max(1, remote_tp // kv_heads)
        wanted = product(range(kv_heads), ("model.layers.0", "model.layers.1"))
        assert Counter((head, layer) for _, head, layer in read) == dict.fromkeys(wanted, readers)
        assert max(Counter(read).values()) <= ceil(readers / replicas)
        assert all(head in heads_of(kv_heads, remote_tp, rank % remote_tp) for rank, head, _ in read)
        if local_pp == remote_pp == 1:
            assert read == readings(served_by_two, local, remote), "the choice depends on nothing but the geometry"
        cases["replicas"] += 1


def test_the_holder_of_most_heads_is_read() -> None:
    (local,) = geometries(model(4), Engine(), LOCAL_BASE)
    remotes = [*geometries(model(4), Engine(tp=2)), *geometries(model(4), Engine(tp=1))]
    assert [source.remote for source in choose_sources(local, remotes)] == [2]


def test_pipeline_stages_and_tensor_ranks_combine() -> None:
    """Remote ranks 0 and 1 hold layers 0 and 1, ranks 2 and 3 hold layers 2 and 3."""
    remotes = geometries(model(2, 4), Engine(tp=2, pp=2))
    (local,) = geometries(model(2, 4), Engine(), LOCAL_BASE)
    read = {source.remote: [share.layers for share in source.shares] for source in choose_sources(local, remotes)}
    first, second = ("model.layers.0", "model.layers.1"), ("model.layers.2", "model.layers.3")
    assert read == {0: [first], 1: [first], 2: [second], 3: [second]}


def test_layers_that_only_the_remote_side_holds_are_left_there() -> None:
    """P serves a draft layer that D does without."""
    engine = Engine("BHLNC")
    with_draft = model(2, 3)
    reads = pull(model(2, 2), engine, engine, plain(20, engine, engine), remote_model=with_draft)
    assert len(reads) == 1


def test_a_layer_that_the_remote_side_lacks_is_refused_by_name() -> None:
    (local,) = geometries(model(2, 3), Engine(), LOCAL_BASE)
    with pytest.raises(IncompatibleCachesError, match=r"part 'kv' for head 0 of layer 'model\.layers\.2'"):
        choose_sources(local, geometries(model(2, 2), Engine()))


def test_a_draft_layer_that_the_remote_side_lacks_is_left_as_it_is() -> None:
    engine, drafting = Engine("BHLNC"), replace(model(2, 3), drafts=(2,))
    (read,) = pull(drafting, engine, engine, plain(20, engine, engine), remote_model=model(2, 2))
    assert read.copies.total_bytes == 32 * 2 * 2 * 2 * 2  # tokens, layers, heads, items, bytes
    (local,) = geometries(drafting, Engine(), LOCAL_BASE)
    only_drafts = replace(local, groups=(replace(local.groups[0], planes=local.groups[0].planes[1:]),))
    assert choose_sources(only_drafts, geometries(model(2, 2), Engine())) == ()


def test_a_draft_layer_of_other_parts_is_refused_not_left() -> None:
    """It is there, so it would be read if it could be."""
    (local,) = geometries(replace(model(2, 3), drafts=(0, 1, 2)), Engine(form="views"), LOCAL_BASE)
    rule = r"part 'k' for head 0 of layer .* holds part 'kv'; the layer drafts tokens: start both engines with the same"
    with pytest.raises(IncompatibleCachesError, match=rule):
        choose_sources(local, geometries(model(2, 3), Engine()))


def test_a_head_that_no_remote_rank_holds_is_refused_by_number() -> None:
    (local,) = geometries(model(4), Engine(), LOCAL_BASE)
    with pytest.raises(IncompatibleCachesError, match="part 'kv' for head 2 of layer"):
        choose_sources(local, geometries(model(4), Engine(tp=2))[:1])


def test_heads_that_a_kernel_packs_on_one_side_only_are_refused_with_both_forms() -> None:
    (local,) = geometries(model(2), Engine(form="transposed"), LOCAL_BASE)
    rule = r"no KV cache part 'k' for head 0 of .* holds part 'kv' \(opaque, packing 'amx'\)\. .*same kind of machine"
    with pytest.raises(IncompatibleCachesError, match=rule):
        choose_sources(local, geometries(model(2), Engine(form="packed", packing="amx")))


def test_engines_of_one_rank_are_spread_over_replicas_by_their_turn() -> None:
    (local,) = geometries(model(1), Engine(), LOCAL_BASE)
    replicas = geometries(model(1), Engine(tp=4))
    chosen = [choose_sources(local, replicas, turn)[0].remote for turn in range(8)]
    assert chosen == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_worker_without_layers_reads_nothing() -> None:
    (local,) = geometries(model(2), Engine(), LOCAL_BASE)
    empty = replace(local, groups=(replace(local.groups[0], planes=()),))
    assert choose_sources(empty, geometries(model(2), Engine())) == ()
