"""The plugin that vLLM loads in every process: makes the connector known by its name, and hooks the workers.

This module must stay cheap to import: no torch or vllm at module level.
"""

import logging

from pd_connector.vllm.cpu import cpu_layouts
from pd_connector.vllm.layout_switch import CONNECTOR, CONNECTOR_MODULE
from pd_connector.vllm.npu import allocation

#: A child of vLLM's logger, so that vLLM's handlers and level apply.
logger = logging.getLogger(f"vllm.{__name__}")


def register() -> None:
    """Do all that the connector needs in a process of vLLM: the entry point of ``vllm.general_plugins``. Idempotent."""
    register_connector()
    cpu_layouts.register()
    allocation.register()


def register_connector() -> None:
    """Let vLLM find the connector by its name, without ``kv_connector_module_path``. Idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    try:
        KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)
    except ValueError as error:  # the name is taken, usually by an earlier call
        logger.debug("PDConnector: not registered by name: %s", error)
