"""Two turns of a conversation on a recipe's engines: both prompts end inside a block, and the second goes on from the
first, of which either side finds what it keeps. Every byte that D then has of them is checked.
"""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from layout.geometry import WorkerGeometry
from layout.plan import BlockTable, compile_plans
from layout.regions import RegionTable
from layout.sharding import choose_sources
from pd_connector.orders import PullOrder, block_table
from pd_connector.vllm.cache_groups import Ranks, cache_groups
from pd_connector.worker.caches import describe_caches
from tests.support.ascend.recipe_memory import RankMemory, differences, tensors_of
from tests.support.ascend.recipe_oracle import RecipePrompt, prompt_tokens
from tests.support.ascend.recipe_ranks import RankCaches, make_ranks
from tests.support.ascend.recipe_schedulers import OUTPUT, Event, RecipeScheduler
from tests.support.ascend.recipes import Recipe

_ANSWER = 3  # tokens of the first turn's
_PART, _MORE = 5, 150  # tokens behind the last block that the first prompt fills, and behind its answer
_ROOM = 2  # prompts


@dataclass(frozen=True)
class TwoTurns:
    """What was done, for those who read it."""

    tokens: list[int]  # of both prompts
    bytes: int  # of them, on all ranks of D
    found: list[int]  # tokens of the second one, by P and by D
    caching: list[bool]  # whether P and D find prefixes


def describe(rank: RankCaches) -> WorkerGeometry:
    """A rank's caches as the connector describes them."""
    parallel = rank.vllm_config.parallel_config
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    dcp_rank = rank.tp_rank % parallel.decode_context_parallel_size
    ranks = Ranks(rank.tp_rank, tp_size, rank.pp_rank, pp_size, dcp_rank=dcp_rank)
    groups = cache_groups(rank.vllm_config, rank.kv_cache_config)
    geometry = describe_caches(rank.kv_caches, groups, ranks, f"host:{ranks.index}")
    RegionTable(geometry.regions)  # as whoever registers them
    return geometry


def hold_conversation(recipe: Recipe, directory: Path) -> TwoTurns:
    """Compute two prompts on P, and pull them to D, which answers the first one before the second one comes."""
    with ExitStack() as stack:
        senders = list(make_ranks(recipe, "P", directory, room=_ROOM))
        theirs = [describe(rank) for rank in senders]
        prefill = stack.enter_context(closing(RecipeScheduler(senders, theirs)))  # in P's environment
        readers = list(make_ranks(recipe, "D", directory, room=_ROOM))
        ours = [describe(rank) for rank in readers]
        lacks = _LackingStates(ours[0], theirs)
        decode = stack.enter_context(closing(RecipeScheduler(readers, ours, lacks)))
        tokens = prompt_tokens([senders[0], readers[0]]) + _PART + 1
        first = [number % 1000 for number in range(tokens)]
        second = [*first, *[OUTPUT] * _ANSWER, *range(2000, 2000 + _MORE)]
        begins = []
        for name, prompt, outputs in (("first", first, _ANSWER), ("second", second, 1)):
            begins.append(len(prefill.events))
            params = prefill.run(name, prompt, {"do_remote_decode": True})
            assert params is not None, f"P has leased nothing of the {name} prompt"
            decode.run(name, prompt, params, outputs)
        computed = [event for event in prefill.events if isinstance(event, RecipePrompt)]
        received = decode.events
        caching = [bool(each.scheduler.kv_cache_manager.enable_caching) for each in (prefill, decode)]
    memories = [RankMemory(rank.kv_caches) for rank in senders]
    for number, memory in enumerate(memories):
        memory.fill_with_noise(number)
    for step in computed:
        for rank, memory in zip(senders, memories, strict=True):
            step.write(rank, memory)
    known = frozenset(layer for rank in senders for layer in rank.kv_caches)
    checked = 0
    for reader, geometry in zip(readers, ours, strict=True):
        checked += _Receiver(reader, geometry, theirs, memories, known).follow(received)
    pulls = [event for event in received if isinstance(event, PullOrder) and not event.part]
    assert [pull.end_token for pull in pulls] == [len(first) - 1, len(second) - 1]
    assert pulls[0].first_token == 0
    found = [computed[begins[1]].first, pulls[1].first_token]
    return TwoTurns([len(first), len(second)], checked, found, caching)


