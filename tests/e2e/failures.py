"""What becomes of a request whose pull fails, seen from outside."""

from tests.e2e.client import KVTransferParams
from tests.e2e.pair import Pair, wait_until_at_rest
from transfer.control.client import ControlClient
from transfer.control.messages import Cancel


def assert_failed_pull(
    pair: Pair, prompt: list[int], params: KVTransferParams, cause: str, logged: tuple[str, ...]
) -> None:
    """The decode leg fails or recomputes, as the server's policy says; its cause is counted, its values are logged."""
    mark = pair.decode.log_size
    before = pair.decode.client.metrics()
    completion = pair.decode_leg(prompt, params)
    wait_until_at_rest(pair.decode)
    counted = pair.decode.client.metrics().since(before)
    log = pair.decode.log_since(mark)
    if pair.decode.spec.load_failure_policy == "recompute":
        pair.assert_right(completion, prompt)
        assert counted.prompt_tokens("local_compute") == len(prompt)
    else:
        assert completion.status == 500, f"{completion.status} {completion.body}"
        assert "error" in completion.body
    assert counted.value("vllm:pd_pull_failures_total", cause=cause) == pair.decode_ranks
    assert counted.value("vllm:pd_pull_failures_total") == pair.decode_ranks
    for word in logged:
        assert any(word in line for line in log.splitlines() if "PDConnector" in line), f"{word!r} is not in:\n{log}"


def end_lease(params: KVTransferParams) -> None:
    """Do what a decode server cannot do that does not know the lease: cancel it instead of waiting for its expiry."""
    client = ControlClient()
    cancel = Cancel(params["remote_engine_id"], (params["lease_id"],))
    client.request(params["remote_host"], params["remote_port"], cancel, 10.0).result()
    client.close()
