"""A pull that cannot be right ends as the policy says: an HTTP error, or the right answer computed by D. Never garbage.

Every failure names its values in the decode server's log, is counted by cause, and leaves a server that serves the
next request. Nothing else in the log is an error.
"""

import copy
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import zmq

from pd_connector.engine_limits import ENGINE_LIMITS
from tests.support.e2e.choice import rarely
from tests.support.e2e.client import KVTransferParams
from tests.support.e2e.cluster import BLOCK_SIZE, Cluster, Server
from tests.support.e2e.deployments import FAULTS, OTHER_MODELS, on
from tests.support.e2e.pair import Pair, assert_failed_pull, end_lease, make_prompt

PROMPT_TOKENS = 200

failing = pytest.mark.parametrize("pair", [("P", "D fail"), rarely(("P", "D recompute"))], indirect=True, ids="-".join)
recomputing = pytest.mark.parametrize(
    "pair", [("P", "D recompute"), rarely(("P", "D fail"))], indirect=True, ids="-".join
)

Mutation = Callable[[KVTransferParams], object]


@dataclass(frozen=True, slots=True)
class Case:
    """A way to spoil ``kv_transfer_params``, and how the decode server has to name it."""

    name: str
    spoil: Mutation
    cause: str
    logged: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


def _without(key: str) -> Mutation:
    return lambda params: params.pop(key)


def _with(**values: Any) -> Mutation:
    return lambda params: params.update(values)


def _closed_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


#: One of each kind: what cannot be read, what cannot be, and what is not so.
SPOILT_PARAMS = [
    Case("no lease", _without("lease_id"), "params", ("lease_id",)),
    Case("a block of no cache", _with(remote_block_ids=[[10**6] * 7]), "params", ("1000000",)),
    Case("two blocks exchanged", lambda params: params["remote_block_ids"][0].reverse(), "lease", ("altered",)),
]
MORE_SPOILT_PARAMS = [
    Case("no engine", _without("remote_engine_id"), "params", ("remote_engine_id",)),
    Case("no blocks", _without("remote_block_ids"), "params", ("remote_block_ids",)),
    Case("port is text", _with(remote_port="many"), "params", ("remote_port", "int")),
    Case("blocks are text", _with(remote_block_ids="all"), "params", ("remote_block_ids", "array")),
    Case("a block is negative", _with(remote_block_ids=[[-5]]), "params", ("remote_block_ids",)),
    Case("too few blocks", lambda params: params["remote_block_ids"][0].pop(), "params", ("6", "7")),
    Case("too many groups", lambda params: params["remote_block_ids"].append([1]), "params", ("2",)),
    Case("unknown lease", _with(lease_id="nothing"), "lease", ("nothing",)),
]


@pytest.fixture
def quiet(pair: Pair) -> Iterator[None]:
    """The decode server logs no exception during the test: every failure is one that it expected."""
    mark = pair.decode.log_size
    yield
    assert "Traceback" not in pair.decode.log_since(mark)


def assert_serves(pair: Pair, seed: str) -> None:
    """The next request through the same pair is right."""
    prompt = make_prompt(PROMPT_TOKENS, ("next", seed))
    pair.assert_right(pair.disaggregate(prompt), prompt)


