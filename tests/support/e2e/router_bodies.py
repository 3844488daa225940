"""Whole bodies of both legs, as routers write them that cannot be run here: keys, order and numbers.

docs/routers.md names the routers' versions. In place of PROMPT, TRANSFER (what P has answered, as the router relays it)
and the names of a transfer, a test puts its own.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

#: What a client asks llm-d for, by the API below /v1.
_ASKED: Mapping[str, dict[str, Any]] = {
    "completions": {
        "prompt": "PROMPT", "max_tokens": 16, "temperature": 0, "ignore_eos": True, "logprobs": 1,
        "return_token_ids": True,
    },
    "responses": {"input": "PROMPT", "max_output_tokens": 16, "temperature": 0, "ignore_eos": True},
    "messages": {"messages": [{"role": "user", "content": "PROMPT"}], "max_tokens": 16, "temperature": 0},
}  # fmt: skip
_NULLS = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
_CAPS = ("max_tokens", "max_completion_tokens", "min_tokens")


@dataclass(frozen=True, slots=True)
class LegBodies:
    """What a router sends to P and to D."""

    prefill: str
    decode: str
    relayed: Callable[[dict[str, Any]], str] = json.dumps  # P's ``kv_transfer_params``, with legs in turn
    api: str = "completions"


def _through_go(value: Any) -> str:
    """As Go's JSON library writes it: keys in order, no spaces, whole numbers without a fraction."""

    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: whole(one) for name, one in sorted(value.items())}
        if isinstance(value, list):
            return [whole(one) for one in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return json.dumps(whole(value), separators=(",", ":"))


def _by_llm_d(api: str, caps: tuple[str, ...], for_p: dict[str, Any], for_d: object) -> LegBodies:
    """Both legs of llm-d's sidecar, which sets ``caps`` to 1 for P."""
    asked = {"model": "tiny", **_ASKED[api]}
    prefill = asked | dict.fromkeys(caps, 1) | {"stream": False, "kv_transfer_params": for_p}
    bodies = (_through_go(body) for body in (prefill, asked | {"kv_transfer_params": for_d}))
    p, d = (body.replace('"PROMPT"', "PROMPT").replace('"TRANSFER"', "TRANSFER") for body in bodies)
    return LegBodies(p, d, _through_go, api)


#: Of llm-d's sidecar, ``mooncake``, by API; P's has the header ``X-data-parallel-rank: 0``. P's leg of a response may
#: have as many tokens as D's.
AT_ONCE = {
    api: _by_llm_d(
        api,
        ("max_tokens",),
        {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "TRANSFER_ID"},
        {
            "do_remote_decode": False, "do_remote_prefill": True, "remote_bootstrap_addr": "BOOTSTRAP",
            "remote_engine_id": "ENGINE_ID", "transfer_id": "TRANSFER_ID",
        },
    )
    for api in _ASKED
}  # fmt: skip

#: The router puts P's host as it knows it in the place of P's own: here they are the same.
_HOST = {"remote_host": "127.0.0.1"}

IN_TURN = {
    **{
        f"llm-d sidecar nixlv2, {api}": _by_llm_d(
            api,
            ("max_output_tokens",) if api == "responses" else _CAPS,
            {"do_remote_decode": True, "do_remote_prefill": False, **_NULLS},
            "TRANSFER",
        )
        for api in _ASKED
    },
    "production-stack": LegBodies(
        '{"model": "tiny", "prompt": PROMPT, "max_tokens": 1, "temperature": 0.0, "ignore_eos": true, "logprobs": 1, '
        '"return_token_ids": true, "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false, '
        '"remote_engine_id": null, "remote_block_ids": null, "remote_host": null, "remote_port": null}, '
        '"stream": false}',
        '{"model": "tiny", "prompt": PROMPT, "max_tokens": 16, "temperature": 0.0, "ignore_eos": true, '
        '"logprobs": 1, "return_token_ids": true, "kv_transfer_params": TRANSFER}',
        lambda params: json.dumps(params | _HOST),
    ),
    "AIBrix shfs": LegBodies(  # its JSON library keeps no order
        '{"prompt":PROMPT,"stream":false,"max_completion_tokens":1,"logprobs":1,"kv_transfer_params":{"remote_host":null,'
        '"remote_port":null,"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
        '"remote_block_ids":null},"model":"tiny","temperature":0,"ignore_eos":true,"return_token_ids":true,'
        '"max_tokens":1}',
        '{"kv_transfer_params":TRANSFER,"temperature":0,"model":"tiny","max_tokens":16,"ignore_eos":true,"logprobs":1,'
        '"return_token_ids":true,"prompt":PROMPT}',
        lambda params: _through_go(params | _HOST),
    ),
}
