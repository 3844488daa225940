"""Cache groups that vLLM itself makes of a model's layers, with a draft or without its hybrid manager on one side.

Gemma 3's shapes: five layers with a sliding window to one without. What the decode engine's scheduler half says can be
pulled is read, byte by byte.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import pytest
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from pd_connector.orders import WorkerHandshake
from pd_connector.params import RemoteTransfer
from pd_connector.progress import Progress
from pd_connector.scheduler.decode.consumer import Consumer
from pd_connector.scheduler.decode.needed_blocks import NeededBlocks
from pd_connector.scheduler.prefill.lease_service import LeaseService
from pd_connector.scheduler.prefill.leases import LeaseTable
from pd_connector.vllm.cache_specs import retention
from tests.support.connector.consumers import consumer_parts
from tests.support.connector.engines import IDENTITY
from tests.support.connector.kept_blocks import groups_by_vllm, leased_table, table_to_pull_into
from tests.support.connector.requests import FakeRequest, RecordingClient, a_prompt, allocated
from tests.support.layout.oracle import Engine, Model, Table, build, name_of
from tests.support.layout.pulls import Request, pull
from tests.support.waiting import ManualClock
from transfer.control.messages import Follow, Followed, TransferState

WINDOW, BLOCK = 64, 16
SHAPES = {"1B": 26, "4B": 34, "27B": 62}  # layers
LENGTHS = (17, WINDOW, *range(190, 210))  # every number modulo the block size


class Side(NamedTuple):
    """An engine: its draft layers, and whether its hybrid cache manager is on."""

    draft: int = 0
    hybrid: bool = True


PLAIN, DRAFTS, WITHOUT_MANAGER = Side(), Side(draft=1), Side(hybrid=False)


class Grouped:
    """A model's layers in the groups that vLLM makes on one engine."""

    def __init__(self, layers: int, side: Side) -> None:
        windows = [0 if number % 6 == 5 else WINDOW for number in range(layers)] + [0] * side.draft
        named = {name_of(number): window for number, window in enumerate(windows)}
        self.specs: list[KVCacheGroupSpec] = groups_by_vllm(named, BLOCK, hybrid=side.hybrid)
        numbers = {name: number for number, name in enumerate(named)}
        self.kept = [retention(group.kv_cache_spec) for group in self.specs]
        self.model = Model(
            kv_heads=1,
            contents=(1, 1),
            item_size=1,
            groups=tuple(tuple(numbers[name] for name in group.layer_names) for group in self.specs),
            windows=tuple(kept.window for kept in self.kept),
            drafts=tuple(range(layers, layers + side.draft)),
            seen=tuple(enumerate(windows)),
        )

    def leases(self, tokens: int) -> tuple[tuple[int, ...], ...]:
        return tuple(leased_table(group.kv_cache_spec, tokens) for group in self.specs)

    def pulls_into(self, tokens: int) -> tuple[tuple[int, ...], ...]:
        return tuple(table_to_pull_into(group.kv_cache_spec, tokens - 1) for group in self.specs)


class Prefill:
    """The lease service of an engine."""

    def __init__(self, grouped: Grouped) -> None:
        leases: LeaseTable[str] = LeaseTable(30.0, ManualClock())
        self.grouped = grouped
        self.service = LeaseService(leases, IDENTITY, 1)
        self.service.set_workers(tuple(rank.geometry for rank in build(grouped.model, Engine(blocks=2), 0, 1 << 44)))

    def lease(self, tokens: int) -> FakeRequest:
        """The decode leg of a prompt that is complete."""
        request, prompt = FakeRequest("r", a_prompt(tokens)), a_prompt(tokens)
        params = self.service.grant(request, self.grouped.leases(tokens), "r", ("10.0.0.5", 8998))
        return FakeRequest("r", prompt, params)

    def announces(self, tokens: int) -> Progress:
        """What a decode engine knows of a prompt of which the first block is computed."""
        assert self.service.begin(FakeRequest("r", a_prompt(tokens)), "t")
        self.service.transfers.announce("t", BLOCK, [[1] for _ in self.grouped.specs])
        told = self.service.handle(Follow("", "t"))
        assert isinstance(told, Followed)
        assert told.state == TransferState.COMPUTING
        return Progress.of_transfer(RemoteTransfer("t", "10.0.0.5", 8998)).after(told)


def a_consumer(grouped: Grouped) -> Consumer:
    parts = consumer_parts(RecordingClient(), retentions=grouped.kept)
    return Consumer(*parts._replace(layers=[group.layer_names for group in grouped.specs]))


def needed_in(grouped: Grouped) -> NeededBlocks:
    return NeededBlocks(grouped.kept, [group.layer_names for group in grouped.specs])


def tables(ids: tuple[tuple[int, ...], ...]) -> tuple[Table, ...]:
    return tuple(Table(0, tuple(block or -1 for block in table)) for table in ids)


