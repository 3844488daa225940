"""Which layouts a CPU worker offers, to whom, and what it says when it cannot tell."""

import logging
import subprocess
import sys
import warnings
from typing import Any

import pytest

from tests.support.releases import INSTALLED, module_needs

if INSTALLED < (0, 30):
    module_needs((0, 30), "layouts that workers offer")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torch and vLLM deprecate of each other is not ours
    from vllm.distributed.kv_transfer.kv_connector import utils as kv_connector_utils
    from vllm.v1.attention.backends import cpu_attn
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
    from vllm.v1.kv_cache_interface import KVCacheLayout
    from vllm.v1.worker.worker_base import WorkerBase

from pd_connector.vllm.cpu import cpu_layouts
from pd_connector.vllm.layouts import wanted_layout, warn_if_not_hooked
from tests.support.connector.cpu_layers import OUR_CONNECTOR, Layer, a_shape, asked, cpu_only, layers_config

pytestmark = [cpu_only, pytest.mark.usefixtures("hooked")]


def test_our_connector_is_offered_the_block_outer_layouts_first(log: pytest.LogCaptureFixture) -> None:
    assert asked(layers_config(OUR_CONNECTOR)) == ["BHLNC", "BLHNC", "LBHNC"]
    assert "work in BHLNC, BLHNC" in log.text


def test_our_connector_is_known_by_its_registered_name() -> None:
    assert asked(layers_config({"kv_connector": "PDConnector"}))[0] == "BHLNC"


@pytest.mark.parametrize("name", ["PDConnector", "NixlConnector"])
def test_our_connector_is_known_by_its_module_under_any_name(name: str) -> None:
    config = {"kv_connector": name, "kv_connector_module_path": "pd_connector.aliases"}
    assert asked(layers_config(config))[0] == "BHLNC"


def test_our_connector_inside_a_multi_connector_is_found() -> None:
    children = [{"kv_connector": "ExampleConnector"}, OUR_CONNECTOR]
    config = layers_config({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}})
    assert asked(config) == ["BHLNC", "BLHNC", "LBHNC"]


@pytest.mark.parametrize(
    "connector",
    [
        None,
        {"kv_connector": "ExampleConnector"},
        {"kv_connector": "NixlConnector"},
        {"kv_connector": "PDConnector", "kv_connector_module_path": "pd_connector_of_others"},
        {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [{"kv_connector": "Other"}]}},
        OUR_CONNECTOR | {"kv_connector_extra_config": {"cross_layer_blocks": False}},
    ],
)
def test_without_our_connector_or_with_the_switch_off_nothing_changes(
    connector: dict[str, Any] | None, log: pytest.LogCaptureFixture
) -> None:
    config = layers_config(connector)
    assert asked(config) == ["LBHNC"]
    assert wanted_layout(config) is None
    warn_if_not_hooked(config)
    assert log.text == ""


def test_two_workers_of_one_process_get_an_answer_each() -> None:
    ours, other = layers_config(OUR_CONNECTOR), layers_config(None)
    assert asked(other) == ["LBHNC"]
    assert asked(ours)[0] == "BHLNC"
    assert asked(other) == ["LBHNC"]


def test_the_backend_itself_still_declares_what_vllm_says() -> None:
    asked(layers_config(OUR_CONNECTOR))
    assert cpu_attn.CPUAttentionBackend.supported_kv_cache_layouts() == (KVCacheLayout.LBHNC,)


def test_a_backend_that_is_not_known_keeps_its_own_layouts(log: pytest.LogCaptureFixture) -> None:
    ours, foreign = Layer(a_shape(), cpu_attn.CPUAttentionBackend), Layer(a_shape(), CPUMLABackend)
    assert asked(layers_config(OUR_CONNECTOR, ours, foreign)) == ["LBHNC"]
    assert "CPU_MLA" in log.text


def test_registering_twice_hooks_once() -> None:
    before = WorkerBase.get_supported_kv_cache_layouts
    cpu_layouts.register()
    assert WorkerBase.get_supported_kv_cache_layouts is before


def test_importing_the_plugin_loads_neither_torch_nor_vllm() -> None:
    code = "import pd_connector.vllm.cpu.cpu_layouts, sys; print(sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


# A vLLM whose internals differ


def test_a_missing_private_name_is_named_and_the_server_starts(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    config = layers_config(OUR_CONNECTOR)
    monkeypatch.delattr(cpu_attn, "CPUAttentionMetadata")
    assert asked(config) == ["LBHNC"]
    [record] = log.records
    assert record.levelno == logging.WARNING
    assert "CPUAttentionMetadata" in record.getMessage()
    assert "LBHNC" in record.getMessage()


def test_a_worker_that_is_asked_otherwise_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    config = layers_config(OUR_CONNECTOR)
    monkeypatch.delattr(WorkerBase, "get_supported_kv_cache_layouts")
    cpu_layouts.register()
    assert log.text == ""  # whoever does not use the connector need not know
    warn_if_not_hooked(config)
    assert "get_supported_kv_cache_layouts" in log.text


def test_a_plugin_that_was_not_loaded_is_named(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    config = layers_config(OUR_CONNECTOR)
    monkeypatch.setattr(WorkerBase, "get_supported_kv_cache_layouts", kv_connector_utils.get_current_attn_backends)
    warn_if_not_hooked(config)
    assert "the plugin pd_connector;" in log.text
    assert "VLLM_PLUGINS" in log.text
