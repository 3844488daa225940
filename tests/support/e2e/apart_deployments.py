"""Sets of servers that are not one engine on one machine: on hosts of their own, or data-parallel."""

from dataclasses import replace

from tests.support.e2e.cluster import START_TIMEOUT_S, ServerSpec
from tests.support.e2e.deployments import SECRET, Deployment, decode, peer, prefill, with_host_memory

#: Each on a host of its own, and finds its address by itself.
HOSTS = Deployment("hosts", (("P", replace(prefill(), host=1)), ("D", replace(decode(), host=2))))

#: A server whose two ranks are on two hosts, and one of one rank on a third. Each pulls from the other.
TWO_NODES = Deployment(
    "two nodes",
    (
        (
            "TP2",
            replace(
                peer(tensor_parallel=2), secret=SECRET, host=1, more_hosts=(2,), start_timeout_s=2 * START_TIMEOUT_S
            ),
        ),
        ("TP1", replace(peer(layout="LBHNC"), secret=SECRET, host=3, start_timeout_s=2 * START_TIMEOUT_S)),
    ),
    slow=True,
)


def _data_parallel(prefill_size: int, decode_size: int) -> Deployment:
    """P and D of so many engines each, which vLLM balances behind one URL. Each engine has host memory."""
    sides = (("P", prefill(), prefill_size), ("D", decode(patient=True), decode_size))
    servers = []
    for name, spec, size in sides:
        server = with_host_memory(spec)
        arguments = (*server.arguments, *(("--data-parallel-size", str(size)) if size > 1 else ()))
        servers.append((name, replace(server, arguments=arguments, start_timeout_s=3 * START_TIMEOUT_S)))
    return Deployment(f"data parallel {prefill_size} to {decode_size}", tuple(servers), slow=True)


DATA_PARALLEL, FOUR_TO_ONE, ONE_TO_FOUR = _data_parallel(2, 2), _data_parallel(4, 1), _data_parallel(1, 4)


def balanced_by_node(port: int) -> tuple[ServerSpec, ServerSpec]:
    """Two prefill servers, each with two of four data-parallel engines, which meet at ``port``."""
    first, second = (
        replace(
            prefill(),
            arguments=(
                *("--data-parallel-size", "4", "--data-parallel-size-local", "2", "--data-parallel-hybrid-lb"),
                *("--data-parallel-start-rank", str(rank), "--data-parallel-address", "127.0.0.1"),
                *("--data-parallel-rpc-port", str(port)),
            ),
            start_timeout_s=3 * START_TIMEOUT_S,
        )
        for rank in (0, 2)
    )
    return first, second
