"""Processes that stop, die and come back at chosen points of a landing, and of the move of a lease to host memory.

Gates in the workers hold requests at a point. Whatever happens to a server then: every request ends, with the right
answer or as the failure policy says, what has landed needs no prefill server any more, and no block, lease or slot of
host memory stays. A short stop costs time and nothing else.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import httpx
import pytest

from tests.support.e2e.client import Completion
from tests.support.e2e.cluster import Cluster, Server
from tests.support.e2e.deployments import POINTS, POINTS_OF_RANKS, drained_at_points, on
from tests.support.e2e.fixtures import Acquaintance, meet
from tests.support.e2e.host_memory import metrics_after_a_step
from tests.support.e2e.pair import Pair, end_lease
from tests.support.e2e.points import LONG_S, SHORT_S, Incident, Scene
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Point = Callable[[Scene], None]

SHORT_STOPS = (Incident("prefill", "stop", SHORT_S), Incident("decode", "stop", SHORT_S))
P_LASTS = (Incident("prefill", "stop", LONG_S), Incident("prefill", "kill"))
D_LASTS = (Incident("decode", "stop", LONG_S), Incident("decode", "kill"))
P_COMES_BACK = (Incident("prefill", "restart"),)
EVERY = (*SHORT_STOPS, *P_LASTS, *D_LASTS)

_DRAIN_TIMEOUT_S = 20.0
_SMALL = 200  # tokens of a prompt whose lease is within the share of P's blocks that leases may hold


def landed(pair: Pair) -> float:
    return pair.decode.client.metrics().value("vllm:pd_landings_total", event="landed")


def moved(server: Server) -> float:
    metrics = metrics_after_a_step(server)
    return sum(metrics.value("vllm:pd_lease_moves_total", event=why) for why in ("short", "share"))


def queued(scene: Scene) -> None:
    """D's engine is busy with a step, so that it has not asked where the prompt of a decode leg is to go."""
    scene.fill_decode()
    pair, prompt = scene.pair, scene.prompt("queued")
    params = pair.prefill.client.prefill(prompt)
    pair.decode.gates.close("step")
    scene.send(scene.prompt("in the step", 8))
    pair.decode.gates.wait_for("step")
    scene.send(prompt, params)


def landing(scene: Scene) -> None:
    """Half of the prompt is in D's host memory."""
    scene.fill_decode()
    scene.pair.decode.gates.close("landing")
    scene.disaggregate("landing")
    scene.pair.decode.gates.wait_for("landing")


def unconfirmed(scene: Scene) -> None:
    """All of the prompt is in D's host memory, but P has not confirmed it."""
    scene.fill_decode()
    scene.pair.decode.gates.close("unconfirmed")
    scene.disaggregate("unconfirmed")
    scene.pair.decode.gates.wait_for("unconfirmed")


def waiting(scene: Scene) -> None:
    """The prompt has landed and waits for blocks of D's device."""
    scene.fill_decode()
    land(scene)


def loading(scene: Scene) -> None:
    """The prompt has landed and is being loaded."""
    filler = scene.fill_decode()
    land(scene)
    scene.pair.decode.gates.close("loading")
    scene.finish(filler)
    scene.pair.decode.gates.wait_for("loading")


def answering(scene: Scene) -> None:
    """The prompt has been loaded and D generates its answer."""
    filler = scene.fill_decode()
    land(scene, max_tokens=300)
    scene.finish(filler)
    generated = generated_tokens(scene.pair)
    until(lambda: generated_tokens(scene.pair) > generated, "the first tokens")
    scene.pair.decode.gates.close("step")
    scene.pair.decode.gates.wait_for("step")


def land(scene: Scene, max_tokens: int = 16) -> None:
    before = landed(scene.pair)
    scene.disaggregate("landed", max_tokens).is_lost = False
    until(lambda: landed(scene.pair) > before, "the prompt has landed")


def generated_tokens(pair: Pair) -> float:
    return pair.decode.client.metrics().value("vllm:generation_tokens_total")


