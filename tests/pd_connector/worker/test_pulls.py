"""A worker's pulls from many engines, and both scheduler halves with them: nobody waits for anybody else."""

import itertools
import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from pd_connector.orders import Cause, Orders, PullOrder, RefuseOrder, Report
from pd_connector.scheduler.decode.consumer import Consumer
from pd_connector.scheduler.prefill.leases import LeaseTable
from pd_connector.traces import PullTrace
from pd_connector.worker import pulls as pulls_module
from pd_connector.worker import session as session_module
from pd_connector.worker.pull_end import PullEnd
from pd_connector.worker.pulls import Pulls
from tests.support.connector.consumers import consumer_parts
from tests.support.connector.engines import (
    DECODE,
    OURS,
    PREFILL,
    THEIRS,
    Blocks,
    DecodeWorker,
    Site,
    an_order,
    decode_workers,
)
from tests.support.connector.requests import FakeRequest, a_prompt, allocated
from tests.support.engine.in_process import Fault, InProcessFabric
from tests.support.process import free_port
from tests.support.waiting import ManualClock, until
from transfer.control.client import ControlClient


class DecodeEngine:
    """The worker halves of a decode engine."""

    def __init__(self, fabric: InProcessFabric, tp: int = 1, peer_idle_s: float = 600.0, **changes: Any) -> None:
        self.workers = decode_workers(fabric, replace(DECODE, tp=tp))
        self.services = [Pulls(replace(worker.context(), **changes), peer_idle_s) for worker in self.workers]

    @property
    def worker(self) -> DecodeWorker:
        (worker,) = self.workers
        return worker

    @property
    def service(self) -> Pulls:
        (service,) = self.services
        return service

    def run(self, *orders: PullOrder) -> dict[str, list[PullEnd]]:
        """Hand orders to all ranks, and wait for the end of each on every rank."""
        for order in orders:
            for service in self.services:
                submit(service, order)
        return self.wait(len(orders) * len(self.services))

    def wait(self, number: int, timeout_s: float = 30.0) -> dict[str, list[PullEnd]]:
        """The next ends, by request id; fails if there are more of them or fewer."""
        ends: list[PullEnd] = []

        def arrived() -> bool:
            ends.extend(end for service in self.services for end in service.take_ends())
            for service in self.services:
                service.check_integrity()
            return len(ends) >= number

        until(arrived, lambda: f"only {len(ends)} of {number} pulls have settled", within_s=timeout_s)
        assert len(ends) == number
        return {request_id: [end for end in ends if end.request_id == request_id] for request_id in _ids(ends)}

    def close(self) -> None:
        for service in self.services:
            service.close()
            service.join()
        for worker in self.workers:
            worker.close()


def _ids(ends: list[PullEnd]) -> set[str]:
    return {end.request_id for end in ends}


def submit(service: Pulls, order: PullOrder) -> None:
    assert service.execute(Orders(pulls=(order,))) == [order.request_id]


def test_where_the_system_has_no_thread_left_a_pull_fails_and_the_worker_goes_on(site: Site) -> None:
    def no_thread(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    (worker,) = site.decode()
    pulls = site.add(Pulls(worker.context(), 600.0, open_session=no_thread))
    submit(pulls, an_order("r", site.prefill().prefill("r", THEIRS), OURS))
    (end,) = pulls.take_ends()
    assert (end.cause, end.reason) == (Cause.INTERNAL, "no pull can begin: can't start new thread")


Decode = Callable[..., DecodeEngine]


@pytest.fixture
def start_decode(site: Site) -> Decode:
    """Starts a decode engine on the site."""
    return lambda **options: site.add(DecodeEngine(site.fabric, **options))


def pull_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("pd-pull-")}


def engines_pulled_from() -> set[str]:
    return {thread.name for thread in pull_threads()}


