"""In which order blocks are put into a pool, on vLLM's own schedulers: a prompt's last one first, over all steps."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from pd_connector.scheduler.host import put_queue
from pd_connector.scheduler.host.put_queue import PutQueue
from tests.support.simulation.prefix_engines import BLOCK
from tests.support.simulation.vllm_schedulers import ClientRequest, EngineSim, World
from tests.support.store.mooncake_processes import MooncakeProcesses
from transfer.store.interface import Piece, StoreFailed
from transfer.store.mooncake_store import MooncakeStore

LONG = list(range(500))  # two steps
BLOCKS = 500 // BLOCK


def an_engine(world: World, slots: int = 200, blocks: int = 120, **settings: object) -> EngineSim:
    return EngineSim(world, "kv_producer", blocks, slots=slots, pooled=True, **settings)  # type: ignore[arg-type]


def ask(engine: EngineSim, name: str, tokens: list[int], outputs: int = 1) -> list[str]:
    """Ask for a prompt; return how the pool's objects name its blocks."""
    engine.ask(ClientRequest(name, tokens, outputs))
    _, request = engine.requests[f"{name}-d"]
    return [bytes(each).hex() for each in request.block_hashes]


def begin(world: World, engine: EngineSim, name: str) -> None:
    """Step until the first step of a prompt is computed."""
    while not engine.computed_of[f"{name}-d"]:
        world.step()


def steps(world: World, number: int = 60) -> None:
    for _ in range(number):
        world.step()


def put_order(world: World, names: list[str], kind: str = "") -> list[int]:
    """The blocks of a prompt, as they were put; of one kind of objects."""
    put = [key.rsplit("/", 1)[1] for key in world.pool.objects if key.startswith(kind)]
    return [names.index(each) for each in put if each in names]


def end_first(blocks: int) -> list[int]:
    return list(reversed(range(blocks)))


class TestOrder:
    def test_the_end_of_a_prompt_of_several_steps_is_put_first(self, world: World) -> None:
        engine = an_engine(world)
        names = ask(engine, "long", LONG)
        steps(world)
        assert put_order(world, names) == end_first(BLOCKS)
        assert not engine.side.wants_step()

    @pytest.mark.parametrize("states", ["", "align"])
    def test_the_same_beside_others_and_with_states(self, world: World, states: str) -> None:
        engine = an_engine(world, slots=400, blocks=240, states=states)
        names = [ask(engine, f"r{n}", [n * 1000 + token for token in LONG], outputs=1 + 20 * n) for n in range(3)]
        steps(world, 120)
        for of_prompt in names:
            for kind in {key.rsplit("/", 1)[0] for key in world.pool.objects}:
                order = put_order(world, of_prompt, kind)
                assert order == sorted(order, reverse=True)
                assert order[0] == BLOCKS - 1

    def test_what_is_stored_lazily_is_put_as_it_is_evicted_from_the_device(self, world: World) -> None:
        engine = an_engine(world, blocks=60, cpu_store="lazy")
        names = ask(engine, "first", LONG)
        steps(world)
        for number in range(3):
            ask(engine, f"r{number}", [n + 1000 * (1 + number) for n in LONG])
            steps(world)
        assert put_order(world, names) == end_first(BLOCKS)

    def test_blocks_of_an_answer_do_not_wait_for_its_end(self, world: World) -> None:
        engine = an_engine(world)
        ask(engine, "r", LONG[:400], outputs=100)
        steps(world, 60)
        assert len(world.pool.objects) > 400 // BLOCK + 1
        assert engine.requests, "it goes on"


class TestNothingIsLost:
    def test_what_is_lost_and_stored_again_while_it_waits_is_put_once(self) -> None:
        """vLLM 0.23 would append a block twice to its free queue that is given back twice at once."""
        tier: Any = SimpleNamespace(is_lazy=False)
        queue, keys = PutQueue(tier), [make_block_hash_with_group_id(BlockHash(bytes([n])), 0) for n in range(3)]
        assert queue.add(keys) + queue.add(keys[:1]) == 0
        assert queue.take(64) == ((*keys[1:], keys[0]), set())

    def test_what_an_aborted_prompt_has_stored_is_put(self, world: World) -> None:
        engine = an_engine(world)
        names = ask(engine, "r", LONG)
        begin(world, engine, "r")
        engine.abort("r-d")
        steps(world)
        assert put_order(world, names) == end_first(256 // BLOCK)
        assert not engine.side.wants_step()

    def test_a_prompt_that_loses_its_blocks_meanwhile_is_put_when_it_is_computed(self, world: World) -> None:
        engine = an_engine(world)
        names = ask(engine, "r", LONG)
        _, request = engine.requests["r-d"]
        begin(world, engine, "r")
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        steps(world)
        assert request.num_preemptions
        assert put_order(world, names) == end_first(BLOCKS)

    def test_the_beginning_that_two_prompts_share_is_put_though_one_of_them_is_aborted(self, world: World) -> None:
        engine = an_engine(world)
        engine.pooled.copy_s = 0.3
        ask(engine, "first", LONG)
        names = ask(engine, "second", [*LONG[:400], *range(5000, 5100)])
        begin(world, engine, "first")
        engine.abort("first-d")
        steps(world)
        assert sorted(put_order(world, names)) == list(range(BLOCKS))
        assert not engine.side.wants_step()

    def test_of_more_than_may_wait_the_beginning_is_kept(self, world: World) -> None:
        engine = an_engine(world)
        names = ask(engine, "r", LONG)
        with patch.object(put_queue, "_MOST", 10):
            steps(world)
        assert put_order(world, names) == end_first(10)
        engine.side.update_stats()
        assert engine.counts["pool_blocks: left"] == BLOCKS - 10

    def test_of_more_that_comes_lazily_the_beginning_is_kept_too(self) -> None:
        """It comes last, as vLLM evicts the end of a prompt first."""
        tier: Any = SimpleNamespace(is_lazy=True)
        queue, keys = PutQueue(tier), [make_block_hash_with_group_id(BlockHash(bytes([n])), 0) for n in range(5)]
        with patch.object(put_queue, "_MOST", 3):
            assert queue.add(reversed(keys)) == 2
        assert queue.take(3) == (tuple(keys[:3]), set())


@pytest.mark.skipif(not Path(sys.executable).with_name("mooncake_client").exists(), reason="no mooncake_client here")
class TestUnderPressure:
    def test_a_full_store_loses_the_end_of_a_prompt(self, world: World, tmp_path: Path) -> None:
        """What the engine puts, in its order, in a real store that then needs room for others."""
        engine = an_engine(world)
        names = ask(engine, "r", LONG)
        steps(world)
        processes = MooncakeProcesses(tmp_path, 64 << 20)
        try:
            store = MooncakeStore(processes.address, 1 << 20)
            for number in put_order(world, names):
                assert store.put([Piece(names[number], 0, 1 << 20)]) == [True]
            kept = fill_up(store, names)
            store.close()
        finally:
            processes.close()
        assert 0 < len(kept) < BLOCKS
        assert kept == list(range(len(kept)))


def fill_up(store: MooncakeStore, names: list[str]) -> list[int]:
    """Put others' objects until the store has evicted some of these; return which it still holds."""
    for number in range(200):
        try:
            store.put([Piece(f"other/{number}", 0, 1 << 20)])
        except StoreFailed:
            continue
        if number >= 32 and not all(held := store.exist(list(reversed(names)))):
            break
        time.sleep(0.02)
    return [number for number, is_held in enumerate(reversed(held)) if is_held]
