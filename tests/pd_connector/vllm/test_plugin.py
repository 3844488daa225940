"""The plugin: the connector has a name in vLLM, and CPU workers are hooked."""

import logging
import sys
import tomllib
import warnings
from importlib.metadata import EntryPoint

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torch and vLLM deprecate of each other is not ours
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.worker.worker_base import WorkerBase

import pd_connector.connector
from pd_connector.connector import PDConnector
from pd_connector.vllm import plugin
from pd_connector.vllm.cpu import cpu_layouts
from tests.support.sources import ROOT


@pytest.fixture(autouse=True)
def _nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = {name: load for name, load in KVConnectorFactory._registry.items() if name != "PDConnector"}
    monkeypatch.setattr(KVConnectorFactory, "_registry", registry)
    if (ask := getattr(WorkerBase, "get_supported_kv_cache_layouts", None)) is not None:  # since vLLM 0.30
        monkeypatch.setattr(WorkerBase, "get_supported_kv_cache_layouts", ask)


def test_the_connector_is_found_by_its_name_alone() -> None:
    config = KVTransferConfig(kv_connector="PDConnector", kv_role="kv_both")
    with pytest.raises(ValueError, match="Unsupported connector type"):
        KVConnectorFactory.get_connector_class(config)
    for _ in range(2):
        plugin.register()
        assert KVConnectorFactory.get_connector_class(config) is PDConnector
        assert KVConnectorFactory.get_connector_class_by_name("PDConnector") is PDConnector


def test_a_name_that_another_package_has_taken_stays_with_it(caplog: pytest.LogCaptureFixture) -> None:
    KVConnectorFactory.register_connector("PDConnector", "collections", "OrderedDict")
    with caplog.at_level(logging.DEBUG, logger=plugin.logger.name):
        plugin.register_connector()
    assert KVConnectorFactory.get_connector_class_by_name("PDConnector").__name__ == "OrderedDict"


def test_whoever_loads_the_class_has_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """MultiConnector looks names up in the API server, where VLLM_PLUGINS may have left this plugin out."""
    monkeypatch.setattr(pd_connector, "connector", pd_connector.connector)  # the import puts another one there
    monkeypatch.delitem(sys.modules, "pd_connector.connector")
    assert "PDConnector" not in KVConnectorFactory._registry
    loaded = pd_connector.PDConnector
    assert loaded is not PDConnector
    assert KVConnectorFactory.get_connector_class_by_name("PDConnector") is loaded


def test_vllm_is_pointed_to_the_plugin_by_the_name_that_messages_tell() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, target),) = project["entry-points"]["vllm.general_plugins"].items()
    assert name == cpu_layouts.PLUGIN
    assert EntryPoint(name, target, "vllm.general_plugins").load() is plugin.register
