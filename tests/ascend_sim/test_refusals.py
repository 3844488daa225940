"""What of vllm-ascend cannot be served ends the start of a real engine with a sentence that names it."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.ascend.engine_process import TRANSFER_CONFIG, output_of_start
from tests.support.ascend.servers import DEEPSEEK_V2
from tests.support.e2e.models import DEFAULT_MODEL, ModelSpec, write_model

BESIDE = [TRANSFER_CONFIG, {"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_both"}]
IN_MULTI_CONNECTOR = {
    "kv_connector": "MultiConnector",
    "kv_connector_module_path": None,
    "kv_connector_extra_config": {"connectors": BESIDE},
}


#: Starts that vllm-ascend lets pass. It refuses others by itself: the private format without MLA, int8 without scales.
@pytest.mark.parametrize(
    ("model", "arguments", "says"),
    [
        (
            DEEPSEEK_V2,
            {"additional_config": {"enable_kv_nz": True}, "transfer": {"kv_role": "kv_consumer"}},
            "enable_kv_nz: it keeps KV caches in a private format",
        ),
        (DEEPSEEK_V2, {"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype = fp8_e5m2: this connector does not know"),
        (DEFAULT_MODEL, {"transfer": IN_MULTI_CONNECTOR}, "MooncakeConnectorV1 beside PDConnector: a process on"),
    ],
    ids=["private format", "quantised cache", "own connector"],
)
def test_a_start_that_cannot_be_right_is_refused_by_name(
    tmp_path: Path, model: ModelSpec, arguments: dict[str, Any], says: str
) -> None:
    status, output = output_of_start(write_model(tmp_path / "model", model), **arguments)
    assert status != 0, output[-2000:]
    assert f"UnsupportedError: {says}" in output, output[-4000:]
