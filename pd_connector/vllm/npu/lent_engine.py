"""The transfer engine that vllm-ascend lends to a worker beside its pool of KV blocks, AscendStoreConnector.

vllm-ascend has one Mooncake engine in a process, made for the first of its connectors that asks. The first that
registers KV caches with it registers them for all, and the calls of the others do nothing. This module imports
vllm_ascend only where the pool is beside this connector.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from pd_connector.vllm.ascend_options import has_ascend_store

#: Returns Mooncake's TransferEngine, which is known to peers by the address that it is given.
LendEngine: TypeAlias = Callable[[str], Any]


def lent_engine() -> LendEngine | None:
    """Return what lends the engine, if the pool is beside the connector that is being made; else None.

    From then on, nobody else registers KV caches with it: the caller must register all of them. Connectors are all made
    before one of them is given KV caches, so for that it does not matter which comes first. Which variables of the
    environment the engine has read does depend on it.
    """
    if not has_ascend_store():
        return None
    from vllm_ascend.distributed.kv_transfer.utils import mooncake_transfer_engine as lender  # noqa: PLC0415  see above

    process = lender.global_te
    process.is_register_buffer = True
    return lambda host: process.get_transfer_engine(host, device_name=None)


def is_started() -> bool:
    """Return whether the pool has started the engine: what is set in the environment now comes too late."""
    from vllm_ascend.distributed.kv_transfer.utils import mooncake_transfer_engine as lender  # noqa: PLC0415  see above

    return lender.global_te.transfer_engine is not None
