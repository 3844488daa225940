"""Objects between the host slots of any two engines of a model: every byte, by the oracle of layouts."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout.block_objects import ObjectError, ObjectForm, object_forms
from tests.support.layout.oracle import WHOLE_HEADS, Engine, Model, Rank, Table, build
from tests.support.layout.strategies import INDEXER, SCALE, thorough, tp_sizes
from tests.support.store.object_slots import HostSlots
from transfer.store import slot_objects
from transfer.store.slot_objects import HEADER_BYTES, KEY_BYTES, SlotObjects

BLOCKS = 3


def put_all(ranks: Sequence[Rank], tables: Sequence[Table]) -> dict[str, np.ndarray]:
    """The objects that ranks put; replicas put equal ones."""
    kept: dict[str, np.ndarray] = {}
    for rank in ranks:
        rank.fill(tables)
        slots = HostSlots(rank)
        slots.copy(tables, to_host=True)
        before = slots.memory.copy()
        for objects, slot, share, key in slots.names(tables):
            sealed = np.zeros(objects.sealed_bytes, np.uint8)
            objects.seal(slot, share, key, sealed)
            same = kept.setdefault(key, sealed)
            assert (same[HEADER_BYTES:] == sealed[HEADER_BYTES:]).all(), "two ranks put other bytes under one key"
        assert (slots.memory == before).all(), "sealing writes to slots"
    return kept


def fetch_all(ranks: Sequence[Rank], tables: Sequence[Table], kept: dict[str, np.ndarray]) -> None:
    """Bring all blocks to the devices of ranks by objects alone, and check every byte of them."""
    for rank in ranks:
        slots = HostSlots(rank)
        for objects, slot, share, key in slots.names(tables):
            assert objects.is_sealed(key, kept[key])
            objects.unpack(kept[key], slot, share)
        expected = rank.memory.copy()
        slots.copy(tables, to_host=False)
        for held in rank.planes:
            of_group = tables[held.group]
            tokens = range(len(of_group.ids) * rank.engine.tokens_of(held.group))
            expected[rank.positions(held, of_group, tokens)] = rank.wanted_values(held, tokens)
        assert (rank.memory == expected).all()


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Model, Engine, Engine]:
    """A model, and two engines of it that share a block size, stages, and what they divide a block into."""
    heads = draw(st.sampled_from([1, 2, 4, 8, 12]))
    model = Model(
        heads, draw(st.sampled_from([(1, 1), (2, 2), (3, 2)])), draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([((0, 1, 2),), ((0, 2), (1, 3)), (tuple(range(12)),)])), (0, 0),
        draw(st.sampled_from([(), (SCALE,), (SCALE, INDEXER)])),
        drafts=draw(st.sampled_from([(), (1,)])),
    )  # fmt: skip
    pp, forms = draw(st.sampled_from([1, 2])), draw(st.sampled_from([("fused",), ("views", "apart"), ("packed",)]))
    kernel_blocks = draw(st.sampled_from([1, 2]))
    sizes = [size for size in tp_sizes(heads) if size <= 8]

    def engine() -> Engine:
        return Engine(
            draw(st.sampled_from(WHOLE_HEADS)), draw(st.sampled_from(forms)), draw(st.sampled_from(sizes)), pp,
            32, 1 if forms == ("packed",) else kernel_blocks, BLOCKS, draw(st.sampled_from([0, 3])),
            layers_apart=draw(st.booleans()), groups_reversed=draw(st.booleans()),
        )  # fmt: skip

    return model, engine(), engine()


class TestAnyTwoEngines:
    @thorough
    @given(pairs())
    def test_blocks_arrive_with_every_byte_in_its_place(self, case: tuple[Model, Engine, Engine]) -> None:
        model, writer, reader = case
        tables = [Table(0, (2, 0)) for _ in model.groups]
        kept = put_all(build(model, writer, 1, 1 << 44), tables)
        fetch_all(build(model, reader, 2, 1 << 45), [Table(0, (1, 2)) for _ in model.groups], kept)

    @pytest.mark.parametrize(("writers", "readers"), [(4, 1), (1, 4), (3, 2), (8, 1), (1, 8)])
    def test_tensor_parallel_sizes_that_do_not_divide_each_other(self, writers: int, readers: int) -> None:
        model = Model(12 if 3 in (writers, readers) else 4, (2, 2), 2, ((0, 1, 2, 3),), (0,))
        tables = [Table(0, (1, 0))]
        kept = put_all(build(model, Engine("BLHNC", tp=writers), 1, 1 << 44), tables)
        fetch_all(build(model, Engine("LBHNC", tp=readers), 2, 1 << 45), tables, kept)

    @pytest.mark.parametrize("pcp", [1, 2, 3])
    @pytest.mark.parametrize("tp", [1, 2, 4, 8])
    def test_each_object_is_put_once(self, tp: int, pcp: int) -> None:
        """By those whose turn it is, of all ranks that hold the same."""
        model = Model(2, (2, 2), 2, ((0, 1),), (0,), (INDEXER,))
        put: list[str] = []
        for rank, pcp_rank in product(build(model, Engine(tp=tp), 1, 1 << 44), range(pcp)):
            for form in object_forms(replace(rank.geometry, pcp_rank=pcp_rank, pcp_size=pcp))[0]:
                for block_hash in (b"\x00", b"\x05", b"\xfe"):
                    if block_hash[0] % form.holders == form.holder:
                        put += [form.key("ns", share, block_hash) for share in form.held]
        assert len(set(put)) == len(put) == 3 * (2 + 1), "two heads, and the indexer's"


class TestForms:
    def only(self, model: Model, engine: Engine) -> ObjectForm:
        ((form, *_), *_) = object_forms(build(model, engine, 1, 1 << 44)[0].geometry)
        return form

    @pytest.mark.parametrize(
        ("model", "engine"),
        [
            (Model(2, (2, 2), 1, ((0, 1),), (0,)), Engine()),
            (Model(2, (2, 1), 2, ((0, 1),), (0,)), Engine()),
            (Model(2, (2, 2), 2, ((0, 1, 2),), (0,)), Engine()),
            (Model(4, (2, 2), 2, ((0, 1),), (0,)), Engine()),
            (Model(2, (2, 2), 2, ((0, 1),), (0,)), Engine(block_tokens=32)),
            (Model(2, (2, 2), 2, ((0, 1),), (0,)), Engine(form="apart")),
            (Model(2, (2, 2), 2, ((0, 1),), (0,)), Engine(form="packed")),
            (Model(2, (2, 2), 2, ((0, 1),), (0,)), Engine(pp=2)),
        ],
    )
    def test_what_means_something_else_has_another_name(self, model: Model, engine: Engine) -> None:
        assert self.only(Model(2, (2, 2), 2, ((0, 1),), (0,)), Engine()).digest != self.only(model, engine).digest

    def test_many_small_heads_share_objects(self) -> None:
        form = self.only(Model(256, (1, 1), 1, ((0,),), (0,)), Engine(blocks=2))
        assert (form.shares, form.share_heads) == (64, 4)

    def test_heads_that_are_no_whole_share_are_refused(self) -> None:
        ranks = build(Model(192, (1, 1), 1, ((0,),), (0,)), Engine(tp=1, blocks=2), 1, 1 << 44)
        (group,) = ranks[0].geometry.groups
        cut = replace(group, planes=tuple(replace(plane, heads=4, head_start=4) for plane in group.planes))
        with pytest.raises(ObjectError, match=r"heads 4 to 7 of 192 .* whole shares of 3"):
            object_forms(replace(ranks[0].geometry, groups=(cut,)))

    def test_an_unknown_number_of_heads_is_refused(self) -> None:
        rank = build(Model(4, (2, 2), 2, ((0,),), (0,)), Engine(tp=2), 1, 1 << 44)[0]
        (group,) = rank.geometry.groups
        unknown = replace(group, planes=tuple(replace(plane, total_heads=0) for plane in group.planes))
        with pytest.raises(ObjectError, match=r"not known how many heads layer 'model\.layers\.0'"):
            object_forms(replace(rank.geometry, groups=(unknown,)))


class TestSeals:
    @pytest.fixture
    def objects(self) -> SlotObjects:
        rank = build(Model(2, (2, 2), 2, ((0, 1),), (0,)), Engine(), 1, 1 << 44)[0]
        self.slots = HostSlots(rank)
        return self.slots.objects[0][0]

    def sealed(self, objects: SlotObjects, key: str = "key") -> np.ndarray:
        sealed = np.zeros(objects.sealed_bytes, np.uint8)
        objects.seal(1, 0, key, sealed)
        return sealed

    def test_every_changed_byte_is_noticed(self, objects: SlotObjects) -> None:
        sealed = self.sealed(objects)
        assert objects.is_sealed("key", sealed)
        for at in [*range(HEADER_BYTES + 2), len(sealed) // 2, len(sealed) - 1]:
            changed = sealed.copy()
            changed[at] ^= 0x80
            assert not objects.is_sealed("key", changed), at

    def test_an_object_of_another_key_is_noticed(self, objects: SlotObjects) -> None:
        assert not objects.is_sealed("other", self.sealed(objects))

    def test_an_object_of_another_secret_is_noticed(self, objects: SlotObjects) -> None:
        stranger = SlotObjects(objects.form, bytes(KEY_BYTES))
        assert not objects.is_sealed("key", self.sealed(stranger))

    def test_an_object_of_another_version_is_none(self, objects: SlotObjects, monkeypatch: pytest.MonkeyPatch) -> None:
        """Though its code is right."""
        monkeypatch.setattr(slot_objects, "SEAL", b"pdobj\0\0\1")
        old = self.sealed(objects)
        assert objects.is_sealed("key", old)
        monkeypatch.undo()
        assert not objects.is_sealed("key", old)

    def test_two_seals_of_the_same_differ(self, objects: SlotObjects) -> None:
        assert (self.sealed(objects)[:HEADER_BYTES] != self.sealed(objects)[:HEADER_BYTES]).any()
