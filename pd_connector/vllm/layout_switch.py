"""Whether an engine keeps all layers of a block together, as its configuration says.

This module must stay cheap to import: no torch or vllm at module level.
"""

from collections.abc import Mapping
from typing import Any

CONNECTOR = "PDConnector"
CONNECTOR_MODULE = "pd_connector"

#: The key in ``kv_connector_extra_config`` that turns this on or off.
SWITCH = "cross_layer_blocks"

#: Best first. BHLNC keeps a head slice of a block contiguous over all layers, so that one descriptor can move it.
BLOCK_OUTER = ("BHLNC", "BLHNC")


def cross_layer_blocks(vllm_config: Any) -> bool:
    """Return whether ``cross_layer_blocks`` is on for this connector, alone or inside a MultiConnector."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return False
    extra = transfer.kv_connector_extra_config or {}
    if transfer.kv_connector == "MultiConnector":
        children = [child for child in extra.get("connectors", ()) if isinstance(child, Mapping)]
        return any(
            is_ours(child.get("kv_connector"), child.get("kv_connector_module_path"))
            and _switched_on(child.get("kv_connector_extra_config") or {})
            for child in children
        )
    return is_ours(transfer.kv_connector, transfer.kv_connector_module_path) and _switched_on(extra)


def is_ours(connector: str | None, module_path: str | None) -> bool:
    """Return whether a configured connector is this one: by its module, or by the name that the plugin registers."""
    if module_path:
        return module_path.partition(".")[0] == CONNECTOR_MODULE
    return connector == CONNECTOR


def _switched_on(extra: Mapping[str, Any]) -> bool:
    return extra.get(SWITCH, True) is True
