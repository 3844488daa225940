"""The decode leg by itself: an answer that is withdrawn in the last moment does not reach the client."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import anyio
import pytest

from pd_proxy.apis import COMPLETIONS
from pd_proxy.connection_pool import Connections
from pd_proxy.control import CircuitBreaker, ControlAddresses
from pd_proxy.decode import run_decode
from pd_proxy.detour import Detour
from pd_proxy.http_client import Client
from pd_proxy.journal import Record
from pd_proxy.servers import Leg, Servers
from pd_proxy.settings import FirstTokenFrom, Legs, Settings, WithoutPrefill
from pd_proxy.upstream import Upstream
from tests.support.examples.fake_servers import FakeServer


@pytest.mark.parametrize("withdrawn", [True, False])
def test_who_cancels_it_while_the_client_has_nothing_can_be_sure_that_it_gets_nothing(
    d: FakeServer, withdrawn: bool
) -> None:
    """Even where the answer is there already, so that nothing is left to wait for."""
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def scenario() -> None:
        async with Connections(Settings(prefill=(d.url,), decode=(d.url,))) as connections:
            servers = Servers(Leg.DECODE, [d.url], connections, 1.0)
            upstream = Upstream(
                COMPLETIONS,
                servers,
                servers,
                ControlAddresses(),
                CircuitBreaker(),
                Legs.TOGETHER,
                FirstTokenFrom.DECODE,
                WithoutPrefill.FAIL,
                Detour(0),
                None,
            )
            client = Client({"type": "http", "headers": []}, send, Record("/"))
            with anyio.CancelScope() as decoding:

                async def may_answer(_: int) -> None:
                    if withdrawn:
                        decoding.cancel()

                await run_decode(upstream, client, {}, may_answer=may_answer)
            assert decoding.cancelled_caught is withdrawn
            assert client.started is not withdrawn

    asyncio.run(scenario())
    assert bool(sent) is not withdrawn
