"""vLLM releases behind the interface of the connector: the installed one answers with the objects of vLLM.

Covers: pd_connector.vllm.releases.newest, pd_connector.vllm.releases.release_030,
pd_connector.vllm.releases.release_031, pd_connector.vllm.releases.release_032.
"""

import logging
import sys
import traceback

import pytest
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.sched.scheduler import Scheduler

import pd_connector
from pd_connector.vllm.releases import installed as installed_release
from pd_connector.vllm.releases.newest import VllmRelease, wrap
from pd_connector.vllm.releases.release_023 import Release023
from pd_connector.vllm.releases.release_030 import Release030
from pd_connector.vllm.releases.release_031 import Release031
from pd_connector.vllm.releases.release_032 import Release032
from tests.support.host_tier.setup import CONFIG, Setup, make_manager, make_request
from tests.support.releases import INSTALLED, since

#: Blocks of 4 tokens, the second group's of 8 with a window, so that hashes are made of 4 tokens.
SETUP = Setup(groups=((4, 0), (8, 12)), device_blocks=12, events=True)


@pytest.fixture
def installed() -> VllmRelease:
    return installed_release.current()


SERVED = {
    (0, 23): Release023,
    (0, 30): Release030,
    (0, 31): Release031,
    (0, 32): Release032,
    (0, 33): VllmRelease,
}


def test_the_release_that_the_tests_run_on_is_served(installed: VllmRelease) -> None:
    assert type(installed) is SERVED[INSTALLED]


def test_every_tested_release_has_its_differences() -> None:
    assert {version: type(installed_release.release_of(version)) for version in installed_release.TESTED} == SERVED


@pytest.mark.parametrize(
    ("version", "nearest"),
    [
        ((0, 20), Release023),
        ((0, 34), VllmRelease),
        ((1, 0), VllmRelease),
        (None, VllmRelease),
    ],
)
def test_other_releases_are_taken_for_the_nearest(
    version: installed_release.Version | None, nearest: type[VllmRelease]
) -> None:
    assert type(installed_release.release_of(version)) is nearest


