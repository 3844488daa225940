"""Whole bodies of both legs of a completion, as routers write them that cannot be run here: keys, order and numbers.

docs/routers.md names the routers' versions. In place of PROMPT, TRANSFER (what P has answered, as the router relays it)
and the names of a transfer, a test puts its own.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: By Go's JSON library: keys in order, no spaces, whole numbers without a fraction.
_GO_P = (
    '{"ignore_eos":true,"kv_transfer_params":%s,"logprobs":1,"max_completion_tokens":1,"max_tokens":1,"model":"tiny",'
    '"prompt":PROMPT,"return_token_ids":true,"stream":false,"temperature":0}'
)
_GO_D = (
    '{"ignore_eos":true,"kv_transfer_params":%s,"logprobs":1,"max_tokens":16,"model":"tiny","prompt":PROMPT,'
    '"return_token_ids":true,"temperature":0}'
)

#: Of llm-d's sidecar, ``mooncake``; P's has the header ``X-data-parallel-rank: 0``.
AT_ONCE_P = _GO_P % '{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"TRANSFER_ID"}'
AT_ONCE_D = _GO_D % (
    '{"do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":"BOOTSTRAP",'
    '"remote_engine_id":"ENGINE_ID","transfer_id":"TRANSFER_ID"}'
)


@dataclass(frozen=True, slots=True)
class InTurn:
    """What a router sends whose decode leg has P's answer."""

    prefill: str
    decode: str
    relayed: Callable[[dict[str, Any]], str]  # P's ``kv_transfer_params``


def _through_go(params: dict[str, Any]) -> str:
    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: whole(one) for name, one in sorted(value.items())}
        if isinstance(value, list):
            return [whole(one) for one in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return json.dumps(whole(params), separators=(",", ":"))


#: The router puts P's host as it knows it in the place of P's own: here they are the same.
_HOST = {"remote_host": "127.0.0.1"}

IN_TURN = {
    "llm-d sidecar nixlv2": InTurn(
        _GO_P
        % (
            '{"do_remote_decode":true,"do_remote_prefill":false,"remote_block_ids":null,"remote_engine_id":null,'
            '"remote_host":null,"remote_port":null}'
        ),
        _GO_D % "TRANSFER",
        _through_go,
    ),
    "production-stack": InTurn(
        '{"model": "tiny", "prompt": PROMPT, "max_tokens": 1, "temperature": 0.0, "ignore_eos": true, "logprobs": 1, '
        '"return_token_ids": true, "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false, '
        '"remote_engine_id": null, "remote_block_ids": null, "remote_host": null, "remote_port": null}, '
        '"stream": false}',
        '{"model": "tiny", "prompt": PROMPT, "max_tokens": 16, "temperature": 0.0, "ignore_eos": true, '
        '"logprobs": 1, "return_token_ids": true, "kv_transfer_params": TRANSFER}',
        lambda params: json.dumps(params | _HOST),
    ),
    "AIBrix shfs": InTurn(  # its JSON library keeps no order
        '{"prompt":PROMPT,"stream":false,"max_completion_tokens":1,"logprobs":1,"kv_transfer_params":{"remote_host":null,'
        '"remote_port":null,"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
        '"remote_block_ids":null},"model":"tiny","temperature":0,"ignore_eos":true,"return_token_ids":true,'
        '"max_tokens":1}',
        '{"kv_transfer_params":TRANSFER,"temperature":0,"model":"tiny","max_tokens":16,"ignore_eos":true,"logprobs":1,'
        '"return_token_ids":true,"prompt":PROMPT}',
        lambda params: _through_go(params | _HOST),
    ),
}