def granted(scene: Scene) -> None:
    """A lease lies on P's device. It moves when another is granted, and only then is D told of it."""
    prefill, prompt = scene.pair.prefill, scene.prompt("granted", _SMALL)
    params, before = prefill.client.prefill(prompt), moved(prefill)

    def ask_late() -> Completion:
        scene.opened.wait()
        with suppress(httpx.HTTPError):
            other = prefill.client.prefill(scene.prompt("another"))
            until(lambda: moved(prefill) > before, "a lease has moved")
            end_lease(other)
        return scene.pair.decode_leg(prompt, params)

    scene.start(prompt, ask_late)


def moving(scene: Scene) -> None:
    """A lease that D knows, and cannot read yet, is being copied to P's host memory."""
    scene.fill_decode()
    scene.pair.prefill.gates.close("moving")
    scene.disaggregate("moving").may_be_late = True
    scene.pair.prefill.gates.wait_for("moving")


def in_host_memory(scene: Scene) -> None:
    """A lease that D knows, and cannot read yet, lies in P's host memory."""
    scene.fill_decode()
    before = moved(scene.pair.prefill)
    scene.disaggregate("moved").may_be_late = True
    until(lambda: moved(scene.pair.prefill) > before, "the lease has moved")


def read_in_host_memory(scene: Scene) -> None:
    """D has read half of a lease in P's host memory."""
    prefill, prompt = scene.pair.prefill, scene.prompt("read")
    before = moved(prefill)
    params = prefill.client.prefill(prompt)
    until(lambda: moved(prefill) > before, "the lease has moved")
    scene.pair.decode.gates.close("pulling")
    scene.send(prompt, params)
    scene.pair.decode.gates.wait_for("pulling")


LANDING_POINTS: dict[Point, Sequence[Incident]] = {
    queued: EVERY,
    landing: (*EVERY, *P_COMES_BACK),
    unconfirmed: EVERY,
    waiting: (*EVERY, *P_COMES_BACK),
    loading: EVERY,
    answering: EVERY,
}
MOVE_POINTS: dict[Point, Sequence[Incident]] = {
    granted: (*SHORT_STOPS, *P_LASTS, Incident("decode", "stop", LONG_S)),
    moving: (*EVERY, *P_COMES_BACK),
    in_host_memory: (*EVERY, *P_COMES_BACK),
    read_in_host_memory: EVERY,
}


def at(points: dict[Point, Sequence[Incident]]) -> pytest.MarkDecorator:
    cases = [(point, incident) for point, incidents in points.items() for incident in incidents]
    return pytest.mark.parametrize(
        ("point", "incident"), cases, ids=lambda one: one.__name__ if callable(one) else str(one)
    )


def go_through(pair: Pair, cluster: Cluster, point: Point, incident: Incident) -> None:
    with Scene(pair, (point.__name__, str(incident))) as scene:
        point(scene)
        answers = scene.suffer(incident, cluster)
    scene.settle()
    scene.assert_answers(incident, answers)


@pytest.mark.chaos
@on(POINTS)
class TestOneWorker:
    @pytest.mark.parametrize("pair", [("P", "D auto fail")], indirect=True, ids="-".join)
    @at(LANDING_POINTS)
    def test_a_landing(self, pair: Pair, cluster: Cluster, point: Point, incident: Incident) -> None:
        go_through(pair, cluster, point, incident)

    @pytest.mark.parametrize("pair", [("P", "D auto recompute")], indirect=True, ids="-".join)
    @at({queued: P_LASTS, landing: P_LASTS, unconfirmed: P_LASTS, waiting: P_LASTS})
    def test_a_landing_whose_prompt_is_computed_if_it_fails(
        self, pair: Pair, cluster: Cluster, point: Point, incident: Incident
    ) -> None:
        go_through(pair, cluster, point, incident)

    @pytest.mark.parametrize("pair", [("P", "D fail")], indirect=True, ids="-".join)
    @at(MOVE_POINTS)
    def test_the_move_of_a_lease(self, pair: Pair, cluster: Cluster, point: Point, incident: Incident) -> None:
        go_through(pair, cluster, point, incident)

    @pytest.mark.parametrize("pair", [("P", "D recompute")], indirect=True, ids="-".join)
    @at({granted: P_LASTS, moving: P_LASTS, in_host_memory: P_LASTS, read_in_host_memory: P_LASTS})
    def test_the_move_of_a_lease_whose_prompt_is_computed_if_it_fails(
        self, pair: Pair, cluster: Cluster, point: Point, incident: Incident
    ) -> None:
        go_through(pair, cluster, point, incident)


