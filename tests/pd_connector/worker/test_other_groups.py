"""Whole pulls between engines that put the same layers into other cache groups, and may have a draft on one side."""

from itertools import product

import pytest

from pd_connector.worker.lease_checksums import CacheChecksums
from pd_connector.worker.verification import Verifier
from tests.support.connector.engines import Site, an_order
from tests.support.layout.oracle import Engine, Model

WINDOW, TOKENS, DRAFT = 40, 70, 4
#: A prompt of 70 tokens: its last one sees those from 30 on, in block 1 and the following.
FULL, WINDOWED = ((5, 6, 3, 9, 2), (7, 1, 10, 4, 8)), ((0, 11, 12, 13, 14), (0, 15, 16, 17, 18), (0, 19, 20, 21, 22))


def a_model(groups: tuple[tuple[int, ...], ...], windows: tuple[int, ...], *, drafts: tuple[int, ...] = ()) -> Model:
    seen = tuple((layer, WINDOW) for layer in (1, 2))
    return Model(2, (3, 5), 2, groups, windows, drafts=drafts, seen=(*seen, *((each, 0) for each in (0, 3))))


PREFILL = {
    "two groups": (a_model(((0, 3), (1, 2)), (0, WINDOW)), (FULL[0], WINDOWED[0])),
    "windows first": (a_model(((1,), (2,), (0, 3)), (WINDOW, WINDOW, 0)), (WINDOWED[0], WINDOWED[1], FULL[0])),
    "all kept in one": (a_model(((0, 1, 2, 3),), (0,)), (FULL[0],)),
}
DECODE = {
    "two groups": (a_model(((0, 3), (1, 2)), (0, WINDOW)), (FULL[1], WINDOWED[2])),
    "with a draft": (a_model(((1, 2), (0, 3, DRAFT)), (WINDOW, 0), drafts=(DRAFT,)), (WINDOWED[2], FULL[1])),
    "a draft alone": (
        a_model(((DRAFT,), (1,), (0, 3), (2,)), (0, WINDOW, 0, WINDOW), drafts=(DRAFT,)),
        (FULL[0], WINDOWED[1], FULL[1], WINDOWED[2]),
    ),
}


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(("theirs", "ours"), [*product(PREFILL, DECODE)])
def test_every_layer_comes_from_its_own_group(site: Site, theirs: str, ours: str, verify: bool) -> None:
    (their_model, held), (our_model, given) = PREFILL[theirs], DECODE[ours]
    prefill = site.prefill(Engine("BHLNC", tp=2, blocks=23), model=their_model, verify=verify)
    remote = prefill.prefill("r", held, TOKENS)
    prefill.hash_leased()
    (worker,) = site.decode(Engine("LBHNC", blocks=23), our_model)
    order = an_order("r", remote, given, 0, TOKENS - 1)
    verifier = Verifier(CacheChecksums(worker.rank.geometry), worker.client) if verify else None
    site.session(worker, remote, verifier=verifier).submit(order)
    end = worker.next_end()
    assert (end.cause, end.reason, end.tokens) == ("", "", TOKENS - 1)
    assert worker.holds([(given, 0, TOKENS - 1)], lacking=[DRAFT])
