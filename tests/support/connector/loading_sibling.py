"""A connector beside ours in MultiConnector that loads prompts while a step computes, as LMCache's does.

Its scheduler side only: who has the workers carries its loads out.
"""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from tests.support.connector.idle import IdleConnector


@dataclass(frozen=True)
class SiblingLoad:
    """What a step is to load before it computes."""

    request_id: str
    tokens: range
    tables: tuple[tuple[int, ...], ...]  # by cache group, the whole block table


@dataclass
class SiblingOrders(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """What the sibling's workers are told in a step."""

    loads: list[SiblingLoad]


class LoadingSibling(IdleConnector):
    """Holds the beginnings of the prompts that the test names, and returns ``(n, False)`` for them."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.held: dict[str, int] = {}  # tokens, by request
        self._asked: dict[str, int] = {}  # tokens on the device, by request
        self._loads: list[SiblingLoad] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self._asked[request.request_id] = num_computed_tokens
        return max(self.held.get(request.request_id, 0) - num_computed_tokens, 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            first = self._asked[request.request_id]
            tables = tuple(map(tuple, blocks.get_block_ids()))
            self._loads.append(SiblingLoad(request.request_id, range(first, first + num_external_tokens), tables))

    def build_connector_meta(self, scheduler_output: Any) -> SiblingOrders:
        loads, self._loads = self._loads, []
        return SiblingOrders(loads)


if "LoadingSibling" not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector("LoadingSibling", __name__, "LoadingSibling")
