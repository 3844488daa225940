"""Pulls on a worker for which no request waits: real reads into blocks of the device, and ends that are reported."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pd_connector.orders import Orders, RankEnds, Report
from pd_connector.stats import StatsRecorder
from pd_connector.worker.pull_end import PullEnd
from pd_connector.worker.pulls import Pulls
from pd_connector.worker.unawaited_pulls import PrefixPulls
from tests.support.connector.engines import OURS, PREFILL, THEIRS, DecodeWorker, Site, an_order
from tests.support.engine.in_process import Fault
from tests.support.waiting import until


class Puller:
    """A worker that pulls prefixes."""

    def __init__(self, worker: DecodeWorker) -> None:
        self.worker, self.stats = worker, StatsRecorder()
        self.prefixes = PrefixPulls(worker.context(), 600.0, self.stats)

    def end(self) -> Report:
        reports: list[Report] = []

        def has_ended() -> bool:
            assert not self.prefixes.take_ends(), "no request waits for it"
            reports.append(self.prefixes.take_report())
            return bool(reports[-1].prefixes)

        until(has_ended)
        return reports[-1]

    def close(self) -> None:
        self.prefixes.close()
        self.prefixes.join()


@pytest.fixture
def puller(site: Site) -> Iterator[Puller]:
    puller = Puller(site.decode()[0])
    yield puller
    puller.close()
    puller.prefixes.check_ended()
    puller.prefixes.check_integrity()


def test_a_prefix_is_pulled_and_no_request_waits_for_it(puller: Puller, site: Site) -> None:
    lease = site.prefill(PREFILL).prefill("lease", THEIRS)
    assert puller.prefixes.execute(Orders(prefixes=(an_order("lease", lease, OURS),))) == []
    assert puller.end().prefixes == {"lease": RankEnds(1)}
    assert puller.worker.holds([(OURS, 0, 69)], PREFILL)
    counts = (puller.stats.take() or {})["counts"]
    assert set(counts) == {"prefix_bytes"}, "it is no pull that a request depends on"


def test_one_that_fails_is_reported_and_not_counted_as_a_failed_pull(
    puller: Puller, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    lease = site.prefill(PREFILL).prefill("lease", THEIRS)
    site.fabric.inject(1, Fault())
    puller.prefixes.execute(Orders(prefixes=(an_order("lease", lease, OURS),)))
    assert puller.end().prefixes == {"lease": RankEnds(1, failed=True)}
    assert "so it is computed" in caplog.text
    assert puller.stats.take() is None


def test_pulls_for_others_are_left_to_others(puller: Puller, site: Site) -> None:
    order = an_order("lease", site.prefill(PREFILL).prefill("lease", THEIRS), OURS)
    puller.prefixes.execute(Orders(pulls=(order,), landings=(order,)))
    assert not puller.prefixes.abandoned()


def test_what_lacked_states_is_said_by_how_it_ended_and_remembered_nowhere(puller: Puller) -> None:
    pulls = puller.prefixes
    pulls._outstanding["prefix"] = False
    pulls._ended.put(PullEnd("prefix", lacking_states=frozenset({(1, 0)})))
    assert puller.end().prefixes == {"prefix": RankEnds(1, lacking_states=frozenset({(1, 0)}))}
    assert not pulls.take_report()


@pytest.fixture
def pulls(site: Site) -> Iterator[Pulls]:
    (worker,) = site.decode()
    pulls = Pulls(worker.context(), 600.0)
    yield pulls
    pulls.close()
    pulls.join()


def test_no_request_waits_for_the_second_part_of_a_pull_whose_end_is_reported_once(pulls: Pulls, site: Site) -> None:
    prefill = site.prefill()
    first = replace(an_order("r", prefill.prefill("r", THEIRS), OURS), parts=2)
    second = replace(first, request_id="b", pull_id="b", first_token=first.end_token, part=1)
    assert pulls.execute(Orders(pulls=(first,), borders=(second,))) == ["r"]
    ends = list[PullEnd]()
    reports = list[Report]()

    def have_both() -> bool:
        ends.extend(pulls.take_ends())
        reports.extend(filter(None, [pulls.take_report()]))
        return bool(ends and reports)

    until(have_both)
    assert [(end.request_id, end.failure) for end in ends] == [("r", "")]
    assert [report.borders for report in reports] == [{"b": RankEnds(1)}]
    assert not prefill.service.leases.active
    assert not pulls.take_report()
    assert not pulls.abandoned()


def test_the_second_part_is_lost_when_its_engine_goes_to_sleep(pulls: Pulls, site: Site) -> None:
    order = replace(an_order("b", site.prefill().prefill("r", THEIRS), OURS, first=69), part=1, parts=2)
    pulls.execute(Orders(borders=(order,)))
    pulls.close()
    assert pulls.abandoned().borders == {"b": RankEnds(1, failed=True)}
    assert not pulls.abandoned()
