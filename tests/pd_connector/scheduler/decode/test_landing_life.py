"""Pulls to host memory, whatever happens to requests, transfers, the device and the caches meanwhile.

Covers: pd_connector.scheduler.decode.landings, pd_connector.scheduler.host.landed_prompts.
"""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pd_connector.vllm.device_blocks import HeldBlocks
from tests.support.host_tier.decoding import LandingEngine

#: Cache groups: block tokens, and window or 0. At the end of the longer prompt, the windows have passed blocks.
GROUPS = {
    "full attention": ((16, 0),),
    "full attention and a wide window": ((16, 0), (16, 40)),
    "full attention and a window": ((16, 0), (16, 20)),
    "blocks of two sizes": ((32, 0), (16, 20)),
}
ACTIONS = ("arrive", "ask", "give", "land", "fail", "load", "leave", "reset", "room", "step", "take")
LONG, SHORT = 61, 33  # without their last tokens, three full blocks and a tail, and two full blocks


class Course:
    """What happens to the requests of a decode engine, one action at a time."""

    def __init__(self, groups: tuple[tuple[int, int], ...]) -> None:
        self.engine = LandingEngine("auto", 7 * len(groups), groups=groups)
        self.largest = math.lcm(*self.engine.setup.sizes)  # what the device holds is a multiple of it, in tokens
        self.engine.device.used = self.engine.device.total
        self.given_blocks: set[str] = set()
        self.taken: HeldBlocks = ()  # by something else

    def act(self, number: int, action: str, choice: int) -> None:
        engine = self.engine
        names = sorted(engine.requests)
        if action == "arrive":
            engine.arrive(f"r{number}", seed=choice % 2, tokens=SHORT if choice >= 6 else LONG)
        elif action == "room":
            engine.device.used = engine.device.total * (choice % 2)
        elif action == "reset":
            for role in engine.roles:
                role.reset()
        elif action == "step":
            engine.step(choice)
        elif action == "take":
            self.take(choice % 3)
        elif action in ("land", "fail", "load"):
            self.end(action, choice)
        elif names:
            computed = (0, 16, 32)[choice % 3] // self.largest * self.largest
            self.act_on(names[choice % len(names)], action, computed)

    def end(self, action: str, choice: int) -> None:
        under_way = self.engine.loading if action == "load" else self.engine.under_way
        if not under_way:
            return
        name = under_way[choice % len(under_way)]
        if action == "load":
            self.engine.end_load(name)
        else:
            self.engine.end_landing(name, failed=action == "fail")

    def act_on(self, name: str, action: str, computed: int) -> None:
        if action == "leave":
            self.engine.leave(name)
        elif name not in self.given_blocks:
            found = self.engine.ask(name, computed)
            if action == "give" and found is not None:
                self.given_blocks.add(name)
                self.engine.give_blocks(name, *found, computed)
                load = self.engine.take_load(name, found[0], computed)
                assert (0 if load is None else load.tokens) == found[0], "vLLM waits for no other loads"

    def take(self, number: int) -> None:
        """Something else takes free slots, and gives back what it had."""
        loans = self.engine.tier.loans
        loans.take_back(self.taken)
        self.taken = loans.lend((), number) or ()

    def end_all(self) -> None:
        self.take(0)
        for name in [*self.engine.under_way]:
            self.engine.end_landing(name)
        for name in [*self.engine.loading]:
            self.engine.end_load(name)
        for name in [*self.engine.requests]:
            self.engine.leave(name)
        self.engine.settle()


def run(groups: tuple[tuple[int, int], ...], examples: int) -> None:
    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck]
    )
    @given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 11)), min_size=30, max_size=60))
    def check(actions: list[tuple[str, int]]) -> None:
        course = Course(groups)
        for number, (action, choice) in enumerate(actions):
            course.act(number, action, choice)
            course.engine.check()
        course.end_all()
        course.engine.check()
        assert course.engine.pool.references() == {}

    check()


every_group = pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)


@pytest.mark.thorough
@every_group
def test_what_lands_is_what_is_loaded_and_no_slot_is_lost_whatever_happens(groups: tuple[tuple[int, int], ...]) -> None:
    run(groups, 40)


@pytest.mark.slow
@pytest.mark.timeout(900)
@every_group
def test_what_lands_is_what_is_loaded_in_many_more_runs(groups: tuple[tuple[int, int], ...]) -> None:
    run(groups, 1000)