def test_requests_of_a_decode_engine_at_tp_2_are_pulled_from_a_prefill_engine_at_tp_2(
    site: Site, start_decode: Decode
) -> None:
    """From the router's params to the freed lease: both scheduler halves, both ranks of both engines."""
    prefill = site.prefill(engine=replace(PREFILL, tp=2))
    decode = start_decode(tp=2)
    client = ControlClient()
    consumer = Consumer(*consumer_parts(client))
    tables: dict[str, Blocks] = {"a": ((1, 2, 8, 3, 11),), "b": ((4, 5, 6, 7, 9),)}
    with closing(client):
        for request_id, blocks in tables.items():
            params = prefill.prefill(f"{request_id} at p", THEIRS).to_params()
            request = FakeRequest(request_id, a_prompt(70), params)
            consumer.add(request)
            consumer.allocated(request, allocated(*blocks), consumer.missing_tokens(request, 0) or 0)
        orders = consumer.step_orders({})
        assert orders == Orders(pulls=orders.pulls)
        ends = decode.run(*orders.pulls)
        for request_id, of_ranks in ends.items():
            assert [end.cause for end in of_ranks] == ["", ""]
            consumer.settled({request_id}, set(), Report())
            consumer.check_integrity()
    assert ends.keys() == tables.keys()
    assert all(worker.holds([(blocks, 0, 69) for blocks in tables.values()]) for worker in decode.workers)
    assert sorted(prefill.leases.collect()) == ["a at p", "b at p"]
    assert prefill.leases.take_counts() == {"granted": 2, "released": 2}


def test_a_renewal_keeps_the_lease_of_a_slow_pull(site: Site, start_decode: Decode) -> None:
    prefill, decode = site.prefill(), start_decode()
    clock, client = ManualClock(), ControlClient()
    prefill.service.leases = LeaseTable(30.0, clock)
    parts = consumer_parts(client, clock)
    renewals, consumer = parts.renewals, Consumer(*parts)
    finish = threading.Event()
    site.fabric.inject(1, Fault(until=finish, fails=False))
    with closing(client):
        request = FakeRequest("r", a_prompt(70), prefill.prefill("r", THEIRS).to_params())
        consumer.add(request)
        consumer.allocated(request, allocated(*OURS), consumer.missing_tokens(request, 0) or 0)
        (order,) = consumer.step_orders({}).pulls
        submit(decode.service, order)
        for _ in range(9):
            clock.advance(10.0)
            answered = client.counters.answered
            renewals.send_due()
            until(lambda answered=answered: client.counters.answered > answered)  # type: ignore[misc]
        finish.set()
        assert [end.cause for end in decode.wait(1)["r"]] == [""]
    assert decode.worker.holds([(OURS, 0, 69)])


def test_a_request_that_leaves_early_frees_the_blocks_of_the_prefill_engine(site: Site, start_decode: Decode) -> None:
    prefill = site.prefill()
    client = ControlClient()
    consumer = Consumer(*consumer_parts(client))
    with closing(client):
        request = FakeRequest("r", a_prompt(70), prefill.prefill("r", THEIRS).to_params())
        consumer.add(request)
        consumer.finish(request, ())
        until(lambda: prefill.leases.collect() == ("r",))


@pytest.mark.thorough
def test_a_dead_engine_does_not_delay_the_pulls_from_another(site: Site, start_decode: Decode) -> None:
    prefill, decode = site.prefill(), start_decode(handshake_timeout_s=3.0)
    dead = an_order("dead", prefill.prefill("dead", THEIRS), OURS, remote_engine_id="d", remote_port=free_port())
    submit(decode.service, dead)
    time.sleep(0.02)  # its thread is in the handshake by now
    for number in range(3):
        assert decode.run(an_order(f"r{number}", prefill.prefill(f"r{number}", THEIRS), OURS)).keys() == {f"r{number}"}
    assert [end.cause for end in decode.wait(1)["dead"]] == ["unreachable"]


def test_a_read_that_hangs_does_not_delay_the_pulls_from_another_engine(site: Site, start_decode: Decode) -> None:
    hung, prefill, decode = site.prefill(), site.prefill(), start_decode()
    finish = threading.Event()
    site.fabric.inject(1, Fault(until=finish, fails=False))
    submit(decode.service, an_order("hung", hung.prefill("hung", THEIRS), ((4, 5, 6, 7, 9),)))
    until(lambda: site.fabric.reads == 1)
    assert [end.cause for end in decode.run(an_order("r", prefill.prefill("r", THEIRS), OURS))["r"]] == [""]
    finish.set()
    assert [end.cause for end in decode.wait(1)["hung"]] == [""]


