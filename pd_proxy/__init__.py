"""A proxy for the APIs of vLLM in front of prefill servers (P) and decode servers (D).

It knows nothing about KV caches or connectors and imports none of this project's packages. What it does is what every
router for P/D disaggregation has to do: send a request to P for one token, take ``kv_transfer_params`` from the answer,
and send the request to D with them.

    pd-proxy --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200

Here lives the public face: ``Settings`` and ``create_app``.
"""

try:
    from pd_proxy.app import create_app
except ModuleNotFoundError as missing:  # its dependencies are an extra: engines do not need them
    raise ModuleNotFoundError(
        f"the proxy needs {missing.name}, which is not installed; run: pip install 'pd-connector[proxy]'",
        name=missing.name,
    ) from missing
from pd_proxy.settings import Settings

__all__ = ["Settings", "create_app"]
