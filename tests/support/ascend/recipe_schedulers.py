"""A recipe's engines as their schedulers see them: vLLM's or vllm-ascend's own, with the connector's scheduler half.

They give requests their blocks, step by step. Nothing computes: what a step would write is kept, by block tables.
"""

import copy
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeAlias

from vllm.config import set_current_vllm_config
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from layout.geometry import WorkerGeometry
from pd_connector.orders import PullOrder, RankEnds, Report, WorkerHandshake, block_table
from pd_connector.vllm.metadata import HandshakeMetadata, ReportMetadata
from tests.support.ascend.recipe_oracle import RecipePrompt, kind_of
from tests.support.ascend.recipe_ranks import RankCaches, our_config
from tests.support.process import free_port

#: What every step samples.
OUTPUT = 7
#: Tokens of a step. While it computes, windows of small blocks take many, and the pools are small.
_STEP, _STEP_OF_WINDOWS = 1024, 32
_MOST_STEPS = 20_000
#: In the place of vLLM's registry of what reads images, which wants tokenizers.
_TEXT_ONLY: Any = SimpleNamespace(supports_multimodal_inputs=lambda _: False)
#: What a step of the model writes, or what is pulled.
Event: TypeAlias = RecipePrompt | PullOrder


class RecipeScheduler:
    """One engine's scheduler, and what its workers would have done so far."""

    def __init__(
        self,
        ranks: Sequence[RankCaches],
        workers: Sequence[WorkerGeometry],
        lacks: Callable[[PullOrder], Set[tuple[int, int]]] = lambda _: frozenset(),
    ) -> None:
        """Start an engine's scheduler. The process must have the engine's environment.

        Args:
            ranks: all of the engine, TP ranks of the first stage first.
            workers: their geometries.
            lacks: of states at borders of blocks that are to be pulled, those that the prefill engine lacks.
        """
        self.events: list[Event] = []
        self._lacks, self._workers = lacks, workers
        self._answers: dict[str, dict[str, Any] | None] = {}
        plans = [copy.deepcopy(rank.kv_cache_config) for rank in ranks if rank.tp_rank == 0]
        plan = generate_scheduler_kv_cache_config(plans)
        config = _with_settings(our_config(ranks[0].vllm_config), _step_tokens(plan))
        config.cache_config.num_gpu_blocks = plan.num_blocks
        block, hashed = resolve_kv_cache_block_sizes(plan, config)
        init_none_hash(sha256_cbor)
        self._hasher = get_request_block_hasher(hashed, sha256_cbor)
        with set_current_vllm_config(config):
            kind = config.scheduler_config.get_scheduler_cls()
            self.scheduler = kind(config, plan, StructuredOutputManager(config), block, hashed, _TEXT_ONLY)
        self._connector: Any = self.scheduler.connector
        self._connector.set_xfer_handshake_metadata_pp_aware(
            {(worker.pp_rank, worker.tp_rank): HandshakeMetadata(WorkerHandshake(worker)) for worker in workers}
        )

    def run(self, name: str, prompt: Sequence[int], params: dict[str, Any], outputs: int = 1) -> dict[str, Any] | None:
        """Serve a request to its end; return the ``kv_transfer_params`` of the answer."""
        sampling = SamplingParams(max_tokens=outputs, ignore_eos=True, extra_args={"kv_transfer_params": params})
        request = Request(name, list(prompt), sampling, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        for _ in range(_MOST_STEPS):
            if name in self._answers:
                return self._answers[name]
            self._step()
        raise AssertionError(f"{name} has not ended: {request.status}, {request.num_computed_tokens} tokens computed")

    def close(self) -> None:
        """End all leases, and the threads."""
        self._connector._scheduler.check_integrity()
        self.scheduler.shutdown()

    def _step(self) -> None:
        output = self.scheduler.schedule()
        orders = output.kv_connector_metadata.orders
        assert not orders.refusals, orders.refusals
        self.events += orders.pulls + orders.borders
        ids, sampled = list(output.num_scheduled_tokens), []
        for name, number in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            first = request.num_computed_tokens - number
            end = first + number - drafts
            tables = [block_table(ids) for ids in self.scheduler.kv_cache_manager.get_block_ids(name)]
            self.events.append(RecipePrompt(end, tables, first))
            sampled.append([OUTPUT] if end >= request.num_tokens else [])
        result = ModelRunnerOutput(ids, {each: index for index, each in enumerate(ids)}, sampled)
        result.kv_connector_output = KVConnectorOutput(
            finished_recving={order.request_id for order in orders.pulls},
            kv_connector_worker_meta=ReportMetadata(
                Report(
                    steps=dict.fromkeys(orders.steps, 1),
                    borders={
                        order.request_id: RankEnds(len(self._workers), lacking_states=frozenset(self._lacks(order)))
                        for order in orders.borders
                    },
                )
            ),
        )
        for outputs in self.scheduler.update_from_output(output, result).values():
            for each in outputs.outputs:
                if each.finish_reason is not None:
                    assert str(each.finish_reason) == "length", each
                    self._answers[each.request_id] = each.kv_transfer_params


def _step_tokens(plan: Any) -> int:
    """How many tokens a step computes: where states are kept at borders of blocks, it ends there."""
    specs = [group.kv_cache_spec for group in plan.kv_cache_groups]
    least = _STEP_OF_WINDOWS if any(kind_of(spec) == "window" for spec in specs) else _STEP
    return max([least, *(int(spec.block_size) for spec in specs if getattr(spec, "mamba_cache_mode", "") == "align")])


def _with_settings(config: Any, step_tokens: int) -> Any:
    """A recipe's configuration, with what makes the connector work in one process without workers, and small steps."""
    given = config.kv_transfer_config
    ours = copy.copy(config)
    ours.cache_config, ours.scheduler_config = copy.copy(config.cache_config), copy.copy(config.scheduler_config)
    ours.scheduler_config.max_num_batched_tokens = step_tokens
    ours.scheduler_config.max_num_scheduled_tokens = step_tokens
    settings = {"host": "127.0.0.1", "port": free_port(), "canary": "off", "model_check": "off", "lease_ttl_s": 600}
    ours.kv_transfer_config = replace(
        given, kv_connector_extra_config=given.kv_connector_extra_config | settings, kv_load_failure_policy="fail"
    )
    return ours
