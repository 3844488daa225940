"""What is pulled from host memory or into it is what the prompt's blocks hold, whatever the two engines look like.

Every case from the prefill engine's device and from its host memory into host memory, and from its host memory to the
device, on every rank, to the last byte.
"""

from contextlib import closing
from dataclasses import dataclass, replace

import pytest

from pd_connector.orders import Orders, RankEnds
from tests.support.connector.engines import MODEL, OURS, PREFILL, THEIRS, Blocks, Site, an_order
from tests.support.connector.landing import HostMemory
from tests.support.connector.moving import IN_HOST, MovingEngine
from tests.support.layout.oracle import Engine, Extra, Model

WINDOWED = Model(kv_heads=4, contents=(6, 10), item_size=2, groups=((0, 2), (1,)), windows=(0, 40))
MLA = Model(kv_heads=1, contents=(8, 1), item_size=2, groups=((0, 1, 2),), windows=(0,))
INDEXED = replace(MLA, extras=(Extra("indexer", 3, 1, shared=True),))


@dataclass(frozen=True)
class Case:
    """Block tables of one prompt of 70 tokens, for each cache group; 0 (-1 for the prefill engine's slots): a hole."""

    source: Engine
    target: Engine
    model: Model = MODEL
    theirs: Blocks = THEIRS
    their_slots: Blocks = IN_HOST
    ours: Blocks = OURS
    landed: Blocks = ((7, 1, 8, 2, 5),)  # block ids of the decode engine's host pool


def unequal(tp: tuple[int, int], layouts: tuple[str, str], tokens: int, model: Model = MODEL) -> Case:
    """``tokens``: of a block of the decode engine."""
    form = "apart" if model.kv_heads == 1 else "fused"
    source = Engine(layout=layouts[0], form=form, blocks=12, tp=tp[0])
    target = Engine(layout=layouts[1], form=form, blocks=24, tp=tp[1], block_tokens=tokens)
    count = -(-70 // tokens)
    ours, landed = tuple(range(1, 1 + count)), tuple(range(2, 2 + count))[::-1]
    return Case(source, target, model, ours=(ours,), landed=(landed,))


CASES = {
    "smaller blocks": unequal((1, 1), ("LBHNC", "BLHNC"), 8),
    "larger blocks, TP 2 to 1": unequal((2, 1), ("BLHNC", "BHLNC"), 32),
    "TP 1 to 2": unequal((1, 2), ("BHLNC", "LBHNC"), 16),
    "smaller blocks, TP 2 to 4": unequal((2, 4), ("LBHNC", "BHLNC"), 8),
    "TP 4 to 2, tokens before heads": unequal((4, 2), ("LBNHC", "BLNHC"), 16),
    "windows": Case(
        PREFILL,
        Engine(layout="LBHNC", blocks=12),
        WINDOWED,
        ((5, 6, 3, 9, 2), (0, 0, 4, 7, 8)),
        ((7, 0, 4, 8, 1), (-1, -1, 2, 3, 5)),
        ((1, 2, 8, 3, 11), (0, 0, 4, 5, 6)),
        ((7, 1, 8, 2, 5), (0, 0, 3, 6, 9)),
    ),
    "windows, TP 1 to 2": Case(
        PREFILL,
        Engine(layout="BLHNC", blocks=12, tp=2),
        WINDOWED,
        ((5, 6, 3, 9, 2), (0, 0, 4, 7, 8)),
        ((7, 0, 4, 8, 1), (-1, -1, 2, 3, 5)),
        ((1, 2, 8, 3, 11), (0, 0, 4, 5, 6)),
        ((7, 1, 8, 2, 5), (0, 0, 3, 6, 9)),
    ),
    "MLA, TP 1 to 2": unequal((1, 2), ("LBNHC", "BLNHC"), 16, MLA),
    "MLA with an indexer, smaller blocks, TP 2 to 1": unequal((2, 1), ("LBNHC", "LBNHC"), 8, INDEXED),
}


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_lands_and_is_loaded_is_what_was_computed(site: Site, case: Case, place: str) -> None:
    moving = MovingEngine(site, case.source, case.model)
    lease = moving.prefill.prefill("r", case.theirs)
    if place == "host":
        moving.move(lease, case.theirs, case.their_slots)
    for worker in site.decode(case.target, case.model):
        host = site.add(HostMemory(worker, slots=16))
        with closing(host):
            pairs = [
                list(zip(*[(block, slot) for block, slot in zip(*tables, strict=True) if block], strict=True))
                for tables in zip(case.ours, case.landed, strict=True)
            ]
            for group, (ours, landed) in enumerate(pairs):
                host.store(group, ours, landed)  # what the prompt leaves of its last block stays as it was
            host.landings.execute(Orders(landings=(an_order("r", lease, case.landed),)))
            assert host.end() == RankEnds(1)
            assert worker.untouched, "a landing writes to the device"
            counts = (host.stats.take() or {})["counts"]
            assert counts.get("pull_bytes_from_host", 0) == (counts["landed_bytes"] if place == "host" else 0)
            for group, (ours, landed) in enumerate(pairs):
                host.load(group, ours, landed)
            assert worker.holds([(case.ours, 0, 69)], case.source)
            kept = {slot - 1 for landed in case.landed for slot in landed if slot}
            unused = sorted(set(range(16)) - kept)
            assert not host.memory.reshape(16, -1)[unused].any(), "a landing writes outside its slots"
    # As every rank has confirmed, the prefill engine's blocks or slots are free again.
    assert moving.prefill.leases.collect() == (("slots",) if place == "host" else ("r",))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_read_in_host_memory_is_what_was_computed(site: Site, case: Case) -> None:
    moving = MovingEngine(site, case.source, case.model)
    lease = moving.prefill.prefill("r", case.theirs)
    assert moving.move(lease, case.theirs, case.their_slots) == "r"
    workers = site.decode(case.target, case.model)
    for worker in workers:
        site.session(worker, lease).submit(an_order("r", lease, case.ours))
    for worker in workers:
        end = worker.next_end()
        assert (end.cause, end.tokens) == ("", 69), end.reason
        assert end.host_bytes == end.copied_bytes > 0
        assert worker.holds([(case.ours, 0, 69)], case.source)
    assert moving.prefill.leases.collect() == ("slots",)
