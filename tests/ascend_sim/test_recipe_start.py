"""An engine starts with what a recipe of vllm-ascend gives its own connector, one word exchanged."""

from pathlib import Path

from tests.support.ascend.engine_process import output_of_start
from tests.support.e2e.models import DEFAULT_MODEL, write_model
from tests.support.process import free_port

#: As the recipe for DeepSeek-V3.1, but of this engine's size: vllm-ascend itself compares that.
SIZES = {"prefill": {"dp_size": 1, "tp_size": 1}, "decode": {"dp_size": 32, "tp_size": 1}}


def test_the_connectors_name_is_enough(tmp_path: Path) -> None:
    port = free_port()
    transfer = {
        "kv_connector_module_path": None,
        "kv_role": "kv_producer",
        "kv_port": str(port),
        "engine_id": "0",
        # Mooncake's TCP plays the NIC.
        "kv_connector_extra_config": {"use_ascend_direct": True, **SIZES, "protocol": "tcp", "host": "127.0.0.1"},
    }
    status, output = output_of_start(write_model(tmp_path / "model", DEFAULT_MODEL), transfer=transfer)
    assert status == 0, output[-4000:]
    assert f"answers on the control channel at 127.0.0.1:{port}" in output
    assert "in kv_connector_extra_config says" not in output