def test_a_pull_under_way_ends_when_the_model_changes_and_the_next_compares_anew(
    site: Site, start_decode: Decode
) -> None:
    """Sessions with what was compared before finish their pulls, and get no more."""
    prefill, decode = site.prefill(), start_decode()
    finish = threading.Event()
    names = [f"old{number}" for number in range(6)]  # two more than there are lanes
    for number in range(1, 5):
        site.fabric.inject(number, Fault(until=finish, fails=False))
    for name in names:
        submit(decode.service, an_order(name, prefill.prefill(name, THEIRS), ((4, 5, 6, 7, 9),)))
    until(lambda: site.fabric.reads == 4)
    assert decode.service.execute(Orders(model_changes=1)) == []
    assert [end.cause for end in decode.run(an_order("r", prefill.prefill("r", THEIRS), OURS))["r"]] == [""]
    finish.set()
    ends = decode.wait(len(names))
    assert [ends[name][0].cause for name in names] == [""] * len(names)


@pytest.mark.thorough
def test_params_with_a_wrong_address_do_not_divert_other_pulls_from_that_engine(
    site: Site, start_decode: Decode
) -> None:
    prefill, decode = site.prefill(), start_decode(handshake_timeout_s=3.0)
    wrong = an_order("wrong", prefill.prefill("wrong", THEIRS), OURS, remote_port=free_port())
    ends = decode.run(wrong, an_order("right", prefill.prefill("right", THEIRS), OURS))
    assert [end.cause for end in ends["wrong"]] == ["unreachable"]
    assert [end.cause for end in ends["right"]] == [""]


def test_one_rank_that_fails_says_so_and_the_others_do_not(site: Site, start_decode: Decode) -> None:
    prefill, decode = site.prefill(engine=replace(PREFILL, tp=2)), start_decode(tp=2)
    site.fabric.inject(1, Fault(settled=False))
    ends = decode.run(an_order("r", prefill.prefill("r", THEIRS), OURS))["r"]
    assert sorted(end.cause for end in ends) == ["", "read"]
    assert site.fabric.deliver_late_bytes() == 0
    until(lambda: prefill.leases.collect() == ("r",))


def test_a_refusal_of_the_scheduler_half_is_reported_once_as_failed(site: Site, start_decode: Decode) -> None:
    decode = start_decode()
    refusal = RefuseOrder("r", Cause.PARAMS, "the two legs must carry the same prompt")
    assert decode.service.execute(Orders(refusals=(refusal,))) == ["r"]
    (end,) = decode.service.take_ends()
    assert end == PullEnd("r", Cause.PARAMS, "the two legs must carry the same prompt")
    assert decode.service.take_ends() == []


def test_a_refusal_of_the_scheduler_half_is_logged_by_one_rank(site: Site, start_decode: Decode) -> None:
    """There may be many ranks, and clients that send the same wrong params again and again."""
    decode = start_decode(tp=2)
    for service in decode.services:
        service.execute(Orders(refusals=(RefuseOrder("r", Cause.PARAMS, "of another prompt"),)))
    ends = decode.wait(2)["r"]
    assert [(end.reason, end.is_told) for end in ends] == [("of another prompt", False), ("of another prompt", True)]
    second = decode.services[1]
    second._max_peers = 0
    submit(second, an_order("other", site.prefill().prefill("other", THEIRS), OURS))
    (end,) = second.take_ends()
    assert (end.cause, end.is_told) == ("unreachable", False), "what is so on this rank alone"


def test_a_second_settlement_is_never_reported(
    site: Site, start_decode: Decode, caplog: pytest.LogCaptureFixture
) -> None:
    decode = start_decode()
    decode.service.execute(Orders(refusals=(RefuseOrder("r", Cause.PARAMS, "first"),)))
    decode.service._ended.put(PullEnd("r", Cause.READ, "second"))
    with caplog.at_level(logging.ERROR):
        assert [end.reason for end in decode.service.take_ends()] == ["first"]
    assert "request r settled twice" in caplog.text


def test_an_id_may_be_pulled_again_after_it_was_reported(site: Site, start_decode: Decode) -> None:
    prefill, decode = site.prefill(), start_decode()
    for _ in range(2):
        assert [end.cause for end in decode.run(an_order("r", prefill.prefill("r", THEIRS), OURS))["r"]] == [""]
        assert prefill.leases.collect() == ("r",)


def test_an_idle_session_is_closed_when_a_new_engine_comes(site: Site, start_decode: Decode) -> None:
    first, second, decode = site.prefill(), site.prefill(), start_decode(peer_idle_s=0.05)
    decode.run(an_order("r1", first.prefill("r1", THEIRS), OURS))
    idle = pull_threads()
    time.sleep(0.1)
    decode.run(an_order("r2", second.prefill("r2", THEIRS), OURS))
    until(lambda: not idle & pull_threads())
    assert len(engines_pulled_from()) == 1
    assert [end.cause for end in decode.run(an_order("r3", first.prefill("r3", THEIRS), OURS))["r3"]] == [""]


