"""A recipe's prompt from every rank of P into every rank of D, of which every byte is checked."""

from dataclasses import dataclass
from pathlib import Path

from layout.geometry import WorkerGeometry
from layout.plan import compile_plans
from layout.regions import RegionTable
from layout.sharding import choose_sources
from pd_connector.orders import block_table
from pd_connector.vllm.cache_groups import Ranks, cache_groups
from pd_connector.worker.caches import describe_caches
from tests.support.ascend.recipe_books import Books, remote_prefill
from tests.support.ascend.recipe_memory import RankMemory, differences
from tests.support.ascend.recipe_oracle import RecipePrompt, prompt_tokens
from tests.support.ascend.recipe_ranks import RankCaches, make_ranks
from tests.support.ascend.recipes import Recipe


@dataclass(frozen=True)
class Pulled:
    """What was done, for those who read it."""

    tokens: int
    descriptors: int
    bytes: int


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


def pull_prompt(recipe: Recipe, directory: Path) -> Pulled:
    """Make both engines, fill P with a prompt and D with noise, read it as the connector plans it, and check D.

    P leases the prompt and D is given blocks for it by vLLM's own cache managers. The prompt has one token more than
    what is pulled, which fills whole blocks.
    """
    senders = list(make_ranks(recipe, "P", directory))
    memories = [RankMemory(rank.kv_caches) for rank in senders]
    theirs = [describe(rank) for rank in senders]
    known = frozenset(layer for rank in senders for layer in rank.kv_caches)
    tokens = descriptors = moved = 0
    sent = wanted = None
    for reader in make_ranks(recipe, "D", directory):
        if sent is None or wanted is None:
            tokens = prompt_tokens([senders[0], reader])
            remote = remote_prefill(Books(senders[0], tokens + 1), tokens + 1)
            sent = RecipePrompt(tokens, [block_table(ids) for ids in remote.remote_block_ids])
            wanted = RecipePrompt(tokens, Books(reader, tokens + 1).receive(remote))
            for number, (rank, memory) in enumerate(zip(senders, memories, strict=True)):
                memory.fill_with_noise(number)
                sent.write(rank, memory)
        memory = RankMemory(reader.kv_caches)
        memory.fill_with_noise(1000 + reader.tp_rank)
        expected = memory.copy()
        due = wanted.write(reader, expected, known)
        ours, arrived = describe(reader), 0
        for source, plan in compile_plans(ours, theirs, choose_sources(ours, theirs)).items():
            for copies in (
                plan.instantiate(wanted.tables, sent.tables, 0, tokens),
                plan.instantiate_states(wanted.tables, sent.tables, tokens),
            ):
                memory.receive(copies, [memories[source]])
                descriptors, arrived = descriptors + len(copies), arrived + copies.total_bytes
        assert not (wrong := differences(memory, expected)), f"D's rank {reader.tp_rank}: {wrong}"
        assert arrived == due, f"D's rank {reader.tp_rank}: {arrived} bytes for {due}"
        moved += arrived
    return Pulled(tokens, descriptors, moved)
