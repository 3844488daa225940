"""A real browser without a window: chromium, driven over its DevTools protocol."""

import base64
import itertools
import json
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest
from websockets.sync.client import connect

from tests.support.waiting import until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""

needs_chromium = pytest.mark.skipif(
    not CHROMIUM, reason="chromium is not installed (Debian: apt-get install --no-install-recommends chromium)"
)

_START_S = 120.0


class Browser:
    """One page. Leaving the context ends the browser."""

    def __init__(self, directory: Path, width: int = 1200, height: int = 1000) -> None:
        self._log = (directory / "chromium.log").open("wb")
        self._process = subprocess.Popen(
            [
                *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--disable-extensions", "--disable-background-networking", "--no-first-run", "--no-proxy-server"),
                "--hide-scrollbars",
                *("--remote-debugging-port=0", f"--user-data-dir={directory / 'profile'}"),
                *(f"--window-size={width},{height}", "about:blank"),
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._stack = ExitStack()
        self._stack.callback(self._end)
        self._numbers = itertools.count(1)
        self.errors: list[str] = []  # what scripts have thrown and what the page's policy has refused
        try:
            file = directory / "profile" / "DevToolsActivePort"
            port = until(lambda: self._port(file), "chromium", within_s=_START_S)
            url = f"ws://127.0.0.1:{port}{self._path}"
            self._socket = self._stack.enter_context(connect(url, max_size=None, open_timeout=_START_S))
            targets = self._call("Target.getTargets")["targetInfos"]
            (page,) = [one["targetId"] for one in targets if one["type"] == "page"]
            self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self._call(f"{domain}.enable")
        except BaseException:
            self._stack.close()
            raise

    _path = ""
    _session = ""

    def open(self, url: str) -> None:
        """Go to a page; what is there before it has loaded, ``until`` has to find out."""
        self._call("Page.navigate", url=url)

    def resize(self, width: int, height: int) -> None:
        """Give the page another size, also one that no window can have."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """The text of an element as it is shown; empty if there is none."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def screenshot(self, file: Path) -> None:
        """Write the whole page as a PNG, also what is below the window."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(answer["data"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._log.close()

    def _port(self, file: Path) -> int:
        assert self._process.poll() is None, "chromium has ended"
        lines = file.read_text().splitlines() if file.exists() else []
        if len(lines) < 2:
            return 0
        self._path = lines[1]
        return int(lines[0])

    def _call(self, method: str, **parameters: object) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        self._socket.send(json.dumps(message | ({"sessionId": self._session} if self._session else {})))
        while True:
            answer = json.loads(self._socket.recv(timeout=_START_S))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(answer["params"]["exceptionDetails"]))
            if answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.errors.append(str(answer["params"]["entry"]["text"]))
