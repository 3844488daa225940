"""A pool on a real Mooncake Store behind the host memory of servers on simulated NPUs."""

from pathlib import Path

from tests.support.ascend.servers import SEVERAL_RANKS
from tests.support.e2e.cluster import Cluster
from tests.support.e2e.pooled_servers import pooled, start_where_another_has_ended
from tests.support.store.mooncake_processes import MooncakeProcesses


def test_what_two_ranks_have_computed_one_finds_after_their_end(cluster: Cluster, tmp_path: Path) -> None:
    servers, store = dict(SEVERAL_RANKS.servers), MooncakeProcesses(tmp_path)
    try:
        first, second = (pooled(servers[name], store) for name in ("TP2", "TP1"))
        cluster.stop([start_where_another_has_ended(cluster, first, second)])
    finally:
        store.close()
