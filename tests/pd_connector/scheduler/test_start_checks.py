"""What is refused at the start of an engine whose model keeps states."""

from types import SimpleNamespace
from typing import Any

import pytest

from pd_connector.config import ConfigError, parse_config
from pd_connector.scheduler.start_checks import check_prefix_unit, check_settings
from pd_connector.vllm.cache_specs import Retention
from pd_connector.vllm.engine_config import EngineRole

ROLE = EngineRole(produces=True, consumes=True, recomputes=False)
TOKENS, STATES = Retention(96), Retention(96, states=True)


def test_states_are_not_kept_in_host_memory() -> None:
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=True))
    settings = parse_config({"cpu_bytes_to_use": 2**30})
    check_settings(settings, ROLE, config, [TOKENS])
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use: some layers of this model keep states .* set it to 0"):
        check_settings(settings, ROLE, config, [TOKENS, STATES])


def test_prefixes_of_a_model_with_states_end_at_borders_of_blocks() -> None:
    check_prefix_unit(96, [TOKENS, STATES])
    check_prefix_unit(32, [TOKENS])
    with pytest.raises(ConfigError, match=r"prefix_match_unit = 32: .* a block of 96 tokens.* set it to 96"):
        check_prefix_unit(32, [TOKENS, STATES])
