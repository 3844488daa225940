"""Both sides of one engine's ``PDConnector``, called as vLLM calls them.

The caches and the block pool are real, the transfer engine is the in-process one, and there is no model. The
configuration holds what the connector reads of vLLM's.
"""

import queue
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from vllm.config import KVTransferConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import RequestStatus

from pd_connector.connector import PDConnector
from pd_connector.scheduler.scheduler_role import SchedulerRole
from tests.support.connector.requests import FakeRequest, a_prompt, cache_manager
from tests.support.connector.vllm_calls import Results, bind_cache_manager, results_of, take_output
from tests.support.waiting import until

_Role = TypeVar("_Role", bound=SchedulerRole)

BLOCK_TOKENS = 32
LAYERS = ("l0", "l1")
SPEC = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=64, dtype=torch.float32)
CACHES = KVCacheConfig(8, [], [KVCacheGroupSpec(list(LAYERS), SPEC)])


def transfer_config(role: str = "kv_both", policy: str = "fail", **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="PDConnector",
        kv_connector_module_path="pd_connector",
        kv_role=role,
        kv_load_failure_policy=policy,
        # No model computes anything, so no engine can be proven.
        kv_connector_extra_config={"host": "127.0.0.1", "canary": "off", **extra},
    )


def a_config(model: Path, role: str = "kv_both", policy: str = "fail", **extra: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=transfer_config(role, policy, **extra),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_external_lb=False,
            decode_context_parallel_size=1,
            local_world_size=1,
            use_ray=False,
            distributed_executor_backend="uni",
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context={}),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        observability_config=SimpleNamespace(otlp_traces_endpoint=None),
        shutdown_timeout=60,
        speculative_config=None,
        model_config=SimpleNamespace(
            model=str(model),
            dtype=torch.float32,
            architecture="LlamaForCausalLM",
            use_mla=False,
            is_hybrid=False,
            enable_sleep_mode=False,
            max_model_len=4096,
            revision=None,
            hf_overrides=None,
            hf_config_path=None,
            quantization=None,
            quantization_config=None,
            get_total_num_hidden_layers=lambda: len(LAYERS),
            get_total_num_kv_heads=lambda: 2,
            get_head_size=lambda: 64,
        ),
    )


@dataclass
class EngineUnderTest:
    """Both sides of one engine's connector, its caches, and what its worker has reported."""

    scheduler: PDConnector
    worker: PDConnector
    caches: dict[str, torch.Tensor]
    pool: BlockPool
    tables: dict[str, list[int]] = field(default_factory=dict)
    results: Results = field(default_factory=Results)
    waiting: dict[str, list[int]] = field(default_factory=dict)  # blocks of the requests that wait for tokens
    _allocated: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # those requests, and their blocks
    _arrived: set[str] = field(default_factory=set)  # those whose wait has ended, and which have not run since

    def step(self, left: Collection[str] = ()) -> None:
        """What vLLM calls in one step without a model. Requests whose wait has ended get their turn.

        ``left``: requests that have ended since the last step.
        """
        for request_id in self._arrived:
            self.scheduler.update_state_after_alloc(*self._allocated.pop(request_id), 0)
        self._arrived.clear()
        orders = self.scheduler.build_connector_meta(SimpleNamespace(num_scheduled_tokens={}))
        self.worker.bind_connector_metadata(orders)
        output = take_output(self.worker, left)
        self.worker.clear_connector_metadata()
        results = results_of(output, self.waiting)
        for name in ("finished_recving", "failed_recving"):
            before, new = getattr(self.results, name), getattr(results, name)
            assert not before & new, "vLLM's scheduler dies of an id that it no longer holds"
            before |= new
        self._arrived = results.finished_recving & self._allocated.keys()
        self.scheduler.update_connector_output(output)

    @property
    def held(self) -> list[int]:
        """Blocks that somebody has references to."""
        return [block.block_id for block in self.pool.blocks if block.ref_cnt and not block.is_null]

    def steps_until(self, condition: Callable[[Results], object]) -> None:
        def reached() -> bool:
            self.step()
            return bool(condition(self.results))

        until(reached)
        self.step()

    def prefill(self, request_id: str, blocks: list[int], status: Any = RequestStatus.FINISHED_LENGTH_CAPPED) -> Any:
        """A prefill leg, computed and finished: what the connector tells vLLM."""
        request = FakeRequest(request_id, a_prompt(70), {"do_remote_decode": True}, status=status)
        self.scheduler.on_new_request(request)
        assert self.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        self.tables[request_id] = blocks
        answer = self.scheduler.request_finished_all_groups(request, (blocks,))
        del self.tables[request_id]
        return answer

    def allocate(self, request: FakeRequest, blocks: list[int]) -> None:
        """A decode leg that arrives and gets its blocks."""
        self.scheduler.on_new_request(request)
        tokens, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert is_async
        assert tokens is not None
        assert tokens == request.num_prompt_tokens - 1
        self.waiting[request.request_id] = blocks
        allocated = SimpleNamespace(
            get_block_ids=lambda: (blocks,), blocks=([self.pool.blocks[block] for block in blocks],)
        )
        self._allocated[request.request_id] = request, allocated
        self.scheduler.update_state_after_alloc(request, allocated, tokens)

    @property
    def cache_manager(self) -> Any:
        """What vLLM binds to the connector."""
        return cache_manager(self.pool, self.tables)

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


#: What the fixture ``start`` is: kv_role, kv_load_failure_policy, and settings of the connector.
StartEngine = Callable[..., EngineUnderTest]


def role_of(engine: EngineUnderTest, kind: type[_Role]) -> _Role:
    """The scheduler side's role of a kind."""
    (role,) = (role for role in engine.scheduler._scheduler._roles if isinstance(role, kind))
    return role


class EngineCoreUnderConstruction(EngineCoreProc):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's engine core at the moment at which it makes its scheduler, which binds the connector."""

    def __init__(self, connector: PDConnector, manager: Any) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.shutdown_state = EngineShutdownState.RUNNING
        bind_cache_manager(connector, manager)
