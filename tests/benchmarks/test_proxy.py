"""The benchmark of the proxy finds its processes, and every stream of a burst arrives."""

import pytest

from benchmarks import proxy


@pytest.mark.thorough
def test_bursts_arrive_both_ways() -> None:
    figures = proxy.main(["--requests", "3", "--rounds", "1", "--pause-s", "0", "--wait-s", "0"])
    assert set(figures) == set(proxy.WAYS)
    for way in proxy.WAYS:
        assert figures[way]["3"]["sent"] == 6
        assert figures[way]["3"]["failed"] == 0
