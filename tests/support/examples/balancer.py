"""Several servers behind one URL, as a Service of Kubernetes has them: one is chosen for each connection."""

import asyncio
import itertools
from contextlib import ExitStack
from urllib.parse import urlsplit

from tests.support.examples.fake_servers import Loop


class Balancer:
    """Takes connections, and passes each on to the next of its servers until one end closes it."""

    def __init__(self, stack: ExitStack, *servers: str) -> None:
        """Run until ``stack`` is closed. ``servers``: their URLs."""
        self.servers = list(servers)  # that take new connections; the old ones stay where they are
        self.taken = 0  # connections
        self._turn = itertools.count()
        self._passing: set[asyncio.Task[None]] = set()
        self._loop = Loop()
        stack.callback(self._loop.close)
        self._listening = self._loop.run(asyncio.start_server(self._connected, "127.0.0.1"))
        stack.callback(lambda: self._loop.run(self._stop()))
        self.url = f"http://127.0.0.1:{self._listening.sockets[0].getsockname()[1]}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._passing.add(task)
        self.taken += 1
        server = self.servers[next(self._turn) % len(self.servers)]
        there, back = await asyncio.open_connection("127.0.0.1", urlsplit(server).port)
        try:
            ends = [asyncio.ensure_future(_pass_on(reader, back)), asyncio.ensure_future(_pass_on(there, writer))]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
            writer.close()
            back.close()
            self._passing.discard(task)

    async def _stop(self) -> None:
        self._listening.close()
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(1 << 16):
        writer.write(piece)
        await writer.drain()
