"""APIs beside OpenAI's completions: what each leg is sent, what the client gets, in each API's own form."""

import ast
import asyncio
import copy
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pd_proxy.apis import ALL, GENERATE, MESSAGES, RESPONSES, Api
from pd_proxy.parameters import REMOTE_DECODE, decode_body, prefill_body, undivided_reason
from pd_proxy.relay import RELAYED, STORED
from tests.support.examples.fake_servers import NAMED_TRANSFER, TRANSFER, FakeServer, Received, Script, Wire, answers
from tests.support.examples.served_proxy import Proxy, ProxySetup

RESPONSE: dict[str, Any] = {"model": "tiny", "input": "hello", "instructions": "be kind", "max_output_tokens": 40}
MESSAGE: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 40}
TOKENS: dict[str, Any] = {"model": "tiny", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 40, "seed": 3}}
BODIES = {RESPONSES: RESPONSE, MESSAGES: MESSAGE, GENERATE: TOKENS}


def shown(value: object) -> str:
    """The id of a parameter."""
    return value.path if isinstance(value, Api) else str(value)


each = pytest.mark.parametrize("api", BODIES, ids=shown)


def events(*named: tuple[str, dict[str, Any]]) -> list[bytes]:
    """A stream as vLLM writes it for responses and messages."""
    return [f"event: {name}\ndata: {json.dumps({'type': name} | data)}\n\n".encode() for name, data in named]


def streams(pieces: list[bytes]) -> Script:
    async def script(_: Received, wire: Wire) -> None:
        await wire.head()
        for piece in pieces:
            await wire.chunk(piece)
        await wire.end()

    return script


# What the legs are sent


@each
def test_a_request_is_prefilled_then_decoded(proxy: Proxy, p: FakeServer, d: FakeServer, api: Api) -> None:
    body = BODIES[api] | {"unknown": [1.5, None]}
    response = proxy.http.post(f"{api.path}?beta=true", json=body)
    assert response.json() == {"choices": [{"text": " the answer"}]}
    assert [one.path for one in (*p.received, *d.received)] == [api.path, api.path]
    assert p.bodies[0]["kv_transfer_params"]["do_remote_decode"] is True
    assert d.bodies == [body | {"kv_transfer_params": TRANSFER}]


@pytest.mark.parametrize(
    ("api", "added", "sent"),
    [
        (
            RESPONSES,
            {
                "stream": True, "store": True, "background": False, "stop": ["a"],
                "include": ["message.output_text.logprobs"],
                "top_logprobs": 3, "text": {"format": {"type": "text"}}, "tools": [{"type": "function", "name": "f"}],
                "reasoning": {"effort": "high"}, "temperature": 0.7, "structured_outputs": {"regex": "a"},
            },
            RESPONSE | {
                "stream": False, "store": False, "background": False, "max_output_tokens": 1, "ignore_eos": True,
                "temperature": 0.0, "text": {"format": {"type": "text"}}, "tools": [{"type": "function", "name": "f"}],
                "reasoning": {"effort": "high"},
            },
        ),
        (
            MESSAGES,
            {
                "stream": True, "stop_sequences": ["a"], "top_k": 4, "top_p": 0.4, "system": "be kind",
                "temperature": 0.7, "thinking": {"type": "enabled", "budget_tokens": 1024},
                "tool_choice": {"type": "any"},
            },
            MESSAGE | {
                "stream": False, "max_tokens": 1, "temperature": 0.0, "system": "be kind",
                "tool_choice": {"type": "any"},
            },
        ),
        (
            GENERATE,
            {
                "stream": True, "stream_options": {}, "return_token_ids": True, "priority": 2,
                "sampling_params": {"max_tokens": 9, "n": 3, "stop": ["a"], "min_tokens": 4, "logprobs": 2, "a": 2},
            },
            TOKENS | {
                "stream": False, "priority": 2,
                "sampling_params": {"max_tokens": 1, "n": 1, "ignore_eos": True, "temperature": 0.0, "a": 2},
            },
        ),
    ],
    ids=shown,
)  # fmt: skip
def test_the_prefill_leg_has_the_prompt_and_one_token(api: Api, added: dict[str, Any], sent: dict[str, Any]) -> None:
    body = BODIES[api] | added
    before = copy.deepcopy(body)
    assert prefill_body(api, body, "t") == sent | {"kv_transfer_params": REMOTE_DECODE | {"transfer_id": "t"}}
    assert body == before