def check_bytes(theirs: Grouped, ours: Grouped, tokens: int) -> None:
    """Pull a prompt between the two, with the blocks that vLLM has kept there and gives here."""
    request = Request(0, tokens - 1, tables(ours.pulls_into(tokens)), tables(theirs.leases(tokens)))
    pull(ours.model, Engine(blocks=64), Engine(blocks=64), request, remote_model=theirs.model)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_draft_changes_vllms_groups(shape: str) -> None:
    """Otherwise these tests show nothing: the group of full attention has another number, and another length."""
    plain, drafts = (Grouped(SHAPES[shape], side) for side in (PLAIN, DRAFTS))
    assert [kept.window for kept in plain.kept] != [kept.window for kept in drafts.kept]
    assert {len(group.layer_names) for group in plain.specs} != {len(group.layer_names) for group in drafts.specs}


def matches() -> Iterator[tuple[Side, Side]]:
    """Sides of which the first holds all that the second needs: all pairs but those that keep more here than there."""
    for theirs, ours in product((PLAIN, DRAFTS, WITHOUT_MANAGER), repeat=2):
        if ours.hybrid or not theirs.hybrid:
            yield theirs, ours


@pytest.mark.parametrize(("theirs", "ours"), [*matches()])
@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_of_every_length_are_pulled_whatever_the_groups(shape: str, theirs: Side, ours: Side) -> None:
    there, here = Grouped(SHAPES[shape], theirs), Grouped(SHAPES[shape], ours)
    prefill, consumer = Prefill(there), a_consumer(here)
    for tokens in LENGTHS:
        request = prefill.lease(tokens)
        request.request_id = f"r{tokens}"
        consumer.add(request)
        assert consumer.missing_tokens(request, 0) == tokens - 1, tokens
    check_bytes(there, here, LENGTHS[-1])


@pytest.mark.parametrize(("theirs", "ours"), [(DRAFTS, PLAIN), (PLAIN, DRAFTS), (WITHOUT_MANAGER, PLAIN)])
def test_a_pull_between_other_groups_brings_every_byte(theirs: Side, ours: Side) -> None:
    there, here = Grouped(SHAPES["1B"], theirs), Grouped(SHAPES["1B"], ours)
    for tokens in LENGTHS:
        check_bytes(there, here, tokens)


@pytest.mark.parametrize(("theirs", "ours"), [*matches()])
def test_a_prompt_that_is_being_computed_is_pulled_ahead_whatever_the_groups(theirs: Side, ours: Side) -> None:
    there, here = Grouped(SHAPES["1B"], theirs), Grouped(SHAPES["1B"], ours)
    for tokens in LENGTHS:
        progress = Prefill(there).announces(tokens)
        assert not needed_in(here).will_lack(progress.remote, progress.first_tokens), tokens


def test_without_the_hybrid_manager_here_only_prompts_within_the_window_are_pulled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What is not pulled would be found by others' prefix hits."""
    there, here = Grouped(SHAPES["1B"], PLAIN), Grouped(SHAPES["1B"], WITHOUT_MANAGER)
    prefill, consumer = Prefill(there), a_consumer(here)
    for tokens in LENGTHS:
        request = prefill.lease(tokens)
        request.request_id = f"r{tokens}"
        consumer.add(request)
        is_within = tokens <= WINDOW
        assert consumer.missing_tokens(request, 0) == (tokens - 1 if is_within else 0)
        progress = Prefill(there).announces(tokens)
        assert needed_in(here).will_lack(progress.remote, progress.first_tokens) == (not is_within)
        if not is_within:
            consumer.allocated(request, allocated((1,)), 0)
    (text,) = [record.getMessage() for record in caplog.records if "is computed here" in record.getMessage()]
    assert "of which this engine keeps all: no prompt beyond the window or chunk can be pulled" in text


def test_layers_of_all_pipeline_stages_count_here() -> None:
    """vLLM tells its scheduler of those of the first stage only."""
    here = Grouped(SHAPES["1B"], WITHOUT_MANAGER)
    parts = consumer_parts(RecordingClient(), retentions=here.kept)
    consumer = Consumer(*parts._replace(layers=[(name_of(5),)]))  # one of those of which nothing is let go
    request = Prefill(Grouped(SHAPES["1B"], PLAIN)).lease(200)
    consumer.add(request)
    assert consumer.missing_tokens(request, 0) == 199
    stages = build(here.model, Engine(pp=2, blocks=2), 0, 1 << 44)
    consumer.set_workers([WorkerHandshake(rank.geometry) for rank in stages])
    assert consumer.missing_tokens(request, 0) == 0


def test_the_params_of_one_group_do_not_name_its_layers() -> None:
    grouped = Grouped(SHAPES["1B"], WITHOUT_MANAGER)
    assert Prefill(grouped).lease(40).kv_transfer_params["remote_layers"] == ()  # type: ignore[index]


def test_params_of_several_groups_without_layers_are_refused_with_the_way_out() -> None:
    """Those of an older version of the connector."""
    request = Prefill(Grouped(SHAPES["1B"], PLAIN)).lease(40)
    assert request.kv_transfer_params is not None
    del request.kv_transfer_params["remote_layers"]
    consumer = a_consumer(Grouped(SHAPES["1B"], PLAIN))
    consumer.add(request)
    brought = consumer.missing_tokens(request, 0)
    consumer.allocated(request, allocated((1, 2, 3)), brought)
    (refusal,) = consumer.step_orders({}).refusals
    assert "older than this one. Use the same version on both sides" in refusal.reason
