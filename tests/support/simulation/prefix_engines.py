"""Engines that find prefixes at each other and in a pool, on vLLM's own schedulers: how tests start and watch them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pd_connector.orders import Orders, PullOrder
from tests.support.simulation.engine_worker import PeerOf
from tests.support.simulation.vllm_schedulers import HOST, ClientRequest, EngineSim, World
from transfer.control.messages import Located

BLOCK, TURN = 16, 200
FIRST = list(range(TURN))
#: What an engine computes of a prompt of a token more than is held elsewhere.
REST = TURN + 1 - TURN // BLOCK * BLOCK
#: So that computing what is missing of ``FIRST`` takes a second.
RATE = float(TURN)


def a_holder(world: World, role: str = "kv_consumer", blocks: int = 60, **settings: Any) -> EngineSim:
    return EngineSim(world, role, blocks, serve_prefixes=True, **settings)


def asker(world: World, *servers: EngineSim, role: str = "kv_producer", blocks: int = 60, **settings: Any) -> EngineSim:
    return EngineSim(world, role, blocks, peers=[f"{HOST}:{each.port}" for each in servers], **settings)


def searcher(world: World, *peers: EngineSim, pooled: bool = True, blocks: int = 900, **settings: Any) -> EngineSim:
    """An engine that asks peers, if there are any, and the pool, if it has one."""
    if pooled:
        settings |= {"slots": 900, "pooled": True, "host_transfers": "off"}
    engine = (
        asker(world, *peers, blocks=blocks, **settings)
        if peers
        else EngineSim(world, "kv_producer", blocks, **settings)
    )
    engine.side._rate._per_second = RATE
    return engine


class RestingCore:
    """An engine core that rests: answers come meanwhile, unless they are late, and others make a step."""

    def __init__(self, world: World, engine: EngineSim, *others: EngineSim) -> None:
        self.scheduler, self.input_queue = engine.scheduler, SimpleNamespace(queue=[], not_empty=self)
        self.is_late = False
        self.rests: list[float] = []  # in seconds
        self._world, self._others = world, others
        vars(engine.side._engine)["_core"] = lambda: self

    def is_running(self) -> bool:
        return True

    def __enter__(self) -> None:
        """Others may notify of an answer at any time."""

    def __exit__(self, *_: object) -> None:
        """They may."""

    def notify(self) -> None:
        """It looks for itself."""

    def wait_for(self, is_over: Callable[[], object], seconds: float) -> None:
        self.rests.append(seconds)
        if not self.is_late:
            self._world.deliver()
            for other in self._others:
                other.step()
            self._world.deliver()


def numbered_prompt(number: int) -> list[int]:
    """A prompt of the length of ``FIRST``; that of another number has none of its tokens."""
    return [token + 1000 * number for token in FIRST]


def fill_pool(world: World, tokens: list[int]) -> None:
    """An engine puts a prompt into the pool."""
    compute(world, searcher(world), tokens)
    for _ in range(40):
        world.step()
    assert world.pool.objects


def compute(
    world: World, engine: EngineSim, tokens: list[int], outputs: int = 1, **params: Any
) -> tuple[int, list[int]]:
    """How many tokens an engine computes of a request, and all tokens of prompt and answer."""
    request = ClientRequest(f"r{len(engine.computed_of)}", tokens, outputs)
    engine.ask(request, params or None)
    (name,) = [each for each in engine.requests if each.startswith(request.name)]
    _, known = engine.requests[name]
    world.run(20.0)
    assert request.ended == "finished"
    return engine.computed_of[name], list(known.all_token_ids)


def hold(world: World, engine: EngineSim, tokens: list[int]) -> None:
    """An engine computes a prompt, and takes some steps more: where vLLM does not count what is under way (0.23), the
    last steps may be.
    """
    compute(world, engine, tokens)
    compute(world, engine, [1000, 1001], 3)


def take_all_blocks(world: World, engine: EngineSim) -> None:
    """Others take all blocks of the device."""
    for part in range(2):
        compute(world, engine, [2000 + part] * 440)
    world.run(1.0)


def watch_orders(engine: EngineSim) -> list[PullOrder]:
    """The orders for prefixes of an engine from now on."""
    seen: list[PullOrder] = []
    start = engine.worker.start

    def watched(orders: Orders, now: float, peer_of: PeerOf) -> None:
        seen.extend(orders.prefixes)
        start(orders, now, peer_of)

    vars(engine.worker)["start"] = watched
    return seen


def watch_places(engine: EngineSim) -> list[str]:
    """Where other engines have read this one, from now on."""
    places: list[str] = []
    locate = engine.service.leases.locate

    def watched(lease_id: str) -> Located:
        located: Located = locate(lease_id)
        places.append(located.place)
        return located

    engine.service.leases.locate = watched
    return places