def test_a_session_with_a_pull_under_way_is_not_idle(site: Site, start_decode: Decode) -> None:
    slow, other, decode = site.prefill(), site.prefill(), start_decode(peer_idle_s=0.01)
    finish = threading.Event()
    site.fabric.inject(1, Fault(until=finish, fails=False))
    submit(decode.service, an_order("slow", slow.prefill("slow", THEIRS), ((4, 5, 6, 7, 9),)))
    until(lambda: site.fabric.reads == 1)
    time.sleep(0.02)
    decode.run(an_order("r", other.prefill("r", THEIRS), OURS))
    submit(decode.service, an_order("behind", slow.prefill("behind", THEIRS), OURS))
    assert len(engines_pulled_from()) == 2
    finish.set()
    ends = decode.wait(2)
    assert {end.cause for of_ranks in ends.values() for end in of_ranks} == {""}


def test_closing_drops_what_is_queued_and_joins_all_threads(
    site: Site, start_decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "LANES", 1)
    engines, decode = [site.prefill() for _ in range(3)], start_decode()
    finish = threading.Event()
    for read in (1, 2, 3):
        site.fabric.inject(read, Fault(until=finish, fails=False))
    for number in range(9):
        submit(decode.service, an_order(f"r{number}", engines[number % 3].prefill(f"r{number}", THEIRS), OURS))
    until(lambda: site.fabric.reads == 3)
    decode.service.close()
    finish.set()
    decode.service.join()
    assert pull_threads() == set()
    assert site.fabric.reads == 3


def test_no_more_engines_are_pulled_from_at_once_than_allowed(site: Site) -> None:
    """The ids and addresses of engines come from clients: they must not make threads without end."""
    (worker,), prefill = site.decode(), site.prefill()
    service = Pulls(worker.context(), 600.0, max_peers=2)
    finish = threading.Event()
    site.fabric.inject(1, Fault(until=finish, fails=False))
    submit(service, an_order("real", prefill.prefill("real", THEIRS), OURS))
    port = free_port()
    for name in ("x", "y"):
        remote = prefill.prefill(name, THEIRS)
        submit(service, an_order(name, remote, OURS, remote_engine_id=name, remote_port=port))
    (end,) = service.take_ends()
    assert (end.request_id, end.cause) == ("y", "unreachable")
    assert len(engines_pulled_from()) == 2
    finish.set()
    service.close()
    worker.client.close()
    service.join()
    assert pull_threads() == set()