@pytest.mark.failures
@pytest.mark.usefixtures("quiet")
@on(FAULTS)
class TestSpoiltParams:
    @pytest.mark.parametrize("pair", [("P", "D fail"), ("P", "D recompute")], indirect=True, ids="-".join)
    @pytest.mark.parametrize("case", [*SPOILT_PARAMS, *map(rarely, MORE_SPOILT_PARAMS)], ids=str)
    def test_the_pull_fails_and_the_next_one_works(self, pair: Pair, case: Case) -> None:
        seed = f"{case} {pair.decode.spec.name}"
        prompt = make_prompt(PROMPT_TOKENS, seed)
        params = pair.prefill.client.prefill(prompt)
        spoilt = copy.deepcopy(params)
        case.spoil(spoilt)
        assert_failed_pull(pair, prompt, spoilt, case.cause, case.logged)
        end_lease(params)
        assert_serves(pair, seed)

    @failing
    @pytest.mark.parametrize(
        ("spoil", "named"),
        [
            (_with(remote_engine_id="nobody"), "prefill engine nobody at 127.0.0.1"),
            (lambda params: params.update(remote_port=_closed_port()), "127.0.0.1"),
            pytest.param(_with(remote_host="no-such-host.invalid"), "no-such-host.invalid", marks=pytest.mark.slow),
        ],
        ids=["id", "port", "host"],
    )
    def test_of_an_engine_that_nobody_knows_nothing_is_used(self, pair: Pair, spoil: Mutation, named: str) -> None:
        """It is not proven: the prompt is computed here, and what is pulled beside that fails."""
        prompt = make_prompt(PROMPT_TOKENS, f"unknown engine {named} {pair.decode.spec.name}")
        mark = pair.decode.log_size
        with pair.traffic() as traffic:
            params = pair.prefill.client.prefill(prompt)
            spoilt = copy.deepcopy(params)
            spoil(spoilt)
            pair.assert_right(pair.decode_leg(prompt, spoilt), prompt)
            end_lease(params)
        assert traffic.decode is not None
        assert traffic.decode.value("vllm:pd_canaries_total", outcome="failed") == 1
        assert traffic.pulled("pulls") == 0
        told = [line for line in pair.decode.log_since(mark).splitlines() if "is not proven: request" in line]
        assert len(told) == 1
        assert named in told[0]

    @failing
    def test_a_longer_prompt_than_the_prefilled_one_is_refused(self, pair: Pair) -> None:
        seed = f"longer {pair.decode.spec.name}"
        prompt = make_prompt(PROMPT_TOKENS, seed)
        params = pair.prefill.client.prefill(prompt[:-1])
        assert_failed_pull(pair, prompt, params, "params", (str(PROMPT_TOKENS - 1), str(PROMPT_TOKENS)))
        end_lease(params)

    @recomputing
    def test_another_prompt_of_the_same_length_is_refused(self, pair: Pair) -> None:
        seed = f"other {pair.decode.spec.name}"
        params = pair.prefill.client.prefill(make_prompt(PROMPT_TOKENS, ("not", seed)))
        assert_failed_pull(pair, make_prompt(PROMPT_TOKENS, seed), params, "params", ("prompt",))
        end_lease(params)

    @failing
    def test_params_that_were_used_before_give_no_wrong_answer(self, pair: Pair) -> None:
        """A router's retry on the same params, after P has given the blocks to other prompts."""
        seed = f"retry {pair.decode.spec.name}"
        prompt = make_prompt(PROMPT_TOKENS, seed)
        params = pair.prefill.client.prefill(prompt)
        pair.assert_right(pair.decode_leg(prompt, params), prompt)
        pair.wait_until_at_rest()
        overwrite_all_blocks(pair.prefill)
        again = pair.decode_leg(prompt, params, cache_salt=seed)
        assert again.status in {200, 500}
        if again.status == 200:
            pair.assert_right(again, prompt)

    @failing
    def test_two_choices_of_one_prompt_are_right(self, pair: Pair) -> None:
        """``n = 2``: vLLM makes two requests of it, which carry the same params."""
        seed = f"n=2 {pair.decode.spec.name}"
        prompt = make_prompt(PROMPT_TOKENS, seed)
        params = pair.prefill.client.prefill(prompt)
        choices = pair.decode.client.choices(prompt, 2, kv_transfer_params=params, temperature=1.0, top_k=1)
        expected = pair.decode.client.compute(prompt)
        assert choices == [expected.tokens, expected.tokens]

    @recomputing
    def test_a_prefill_server_that_stops_answering_fails_the_pull_in_time(self, pair: Pair) -> None:
        seed = f"stopped {pair.decode.spec.name}"
        prompt = make_prompt(PROMPT_TOKENS, seed)
        params = pair.prefill.client.prefill(prompt)
        spoilt = {**params, "remote_engine_id": f"a first handshake, {seed}"}
        pair.prefill.signal(signal.SIGSTOP, "EngineCore")
        with ThreadPoolExecutor(1) as pool:
            try:
                completion = pool.submit(pair.decode_leg, prompt, spoilt).result(3 * ENGINE_LIMITS.handshake_timeout_s)
            finally:
                pair.prefill.signal(signal.SIGCONT, "EngineCore")
        if pair.decode.spec.load_failure_policy == "recompute":
            pair.assert_right(completion, prompt)
        else:
            assert completion.status == 500
        end_lease(params)
        assert_serves(pair, seed)


