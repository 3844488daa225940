"""Servers of vllm-ascend over Mooncake's own transport for Ascend, which is their default.

CANN's ADXL below it is a stand-in, so nothing here says how HCCS or RoCE behave; all above it is real.
"""

import shutil
from collections.abc import Iterator

import pytest

from tests.support.ascend.mooncake_peer import build_adxl
from tests.support.ascend.servers import ADXL, ASCEND_TRANSPORT
from tests.support.e2e.deployments import on
from tests.support.e2e.pair import Pair, make_prompt


@pytest.fixture(scope="session", autouse=True)
def _adxl() -> Iterator[None]:
    """Before the servers start."""
    ADXL.mkdir()
    build_adxl(ADXL)
    yield
    shutil.rmtree(ADXL)


@on(ASCEND_TRANSPORT)
@pytest.mark.parametrize("pair", [("P", "D"), ("P TP2", "D")], indirect=True, ids="-".join)
class TestAscendTransport:
    def test_it_is_what_servers_choose(self, pair: Pair) -> None:
        for server in (pair.prefill, pair.decode):
            assert "protocol" not in dict(server.spec.options)
            assert "with the ascend transport" in server.log.read_text(errors="replace")

    @pytest.mark.parametrize("tokens", [2, 200, 1500])
    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair, tokens: int) -> None:
        pair.assert_pulls_right(make_prompt(tokens, (pair.name, "ascend transport", tokens)))

    def test_concurrent_prompts_give_the_same_outputs(self, pair: Pair) -> None:
        pair.assert_concurrent_pulls_right(4)
