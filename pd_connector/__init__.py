"""A KV connector for vLLM: prefill/decode disaggregation and host-memory KV offload in one piece.

The one public name is ``PDConnector``, which vLLM finds with ``"kv_connector": "PDConnector",
"kv_connector_module_path": "pd_connector"``. It is imported on first use: vLLM loads this package's plugin in every
one of its processes, and those without the connector must not pay for it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pd_connector.connector import PDConnector

__all__ = ["PDConnector"]


def __getattr__(name: str) -> Any:
    if name == "PDConnector":
        from pd_connector.connector import PDConnector  # noqa: PLC0415  see above

        return PDConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
