"""Which servers are to be restarted: a file names them, so that no client can.

Behind the URL of a decode server, the file may say where others find the prefixes that it holds: the address of its
connector's control channel. Then the rest of each of its answers goes to another decode server alone, which pulls them.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from pd_proxy.servers import Servers

logger = logging.getLogger(__name__)

#: How often the file is looked at.
_INTERVAL_S = 1.0
#: A URL, and behind it nothing or ``host:port``.
_LINE = re.compile(r"(.*?)/*(?:\s+([^\s/]+:\d+))?")


class Draining:
    """Marks the servers that a file names, one URL a line, as leaving. A file that is not there names none."""

    def __init__(self, path: str, legs: Sequence[Servers]) -> None:
        self._path, self._legs = Path(path), legs
        self._known = frozenset(server.url for servers in legs for server in servers.members)
        self._named: dict[str, str] = {}  # when the file was read the last time, with where prefixes are found
        self._problem = ""

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Look at the file again and again, until the context is left."""
        self._mark(self._read())  # before the first request
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            try:
                self._mark(await asyncio.to_thread(self._read))
            except Exception:  # nothing ends the watching without a word
                logger.exception("--draining %s was not looked at; once more in %g s", self._path, _INTERVAL_S)

    def _read(self) -> dict[str, str]:
        """Return the URLs that the file names, and what stands behind each. If it cannot be read, those from before."""
        try:
            if self._path.exists() and not self._path.is_file():
                raise OSError("it is no regular file")  # reading a pipe may never end
            lines = self._path.read_text(encoding="utf-8-sig").splitlines()
        except FileNotFoundError:
            lines = []
        except (OSError, ValueError) as error:  # ValueError: no UTF-8
            if str(error) != self._problem:
                self._problem = str(error)
                logger.warning("--draining %s cannot be read (%s): it changes nothing until it can", self._path, error)
            return self._named
        self._problem = ""
        return {found[1]: found[2] or "" for line in lines if (found := _LINE.fullmatch(line.strip())) and found[1]}

    def _mark(self, named: dict[str, str]) -> None:
        """Mark these servers as leaving, and no others."""
        for url in named.keys() - self._known - self._named.keys():
            logger.warning(
                "--draining %s names %r, which is none of the servers; write URLs as behind --prefill or --decode (%s)",
                self._path, url, ", ".join(sorted(self._known)),
            )  # fmt: skip
        self._named = named
        for leg, server in ((servers.leg, server) for servers in self._legs for server in servers.members):
            server.prefixes_at = named.get(server.url, "")
            if server.is_leaving != (server.url in named):
                server.is_leaving = server.url in named
                state = "is leaving" if server.is_leaving else "is back"
                logger.info("%s server %s %s; it has %d requests", leg, server.url, state, server.in_flight)
