"""Every name of vLLM that the connector uses exists in each supported release, and vLLM can call what it calls.

The releases are known from ``names.json``, which ``python -m tests.support.vllm_names`` makes. None of them needs to be
installed.
"""

import inspect
from functools import cache
from pathlib import Path

import pytest

from pd_connector.vllm.releases.installed import TESTED, release_of
from pd_connector.vllm.releases.newest import VllmRelease
from tests.support.sources import modules
from tests.support.vllm_names.table import Fact, Names, NameTable, UnknownNameError, read_tables
from tests.support.vllm_names.uses import CONNECTOR_BASES, Missing, ModuleUses, compare_methods

#: The values of a case that is left out of most runs: each looks at all sources again.
AGAIN = "names.json does not tell of {}: make it again, see tests/support/vllm_names/__main__.py"

#: Methods of the connector that a release does not call: what they are for, it does not do.
_SLEEP = {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}
_BEFORE_032 = {"get_external_cache_hit_sources", "get_loaded_kv_cache_group_ids"}
_BEFORE_030 = {
    "bind_kv_cache_manager", "get_transfer_results", "has_pending_block_frees", "has_pending_push_work",
    "supports_divergent_local_hybrid_hits",
}  # fmt: skip
NOT_CALLED = {
    "0.23": _SLEEP | _BEFORE_032 | _BEFORE_030,
    "0.30": _SLEEP | _BEFORE_032,
    "0.31": _SLEEP | _BEFORE_032,
    "0.32": _SLEEP,
    "0.33": set[str](),
}

#: Those that vLLM never calls: vllm-ascend's scheduler does.
OF_OTHERS = {"update_state_before_preempt"}

#: What of ``VllmRelease`` only such a method asks, by the method.
ASKED_BY = {
    "get_external_cache_hit_sources": "VllmRelease.cache_hit_sources",
    "get_transfer_results": "VllmRelease.transfer_results",
}

#: What is run only on releases on which connectors ask for layouts, by the start of its name.
ABOUT_LAYOUTS = (
    "pd_connector.vllm.cpu.kernels.",
    "pd_connector.vllm.cpu.cpu_layouts.",
)

#: What of a release only a method asks that a later one overrides, by that release.
ASKED_BEFORE_OVERRIDDEN = {
    "Release023": {"Release030.prefill_lookahead", "Release030.ending_with_errors"},  # by host_coordinator, by hook
}


@cache
def tables() -> dict[str, NameTable]:
    return read_tables(Path(__file__).with_name("names.json"))


def release(name: str) -> VllmRelease:
    major, minor = name.split(".")
    return release_of((int(major), int(minor)))


def all_releases(of: type[VllmRelease] = VllmRelease) -> set[type[VllmRelease]]:
    return {of}.union(*(all_releases(each) for each in of.__subclasses__()))


def not_run(on: VllmRelease) -> frozenset[str]:
    """The methods of releases that the one does not run: "Class.method"."""
    run = set()
    for name in dir(on):
        for owner in type(on).__mro__:
            if name in vars(owner):
                run.add(f"{owner.__name__}.{name}")
                method = vars(owner)[name]
                if not (inspect.isfunction(method) and f"super().{name}" in inspect.getsource(method)):
                    break
    every = {f"{owner.__name__}.{name}" for owner in all_releases() for name in vars(owner)}
    return frozenset(every - run)


def is_run(module: str, on: VllmRelease) -> bool:
    """Whether a module is one of all releases, or one of those that this one is made of."""
    return "pd_connector.vllm.release_" not in module or module in {each.__module__ for each in type(on).__mro__}


def missing(names: Names, on: VllmRelease, not_called: frozenset[str] = frozenset()) -> list[Missing]:
    skipped = not_run(on) | {ASKED_BY[each] for each in not_called & ASKED_BY.keys()}
    skipped |= ASKED_BEFORE_OVERRIDDEN.get(type(on).__name__, set())
    return [
        each
        for module in modules("pd_connector")
        if is_run(module, on)
        for each in ModuleUses(module, names).missing(skipped)
        if on.declares_layouts or not each.where.startswith(ABOUT_LAYOUTS)
    ]


def test_the_table_is_of_the_tested_releases() -> None:
    assert list(tables()) == [f"{major}.{minor}" for major, minor in TESTED]
    assert list(NOT_CALLED) == list(tables())


@pytest.mark.parametrize("name", NOT_CALLED)
def test_every_name_that_is_used_exists(name: str) -> None:
    try:
        found = missing(tables()[name], release(name), frozenset(NOT_CALLED[name]))
    except UnknownNameError as unknown:
        pytest.fail(AGAIN.format(unknown))
    assert [str(each) for each in found] == []


@pytest.mark.parametrize("name", NOT_CALLED)
def test_every_method_is_called_as_it_is_written(name: str) -> None:
    try:
        wrong, unknown = compare_methods(tables()[name], "pd_connector.connector", "PDConnector", CONNECTOR_BASES)
    except UnknownNameError as missing_name:
        pytest.fail(AGAIN.format(missing_name))
    assert [str(each) for each in wrong] == []
    assert unknown == NOT_CALLED[name] | OF_OTHERS


class TestTheReadingFindsWhatIsMissing:
    def test_what_a_release_overrides_is_missing_without_its_override(self) -> None:
        found = {str(each) for each in missing(tables()["0.30"], VllmRelease())}
        assert any("to_event_extra_keys" in each for each in found)
        assert any("VllmConfig.num_prefill_lookahead_tokens" in each for each in found)
        assert any("get_num_cacheable_tokens" in each for each in found)

    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("vllm.v1.core.block_pool.BlockPool.touch", "BlockPool.touch"),  # of an object that is followed
            ("vllm.v1.request.RequestStatus.FINISHED_STOPPED", "FINISHED_STOPPED"),
            ("vllm.distributed.kv_events.BlockStored", "there is no vllm.distributed.kv_events.BlockStored"),
            ("vllm.platforms.interface.Platform.is_cuda", "Platform.is_cuda"),
        ],
    )
    def test_a_name_that_is_gone(self, name: str, told: str) -> None:
        facts = dict(tables()["0.32"].facts)
        assert facts[name] is not None
        facts[name] = None
        facts.setdefault(name.rpartition(".")[0], Fact("class"))  # not in the table, as nothing of it was missing
        assert any(told in str(each) for each in missing(NameTable(facts), VllmRelease()))

    @pytest.mark.parametrize(
        ("parameters", "told"),
        [
            (("kv_cache_config", "max_model_len"), "has no parameter use_eagle"),
            (("kv_cache_config", "another"), "needs another"),
        ],
    )
    def test_a_call_with_other_arguments(self, parameters: tuple[str, ...], told: str) -> None:
        name = "vllm.v1.core.kv_cache_coordinator.get_kv_cache_coordinator"
        facts = dict(tables()["0.32"].facts)
        facts[name] = Fact("function", "", parameters)
        assert any(told in str(each) for each in missing(NameTable(facts), VllmRelease()))

    def test_a_method_that_is_called_with_other_arguments(self) -> None:
        facts = dict(tables()["0.32"].facts)
        name = f"{CONNECTOR_BASES[0]}.update_state_after_alloc"
        facts[name] = Fact("function", "", ("self", "request", "blocks", "num_external_tokens", "step"))
        wrong, _ = compare_methods(NameTable(facts), "pd_connector.connector", "PDConnector", CONNECTOR_BASES)
        assert [each.where.rpartition(".")[2] for each in wrong] == ["update_state_after_alloc"]
