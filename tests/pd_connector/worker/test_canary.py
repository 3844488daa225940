"""A worker's canaries: what is pulled is compared with what was computed, and nothing else is touched."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layout.cost import CostModel
from layout.plan import BlockTable
from layout.scratch import blocks_of_tokens, scratch_bytes
from pd_connector.orders import CanaryEnds, CanaryReference, Cause, Orders, PullOrder
from pd_connector.worker import canary, quarantine
from pd_connector.worker.canary import CanaryPulls, Comparison, Scratch, canary_pulls, canary_room, plane_formats
from pd_connector.worker.device_fence import Fence, RaiseFence, no_fence
from pd_connector.worker.pull_end import PullEnd
from pd_connector.worker.pulls import Pulls
from pd_connector.worker.quarantine import HeldRead, UnsettledPull, UnsettledReadError
from pd_connector.worker.remote_reader import RemoteReader
from pd_connector.worker.same_host import TwoWayEngine
from pd_connector.worker.session import PeerSession
from tests.support.connector.engines import MODEL, OURS, THEIRS, DecodeWorker, PrefillEngine, Site, an_order, tables
from tests.support.devices.shared_devices import SharedDevices
from tests.support.engine.ipc_engines import FakeIpcEngine
from tests.support.layout.oracle import LAYOUTS, WHOLE_HEADS, Engine, build
from tests.support.layout.ranks import a_rank, compressed, reader_of
from tests.support.layout.strategies import engines, models, thorough
from tests.support.waiting import ManualClock, holds_for, until
from transfer.copies.checksums.values import read_values

TOKENS = range(16, 69)
#: Its blocks in scratch memory: the first is not asked for.
TABLE = ((0, 1, 2, 3, 4),)
#: As a prompt of 70 tokens has them on D.
COMPUTED = CanaryReference("r", OURS)


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


@dataclass
class Checked:
    """A decode worker with its canaries."""

    worker: DecodeWorker
    role: CanaryPulls

    def end(self) -> CanaryEnds:
        """How the canary ends."""
        found: dict[str, CanaryEnds] = {}

        def has_ended() -> bool:
            self.role.check_integrity()
            found.update(self.role.take_report().canaries)
            return bool(found)

        until(has_ended)
        assert self.role.take_report().canaries == {}
        return found["r"]


def checked(site: Site, worker: DecodeWorker, form: str = "bytes", raise_fence: RaiseFence = no_fence) -> Checked:
    caches = worker.rank.geometry
    scratch = Scratch.allocate(caches, None)
    worker.engine.register(scratch.geometry.regions)
    reads = RemoteReader(CostModel.of_protocol("tcp"), scratch.geometry.regions)
    context = replace(worker.context(), local=scratch.geometry, reads=reads, raise_fence=no_fence)
    formats = {plane: form for group in caches.groups for plane in group.planes}
    comparison = Comparison(caches, _in_place(), scratch, formats, form)
    return site.add(_Closing(worker, CanaryPulls(Pulls(context, 0.0), comparison, raise_fence)))


def _in_place() -> Any:
    from transfer.copies.checksums.block_checksums import in_place  # noqa: PLC0415

    return in_place


class _Closing(Checked):
    def close(self) -> None:
        self.role.close()
        self.role.join()
        self.role.check_ended()


def canary_order(p: PrefillEngine, **changes: Any) -> PullOrder:
    return an_order("r", p.prefill("r", THEIRS), TABLE, TOKENS.start, TOKENS.stop, **changes)


FORMS = [
    (Engine(layout="BHLNC", blocks=12), Engine(layout="LBHNC", blocks=12)),
    (Engine(layout="LBHNC", blocks=12, tp=2), Engine(layout="BLNHC", blocks=12)),
    (Engine(layout="BHLNC", form="packed", blocks=12), Engine(layout="LBHNC", form="packed", blocks=12)),
    (Engine(layout="LBNHC", form="views", blocks=12), Engine(layout="LBNHC", form="views", blocks=12, tp=2)),
]


@pytest.mark.parametrize(("prefill", "decode"), FORMS)
def test_equal_bytes_agree_and_the_caches_stay_as_they_are(site: Site, prefill: Engine, decode: Engine) -> None:
    p = site.prefill(prefill)
    workers = [checked(site, worker) for worker in site.decode(decode)]
    order = canary_order(p)
    for each in workers:
        each.worker.rank.fill(tables(OURS))
        each.worker.before = each.worker.rank.memory.copy()
        each.role.execute(Orders(canaries=(order,)))
        each.role.execute(Orders(references=(COMPUTED,)))
    for each in workers:
        end = each.end()
        assert (end.ranks, end.failure, end.difference) == (1, "", "")
        assert end.samples >= MODEL.layers
        assert each.worker.untouched
    assert p.leases.active == 0


def test_what_is_computed_here_is_not_read_before_the_device_has_written_it(site: Site) -> None:
    """A step's tokens are known while the device still writes the drafts' caches."""
    late = create_autospec(Fence, instance=True)
    late.passed.return_value = False
    p, each = site.prefill(), checked(site, site.decode()[0], raise_fence=lambda: late)
    each.role.execute(Orders(canaries=(canary_order(p),)))
    each.role.execute(Orders(references=(COMPUTED,)))
    until(lambda: p.leases.active == 0)
    holds_for(lambda: each.role.take_report().canaries == {}, 0.5)
    each.worker.rank.fill(tables(OURS))
    late.passed.return_value = True
    assert each.end().difference == ""


@pytest.mark.parametrize("layer", [0, 2])
def test_other_values_are_found_and_the_layer_is_named(site: Site, layer: int) -> None:
    p, each = site.prefill(), checked(site, site.decode()[0])
    rank = each.worker.rank
    rank.fill(tables(OURS))
    held = rank.planes[0]
    positions = rank.positions(held, tables(OURS)[0], TOKENS)[:, [held.layers.index(layer)]]
    rank.memory[positions] ^= 0x55
    each.role.execute(Orders(canaries=(canary_order(p),)))
    each.role.execute(Orders(references=(COMPUTED,)))
    end = each.end()
    assert end.failure == ""
    assert f"layer '{held_name(each, layer)}'" in end.difference


def held_name(each: Checked, layer: int) -> str:
    group = each.worker.rank.geometry.groups[0]
    return sorted(group.layers)[layer]


def test_what_lies_before_the_canarys_tokens_is_not_compared(site: Site) -> None:
    p, each = site.prefill(), checked(site, site.decode()[0])
    rank = each.worker.rank
    rank.fill(tables(OURS))
    for held in rank.planes:
        rank.memory[rank.positions(held, tables(OURS)[held.group], range(16))] ^= 0xFF
    each.role.execute(Orders(canaries=(canary_order(p),)))
    each.role.execute(Orders(references=(COMPUTED,)))
    assert each.end().difference == ""


@pytest.mark.parametrize(("spoilt", "is_found"), [(range(0), False), (range(19), True), (range(19, 64), False)])
def test_a_prompt_that_fills_no_block_is_compared_up_to_its_last_token(
    site: Site, spoilt: range, is_found: bool
) -> None:
    """Of blocks of unequal sizes."""
    p = site.prefill(Engine(layout="BHLNC", tp=2, block_tokens=48))
    each = checked(site, site.decode(Engine(layout="LBHNC", block_tokens=64))[0])
    rank, ours = each.worker.rank, tables(((3,),))
    rank.fill(ours)
    for held in rank.planes if spoilt else ():
        rank.memory[rank.positions(held, ours[held.group], spoilt)] ^= 0x55
    each.role.execute(Orders(canaries=(an_order("r", p.prefill("r", ((5,),), 20), ((1,),), 0, 19),)))
    each.role.execute(Orders(references=(CanaryReference("r", ((3,),)),)))
    end = each.end()
    assert end.samples >= MODEL.layers
    assert bool(end.difference) == is_found


def test_what_was_computed_may_be_known_before_or_after_the_pull_has_ended(site: Site) -> None:
    p = site.prefill()
    for when in ("before", "after"):
        each = checked(site, site.decode()[0])
        each.worker.rank.fill(tables(OURS))
        each.role.execute(Orders(canaries=(canary_order(p),)))
        if when == "after":
            until(lambda: p.leases.active == 0)
            for _ in range(20):
                assert each.role.take_report().canaries == {}
        each.role.execute(Orders(references=(COMPUTED,)))
        assert each.end().samples


def test_without_what_was_computed_nothing_is_compared_once_the_pull_has_ended(site: Site) -> None:
    p, each = site.prefill(), checked(site, site.decode()[0])
    each.role.execute(Orders(canaries=(canary_order(p),)))
    each.role.execute(Orders(references=(CanaryReference("r"),)))
    assert each.end() == CanaryEnds(1)


def test_a_pull_that_fails_says_why_and_what_comes_later_is_ignored(site: Site) -> None:
    p, each = site.prefill(), checked(site, site.decode()[0])
    order = canary_order(p, lease_id="another")
    each.role.execute(Orders(canaries=(order,)))
    end = each.end()
    assert (end.cause, end.samples, end.difference) == (Cause.LEASE, 0, "")
    assert "another" in end.failure
    each.role.execute(Orders(references=(COMPUTED,)))
    each.role.check_integrity()
    assert each.role.take_report().canaries == {}


def test_a_session_that_ends_after_its_last_canary_is_closed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull tells how it has ended before its lane is idle."""
    p, each = site.prefill(), checked(site, site.decode()[0])
    each.role.execute(Orders(canaries=(canary_order(p, lease_id="another"),)))
    with monkeypatch.context() as patch:
        patch.setattr(PeerSession, "idle", property(lambda _: False))
        each.end()
    assert each.role._pulls._sessions
    until(lambda: not (each.role.take_report().canaries or each.role._pulls._sessions))