@pytest.mark.parametrize("numbers", [(0, 0, "dev"), (0, 1, "dev1", "g0123abc")])
def test_a_build_that_does_not_know_its_version_is_taken_for_the_newest(
    numbers: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.version.__version_tuple__", numbers)
    assert installed_release.installed_version() is None


@pytest.mark.parametrize(
    ("version", "warned"),
    [
        ("0.29.1", True),
        ("0.30.2", False),
        ("0.30.0+empty", False),
        ("0.33.0", False),
        ("0.33.1.dev0+d20261130", False),  # the sources of 0.33.0, built with changed files
        ("0.33.1.dev7+g0123abc", True),  # later ones, in which all may be otherwise
        ("0.34.0", True),
        ("0.1.dev1+g0123abc", True),
        ("dev", True),
    ],
)
def test_a_start_on_another_release_warns_of_it(
    version: str, warned: bool, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm.version.__version__", version)
    installed_release.warn_unless_tested()
    told = [record.getMessage() for record in log.records if record.levelno == logging.WARNING]
    assert [version in line and "0.30, 0.31, 0.32, 0.33" in line for line in told] == [True] * warned


def test_an_import_that_fails_on_another_release_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM imports the connector before it constructs it, which is when it would warn."""
    monkeypatch.setattr("vllm.version.__version__", "0.34.0")
    monkeypatch.setitem(sys.modules, "pd_connector.connector", None)  # as if one of vLLM's names were gone
    with pytest.raises(ImportError) as failed:
        pd_connector.PDConnector  # noqa: B018  what vLLM asks for
    assert "vLLM 0.34.0 is not among the releases" in "".join(traceback.format_exception(failed.value))


def test_a_method_that_another_release_lacks_is_named() -> None:
    with pytest.raises(AttributeError, match=r"Scheduler.*gone"):
        wrap(Scheduler, "gone", lambda method: method)


@pytest.mark.parametrize("of", [Release023(), Release030(), Release031(), Release032(), VllmRelease()])
def test_what_a_release_cannot_give_is_said_at_start(
    of: VllmRelease, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(installed_release, "current", lambda: of)
    monkeypatch.setattr(installed_release, "installed_version", lambda: installed_release.TESTED[-1])
    installed_release.log_limits()
    told = [record.getMessage() for record in log.records]
    assert len(told) == len(of.limits)
    assert all(line.endswith(limit) for line, limit in zip(told, of.limits, strict=True))


def test_everything_that_vllm_023_cannot_give_is_among_its_limits() -> None:
    said = "\n".join(Release023.limits)
    for what in ("cannot ask for layouts", "may be preempted", "do not name the session", "with both legs at once"):
        assert what in said
    assert set(Release030.limits) < set(Release023.limits)


@since((0, 30), "results that name the requests that failed")
def test_arrivals_are_told_in_vllms_words(installed: VllmRelease) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults  # noqa: PLC0415

    told = installed.transfer_results({"a", "b"}, {"b"})
    assert told == KVConnectorTransferResults(finished_recving={"a", "b"}, failed_recving={"b"})


@since((0, 32), "sources of cache hits")
@pytest.mark.parametrize(
    ("loaded", "pulled", "sources"),
    [(32, 100, {"HOST": 32, "P2P": 100}), (0, 100, {"P2P": 100}), (32, 0, {"HOST": 32}), (0, 0, {})],
)
def test_tokens_are_counted_by_where_they_came_from(
    installed: VllmRelease, loaded: int, pulled: int, sources: dict[str, int]
) -> None:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: PLC0415  earlier releases do not have it

    assert installed.cache_hit_sources(loaded, pulled) == {
        CacheHitSource[name]: tokens for name, tokens in sources.items()
    }


def test_host_blocks_are_vllms_own_for_the_same_groups(installed: VllmRelease) -> None:
    device = make_manager(SETUP)
    host = installed.host_coordinator(CONFIG, device, slots=7)
    assert host.block_pool.num_gpu_blocks == 8  # and the null block
    assert host.block_pool.get_num_free_blocks() == 7
    assert host.block_pool is not device.block_pool
    assert host.block_pool.hash_block_size == 4
    assert installed.block_tokens(host) == (4, 8)
    assert installed.cacheable_groups(device) == (0, 1)


@since((0, 30), "a device whose role vllm-ascend adds")
def test_host_blocks_know_what_a_backend_has_told_the_devices(installed: VllmRelease) -> None:
    device = make_manager(SETUP)
    vars(device.kv_cache_config)["role"] = "D"
    known, blocks = vars(device.kv_cache_config), device.kv_cache_config.num_blocks
    assert vars(installed.host_coordinator(CONFIG, device, slots=7).kv_cache_config)["role"] == "D"
    assert known["num_blocks"] == blocks, "the device has as many as before"


@pytest.mark.parametrize("events", [True, False])
def test_host_blocks_tell_events_where_the_devices_do_and_name_their_medium(
    installed: VllmRelease, events: bool
) -> None:
    setup = Setup(events=events)
    host = installed.host_coordinator(CONFIG, make_manager(setup), slots=7)
    host.block_pool.medium = installed.host_medium
    request = make_request(setup, "r", range(8))
    blocks = host.block_pool.get_new_blocks(2)
    host.block_pool.cache_full_blocks(
        request=request, blocks=blocks, num_cached_blocks=0, num_full_blocks=2, block_size=4, kv_cache_group_id=0
    )
    told = [event for event in installed.take_host_events(host.block_pool) if isinstance(event, BlockStored)]
    assert [event.medium for event in told] == (["CPU"] if events else [])


def test_of_what_is_computed_whole_blocks_are_cached(installed: VllmRelease) -> None:
    host = installed.host_coordinator(CONFIG, make_manager(SETUP), slots=7)
    assert [installed.cacheable_tokens(host, computed, 0) for computed in (0, 8, 15, 16)] == [0, 8, 8, 16]


@pytest.mark.parametrize("setup", [SETUP, Setup()], ids=["two groups", "one group"])
@pytest.mark.parametrize(("drafts", "reprefillable"), [(False, 0), (True, 0), (True, 3)])
def test_as_many_tokens_count_as_cached_as_vllm_caches(
    installed: VllmRelease, setup: Setup, drafts: bool, reprefillable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = installed.host_coordinator(CONFIG, make_manager(setup), slots=7)
    host.num_reprefillable_tokens = reprefillable
    cached: list[int] = []
    for manager in host.single_type_managers:
        manager.use_eagle = drafts
        monkeypatch.setattr(manager, "cache_blocks", lambda request, tokens, **_: cached.append(tokens))
    request = make_request(setup, "r", range(30))
    for computed in range(31):
        cached.clear()
        host.cache_blocks(request, computed)
        assert cached == [installed.cacheable_tokens(host, computed, group) for group in range(len(setup.groups))]


def test_hashes_of_larger_blocks_are_made_of_those_of_smaller_ones(installed: VllmRelease) -> None:
    prompt = list(range(20))
    whole, other = (
        make_request(SETUP, "r", tokens).block_hashes for tokens in (prompt, [*prompt[:9], 99, *prompt[10:]])
    )
    assert installed.block_hashes(whole, 4, 4) is whole
    large, differing = list(installed.block_hashes(whole, 4, 8)), list(installed.block_hashes(other, 4, 8))
    assert (len(whole), len(large)) == (5, 2)
    assert large[0] == differing[0]
    assert large[1] != differing[1]
