"""Limits that are no settings, and who has which share of the blocks."""

import inspect

import pytest

from pd_connector.engine_limits import ENGINE_LIMITS, EngineLimits
from pd_connector.worker.pulls import Pulls
from transfer.control.peer_sockets import ClientSettings


@pytest.mark.parametrize(
    ("limits", "consumes", "fraction"),
    [(ENGINE_LIMITS, False, 1.0), (ENGINE_LIMITS, True, 0.5), (EngineLimits(max_leased_fraction=0.3), True, 0.3)],
)
def test_leases_leave_blocks_to_an_engine_that_also_decodes(
    limits: EngineLimits, consumes: bool, fraction: float
) -> None:
    assert limits.leased_fraction(consumes=consumes) == fraction


def test_a_hundred_prefill_engines_of_eight_data_parallel_ranks_have_room_on_both_sides_of_a_decode_engine() -> None:
    """Beyond, connections are dropped and made again, and requests are refused."""
    of_workers = inspect.signature(Pulls).parameters["max_peers"].default
    assert of_workers == ClientSettings().max_peers > 100 * 8