def test_a_change_of_the_model_ends_what_was_known_of_peers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digest of weights is of what is no longer served; P may have started anew with the new ones."""
    p, each = site.prefill(), checked(site, site.decode()[0])
    each.worker.rank.fill(tables(OURS))
    known: list[int] = []
    execute = each.role._pulls.execute

    def noted(orders: Orders) -> Sequence[str]:
        known.append(orders.model_changes)
        return execute(orders)

    monkeypatch.setattr(each.role._pulls, "execute", noted)
    each.role.execute(Orders(model_changes=1))
    each.role.execute(Orders(canaries=(canary_order(p),), references=(COMPUTED,)))
    assert each.end().samples
    assert known == [1, 0]


def test_what_drafts_tokens_is_not_compared(site: Site) -> None:
    """Its contents depend on what was sampled, and no answer depends on it."""
    drafting = replace(MODEL, drafts=(2,))
    p = site.prefill(model=drafting)
    each = checked(site, site.decode(model=drafting)[0])
    rank = each.worker.rank
    rank.fill(tables(OURS))
    for held in rank.planes:
        if 2 in held.layers:
            positions = rank.positions(held, tables(OURS)[0], TOKENS)[:, [held.layers.index(2)]]
            rank.memory[positions] ^= 0x55
    each.role.execute(Orders(canaries=(canary_order(p),)))
    each.role.execute(Orders(references=(COMPUTED,)))
    assert each.end().difference == ""


def test_a_draft_is_compared_behind_the_layers_from_which_it_is_computed() -> None:
    """Each layer is allowed more than those before it were wrong by."""
    own = ["model.layers.0.self_attn.attn", "model.layers.60.self_attn.attn"]
    drafts = ["mtp.0.self_attn.swa_cache", "language_model.mtp.layers.0.self_attn", "draft_model.layers.1.self_attn"]
    assert sorted([*drafts, *own], key=lambda name: canary._depth(name, 0))[:2] == own


def test_a_comparison_that_cannot_be_made_is_a_failure(site: Site) -> None:
    p, each = site.prefill(), checked(site, site.decode()[0])
    each.role.execute(Orders(canaries=(canary_order(p),)))
    each.role.execute(Orders(references=(CanaryReference("r", ((99,) * 5,)),)))
    end = each.end()
    assert end.cause is Cause.INTERNAL
    assert "block 99 does not exist" in end.failure


def test_a_comparison_for_which_the_system_has_no_thread_is_a_failure(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("pd-canary"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    p, each = site.prefill(), checked(site, site.decode()[0])
    each.role.execute(Orders(canaries=(canary_order(p),), references=(CanaryReference("r", OURS),)))
    end = each.end()
    assert end.cause is Cause.INTERNAL
    assert end.failure == "RuntimeError: can't start new thread"


def test_canaries_that_have_not_ended_are_lost_when_the_engine_sleeps(site: Site) -> None:
    p, each = site.prefill(), checked(site, site.decode()[0])
    each.role.execute(Orders(canaries=(canary_order(p),)))
    each.role.close()
    each.worker.engine.close()
    each.role.join()
    (end,) = each.role.abandoned().canaries.values()
    assert end.failure == "the engine sleeps"
    assert not end.samples


# How much memory


def geometry_of(**changes: Any) -> Any:
    return build(replace(MODEL, **changes), Engine(blocks=4), seed=1, base=1 << 40)[0].geometry


def test_a_small_model_has_room_for_four_prompts_of_512_tokens() -> None:
    room = canary_room(geometry_of())
    assert (room.tokens, room.prompts) == (512, 4)


def test_a_large_model_has_room_for_one_prompt_of_fewer_tokens_and_two_blocks_at_least() -> None:
    geometry = geometry_of()

    def wide(times: int) -> Any:
        groups = tuple(
            replace(group, planes=tuple(replace(plane, content=plane.content * times) for plane in group.planes))
            for group in geometry.groups
        )
        return replace(geometry, groups=groups)

    room = canary_room(wide(1000))
    assert room.prompts == 1
    assert 32 < room.tokens < 512
    assert scratch_bytes(wide(1000), list(blocks_of_tokens(geometry, room.tokens))) <= 64 << 20
    assert canary_room(wide(1 << 20)).tokens == 32


@thorough
@given(data=st.data())
def test_the_fewest_tokens_that_prove_an_engine_show_something_of_every_plane(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(["fused", "views", "apart", "packed"]))
    layout = data.draw(st.sampled_from(WHOLE_HEADS if form == "packed" else LAYOUTS))
    model = data.draw(models((1, 2, 4)))
    rank = a_rank(model, data.draw(engines(model, layout, form)))
    ratio = data.draw(st.sampled_from([1, 1, 4, 128]), "tokens of a row")
    geometry = rank.geometry if ratio == 1 else compressed(rank, ratio)
    room = canary_room(geometry)
    first = room.border * data.draw(st.integers(0, 2))
    end = first + room.least
    for group in geometry.groups:
        table = BlockTable.of(np.arange(-(-end // group.block_tokens)) % rank.engine.blocks)
        for plane in group.planes:
            assert read_values(plane, group.block_tokens, table, first, end, reader_of(rank)).held.any()
    assert room.least <= room.border
    assert room.least == 16 or form == "packed" or ratio > 1


def test_memory_of_a_device_is_read_by_it(site: Site) -> None:
    worker = site.decode()[0]
    scratch = Scratch.allocate(worker.rank.geometry, torch.device("cpu"))
    assert isinstance(scratch.owner, torch.Tensor)
    (region,) = scratch.geometry.regions
    scratch.owner.fill_(7)
    plane = scratch.geometry.groups[0].planes[0]
    view = scratch.read(plane, np.array([1], np.int64))
    assert view.owner is not None
    assert region.size == scratch.owner.numel()


def test_the_format_of_a_plane_is_that_of_its_tensor() -> None:
    geometry = geometry_of()
    names = sorted(geometry.groups[0].layers)
    caches = {name: torch.zeros(2, dtype=torch.bfloat16) for name in names}
    assert set(plane_formats(geometry, caches, "auto").values()) == {"bfloat16"}


def test_the_role_registers_its_memory(site: Site) -> None:
    worker = site.decode()[0]
    role = role_of(worker)
    assert set(role._pulls._context.local.regions) <= set(worker.engine.memory.table.regions)
    role.close()
    role.join()


def test_a_pipeline_stage_without_layers_registers_none(site: Site) -> None:
    """It would be host memory, which the Ascend transport refuses."""
    worker = site.decode()[0]
    before = worker.engine.memory.table.regions
    geometry = worker.rank.geometry
    groups = tuple(replace(group, planes=()) for group in geometry.groups)
    worker.rank.geometry = replace(geometry, groups=groups, regions=(), transport="ascend")
    role = role_of(worker)
    assert worker.engine.memory.table.regions == before
    role.close()
    role.join()


def test_a_canary_that_does_not_settle_may_hold_all_scratch_memory_for_as_long_as_a_read_may_last(site: Site) -> None:
    (worker,), clock = site.decode(), ManualClock()
    role = role_of(worker, clock=clock)
    geometry = role._pulls._context.local
    every_block = (tuple(range(1, geometry.groups[0].planes[0].blocks)),)
    order = an_order("r", site.prefill().prefill("r", THEIRS), every_block)
    read = create_autospec(HeldRead, instance=True)
    read.release.return_value = False
    role._pulls._quarantine.add(UnsettledPull(order, PullEnd("r", Cause.READ, "as told"), [read]))
    clock.advance(quarantine.MAX_AGE_S)
    assert not role._pulls.take_ends()
    clock.advance(1.0)
    with pytest.raises(UnsettledReadError, match="have not settled for 301 s"):
        role._pulls.take_ends()
    role.close()
    role.join()


def test_canaries_read_the_first_way_which_needs_no_pinned_memory(site: Site) -> None:
    worker = site.decode()[0]
    engine = TwoWayEngine(worker.engine, site.add(FakeIpcEngine(SharedDevices(), is_read=False)))
    role = role_of(worker, engine=engine)
    assert role._pulls._context.engine is worker.engine
    role.close()
    role.join()


def role_of(worker: DecodeWorker, **changes: Any) -> CanaryPulls:
    """The role of canaries as a worker starts it."""
    names = sorted({name for group in worker.rank.geometry.groups for name in group.layers})
    caches = {name: torch.zeros(2, dtype=torch.bfloat16) for name in names}
    context = replace(worker.context(), **changes)
    return canary_pulls(context, caches, [*caches.values()], CostModel.of_protocol("tcp"), on_host=True)
