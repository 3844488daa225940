"""The scheduler side: which roles it takes up, in which order they are asked, and what of their answers vLLM is told.

Covers: pd_connector.scheduler.scheduler_role.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from layout.geometry import CacheGroup, WorkerGeometry
from pd_connector.orders import CanaryRoom, Cause, Orders, RefuseOrder, Report, WorkerHandshake
from pd_connector.scheduler.decode.canaries import Canaries
from pd_connector.scheduler.decode.consumer import Consumer
from pd_connector.scheduler.decode.landings import Landings
from pd_connector.scheduler.external_loads import ExternalLoads
from pd_connector.scheduler.host.tier import HostTier
from pd_connector.scheduler.prefill.lease_moves import LeaseMoves
from pd_connector.scheduler.prefill.producer import Producer
from pd_connector.scheduler.request_admission import RequestAdmission
from pd_connector.scheduler.scheduler import ConnectorScheduler
from pd_connector.scheduler.scheduler_role import SchedulerRole
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.engine_config import UnsupportedError
from tests.support.connector.requests import FakeRequest, a_prompt, allocated
from tests.support.host_tier.setup import Setup, make_manager, make_request
from tests.support.process import free_port

Calls = list[tuple[Any, ...]]
REQUEST: Any = FakeRequest("r", a_prompt(70))
HOST = {"cpu_bytes_to_use": 1 << 20}


class Recorded(SchedulerRole):
    """Writes down what it is asked, and answers as the test says."""

    def __init__(self, name: str, calls: Calls) -> None:
        self.name, self.calls = name, calls
        self.missing = 0
        self.takes = 0
        self.params: dict[str, Any] | None = None
        self.wants = self.frees_soon = self.waits = False
        self.can_reset = True

    def note(self, *what: object) -> None:
        self.calls.append((self.name, *what))

    def set_workers(self, handshakes: Sequence[WorkerHandshake]) -> None:
        self.note("workers", *(handshake.host_slots for handshake in handshakes))

    def add(self, request: Any) -> None:
        self.note("add", request.request_id)

    def free_blocks(self) -> None:
        self.note("free")

    def must_wait(self, request: Any, computed_tokens: int) -> bool:
        return self.waits

    def missing_tokens(self, request: Any, computed_tokens: int) -> int:
        self.note("missing", computed_tokens)
        return self.missing

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> int:
        self.note("allocated", external_tokens)
        return self.takes

    def step_orders(self, scheduled: Mapping[str, int]) -> Orders:
        self.note("orders", *scheduled)
        return Orders(refusals=(RefuseOrder(self.name, Cause.LEASE, ""),))

    def settled(self, request_ids: set[str], failed: set[str], report: Report) -> None:
        self.note("settled", *sorted(request_ids), "failed", *sorted(failed))

    def finish(self, request: Any, block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        self.note("finish", *block_ids)
        return self.params

    @property
    def wants_step(self) -> bool:
        return self.wants

    @property
    def frees_blocks_soon(self) -> bool:
        return self.frees_soon

    def loaded_tokens(self, request: Any) -> int:
        return self.takes

    def take_events(self) -> Any:
        return [f"event of {self.name}"]

    def update_stats(self, stats: StatsRecorder) -> None:
        stats.count("asked", label=self.name)

    def reset(self) -> bool:
        self.note("reset")
        return self.can_reset

    def close(self) -> None:
        self.note("close")

    def check_integrity(self) -> None:
        self.note("check")


Open = Callable[..., ConnectorScheduler]


@pytest.fixture
def calls() -> Calls:
    return []


@pytest.fixture
def side(side_of: Open) -> ConnectorScheduler:
    """One that has no roles of its own, and knows its worker."""
    side = side_of("kv_both")
    side.shutdown()
    side._roles.clear()
    side.set_workers({(0, 0): a_handshake(0, 0, 0)})
    return side


@pytest.fixture
def roles(side: ConnectorScheduler, calls: Calls) -> list[Recorded]:
    """Its roles: "host" is asked before "pulls"."""
    roles = [Recorded("host", calls), Recorded("pulls", calls)]
    side._roles.extend(roles)
    return roles


# Roles


def kinds(side: ConnectorScheduler) -> list[type[SchedulerRole]]:
    return [type(role) for role in side._roles if not isinstance(role, ExternalLoads)]  # which every engine has


@pytest.mark.parametrize(
    ("kv_role", "expected"),
    [
        ("kv_producer", [Producer, RequestAdmission]),
        ("kv_consumer", [RequestAdmission, Consumer]),
        ("kv_both", [Producer, RequestAdmission, Consumer]),
    ],
)
def test_an_engine_takes_up_what_its_kv_role_says(
    side_of: Open, kv_role: str, expected: list[type[SchedulerRole]]
) -> None:
    assert kinds(side_of(kv_role)) == expected


@pytest.mark.parametrize(
    ("kv_role", "fraction"), [("kv_producer", 1.0), ("kv_both", 0.5)], ids=["all blocks", "half of the blocks"]
)
def test_an_engine_keeps_the_limits_that_are_no_settings(side_of: Open, kv_role: str, fraction: float) -> None:
    side = side_of(kv_role, **HOST, host_transfers="auto")
    assert side._admission is not None
    assert side._moves is not None
    assert side._admission._leases._max_age_s == 600.0
    assert side._admission._limits.leased_fraction == fraction
    assert side._moves._most_leased == 0.1
    if (consumer := side._consumer) is not None:
        limits = consumer._ahead._limits
        assert (limits.max_pulls_ahead, limits.max_ahead_fraction) == (16, 0.5)


@pytest.mark.parametrize(
    ("settings", "refuses"),
    [({"canary": None}, True), ({"canary": "warn"}, False), ({"canary": None, "model_check": "off"}, False)],
)
def test_an_engine_that_pulls_proves_where_it_pulls_from(
    side_of: Open, settings: dict[str, Any], refuses: bool
) -> None:
    side = side_of("kv_both", **settings)
    assert kinds(side) == [Producer, RequestAdmission, Canaries, Consumer]
    assert side._canaries.tries
    assert side._canaries._refuses == refuses
    assert side._consumer is not None
    assert side._consumer._canaries is side._canaries
    side.add(REQUEST)
    assert side.missing_tokens(REQUEST, 0) is None, "its workers say what they have room for"
    assert side.wants_step()
    room = CanaryRoom(512, 1, 16, 16)
    side.set_workers({(0, 0): dataclasses.replace(a_handshake(0, 0, 0), canary=room)})
    assert side.missing_tokens(REQUEST, 0) == 0


@pytest.mark.parametrize(
    ("kv_role", "params", "cause"),
    [
        ("kv_producer", {"do_remote_prefill": True, "transfer_id": "T"}, "role"),
        ("kv_producer", ["do_remote_prefill"], "params"),
        ("kv_producer", {"prefill_instance": "p0"}, "unusable"),
        ("kv_consumer", {"prefill_instance": "p0", "do_remote_prefill": None}, "unusable"),
        ("kv_consumer", {"do_remote_prefill": False, "transfer_id": "T"}, None),
        ("kv_consumer", {"do_remote_decode": True}, None),
        ("kv_both", {"do_remote_decode": True}, None),
        ("kv_both", {}, None),
        ("kv_both", None, None),
    ],
)
def test_a_leg_that_an_engine_cannot_serve_is_counted(
    side_of: Open, kv_role: str, params: Any, cause: str | None
) -> None:
    side = side_of(kv_role)
    side.add(FakeRequest("r", a_prompt(70), params))
    data = side._stats.take()
    counts = data["counts"] if data is not None else {}
    assert counts == ({f"prompts_computed:{cause}": 1} if cause else {})


def test_params_of_an_unknown_contract_are_named_in_one_warning(
    side_of: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    side = side_of("kv_both")
    for number in range(3):
        params = {"prefill_instance": "p0", **{f"key{each}": 1 for each in range(20)}, "long" * 50: 1}
        side.add(FakeRequest(f"r{number}", a_prompt(70), params))
    (message,) = [record.getMessage() for record in caplog.records if "contract" in record.getMessage()]
    assert "request r0 is served without a transfer" in message
    assert "neither do_remote_prefill nor do_remote_decode, but 'prefill_instance', 'key0'" in message
    assert len(message) < 500


def a_handshake(tp_rank: int, pp_rank: int, host_slots: int) -> WorkerHandshake:
    groups = (CacheGroup(32, 0, ()),)
    return WorkerHandshake(WorkerGeometry(tp_rank, 2, pp_rank, 2, "10.0.0.5:15000", groups, ()), host_slots)


def test_host_memory_is_asked_first_and_has_what_all_workers_have(side_of: Open) -> None:
    side = side_of("kv_both", **HOST)
    assert kinds(side) == [Producer, RequestAdmission, Consumer]
    side.bind_cache_manager(make_manager(Setup()))
    side.set_workers({(0, 0): a_handshake(0, 0, 9), (0, 1): a_handshake(1, 0, 5)})
    assert kinds(side) == [HostTier, Producer, RequestAdmission, Consumer]
    _, tier, *_ = side._roles
    assert isinstance(tier, HostTier)
    assert tier.pool.slots == 5
    side.check_integrity()


def test_whether_a_prompt_lands_is_asked_when_it_can_be_pulled(side_of: Open) -> None:
    side = side_of("kv_both", **HOST, host_transfers="auto")
    side.bind_cache_manager(make_manager(Setup()))
    side.set_workers({(0, 0): a_handshake(0, 0, 9999), (0, 1): a_handshake(1, 0, 9999)})
    assert kinds(side) == [HostTier, Producer, RequestAdmission, LeaseMoves, Consumer, Landings]


@pytest.mark.parametrize("settings", [HOST, {"serve_prefixes": True}, {"peers": []}], ids=lambda each: next(iter(each)))
def test_what_needs_prefix_caching_is_refused_at_once_without(side_of: Open, settings: dict[str, Any]) -> None:
    def switch_off(config: Any) -> None:
        config.cache_config.enable_prefix_caching = False

    with pytest.raises(UnsupportedError, match=rf"{next(iter(settings))}: .* prefix caching, which is off"):
        side_of("kv_both", switch_off, **settings)


def test_engines_of_one_deployment_on_one_host_have_ports_in_a_row(side_of: Open) -> None:
    def be_the_third(config: Any) -> None:
        config.parallel_config.data_parallel_index = 2

    port = free_port()
    _, producer, _ = side_of("kv_producer", be_the_third, port=port - 2)._roles
    assert isinstance(producer, Producer)
    assert producer.port == port


@pytest.mark.parametrize("given", [int, str])
def test_without_port_the_control_port_is_what_a_recipe_has_beside_the_settings(
    side_of: Open, given: Callable[[int], int | str]
) -> None:
    """As ``--kv-transfer-config`` has it, and with the data-parallel index."""
    port, other = free_port(), free_port()

    def be_the_third(config: Any) -> None:
        config.parallel_config.data_parallel_index = 2
        transfer = config.kv_transfer_config
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="PDConnector",
            kv_role="kv_producer",
            kv_port=given(port - 2),
            kv_connector_extra_config=transfer.kv_connector_extra_config,
        )

    _, producer, _ = side_of("kv_producer", be_the_third)._roles
    assert isinstance(producer, Producer)
    assert producer.port == port
    _, producer, _ = side_of("kv_producer", be_the_third, port=other - 2)._roles
    assert isinstance(producer, Producer)
    assert producer.port == other, "port goes first"


def test_the_default_of_kv_port_is_nobodys_choice(side_of: Open) -> None:
    _, producer, _ = side_of("kv_producer")._roles
    assert isinstance(producer, Producer)
    assert producer.port != KVTransferConfig(kv_connector="PDConnector", kv_role="kv_both").kv_port


def test_workers_are_known_stage_by_stage(side: ConnectorScheduler, roles: list[Recorded], calls: Calls) -> None:
    ranks = [(1, 0), (0, 1), (1, 1), (0, 0)]
    side.set_workers({(pp, tp): a_handshake(tp, pp, 10 * pp + tp) for pp, tp in ranks})
    assert calls == [(role.name, "workers", 0, 1, 10, 11) for role in roles]


def test_a_role_that_overrides_nothing_changes_nothing(side: ConnectorScheduler) -> None:
    side._roles.append(SchedulerRole())
    side.set_workers({(0, 0): a_handshake(0, 0, 1)})
    side.add(REQUEST)
    assert side.missing_tokens(REQUEST, 0) == 0
    side.allocated(REQUEST, allocated([1, 2]), 0)
    assert side.step_orders({}) == Orders()
    side.settled({"r"}, set(), Report())
    assert side.finish(REQUEST, ([1, 2],)) is None
    assert not side.wants_step()
    assert not side.frees_blocks_soon()
    assert side.loaded_tokens(REQUEST) == 0
    assert side.take_events() == []
    assert side.reset()
    side.update_stats()
    side.check_integrity()


# Workers whose handshakes come with a report, because another connector got vLLM's call for them


def two_ranks(config: Any) -> None:
    config.parallel_config.tensor_parallel_size = 2


@pytest.mark.parametrize(("kv_role", "extra"), [("kv_producer", {}), ("kv_consumer", HOST)])
def test_requests_wait_until_reports_have_brought_every_workers_handshake(
    side_of: Open, kv_role: str, extra: dict[str, int]
) -> None:
    side = side_of(kv_role, two_ranks, **extra)
    side.bind_cache_manager(make_manager(Setup()))
    side.set_workers({})
    request = make_request(Setup(), "r", range(9))
    side.add(request)
    for known in ({}, {(0, 1): a_handshake(1, 0, 5)}):
        side.settled(set(), set(), Report(handshakes=known))
        assert side.wants_step(), "the report comes with a step"
        assert side.missing_tokens(request, 0) is None
    side.settled(set(), set(), Report(handshakes={(0, 0): a_handshake(0, 0, 9)}))
    assert not side.wants_step()
    assert side.missing_tokens(request, 0) == 0
    side.check_integrity()


def test_an_engine_that_only_pulls_does_not_wait_for_its_workers(side_of: Open) -> None:
    side = side_of("kv_consumer")
    side.add(REQUEST)
    assert side.missing_tokens(REQUEST, 0) == 0
    assert not side.wants_step()


def test_host_memory_that_opens_late_takes_up_the_requests_that_have_waited(side_of: Open) -> None:
    side = side_of("kv_consumer", **HOST)
    side.bind_cache_manager(make_manager(Setup()))
    stays: Any = FakeRequest("stays", a_prompt(9))
    leaves: Any = FakeRequest("leaves", a_prompt(9))
    for request in (stays, leaves):
        side.add(request)
        assert side.missing_tokens(request, 0) is None
    side.finish(leaves, ([],))
    side.settled(set(), set(), Report(handshakes={(0, 0): a_handshake(0, 0, 5)}))
    tier = side._roles[1]
    assert isinstance(tier, HostTier)
    assert list(tier._requests) == ["stays"]


# Tokens


def test_each_role_is_asked_for_what_those_before_it_do_not_bring(
    side: ConnectorScheduler, roles: list[Recorded], calls: Calls
) -> None:
    roles[0].missing, roles[1].missing = 32, 17
    assert side.missing_tokens(REQUEST, 16) == 49
    freed, asked = calls[:2], calls[2:]
    assert freed == [("host", "free"), ("pulls", "free")], "blocks are free before any are looked for"
    assert asked == [("host", "missing", 16), ("pulls", "missing", 48)]


def test_nobody_looks_for_tokens_of_a_request_that_must_wait(
    side: ConnectorScheduler, roles: list[Recorded], calls: Calls
) -> None:
    roles[1].waits = True
    assert side.missing_tokens(REQUEST, 0) is None
    assert calls == []


def test_each_role_takes_its_part_of_the_tokens_that_were_found_room_for(
    side: ConnectorScheduler, roles: list[Recorded], calls: Calls
) -> None:
    roles[0].takes, roles[1].takes = 32, 17
    side.allocated(REQUEST, allocated([1, 2, 3, 4]), 49)
    assert calls == [("host", "allocated", 49), ("pulls", "allocated", 17)]
    assert side.loaded_tokens(REQUEST) == 49


@pytest.mark.parametrize(("tokens", "expected"), [(49, [("r", [1])]), (0, [])])
def test_vllm_is_to_zero_no_state_that_is_pulled(
    side: ConnectorScheduler, monkeypatch: pytest.MonkeyPatch, tokens: int, expected: list[tuple[str, list[int]]]
) -> None:
    left: list[tuple[str, list[int]]] = []
    monkeypatch.setattr(side, "_states", [1])
    monkeypatch.setattr(side._blocks, "leave_unzeroed", lambda request, groups: left.append((request, groups)))
    side.allocated(REQUEST, allocated([1, 2, 3, 4]), tokens)
    assert left == expected


# Steps


def test_orders_of_a_step_are_those_of_all_roles(side: ConnectorScheduler, roles: list[Recorded], calls: Calls) -> None:
    orders = side.step_orders({"r": 5})
    assert [order.request_id for order in orders.refusals] == ["host", "pulls"]
    assert calls == [("host", "free"), ("pulls", "free"), ("host", "orders", "r"), ("pulls", "orders", "r")]


@pytest.mark.parametrize("number", [0, 1])
def test_one_role_is_enough_to_want_a_step_or_to_wait_for_blocks(
    side: ConnectorScheduler, roles: list[Recorded], calls: Calls, number: int
) -> None:
    assert not side.wants_step()
    assert not side.frees_blocks_soon()
    roles[number].wants = True
    assert (side.wants_step(), side.frees_blocks_soon()) == (True, False)
    assert calls == []
    roles[number].wants, roles[number].frees_soon = False, True
    assert (side.wants_step(), side.frees_blocks_soon()) == (False, True)
    assert calls == []


@pytest.mark.usefixtures("roles")
def test_all_roles_hear_of_every_request(side: ConnectorScheduler, calls: Calls) -> None:
    side.add(REQUEST)
    side.settled({"r"}, {"r"}, Report())
    expected = [("add", "r"), ("settled", "r", "failed", "r")]
    assert calls == [(name, *call) for call in expected for name in ("host", "pulls")]


@pytest.mark.usefixtures("roles")
@pytest.mark.parametrize("by_report", [False, True])
def test_a_request_that_failed_on_one_rank_has_failed_when_all_have_reported_it(
    side: ConnectorScheduler, calls: Calls, by_report: bool
) -> None:
    """The ranks need not report it in the same step, and requests that have not failed may end meanwhile."""
    failed, report = (set[str](), Report(failed=frozenset({"r"}))) if by_report else ({"r"}, Report())
    side.settled(set(), failed, report)
    side.settled({"other"}, set(), Report())
    side.settled({"r"}, set(), Report())
    side.settled({"r"}, set(), Report())  # again under the same id, and well
    expected = [("failed",), ("other", "failed"), ("r", "failed", "r"), ("r", "failed")]
    assert calls == [(name, "settled", *call) for call in expected for name in ("host", "pulls")]


@pytest.mark.parametrize(
    ("answers", "told"),
    [((None, None), None), (({"a": 1}, None), {"a": 1}), ((None, {"b": 2}), {"b": 2}), (({}, {"b": 2}), {})],
)
def test_a_response_has_the_params_of_the_first_role_that_has_any_and_all_let_the_request_go(
    side: ConnectorScheduler, roles: list[Recorded], calls: Calls, answers: tuple[Any, Any], told: Any
) -> None:
    for role, params in zip(roles, answers, strict=True):
        role.params = params
    assert side.finish(REQUEST, ([3, 1],)) == told
    assert calls == [("host", "finish", [3, 1]), ("pulls", "finish", [3, 1])]


@pytest.mark.usefixtures("roles")
def test_events_and_counts_are_those_of_all_roles(side: ConnectorScheduler) -> None:
    assert side.take_events() == ["event of host", "event of pulls"]
    side.update_stats()
    data = side._stats.take()
    assert data is not None
    assert data["counts"] == {"asked:host": 1, "asked:pulls": 1}


@pytest.mark.parametrize("stubborn", [(), (0,), (1,), (0, 1)])
def test_all_roles_forget_and_one_that_cannot_is_told(
    side: ConnectorScheduler, roles: list[Recorded], calls: Calls, stubborn: tuple[int, ...]
) -> None:
    for number in stubborn:
        roles[number].can_reset = False
    assert side.reset() == (not stubborn)
    assert calls == [("host", "reset"), ("pulls", "reset")]


@pytest.mark.usefixtures("roles")
def test_all_roles_are_closed_and_their_books_checked(side: ConnectorScheduler, calls: Calls) -> None:
    side.check_integrity()
    side.shutdown()
    assert calls == [(name, call) for call in ("check", "close") for name in ("host", "pulls")]
