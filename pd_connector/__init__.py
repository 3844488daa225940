"""A KV connector for vLLM: prefill/decode disaggregation and host-memory KV offload in one.

``PDConnector`` is the only public name. vLLM finds it through ``"kv_connector": "PDConnector",
"kv_connector_module_path": "pd_connector"``. It is imported on first use, because vLLM loads this package's plugin in
every one of its processes, and processes without the connector must not pay for the import.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pd_connector.connector import PDConnector

__all__ = ["PDConnector"]


def __getattr__(name: str) -> Any:
    if name == "PDConnector":
        try:
            from pd_connector.connector import PDConnector  # noqa: PLC0415  see above
        except ImportError as error:
            from pd_connector.vllm.releases.installed import warning_if_untested  # noqa: PLC0415  as above

            if warning := warning_if_untested():
                error.add_note(warning)
            raise
        return PDConnector
    if name in ("OffloadingConnector", "SimpleCPUOffloadConnector", "LMCacheMPConnector"):
        raise AttributeError(
            f"--kv-offloading-size puts {name} in the place of PDConnector: leave it out, and set cpu_bytes_to_use in "
            "kv_connector_extra_config"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
