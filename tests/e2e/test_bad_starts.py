"""A server that cannot work says why and ends, instead of starting half."""

import socket

import pytest

from tests.support.e2e.cluster import Cluster, ServerSpec

pytestmark = pytest.mark.failures


@pytest.mark.slow
def test_a_control_port_that_is_taken_is_named(cluster: Cluster) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"127\.0\.0\.1:{port}.*another process holds the port"):
            cluster.start([ServerSpec("kv_producer", options=(("port", port),))])


@pytest.mark.slow
def test_a_bootstrap_port_that_is_taken_is_named_with_its_setting(cluster: Cluster) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"bootstrap_port = {port}: cannot listen there.*already in use"):
            cluster.start([ServerSpec("kv_producer", options=(("bootstrap_port", port),))])


@pytest.mark.slow
def test_an_unknown_protocol_is_named_with_the_known_ones(cluster: Cluster) -> None:
    with pytest.raises(RuntimeError, match=r"protocol = 'tpc': .*'tcp', 'rdma' or 'ascend'"):
        cluster.start([ServerSpec("kv_consumer", options=(("protocol", "tpc"),))])