@pytest.mark.security
@pytest.mark.usefixtures("quiet")
@on(FAULTS)
@pytest.mark.parametrize("pair", [("P", "D fail")], indirect=True)
def test_garbage_on_the_control_port_disturbs_nobody(pair: Pair) -> None:
    prompt = make_prompt(PROMPT_TOKENS, "garbage")
    params = pair.prefill.client.prefill(prompt)
    address = (params["remote_host"], params["remote_port"])
    with socket.create_connection(address) as stranger:  # does not even speak ZeroMQ
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect("tcp://{}:{}".format(*address))
        for frames in ([b""], [b"\xc1" * 1000], [b"{}"], [b"\x93\x01\x01\x80"], [b"a", b"b"], [bytes(1 << 20)]):
            dealer.send_multipart(frames)
        pair.assert_right(pair.decode_leg(prompt, params), prompt)
        context.destroy(linger=0)
    assert_serves(pair, "after the garbage")


def overwrite_all_blocks(server: Server) -> None:
    """Fill a server's whole KV cache with other prompts, so that every block that is free gets new contents."""
    blocks = 0
    wanted = server.client.cache_blocks()
    seed = 0
    while blocks < 1.1 * wanted:
        server.client.complete(make_prompt(4000, ("overwrite", server.log_size, seed)), 1)
        blocks += 4000 // BLOCK_SIZE
        seed += 1


@pytest.mark.failures
@pytest.mark.usefixtures("quiet")
@on(FAULTS)
class TestOtherServers:
    @pytest.mark.parametrize("pair", [("P", "D fail")], indirect=True, ids="-".join)
    def test_a_prefill_server_that_dies_fails_the_pull_and_serves_again_after_its_restart(
        self, pair: Pair, cluster: Cluster
    ) -> None:
        assert_serves(pair, "before the death")
        prompt = make_prompt(PROMPT_TOKENS, "death")
        params = pair.prefill.client.prefill(prompt)
        pair.prefill.kill()
        assert pair.decode_leg(prompt, params).status == 500
        cluster.restart(pair.prefill)
        assert_serves(pair, "after the restart")


@pytest.mark.failures
@pytest.mark.usefixtures("quiet")
@on(OTHER_MODELS)
class TestOtherModels:
    @pytest.mark.parametrize(
        ("pair", "logged"),
        [
            (("P layers", "D fail"), ("layers", "3", "4")),
            (("P kv_heads", "D fail"), ("kv_heads", "2", "4")),
            (("P weights", "D fail"), ("weights",)),
            (("P bfloat16", "D fail"), ("bfloat16", "float32")),
        ],
        indirect=["pair"],
        ids=["layers", "kv_heads", "weights", "dtype"],
    )
    def test_another_model_is_refused_with_both_named(self, pair: Pair, logged: tuple[str, ...]) -> None:
        prompt = make_prompt(PROMPT_TOKENS, logged)
        params = pair.prefill.client.prefill(prompt)
        assert_failed_pull(pair, prompt, params, "incompatible", logged)
