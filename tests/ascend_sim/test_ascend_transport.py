"""Servers of vllm-ascend over Mooncake's own transport for Ascend, which is their default.

CANN's ADXL below it is a stand-in, so nothing here says how HCCS or RoCE behave; all above it is real.
"""

import json
import shutil
from collections.abc import Iterator

import pytest

from tests.support.ascend.mooncake_peer import build_adxl
from tests.support.ascend.servers import NPU_BLOCK_SIZE
from tests.support.ascend.transport_servers import ADXL, ASCEND_STORE, ASCEND_TRANSPORT, STORE_CONFIG
from tests.support.e2e.deployments import on
from tests.support.e2e.pair import Pair, make_prompt
from tests.support.store.mooncake_processes import master_alone

#: Each server's part of the pool; what it stores lies there.
STORE = {
    "metadata_server": "P2PHANDSHAKE", "protocol": "ascend", "device_name": "", "preferred_segment": True,
    "global_segment_size": "64MB", "local_buffer_size": "16MB",
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _adxl() -> Iterator[None]:
    """Before the servers start, with what vllm-ascend's pool needs."""
    ADXL.mkdir()
    build_adxl(ADXL)
    with master_alone(ADXL) as master:
        STORE_CONFIG.write_text(json.dumps({**STORE, "master_server_address": str(master)}))
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


@on(ASCEND_STORE)
@pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join)
class TestBesideTheStore:
    """vllm-ascend's pool with Mooncake's real store, and this connector, as children of AscendMultiConnector."""

    def test_a_process_has_one_transfer_engine(self, pair: Pair) -> None:
        for server in (pair.prefill, pair.decode):
            log = server.log.read_text(errors="replace")
            assert "AscendMultiConnector" in log
            assert log.count("Success to initialize adxl engine") == 1

    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair) -> None:
        pair.assert_pulls_right(make_prompt(1000, (pair.name, "store")))

    def test_concurrent_prompts_give_the_same_outputs(self, pair: Pair) -> None:
        pair.assert_concurrent_pulls_right(4)

    def test_what_the_prefill_server_loads_from_the_store_is_pulled(self, pair: Pair) -> None:
        """Of a prompt whose beginning its device no longer holds."""
        prompt = make_prompt(1000, (pair.name, "loaded"))
        pair.prefill.client.complete(prompt[:700], 1)
        for number in range(2):
            pair.prefill.client.complete(make_prompt(1400, (pair.name, "other", number)), 1)
        traffic = pair.assert_pulls_right(prompt)
        assert traffic.prefill is not None
        assert traffic.prefill.prompt_tokens("external_kv_transfer") == 5 * NPU_BLOCK_SIZE