def landing_on_ranks(scene: Scene) -> None:
    """Half of the prompt is in the host memory of both ranks."""
    scene.pair.decode.gates.close("landing")
    scene.disaggregate("landing")
    scene.pair.decode.gates.wait_for("landing", workers=2)


def loading_on_ranks(scene: Scene) -> None:
    """The prompt has landed, and both ranks are loading it."""
    scene.pair.decode.gates.close("loading")
    scene.disaggregate("loading").is_lost = False
    scene.pair.decode.gates.wait_for("loading", workers=2)


def moving_on_ranks(scene: Scene) -> None:
    """Both ranks of P are copying a lease to host memory; then D is told of it."""
    prefill, prompt = scene.pair.prefill, scene.prompt("moving")
    prefill.gates.close("moving")
    params = prefill.client.prefill(prompt)
    prefill.gates.wait_for("moving", workers=2)

    def ask_late() -> Completion:
        scene.opened.wait()
        return scene.pair.decode_leg(prompt, params)

    scene.start(prompt, ask_late)


RANK = "Worker_TP1"
P_RANK_STOPS, D_RANK_STOPS = (Incident(side, "stop", SHORT_S, RANK) for side in ("prefill", "decode"))
P_RANK_DIES, D_RANK_DIES = (Incident(side, "kill", process=RANK) for side in ("prefill", "decode"))


@pytest.mark.chaos
@on(POINTS_OF_RANKS)
@pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join)
@at(
    {
        landing_on_ranks: (P_RANK_STOPS, D_RANK_STOPS, P_RANK_DIES, D_RANK_DIES),
        loading_on_ranks: (D_RANK_STOPS, P_RANK_DIES, D_RANK_DIES),
        moving_on_ranks: (P_RANK_STOPS, P_RANK_DIES),
    }
)
def test_one_of_two_workers(pair: Pair, cluster: Cluster, point: Point, incident: Incident) -> None:
    go_through(pair, cluster, point, incident)


@pytest.fixture
def leaving(cluster: Cluster) -> Iterator[Server]:
    """A prefill server to be told to stop."""
    (server,) = cluster.start([drained_at_points(_DRAIN_TIMEOUT_S)])
    yield server
    cluster.stop([server])


@pytest.mark.drain
@on(POINTS)
@pytest.mark.parametrize("pair", [("P", "D auto fail")], indirect=True, ids="-".join)
def test_a_prefill_server_that_is_told_to_stop_waits_for_a_landing_and_for_a_lease_that_has_moved(
    pair: Pair, leaving: Server, acquainted: set[Acquaintance]
) -> None:
    stopping = Pair(leaving, pair.decode)
    meet(stopping, acquainted)
    with Scene(pair, "filler") as scene, Scene(stopping, "drain") as drained:
        unread = drained.prompt("unread")
        others = moved(leaving)
        params = leaving.client.prefill(unread)
        until(lambda: moved(leaving) > others, "the lease has moved")
        filler = scene.fill_decode()
        pair.decode.gates.close("landing")
        drained.disaggregate("landing")
        pair.decode.gates.wait_for("landing")
        mark, before = leaving.log_size, pair.decode.client.metrics()
        leaving.process.terminate()
        until(lambda: "decode engines that hold 2 leases" in leaving.log_since(mark), "P stays", within_s=60.0)
        scene.open()
        drained.send(unread, params)
        scene.finish(filler)
        answers = [sent.answer.result(_DRAIN_TIMEOUT_S) for sent in drained.sent]
        assert leaving.process.wait(2 * _DRAIN_TIMEOUT_S) == 0, leaving.log_since(mark)
    for sent, answer in zip(drained.sent, answers, strict=True):
        assert answer is not None
        stopping.assert_right(answer, sent.prompt)
    assert pair.decode.client.metrics().since(before).value("vllm:pd_pull_bytes_from_host_total") > 0
    scene.settle()
