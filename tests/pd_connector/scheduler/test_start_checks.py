"""What is refused at the start of an engine whose model keeps states, or whose ranks share tokens."""

import pytest

from pd_connector.config import ConfigError
from pd_connector.scheduler.start_checks import check_block_sizes, check_prefix_unit
from pd_connector.vllm.cache_specs import Retention

TOKENS, STATES = Retention(96), Retention(96, states=True)


def test_prefixes_of_a_model_with_states_end_at_borders_of_blocks() -> None:
    check_prefix_unit(96, [TOKENS, STATES])
    check_prefix_unit(32, [TOKENS])
    with pytest.raises(ConfigError, match=r"prefix_match_unit = 32: .* a block of 96 tokens.* set it to 96"):
        check_prefix_unit(32, [TOKENS, STATES])


def test_blocks_of_shared_tokens_have_as_many_as_vllm_takes_them_to_have() -> None:
    check_block_sizes((96, 96), [TOKENS, STATES])
    message = r"blocks of \(48, 96\) tokens in its cache groups, which PDConnector takes for \(96, 96\)"
    with pytest.raises(ConfigError, match=message):
        check_block_sizes((48, 96), [TOKENS, STATES])
