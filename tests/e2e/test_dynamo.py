"""Dynamo as it comes from PyPI: its frontend and its vLLM workers with this connector, without etcd or NATS.

Its workers need a vLLM of Dynamo's choice: PD_CONNECTOR_DYNAMO names the Python of an environment with both and this
project. The tests are skipped where there is none.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.support.e2e.architectures import VOCABULARY
from tests.support.e2e.client import MODEL_NAME
from tests.support.e2e.cluster import BLOCK_SIZE, KV_CACHE_BYTES, Server
from tests.support.e2e.deployments import Deployment, on, peer
from tests.support.e2e.models import CHATS
from tests.support.e2e.pair import make_text
from tests.support.e2e.routers import APIS, answer, running
from tests.support.process import free_ports
from tests.support.waiting import until

PYTHON = os.environ.get("PD_CONNECTOR_DYNAMO", "")
#: The one server whose answers are expected.
ALONE = Deployment("alone", (("alone", replace(peer(), arguments=CHATS)),), slow=True)
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_START_TIMEOUT_S = 600.0  # every process of a worker imports vLLM

pytestmark = [
    pytest.mark.routers, pytest.mark.timeout(1800), on(ALONE),
    pytest.mark.skipif(not PYTHON, reason="Dynamo is not here: PD_CONNECTOR_DYNAMO names a Python that has it"),
]  # fmt: skip


class Dynamo:
    """A frontend, a prefill worker and a decode worker."""

    def __init__(self, url: str, decode: str) -> None:
        self.url = url
        self._decode = decode

    @property
    def is_ready(self) -> bool:
        """Whether the frontend has found both workers."""
        try:
            return bool(httpx.get(f"{self.url}/v1/models", trust_env=False).json()["data"])
        except httpx.TransportError:
            return False

    def count(self, metric: str) -> float:
        """The sum of a metric of the decode worker."""
        lines = httpx.get(f"{self._decode}/metrics", trust_env=False).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{metric}{{"))


@pytest.fixture
def dynamo(servers: dict[str, Server], tmp_path: Path) -> Iterator[Dynamo]:
    """Dynamo, with the model of the server: the frontend wants a chat template and a token that ends a text."""
    model = shutil.copytree(servers["alone"].model, tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer_config.json").read_text()) | {"chat_template": CHATS[1]}
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": VOCABULARY - 1}))
    port, *worker_ports = free_ports(3)
    env = peer().environment() | {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(tmp_path / "discovery")}
    worker = [PYTHON, "-m", "dynamo.vllm", "--model", str(model), "--served-model-name", MODEL_NAME]
    worker += ["--dtype", "float32", "--enforce-eager", "--max-num-batched-tokens", "256"]
    worker += ["--block-size", str(BLOCK_SIZE), "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
    connector = {"kv_load_failure_policy": "fail", "kv_connector_extra_config": {"host": "127.0.0.1"}}
    connectors = {
        "prefill": {"kv_connector": "NixlConnector", "kv_connector_module_path": "pd_connector.aliases"},
        "decode": {"kv_connector": "PDConnector", "kv_connector_module_path": "pd_connector"},
    }
    with ExitStack() as stack:
        frontend = [PYTHON, "-m", "dynamo.frontend", "--http-port", str(port), "--enable-anthropic-api"]
        alive = [stack.enter_context(running(frontend, tmp_path / "frontend.log", env))]
        for (mode, names), worker_port in zip(connectors.items(), worker_ports, strict=True):
            role = {"kv_role": "kv_producer" if mode == "prefill" else "kv_consumer"}
            command = [*worker, "--disaggregation-mode", mode]
            command += ["--kv-transfer-config", json.dumps(names | role | connector)]
            variables = env | {"DYN_SYSTEM_PORT": str(worker_port)}
            alive.append(stack.enter_context(running(command, tmp_path / f"{mode}.log", variables)))
        dynamo = Dynamo(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{worker_ports[1]}")
        until(lambda: all(each() for each in alive) and dynamo.is_ready, "Dynamo to start", within_s=_START_TIMEOUT_S)
        yield dynamo


def test_every_api_is_pulled_and_answered_as_by_one_server(dynamo: Dynamo, servers: dict[str, Server]) -> None:
    answer(dynamo.url, "completions", make_text(100, "the canary"))
    until(lambda: dynamo.count("vllm:pd_canaries_total") >= 1, "the canary to be compared")
    expected = []
    for api in APIS:
        for stream in (False, True):
            prompt = make_text(700, ("Dynamo", api, stream))
            before = dynamo.count("vllm:pd_pulls_total")
            text = answer(dynamo.url, api, prompt, stream=stream)
            assert dynamo.count("vllm:pd_pulls_total") == before + 1, (api, stream)
            expected.append((api, stream, prompt, text))
    assert dynamo.count("vllm:pd_pull_failures_total") == dynamo.count("vllm:pd_prompts_computed_total") == 0
    for api, stream, prompt, text in expected:
        alone = answer(servers["alone"].client.base_url, api, prompt, stream=stream)
        # An answer may end within a character: Dynamo says so, vLLM not always.
        assert text.rstrip(REPLACEMENT) == alone.rstrip(REPLACEMENT), (api, stream)
        assert len(text) >= 16, "a token has at least a character"
