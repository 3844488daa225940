"""Prices: the defaults that are there, and what reads and copies cost, also over a link with costs of its own."""

import pytest

from layout.cost import CostModel, ReadCost


@pytest.mark.parametrize("protocol", ["tcp", "rdma", "ascend"])
def test_every_protocol_has_defaults(protocol: str) -> None:
    cost = CostModel.of_protocol(protocol)
    assert min(cost.alpha, cost.beta, cost.copy_alpha, cost.copy_beta) > 0


def test_on_tcp_a_gap_of_some_kilobytes_costs_as_much_as_a_descriptor() -> None:
    tcp = CostModel.of_protocol("tcp")
    assert tcp.read_s(1, 8 << 10) < tcp.read_s(2, 0) < tcp.read_s(1, 64 << 10)


def test_reads_and_copies_are_priced_apart() -> None:
    cost = CostModel(alpha=100, beta=1, copy_alpha=10, copy_beta=2)
    assert cost.read_s(2, 30) == 230
    assert cost.copy_s(3, 5) == 40


def test_a_link_has_costs_of_its_own_for_reads_only() -> None:
    cost = CostModel(alpha=100, beta=1, copy_alpha=10, copy_beta=2)
    assert cost.over(None) is cost
    assert cost.over(ReadCost(3, 4)) == CostModel(alpha=3, beta=4, copy_alpha=10, copy_beta=2)


@pytest.mark.parametrize("is_between_devices", [True, False])
def test_of_mapped_memory_a_kernel_s_runs_cost_less_than_the_driver_s(is_between_devices: bool) -> None:
    by_kernel, by_driver = (
        ReadCost.of_mapped(by_kernel=each, is_between_devices=is_between_devices) for each in (True, False)
    )
    assert 0 < by_kernel.alpha < by_driver.alpha < CostModel.of_protocol("tcp").alpha
    assert 0 < by_kernel.beta <= by_driver.beta