@pytest.mark.filterwarnings("ignore")  # in what vLLM imports
@each
def test_vllm_takes_the_prefill_leg_for_one_token(api: Api) -> None:
    """vLLM's own classes judge it; its messages become chats on the way."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest  # noqa: PLC0415  seconds
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest  # noqa: PLC0415

    place = "scale_out.token_in_token_out" if importlib.util.find_spec("vllm.entrypoints.scale_out") else "serve.disagg"
    GenerateRequest = importlib.import_module(f"vllm.entrypoints.{place}.protocol").GenerateRequest  # noqa: N806
    kinds: dict[Api, Any] = {RESPONSES: ResponsesRequest, MESSAGES: AnthropicMessagesRequest, GENERATE: GenerateRequest}
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}} if api is MESSAGES else {}
    taken = kinds[api].model_validate(prefill_body(api, BODIES[api] | thinking))
    assert taken.kv_transfer_params == REMOTE_DECODE
    assert not taken.stream
    if api is RESPONSES:
        sampling = taken.to_sampling_params(99, {})
        assert (sampling.max_tokens, sampling.ignore_eos, sampling.temperature) == (1, True, 0.0)
        assert (taken.store, taken.background) == (False, False)
    elif api is MESSAGES:
        assert (taken.max_tokens, taken.temperature) == (1, 0.0)
    else:
        assert (taken.sampling_params.max_tokens, taken.sampling_params.ignore_eos) == (1, True)


@each
def test_a_clients_own_transfer_reaches_no_server(api: Api) -> None:
    own = {"do_remote_prefill": True, "remote_host": "evil"}
    body = BODIES[api] | {"kv_transfer_params": own, "vllm_xargs": {"kv_transfer_params": own, "mine": 1}}
    if api is GENERATE:
        body["sampling_params"] = TOKENS["sampling_params"] | {"extra_args": {"kv_transfer_params": own, "mine": 1}}
    assert "evil" not in json.dumps([decode_body(api, body, None), prefill_body(api, body)])
    assert json.dumps(decode_body(api, body, None)).count('"mine": 1') == (2 if api is GENERATE else 1)


# What D serves alone


@pytest.mark.parametrize(
    ("api", "added", "reason"),
    [
        (RESPONSES, {"previous_response_id": "resp_1"}, "an earlier response"),
        (RESPONSES, {"background": True}, "in the background"),
        (RESPONSES, {"tools": [{"type": "function"}, {"type": "web_search_preview"}]}, "tools that a server runs"),
        (RESPONSES, {"tools": [{"type": "mcp", "server_label": "a"}]}, "tools that a server runs"),
        (RESPONSES, {"tools": [{"type": ["mcp"]}, 3]}, None),
        (RESPONSES, {"tools": 3, "truncation": "disabled", "store": True}, None),
        (RESPONSES, {"truncation": None}, "a prompt cut to what the output leaves"),
        (RESPONSES, {"truncation": "auto"}, "a prompt cut to what the output leaves"),
        (RESPONSES, {"max_output_tokens": 0}, "no tokens to generate"),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}}, None),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "f"}}, "a forced tool"),
        (GENERATE, {"sampling_params": {"prompt_logprob_token_ids": [1]}}, "prompt log-probabilities"),
        (GENERATE, {"sampling_params": {"skip_reading_prefix_cache": True}}, "a prompt that reads no cache"),
        (GENERATE, {"sampling_params": {"n": 4}}, None),
        (GENERATE, {"sampling_params": {"n": "4"}}, "an invalid number of samples"),
        (GENERATE, {"sampling_params": {"prompt_logprobs": 1}}, "prompt log-probabilities"),
        (GENERATE, {"sampling_params": "none"}, None),
    ],
    ids=shown,
)
def test_what_d_serves_alone(api: Api, added: dict[str, Any], reason: str | None) -> None:
    assert undivided_reason(api, BODIES[api] | added) == reason


@pytest.mark.parametrize("added", [{"previous_response_id": "resp_1"}, {"background": True, "store": True}], ids=str)
def test_a_kept_response_needs_the_d_that_keeps_it(
    setup: ProxySetup, p: FakeServer, d: FakeServer, added: dict[str, Any]
) -> None:
    assert setup.proxy([p], [d]).http.post("/v1/responses", json=RESPONSE | added).status_code == 200
    assert (p.bodies, d.bodies) == ([], [RESPONSE | added])
    refused = setup.proxy([p], [d, setup.server(answers(200, b"{}"))]).http.post("/v1/responses", json=RESPONSE | added)
    assert refused.status_code == 400
    assert "needs the decode server that keeps responses" in refused.json()["error"]["message"]
    assert len(d.received) == 1


# Errors


def test_errors_are_in_the_form_of_the_api(setup: ProxySetup, p: FakeServer, closed_port: str) -> None:
    proxy = setup.proxy([p], [closed_port])
    told = "a decode server cannot be reached"
    message = proxy.http.post("/v1/messages", json=MESSAGE)
    assert (message.status_code, message.json()) == (
        502, {"type": "error", "error": {"type": "api_error", "message": told}}
    )  # fmt: skip
    response = proxy.http.post("/v1/responses", json=RESPONSE)
    assert (response.status_code, response.json()["error"]["message"]) == (502, told)
    unusable = proxy.http.post("/v1/messages", content=b"[]")
    assert unusable.json()["error"]["type"] == "invalid_request_error"


@each
def test_ps_refusal_is_the_clients_answer(proxy: Proxy, p: FakeServer, d: FakeServer, api: Api) -> None:
    refusal = b'{"type":"error","error":{"type":"invalid_request_error","message":"no"}}'
    p.script = answers(400, refusal)
    response = proxy.http.post(api.path, json=BODIES[api])
    assert (response.status_code, response.content, d.received) == (400, refusal, [])


@pytest.mark.parametrize(
    ("api", "answer"), [(MESSAGES, {"stop_reason": "end_turn"}), (RESPONSES, {"status": "completed"})], ids=shown
)
def test_a_prefill_that_ends_with_its_token_is_ds_alone_where_nothing_forbids_it(
    proxy: Proxy, p: FakeServer, d: FakeServer, api: Api, answer: dict[str, Any]
) -> None:
    p.script = answers(200, json.dumps(answer).encode())
    response = proxy.http.post(api.path, json=BODIES[api])
    if api is MESSAGES:
        assert (response.status_code, d.bodies) == (200, [MESSAGE])
    else:
        assert "finish reason 'stop', expected 'length'" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("api", "answer"),
    [
        (MESSAGES, {"stop_reason": None}),
        (RESPONSES, {"status": "cancelled"}),
        (RESPONSES, {"status": "completed", "usage": {"output_tokens": 0}}),
    ],
    ids=shown,
)
def test_a_prefill_that_was_given_up_goes_to_another(
    setup: ProxySetup, p: FakeServer, d: FakeServer, api: Api, answer: dict[str, Any]
) -> None:
    stopping = setup.server(answers(200, json.dumps(answer).encode()))
    assert setup.proxy([stopping, p], [d]).http.post(api.path, json=BODIES[api]).status_code == 200
    assert (len(stopping.received), len(p.received)) == (1, 1)


# Streams

CREATED = events(("response.created", {"response": {"id": "resp_1"}}), ("response.in_progress", {"response": {}}))
TEXT = events(("response.output_text.delta", {"delta": "a"}), ("response.completed", {"response": {}}))


@pytest.mark.parametrize("pieces", [CREATED + TEXT, [b"".join(CREATED + TEXT)], CREATED, CREATED[:1], []], ids=len)
def test_a_stream_arrives_as_it_was(setup: ProxySetup, p: FakeServer, pieces: list[bytes]) -> None:
    split = [bytes([one]) for one in b"".join(pieces)]
    for sent in (pieces, split):
        proxy = setup.proxy([p], [setup.server(streams(sent))])
        response = proxy.http.post("/v1/responses", json=RESPONSE | {"stream": True})
        assert (response.status_code, response.content) == (200, b"".join(pieces))


async def breaks_off(_: Received, wire: Wire) -> None:
    """As vLLM does when it cannot compute a response: it has no event that says so."""
    await wire.head()
    await wire.chunk(b"".join(CREATED))
    wire.drop()


@pytest.mark.parametrize("cut", [1, 4, 15, 40])
def test_a_d_that_dies_behind_the_prelude_is_an_error_and_no_stream(setup: ProxySetup, p: FakeServer, cut: int) -> None:
    """Wherever the pieces of the prelude end."""

    async def dies(_: Received, wire: Wire) -> None:
        await wire.head()
        await wire.chunk(CREATED[0] + CREATED[1][:cut])
        await asyncio.sleep(0.05)
        await wire.chunk(CREATED[1][cut:])
        wire.drop()

    response = setup.proxy([p], [setup.server(dies)]).http.post("/v1/responses", json=RESPONSE | {"stream": True})
    assert (response.status_code, response.json()["error"]["message"]) == (502, "a decode server broke off")


def test_a_d_that_asked_the_wrong_address_for_a_response_is_asked_again(setup: ProxySetup, p: FakeServer) -> None:
    """P has moved: D, which got its leg together with P, breaks its stream off before P has answered."""
    moved = NAMED_TRANSFER | {"remote_port": NAMED_TRANSFER["remote_port"] + 1}
    p.script = answers(200, json.dumps({"kv_transfer_params": NAMED_TRANSFER}).encode())
    d = setup.server(answers(200, b"{}"))
    proxy = setup.proxy([p], [d])
    proxy.http.post("/v1/responses", json=RESPONSE)

    async def answers_late(_: Received, wire: Wire) -> None:
        await asyncio.sleep(0.3)
        await wire.json(200, {"kv_transfer_params": moved})

    async def knows_the_new_address(received: Received, wire: Wire) -> None:
        right = received.body["kv_transfer_params"]["remote_port"] == moved["remote_port"]
        await (streams(CREATED + TEXT) if right else breaks_off)(received, wire)

    p.script, d.script = answers_late, knows_the_new_address
    response = proxy.http.post("/v1/responses", json=RESPONSE | {"stream": True})
    assert (response.status_code, response.content) == (200, b"".join(CREATED + TEXT))


@pytest.mark.parametrize("api", [RESPONSES, MESSAGES], ids=shown)
def test_a_d_that_fails_for_want_of_p_does_not_hide_ps_refusal(setup: ProxySetup, p: FakeServer, api: Api) -> None:
    """Both legs at once: D's stream has begun, as vLLM's does, and fails because P has."""
    p.script = answers(200, json.dumps({"kv_transfer_params": NAMED_TRANSFER}).encode())
    failed = streams(events(("message_start", {}), ("error", {"error": {}}))) if api is MESSAGES else breaks_off
    d = setup.server(answers(200, b"{}"))
    proxy = setup.proxy([p], [d])
    assert proxy.http.post(api.path, json=BODIES[api]).status_code == 200  # tells P's control address
    refusal = b'{"error":{"message":"too long","code":400}}'
    p.script, d.script = answers(400, refusal), failed
    response = proxy.http.post(api.path, json=BODIES[api] | {"stream": True})
    assert (response.status_code, response.content) == (400, refusal)


# Figures

OF_RESPONSE = b'{"cached_tokens":99,"input_tokens_per_turn":[100],"cached_tokens_per_turn":[99]}'
OF_MESSAGE = b'{"input_tokens":1,"output_tokens":5,"cache_read_input_tokens":99}'
TOOL = b'{"type":"tool_use","input":{"usage":' + OF_MESSAGE + b"}}"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("api", "told", "right"),
    [
        (RESPONSES, b'{"usage":{"input_tokens":100,"input_tokens_details":%b}}' % OF_RESPONSE,
         b'{"cached_tokens":64,"input_tokens_per_turn":[100],"cached_tokens_per_turn":[64]}'),
        (MESSAGES, b'{"content":[%b],"usage":%b,"id":"a"}' % (TOOL, OF_MESSAGE),
         b'{"input_tokens":36,"output_tokens":5,"cache_read_input_tokens":64}'),
        (MESSAGES, b'{"usage":{"input_tokens":100,"output_tokens":5}}', b'{"input_tokens":100,"output_tokens":5}'),
        (GENERATE, b'{"usage":{"prompt_tokens_details":{"cached_tokens":99}}}', b'{"cached_tokens":64}'),
    ],
    ids=["responses", "messages", "messages without details", "generate"],
)  # fmt: skip
def test_the_client_gets_ps_figures(
    setup: ProxySetup, p: FakeServer, api: Api, told: bytes, right: bytes, stream: bool
) -> None:
    """In whole answers, nothing else changes that only looks like them."""
    if stream:
        told = told.replace(b"[" + TOOL + b"]", b"[]")  # a stream has tools' arguments in strings
    transfer = TRANSFER | {"remote_prefill_cached_tokens": 64}
    p.script = answers(200, json.dumps({"kv_transfer_params": transfer}).encode())
    pieces = [b"data: " + told[:50], told[50:] + b"\n\n"]
    proxy = setup.proxy([p], [setup.server(streams(pieces) if stream else answers(200, told))])
    response = proxy.http.post(api.path, json=BODIES[api] | {"stream": stream})
    figures = {RESPONSES: OF_RESPONSE, MESSAGES: OF_MESSAGE, GENERATE: b'{"cached_tokens":99}'}[api]
    before, found, behind = (b"".join(pieces) if stream else told).rpartition(figures)
    assert response.content == before + right + behind if found else response.content == behind


@pytest.mark.parametrize(
    "schema",
    [
        {"input_tokens_details": {"cached_tokens_per_turn": 5}},
        {"properties": {"input_tokens_details": {"cached_tokens": {"type": "integer"}}}},
        {"input_tokens_details": {"type": "object", "properties": {"cached_tokens": {"type": "integer"}}}},
    ],
    ids=str,
)
def test_what_a_stream_of_responses_echoes_is_not_touched(
    setup: ProxySetup, p: FakeServer, schema: dict[str, Any]
) -> None:
    echo = events(("response.created", {"response": {"tools": [{"type": "function", "parameters": schema}]}}))
    proxy = setup.proxy([p], [setup.server(streams(echo + TEXT))])
    response = proxy.http.post("/v1/responses", json=RESPONSE | {"stream": True})
    assert response.content == b"".join(echo + TEXT)


@pytest.mark.parametrize(
    ("api", "answer"),
    [
        (RESPONSES, {"usage": {"input_tokens_details": {"cached_tokens": 32}}}),
        (MESSAGES, {"usage": {"input_tokens": 3, "cache_read_input_tokens": 32}}),
        (GENERATE, {"usage": {"prompt_tokens_details": {"cached_tokens": 32}}}),
    ],
    ids=["responses", "messages", "generate"],
)
def test_p_tells_its_figures_in_the_form_of_the_api(api: Api, answer: dict[str, Any]) -> None:
    assert api.figures.of(answer).cached == 32
    assert api.figures.of({"usage": None}).cached is None


# What is not divided


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/tokenize"), ("POST", "/v1/messages/count_tokens?beta=true"), ("GET", "/version"), ("GET", "/ping"),
        ("POST", "/v1/embeddings"), ("POST", "/v1/audio/transcriptions"), ("POST", "/v1/chat/completions/batch"),
        ("POST", "/generative_scoring"), ("POST", "/v1/systemone"),
        ("POST", "/v1/completions/render"), ("POST", "/v1/completions/derender"),
        ("POST", "/v1/chat/completions/render"), ("POST", "/v1/chat/completions/derender"),
        ("POST", "/v1/messages/render"), ("POST", "/v1/responses/render"),
        ("GET", "/v1/responses/resp_1?stream=true"), ("POST", "/v1/responses/resp_1/cancel"), ("GET", "/mine"),
    ],
)  # fmt: skip
def test_what_generates_nothing_goes_to_d_as_it_is(
    setup: ProxySetup, p: FakeServer, d: FakeServer, method: str, path: str
) -> None:
    d.script = answers(418, b"\x00\xff", content_type="text/x-any")
    proxy = setup.proxy([p], [d], relay=("/mine",))
    content, kind = (b"--b\r\n\xff", "multipart/form-data; boundary=b") if method == "POST" else (b"", "")
    response = proxy.http.request(method, path, content=content, headers={"Content-Type": kind} if kind else {})
    assert (response.status_code, response.content, response.headers["content-type"]) == (
        418,
        b"\x00\xff",
        "text/x-any",
    )
    [one] = d.received
    assert (one.method, one.path, one.content, one.headers.get("content-type", "")) == (method, path, content, kind)
    assert p.received == []


#: Of vLLM: they load adapters or end requests, are no HTTP, or need a package that vLLM does not bring.
NOT_PASSED_ON = {
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/inference/v1/abort_requests", "/v1/realtime",
    "/cohere/v2/chat", "/cohere/v2/chat/render",
}  # fmt: skip


def test_every_path_of_vllms_apis_is_served_or_left_out_on_purpose() -> None:
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    files = Path(vllm.origin).parent.glob("entrypoints/**/*.py")
    sources = (source for file in files if re.search("/(v1|v2|inference|cohere)/", source := file.read_text()))
    calls = (node for source in sources for node in ast.walk(ast.parse(source)))
    named = (ast.literal_eval(call.args[0]) for call in calls if isinstance(call, ast.Call) and _is_route(call))
    apis = {path for path in named if path.startswith(("/v1/", "/v2/", "/inference/", "/cohere/"))}
    assert len(apis) > 20
    assert apis - {api.path for api in ALL} - {*RELAYED, *STORED} - NOT_PASSED_ON == set()


def _is_route(call: ast.Call) -> bool:
    methods = ("get", "post", "websocket", "add_api_route")
    path = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
    return isinstance(call.func, ast.Attribute) and call.func.attr in methods and str(path).startswith("/")


def test_what_is_relayed_has_no_transfer_of_a_client(proxy: Proxy, d: FakeServer) -> None:
    own = {"kv_transfer_params": {"remote_host": "evil"}}
    proxy.http.post("/v1/chat/completions/batch", json={"messages": [], "vllm_xargs": own | {"a": 1}} | own)
    assert d.bodies == [{"messages": [], "vllm_xargs": {"a": 1}}]


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("application/json", b'{"kv_transfer_params": {}, "x": ' + 100_000 * b"[" + 100_000 * b"]" + b', "x": 1}'),
        ("application/json", b'{"x": '),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="vllm_xargs"\r\n\r\n{}\r\n--b--',
        ),
        *(
            (
                f"multipart/form-data; boundary=b; {charset}",
                b'--b\r\nContent-Disposition: form-data; name="+AHY-llm_xargs"\r\n\r\n{}\r\n--b--',
            )
            for charset in ("charset=utf-7", 'Charset = "UTF-7"', "charset=utf-8; charset=utf-7", "charset*=''utf-7")
        ),
    ],
    ids=["deep", "broken", "form", "charset", "quoted", "second", "extended"],
)
def test_what_could_hide_a_transfer_is_not_relayed(proxy: Proxy, d: FakeServer, kind: str, content: bytes) -> None:
    path = "/v1/audio/transcriptions" if kind.startswith("multipart") else "/v1/chat/completions/batch"
    response = proxy.http.post(path, content=content, headers={"Content-Type": kind})
    assert (response.status_code, d.received) == (400, [])


@pytest.mark.parametrize("charset", ["", "; charset=utf-8", '; charset="UTF-8"', ";charset=us-ascii"])
def test_a_form_that_hides_nothing_is_relayed_as_it_is(proxy: Proxy, d: FakeServer, charset: str) -> None:
    content = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n+AHY-\r\n--b--'
    kind = f"multipart/form-data{charset}; boundary=b"
    proxy.http.post("/v1/audio/transcriptions", content=content, headers={"Content-Type": kind})
    assert [(one.headers["content-type"], one.content) for one in d.received] == [(kind, content)]


@pytest.mark.parametrize(
    "path",
    ["/pause", "/v1/responses/derender", "/v1/responses/..", "/v1/responses/a/b", "/v1/responses/..%2Fpause", "/mine"],
)
def test_other_paths_reach_no_server_and_say_how_they_would(proxy: Proxy, d: FakeServer, path: str) -> None:
    response = proxy.http.post(f"{proxy.url}{path}") if ".." not in path else proxy.http.get(path)
    assert response.status_code in (404, 405)
    assert d.received == []
    if path == "/mine":
        assert "started with --relay PATH" in response.json()["error"]["message"]


def test_a_kept_response_of_one_of_several_d_is_not_looked_for(setup: ProxySetup, p: FakeServer, d: FakeServer) -> None:
    response = setup.proxy([p], [d, setup.server(answers(200, b"{}"))]).http.get("/v1/responses/resp_1")
    assert response.status_code == 400
    assert "kept by one of 2 decode servers" in response.json()["error"]["message"]
    assert d.received == []


def test_every_api_has_a_path_of_its_own() -> None:
    assert len({api.path for api in ALL}) == len(ALL) == 5
