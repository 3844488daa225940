"""The connector under names that some routers look for.

A router that relays ``kv_transfer_params`` works with every connector whose contract is NixlConnector's, but some ask
vLLM for the connector's name and tag prefill legs only if it is that one. vLLM takes a connector from
``kv_connector_module_path`` before it looks into its own registry:

    "kv_connector": "NixlConnector", "kv_connector_module_path": "pd_connector.aliases"
"""

from pd_connector.connector import PDConnector as NixlConnector

__all__ = ["NixlConnector"]
