"""What differs by platform besides the devices, and a log that goes where vLLM's goes."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.utils import network_utils

from pd_connector.vllm import platform
from pd_connector.vllm.cache_groups import Ranks

PACKAGES = ("layout", "transfer", "pd_connector")


@pytest.fixture
def vllm_logger(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    logger = logging.getLogger("vllm")
    monkeypatch.setattr(logger, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "level", logging.WARNING)
    return logger


def test_the_packages_log_where_vllm_does_at_its_level(vllm_logger: logging.Logger) -> None:
    for _ in range(2):  # two connectors of one process
        platform.share_logging()
        for logger in map(logging.getLogger, PACKAGES):
            assert (logger.handlers, logger.level, logger.propagate) == (vllm_logger.handlers, logging.WARNING, False)
    vllm_logger.addHandler(new := logging.NullHandler())
    assert new not in logging.getLogger(PACKAGES[0]).handlers, "each has a list of its own"


def test_a_workers_ranks_are_those_of_its_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: SimpleNamespace(rank_in_group=2, world_size=4))
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: SimpleNamespace(rank_in_group=1, world_size=3))
    monkeypatch.setattr(parallel_state, "get_pcp_group", lambda: SimpleNamespace(rank_in_group=1, world_size=2))
    monkeypatch.setattr(parallel_state, "get_dcp_group", lambda: SimpleNamespace(rank_in_group=5, world_size=8))
    ranks = platform.worker_ranks()
    assert ranks == Ranks(2, 4, 1, 3, 1, 2, 5)
    assert (ranks.index, ranks.world_size) == ((1 * 2 + 1) * 4 + 2, 24)


def a_config(**parallel: Any) -> Any:
    return SimpleNamespace(parallel_config=SimpleNamespace(local_world_size=4, **parallel))


def test_vllm_knows_how_many_workers_are_here_without_ray() -> None:
    assert platform.workers_on_this_machine(a_config(use_ray=False)) == 4


@pytest.mark.parametrize(
    ("stages", "here"),
    [
        ([["this", "this"], ["this", "this"]], 4),
        ([["this", "this"], ["that", "that"]], 2),
        ([["this", "that"]], 1),
    ],
)
def test_with_ray_the_workers_of_all_stages_tell_where_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stages: list[list[str]], here: int
) -> None:
    (tmp_path / "boot_id").write_text("this")
    monkeypatch.setattr(platform, "_BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: stages[0])
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: stages)
    asked: list[Any] = []

    def gather(value: Any, group: Any) -> Any:
        asked.append(value)
        return group

    monkeypatch.setattr(platform, "_gather", gather)
    assert platform.workers_on_this_machine(a_config(use_ray=True)) == here
    assert asked == ["this", stages[0]]


def test_values_of_a_group_are_gathered_by_torch(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", world_size=1, rank=0)
    try:
        group = SimpleNamespace(world_size=1, cpu_group=torch.distributed.group.WORLD)
        assert platform._gather({"any": "value"}, group) == [{"any": "value"}]
    finally:
        torch.distributed.destroy_process_group()


def test_the_address_is_the_one_that_vllm_gives_to_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_utils, "get_ip", lambda: "10.1.2.3")
    assert platform.host_address() == "10.1.2.3"


def test_with_ray_workers_that_share_the_computation_of_prompts_count_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "boot_id").write_text("this")
    monkeypatch.setattr(platform, "_BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: ["this"])
    monkeypatch.setattr(parallel_state, "get_pcp_group", lambda: [["this"], ["that"]])
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: [["this", "that"], ["this", "this"]])
    monkeypatch.setattr(platform, "_gather", lambda _, group: group)
    config = a_config(use_ray=True, prefill_context_parallel_size=2)
    assert platform.workers_on_this_machine(config) == 3
