"""Sets of servers that are not one engine on one machine: on hosts of their own, or data-parallel."""

from dataclasses import replace

from tests.support.e2e.cluster import START_TIMEOUT_S
from tests.support.e2e.deployments import SECRET, Deployment, decode, peer, prefill

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

#: Two engines behind each URL, which vLLM balances.
DATA_PARALLEL = Deployment(
    "data parallel",
    tuple(
        (name, replace(spec, arguments=("--data-parallel-size", "2"), start_timeout_s=2 * START_TIMEOUT_S))
        for name, spec in (("P", prefill()), ("D", decode(patient=True)))
    ),
    slow=True,
)
