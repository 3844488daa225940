#!/usr/bin/env python3
"""End with 0 if the container's first process is well, for the images' HEALTHCHECK. Needs the standard library only.

Its command line says what it is and where it listens. The proxy is asked whether it runs (/healthcheck), not whether P
and D do (/health): to restart it because P loads its model helps nobody. What listens nowhere, like a further node of
an engine (--headless), is well while it runs.
"""

import http.client
import itertools
import re
import ssl
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

_TIMEOUT_S = 8  # below the timeout of HEALTHCHECK
_PORT = "8000"  # vLLM's and the proxy's default


def question(words: Sequence[str]) -> str:
    """Return the URL that a process with this command line answers while it is well; empty if it listens nowhere.

    Also if a shell's command line does not tell, because of variables, quotes and the like: nobody is asked then.
    """
    names = [Path(word).name for word in words]
    if "pd-proxy" in names or "pd_proxy" in names:
        path = "/healthcheck"
    elif ("vllm" in names and "serve" in names) or "vllm.entrypoints.openai.api_server" in names:
        path = "" if "--headless" in words else "/health"
    else:
        path = ""
    host = _option(words, "--host")
    if host in ("", "0.0.0.0", "::"):  # noqa: S104  all of them, and so this one
        host = "127.0.0.1"
    port = _option(words, "--port") or _PORT
    if re.fullmatch(r"[\w.:%-]+ \d+", f"{host} {port}") is None:
        return ""
    scheme = "https" if _option(words, "--ssl-certfile") else "http"
    where = f"[{host}]" if ":" in host else host
    return f"{scheme}://{where}:{port}{path}" if path else ""


def _option(words: Sequence[str], name: str) -> str:
    """Return the last value of an option, given as two words or by an equals sign; empty if there is none."""
    values = [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]
    values += [value for option, value in itertools.pairwise(words) if option == name]
    return values[-1] if values else ""


def complaint(words: Sequence[str]) -> str:
    """Ask the process with this command line; return what is wrong, empty if it is well."""
    url = question(words)
    if not url:
        return ""
    unverified = ssl._create_unverified_context()  # noqa: S323  it is this container's own server
    handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unverified)
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=_TIMEOUT_S):
            return ""
    except (OSError, http.client.HTTPException) as error:  # also for a status that is an error
        return f"{url}: {error}"


def words_of(command_line: str) -> list[str]:
    """Return the words of a command line as the kernel tells it: those behind ``sh -c`` too, which are one argument."""
    return command_line.replace("\0", " ").split()


if __name__ == "__main__":
    sys.exit(complaint(words_of(Path("/proc/1/cmdline").read_text(errors="replace"))) or 0)