class _LackingStates:
    """Which states at borders of blocks P has not leased, of those that D has blocks for."""

    def __init__(self, reader: WorkerGeometry, theirs: Sequence[WorkerGeometry]) -> None:
        self._plans = compile_plans(reader, theirs, choose_sources(reader, theirs)).values()

    def __call__(self, order: PullOrder) -> set[tuple[int, int]]:
        return set().union(*(plan.lacking_states(*_tables(order), order.end_token) for plan in self._plans))


def _tables(order: PullOrder) -> tuple[list[BlockTable], list[BlockTable]]:
    """The block tables of a pull, D's and P's."""
    ours, theirs = order.local_block_ids, order.remote.remote_block_ids
    return [block_table(ids) for ids in ours], [block_table(ids) for ids in theirs]


class _Receiver:
    """A rank of D, whose memory goes through what its engine's scheduler has ordered."""

    def __init__(
        self,
        rank: RankCaches,
        geometry: WorkerGeometry,
        theirs: Sequence[WorkerGeometry],
        memories: Sequence[RankMemory],
        known: frozenset[str],
    ) -> None:
        self._rank, self._memories, self._known = rank, memories, known
        self._plans = compile_plans(geometry, theirs, choose_sources(geometry, theirs))
        self._sizes = [group.block_tokens for group in geometry.groups]
        self._memory = RankMemory(rank.kv_caches)
        self._memory.fill_with_noise(1000 + rank.tp_rank)

    def follow(self, events: Sequence[Event]) -> int:
        """Do what was ordered; check the memory after each pull. Return how many bytes of prompts were compared."""
        compared = 0
        for event in events:
            if isinstance(event, PullOrder):
                compared += self._pull(event)
            else:
                event.write(self._rank, self._memory)
        return compared

    def _pull(self, order: PullOrder) -> int:
        before = self._memory.copy()
        ours, leased = _tables(order)
        for source, plan in self._plans.items():
            for copies in (
                plan.instantiate(ours, leased, order.first_token, order.end_token),
                plan.instantiate_states(ours, leased, order.end_token, wants_last=not order.part),
            ):
                self._memory.receive(copies, [self._memories[source]])
        where, compared = f"D's rank {self._rank.tp_rank}, {order.request_id} prompt from {order.first_token} on", 0
        for group, entry in set().union(
            *(plan.lacking_states(ours, leased, order.end_token) for plan in self._plans.values())
        ):
            ours[group].block_ids[entry] = -1
        wanted = RecipePrompt(order.end_token, ours)
        for number, (place, value) in enumerate(wanted.places(self._rank, self._memory, self._known)):
            wrong = np.argwhere(place != value)
            assert not len(wrong), f"{where}: {len(wrong)} of {value.size} bytes of place {number}, first {wrong[0]}"
            compared += value.size
        self._forgive(before, ours, order.first_token)
        assert not (changed := differences(self._memory, before)), f"{where}: beside its blocks, {changed}"
        return compared

    def _forgive(self, before: RankMemory, tables: Sequence[BlockTable], first_token: int) -> None:
        """Take over what is now in the blocks that are pulled to: rows behind the last token may be anything."""
        groups = self._rank.kv_cache_config.kv_cache_groups
        for group, table, size in zip(groups, tables, self._sizes, strict=True):
            blocks = table.block_ids[first_token // size :]
            for layer in group.layer_names:
                for tensor in tensors_of(self._rank.kv_caches[layer]):
                    parts = np.arange(tensor.shape[0] // self._rank.kv_cache_config.num_blocks)
                    rows = (blocks[blocks >= 0][:, None] * len(parts) + parts).ravel()  # of kernel blocks
                    before.view(tensor)[rows] = self._memory.view(tensor)[rows]
