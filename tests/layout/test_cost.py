"""Prices: the defaults that are there, and what reads and copies cost."""

import pytest

from layout.cost import CostModel


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