def test_one_engine_more_than_allowed_costs_one_session(
    site: Site, start_decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a session are links and plans: with all of them closed, the next pull from each would begin anew."""
    engines, decode = [site.prefill() for _ in range(4)], start_decode(handshake_timeout_s=0.5)
    decode.service._max_peers = 3
    sessions, port = decode.service._sessions, free_port()

    def pull(number: int, **changes: Any) -> None:
        name = str(next(names))
        decode.run(an_order(name, engines[number].prefill(name, THEIRS), OURS, **changes))
        until(lambda: all(session.idle for session in sessions.values()))

    names = itertools.count()
    for number in (0, 1, 0):
        pull(number)
    met = dict(sessions)
    monkeypatch.setattr(pulls_module, "MOST_UNMET", 1)
    pull(0, remote_port=free_port())  # nobody is there
    decode.service._max_peers = 4
    pull(0, remote_port=port)
    assert port in {peer.port for peer in sessions}
    assert len(sessions) == 3, "one of these at a time"
    decode.service._max_peers = 3
    pull(2)
    assert port not in {peer.port for peer in sessions}, "who has never answered goes first"
    assert met.items() <= sessions.items()
    pull(3)
    _, second = met
    assert met.keys() - sessions.keys() == {second}, "then what was used longest ago"
    assert len(sessions) == 3


def test_wrong_ports_of_one_host_do_not_keep_other_hosts_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls_module, "MOST_UNMET", 2)
    (worker,), prefill = site.decode(), site.prefill()
    service = Pulls(worker.context(), 600.0)
    submit(service, an_order("real", prefill.prefill("real", THEIRS), OURS))
    until(lambda: [end.cause for end in service.take_ends()] == [""])
    port = free_port()
    for name, host in (("a", "127.0.0.1"), ("b", "127.0.0.1"), ("c", "127.0.0.1"), ("elsewhere", "127.0.0.2")):
        remote = prefill.prefill(name, THEIRS)
        submit(service, an_order(name, remote, OURS, remote_engine_id=name, remote_host=host, remote_port=port))
    (end,) = service.take_ends()
    assert (end.request_id, end.cause) == ("c", "unreachable")
    assert "or 2 of this host of which none has answered yet" in end.reason
    assert len(engines_pulled_from()) == 4
    service.close()
    worker.client.close()
    service.join()
    assert pull_threads() == set()


def test_any_number_of_engines_of_one_host_that_answer_stay_met(
    site: Site, monkeypatch: pytest.MonkeyPatch, start_decode: Decode
) -> None:
    monkeypatch.setattr(pulls_module, "MOST_UNMET", 1)
    decode = start_decode()
    for name in ("a", "b", "c"):
        submit(decode.service, an_order(name, site.prefill().prefill(name, THEIRS), OURS))
        assert not decode.wait(1)[name][0].failure
    assert len(engines_pulled_from()) == 3


def test_wrong_ports_of_one_host_close_no_sessions_of_others(
    site: Site, monkeypatch: pytest.MonkeyPatch, start_decode: Decode
) -> None:
    monkeypatch.setattr(pulls_module, "MOST_UNMET", 2)
    prefill, decode, port = site.prefill(), start_decode(), free_port()
    for name in ("right", "a", "b", "c"):
        wrong: dict[str, Any] = {"remote_engine_id": name, "remote_host": "127.0.0.2", "remote_port": port}
        submit(
            decode.service, an_order(name, prefill.prefill(name, THEIRS), OURS, **({} if name == "right" else wrong))
        )
        if name == "right":
            decode.wait(1)
            met = engines_pulled_from()
    assert met < engines_pulled_from()
    assert len(engines_pulled_from()) == 3


def test_closing_does_not_wait_for_ever_for_a_read_that_hangs(
    site: Site, start_decode: Decode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pulls_module, "_CLOSE_TIMEOUT_S", 0.05)
    prefill, decode = site.prefill(), start_decode()
    finish = threading.Event()
    site.fabric.inject(1, Fault(until=finish, fails=False))
    submit(decode.service, an_order("r", prefill.prefill("r", THEIRS), OURS))
    until(lambda: site.fabric.reads == 1)
    decode.service.close()
    until(lambda: len(pull_threads()) == 1)
    (stuck,) = pull_threads()
    decode.service.join()
    assert "1 reads were still under way at shutdown" in caplog.text
    with pytest.raises(RuntimeError, match="1 reads from prefill engines did not end"):
        decode.service.check_ended()
    finish.set()
    stuck.join(5.0)
    assert not stuck.is_alive()


# Traces


def test_a_pull_that_is_refused_is_traced_as_well(site: Site, start_decode: Decode) -> None:
    traces: list[PullTrace] = []
    service = start_decode(trace=traces.append).service
    refusals = (
        RefuseOrder("traced", Cause.PARAMS, "of another prompt", "00-1-2-01"),
        RefuseOrder("untraced", Cause.PARAMS, "of another prompt"),
    )
    service.execute(Orders(refusals=refusals))
    assert len(service.take_ends()) == 2
    assert [(one.request_id, one.cause, one.reason, one.laps) for one in traces] == [
        ("traced", Cause.PARAMS, "of another prompt", ())
    ]


def test_a_pull_of_real_bytes_has_every_phase_in_its_trace(site: Site, start_decode: Decode) -> None:
    traces: list[PullTrace] = []
    prefill, decode = site.prefill(), start_decode(trace=traces.append)
    decode.run(replace(an_order("r", prefill.prefill("r", THEIRS), OURS), traceparent="00-1-2-01"))
    (trace,) = traces
    assert [lap.phase for lap in trace.laps] == ["queue", "handshake", "plan", "read", "release"]
    assert trace.laps[0].start == trace.started
    assert all(lap.end == following.start for lap, following in pairwise(trace.laps))
    assert (trace.cause, trace.figures["tokens"], trace.source) == ("", 69, f"127.0.0.1:{prefill.port}")
    assert trace.figures["bytes"] > 0
