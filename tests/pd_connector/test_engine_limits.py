"""Limits that are no settings, and who has which share of the blocks."""

import pytest

from pd_connector.engine_limits import ENGINE_LIMITS, EngineLimits


@pytest.mark.parametrize(
    ("limits", "consumes", "fraction"),
    [(ENGINE_LIMITS, False, 1.0), (ENGINE_LIMITS, True, 0.5), (EngineLimits(max_leased_fraction=0.3), True, 0.3)],
)
def test_leases_leave_blocks_to_an_engine_that_also_decodes(
    limits: EngineLimits, consumes: bool, fraction: float
) -> None:
    assert limits.leased_fraction(consumes=consumes) == fraction
