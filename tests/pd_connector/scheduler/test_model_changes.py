"""After the model has changed: what the old one has computed is gone for good once vLLM's own cache is reset.

Covers: pd_connector.scheduler.scheduler, pd_connector.vllm.device_blocks.
"""

from tests.support.simulation.prefix_engines import FIRST, a_holder, asker, compute, hold
from tests.support.simulation.vllm_schedulers import OUTPUT_TOKEN, ClientRequest, EngineSim, World

PROMPT = list(range(64))


def computed(world: World, engine: EngineSim, name: str) -> int:
    """How many tokens of the prompt, and one more, the engine computes."""
    engine.ask(ClientRequest(name, [*PROMPT, 1], 1))
    world.run(5.0)
    return engine.computed_of[f"{name}-d"]


def test_host_memory_brings_nothing_of_the_old_model_after_a_reset(world: World) -> None:
    """Until then vLLM finds it on the device, and what is found there is stored, too."""
    engine = EngineSim(world, "kv_both", 8, slots=40)
    assert computed(world, engine, "before") == 65
    engine.side.model_changed("a test")
    assert [computed(world, engine, name) for name in ("between", "again")] == [1, 1]
    assert engine.scheduler.reset_prefix_cache()
    assert computed(world, engine, "after") == 65


def test_a_prefill_engine_is_proven_again_once_vllm_finds_nothing_of_the_old_model(world: World) -> None:
    """A decode engine that has met such a prompt refuses this engine, under the name that it had."""
    engine, ids = EngineSim(world, "kv_producer", 40), []

    def reset(expected: bool) -> None:
        assert engine.scheduler.reset_prefix_cache(reset_connector=True) == expected
        ids.append(engine.service.engine_id)

    reset(True)
    computed(world, engine, "old")
    engine.side.model_changed("a test")
    ids.append(engine.service.engine_id)
    engine.ask(ClientRequest("busy", PROMPT, 5))
    engine.step()
    reset(False)
    world.run(5.0)
    reset(True)
    reset(True)
    before, changed, in_vain, after, again = ids
    assert changed == in_vain
    assert after == again
    assert len({before, changed, after}) == 3


def test_nothing_is_lent_to_peers_until_vllm_finds_nothing_of_the_old_model(world: World) -> None:
    """They would keep it, under the name of the new one, when this engine is reset."""
    holder = a_holder(world, slots=100, host_transfers="auto")
    hold(world, holder, FIRST)
    holder.side.model_changed("a test")
    finder = asker(world, holder)
    compute(world, finder, [*FIRST, 1])
    assert (finder.counts["prefixes: asked"], holder.counts["prefixes_served: found"]) == (1, 0)
    assert holder.scheduler.reset_prefix_cache()
    assert finder.scheduler.reset_prefix_cache()
    hold(world, holder, FIRST)
    compute(world, finder, [*FIRST, 2])
    assert holder.counts["prefixes_served: found"] == 1


def test_an_engine_that_held_nothing_when_its_model_changed_lends_at_once(world: World) -> None:
    holder = a_holder(world)
    hold(world, holder, FIRST)
    assert holder.scheduler.reset_prefix_cache()
    holder.side.model_changed("a test")
    hold(world, holder, FIRST)
    compute(world, asker(world, holder), [*FIRST, 1])
    assert holder.counts["prefixes_served: found"] == 1


def test_an_engine_whose_model_changes_within_a_block_lends_nothing(world: World) -> None:
    """Nothing can be found then, but the block will be."""
    holder = a_holder(world)
    holder.ask(ClientRequest("r", FIRST[:8], 150))
    holder.step()
    holder.side.model_changed("a test")
    world.run(20.0)
    compute(world, asker(world, holder), [*FIRST[:8], *[OUTPUT_TOKEN] * 150])
    assert (holder.counts["prefixes_served: found"], holder.counts["prefixes_served: refused"]) == (0, 1)
