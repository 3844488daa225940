"""A request goes on when its own tokens are here; the states at borders come behind it, under the same lease."""

from collections.abc import Callable

import pytest

from tests.support.releases import INSTALLED, module_needs
from tests.support.simulation.vllm_schedulers import ClientRequest, EngineSim, World

if INSTALLED < (0, 30):
    module_needs((0, 30), "states of recurrent layers")

TOKENS, OUTPUTS, BLOCK = 100, 3, 16
BORDER = 96  # the last one of what is pulled
LATE_S = 5.0


class Late:
    """A decode engine that pulls a prompt, and then for long the state of its last border."""

    def __init__(
        self, world: World, *, at_once: bool = False, choices: int = 1, slots: int = 0, outputs: int = OUTPUTS
    ) -> None:
        self.world = world
        self.prefill = EngineSim(world, "kv_producer", 60, states="align")
        self.decode = EngineSim(world, "kv_consumer", 60, states="align", slots=slots)
        prompt, at_once = list(range(TOKENS)), at_once or choices > 1
        for number in range(choices if at_once else 0):
            self.decode.ask_by_name(ClientRequest("r", prompt, outputs, choice=str(number or "")), self.prefill)
        self.prefill.ask(ClientRequest("r", prompt, outputs, self.decode, transfer_id="r" if at_once else ""))

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(200):
            if condition():
                return
            self.world.step()
        raise AssertionError("it does not come")

    def until_behind(self) -> None:
        """Step until the prompt is here and the state of the border is being pulled, which takes long."""
        self.until(lambda: bool(self.decode.worker.pulls))
        _, self.request = self.decode.requests["r-d"]
        self.decode.worker.pull_s, kept = LATE_S, self.decode.worker.pull_s
        self.until(lambda: bool(self.decode.worker.borders))
        self.decode.worker.pull_s = kept

    def found(self) -> int:
        """How many tokens of a longer prompt are found, here or in host memory."""
        self.decode.ask(ClientRequest("longer", list(range(TOKENS + 20)), 1))
        self.until(lambda: "longer-d" not in self.decode.requests)
        return TOKENS + 20 - self.decode.computed_of["longer-d"]

    def is_found(self) -> bool:
        """Whether the state is, by whoever looks now."""
        states = self.decode.side._blocks
        return all(states.found_state(self.request, group, BORDER // BLOCK - 1, BLOCK) for group in (1, 2))


@pytest.mark.parametrize("at_once", [False, True])
def test_a_request_is_served_before_the_state_of_its_border_is_here(world: World, at_once: bool) -> None:
    late = Late(world, at_once=at_once)
    late.until_behind()
    late.until(lambda: not late.decode.requests)
    assert late.decode.computed_tokens == OUTPUTS
    assert late.prefill.leases == 1
    assert late.decode.blocks_in_use == 2  # of the border alone, in two cache groups
    assert not late.is_found()
    world.run(2 * LATE_S)
    late.until(lambda: not late.decode.side.wants_step())
    assert late.prefill.leases == 0
    assert late.decode.blocks_in_use == 0
    assert late.is_found()
    assert late.found() == BORDER


def test_further_choices_wait_for_it_and_find_the_prompt(world: World) -> None:
    late = Late(world, choices=2)
    late.until_behind()
    late.until(lambda: late.decode.computed_of["r-d"] == OUTPUTS)
    assert not late.decode.computed_of["r-d1"]
    world.run(2 * LATE_S)
    assert late.decode.computed_of["r-d1"] == TOKENS - BORDER + OUTPUTS - 1


def test_it_comes_for_others_if_its_request_is_aborted_meanwhile(world: World) -> None:
    late = Late(world)
    late.until_behind()
    late.decode.abort("r-d")
    world.run(2 * LATE_S)
    late.until(lambda: not late.decode.side.wants_step())
    assert late.prefill.leases == 0
    assert late.found() == BORDER


def test_it_does_not_come_if_its_request_is_aborted_before_and_the_lease_ends_at_once(world: World) -> None:
    late = Late(world)
    late.until(lambda: bool(late.decode.worker.pulls))
    late.decode.abort("r-d")
    late.until(lambda: not late.decode.worker.pulls)
    for _ in range(3):
        world.step()
    assert late.prefill.leases == 0
    assert late.decode.blocks_in_use == 0
    assert late.found() == 0


def test_a_prefill_engine_that_dies_meanwhile_costs_the_later_hit_alone(world: World) -> None:
    late = Late(world)
    late.until_behind()
    late.prefill.is_cut = True
    late.until(lambda: not late.decode.requests)
    assert late.decode.computed_tokens == OUTPUTS
    world.run(60.0)
    late.until(lambda: not late.decode.side.wants_step())
    assert late.decode.blocks_in_use == 0
    assert late.found() == 0


def test_nobody_finds_it_after_a_change_of_the_model(world: World) -> None:
    late = Late(world)
    late.until_behind()
    late.until(lambda: not late.decode.requests)
    late.decode.side.model_changed("a test")
    world.run(2 * LATE_S)
    late.until(lambda: not late.decode.side.wants_step())
    assert late.decode.blocks_in_use == 0
    assert late.found() == 0


@pytest.mark.parametrize("outputs", [OUTPUTS, 150])
def test_host_memory_stores_it_when_it_comes(world: World, outputs: int) -> None:
    """Whether its request is still there or not."""
    late = Late(world, slots=60, outputs=outputs)
    late.until_behind()
    world.run(2 * LATE_S)
    late.until(lambda: not late.decode.side.wants_step())
    assert late.decode.scheduler.reset_prefix_cache()
    assert late.found() == BORDER


def test_a_request_that_is_preempted_goes_on_behind_it(world: World) -> None:
    late = Late(world)
    late.until_behind()
    late.until(lambda: late.decode.computed_of["r-d"] > 0)
    _, request = late.decode.requests["r-d"]
    late.decode.scheduler.running.remove(request)
    late.decode.scheduler._preempt_request(request, 0.0)
    world.run(2 * LATE_S)
    late.until(lambda: not late.decode.side.wants_step())
    assert late.prefill.leases == 0
    assert late.decode.blocks_in_use == 0
    assert late.found() == BORDER
