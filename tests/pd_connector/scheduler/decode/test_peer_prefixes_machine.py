"""Engines that find prefixes at each other and in a pool: a model-based test on vLLM's own schedulers.

The simulation checks every token that a request finds in its blocks, and ``check_integrity`` after every step.
"""

from typing import Any
from unittest.mock import patch

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.simulation.prefix_engines import RestingCore
from tests.support.simulation.state_groups import StateMode
from tests.support.simulation.vllm_schedulers import HOST, ClientRequest, EngineSim, World

#: What conversations consist of: they have beginnings in common.
PARTS = [[part] * 75 for part in range(3)]
NAMES = "PDQ"
ROLES = ("kv_producer", "kv_consumer", "kv_both")


class PrefixMachine(RuleBasedStateMachine):
    """A prefill engine, a decode engine and one of both kinds, or three of these; each asks the others.

    With the fewest blocks, a device holds little more than one prompt.
    """

    @initialize(
        roles=st.sampled_from([ROLES, ("kv_both",) * 3]),
        blocks=st.sampled_from([28, 34, 60]),
        slots=st.sampled_from([0, 60, 100]),
        hosts=st.sampled_from(["P", "PD", "PDQ"]),
        transfers=st.sampled_from(["off", "auto"]),
        outputs=st.sampled_from([1, 30]),
        states=st.sampled_from(["", "align"]),
        pooled=st.booleans(),
        rests=st.booleans(),
    )
    def start(
        self, roles: tuple[str, ...], blocks: int, slots: int, hosts: str, transfers: str, outputs: int,
        states: StateMode, *, pooled: bool, rests: bool,
    ) -> None:  # fmt: skip
        self.world, self.outputs, self.number = World(), outputs, 0
        self.asked: list[ClientRequest] = []

        def start_engine(name: str, port: int) -> EngineSim:
            has_host = bool(slots) and name in hosts
            settings: dict[str, Any] = {"host_transfers": transfers} if has_host else {}
            with patch.object(self.world, "port", lambda: port):
                engine = EngineSim(
                    self.world, roles[port - 1], blocks * (1 + bool(states)), "fail", states=states,
                    serve_prefixes=True, slots=slots if has_host else 0, pooled=pooled and has_host,
                    peers=[f"{HOST}:{other}" for other in (1, 2, 3) if other != port], **settings,
                )  # fmt: skip
            if rests:
                RestingCore(self.world, engine)
            return engine

        self.start_engine = start_engine
        self.engines = {name: start_engine(name, port) for port, name in enumerate(NAMES, 1)}
        assert [engine.port for engine in self.engines.values()] == [1, 2, 3]

    def _request(self, parts: list[int], on: EngineSim | None = None) -> ClientRequest:
        self.number += 1
        tokens = [token for part in parts for token in PARTS[part]]
        request = ClientRequest(f"r{self.number}", [*tokens, 1000 + self.number], self.outputs, on)
        self.asked.append(request)
        return request

    @rule(name=st.sampled_from(NAMES), parts=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def ask(self, name: str, parts: list[int]) -> None:
        self.engines[name].ask(self._request(parts))

    @rule(of=st.sampled_from("PQ"), parts=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def ask_in_two_legs(self, of: str, parts: list[int]) -> None:
        self.engines[of].ask(self._request(parts, self.engines["D"]))

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()

    @rule(name=st.sampled_from(NAMES))
    def step_alone(self, name: str) -> None:
        """The others are slow."""
        self.engines[name].step()
        self.world.deliver()

    @rule(name=st.sampled_from(NAMES))
    def cut_or_mend(self, name: str) -> None:
        self.engines[name].is_cut = not self.engines[name].is_cut

    @rule(name=st.sampled_from(NAMES))
    def die(self, name: str) -> None:
        """An engine dies, with all that it holds and asks for; one of another id takes its place."""
        dead = self.engines[name]
        for asked, _ in dead.requests.values():
            asked.ended = "aborted"
        dead.worker.memories.device.clear()
        dead.worker.memories.host.clear()
        self.engines[name] = self.start_engine(name, dead.port)
        for request in self.asked:
            if request.decodes_on is dead:
                request.decodes_on = self.engines[name]
        dead.scheduler.shutdown()

    @rule(trouble=st.sampled_from(["fails", "is_stuck", "loses", "refuses"]))
    def trouble_the_pool(self, trouble: str) -> None:
        """It fails, answers nothing, or is mended; or it has lost some of its objects, or takes none for a while."""
        pool = self.world.pool
        if trouble == "loses":
            pool.lose(every=3)
        elif trouble == "refuses":
            pool.refuses = 20
        else:
            setattr(pool, trouble, not getattr(pool, trouble))

    @rule(name=st.sampled_from(NAMES))
    def forget(self, name: str) -> None:
        """vLLM resets its prefix cache, or tries to."""
        self.engines[name].scheduler.reset_prefix_cache(reset_connector=True)

    @rule(name=st.sampled_from(NAMES))
    def change_model(self, name: str) -> None:
        """Another model would compute other keys; here it computes the same, so that what is found can be checked."""
        self.engines[name].side.model_changed("a test")

    @precondition(lambda self: any(engine.requests for engine in self.engines.values()))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        waiting = [(name, each) for name, engine in self.engines.items() for each in engine.requests]
        name, request_id = data.draw(st.sampled_from(waiting))
        self.engines[name].abort(request_id)

    @invariant()
    def books_balance(self) -> None:
        for engine in getattr(self, "engines", {}).values():
            engine.side.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for engine in self.engines.values():
            engine.is_cut = False
        self.world.pool.fails = self.world.pool.is_stuck = False
        self.world.run_to_the_end(60.0, 10.0)
        ended = {request.ended for request in self.asked}
        for pause_s in (0.0, 200.0):  # late questions are answered, and leases that nobody took expire
            self.world.clock.advance(pause_s)
            for _ in range(30):
                self.world.step()
        for engine in self.engines.values():
            assert engine.leases == engine.blocks_in_use == engine.slots_in_use == 0, engine.state
            assert not engine.side._rate._left_s, "who has left is still looked for"
        self.world.close()
        assert ended <= {"finished", "aborted", "failed"}


PrefixMachine.TestCase.settings = hypothesis_settings(max_examples=20, stateful_step_count=40, deadline=None)
TestPrefixes = PrefixMachine.TestCase
