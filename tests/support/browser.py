"""A headless Chromium, driven over its DevTools protocol; only for what a person would do: open, press, read, look."""

import asyncio
import base64
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

LIMIT_S = 60.0
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update",
    "--remote-debugging-port=0", "--window-size=1360,900",
)


def chromium() -> str:
    """Return the browser's path; the test is skipped where there is none."""
    names = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    return found or pytest.skip("no Chromium on this machine")


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.complaints: list[str] = []  # what the page wrote to the console as errors, and what it did not catch
        self.opened: set[str] = set()    # hosts of the pages that were opened
        self.asked: set[str] = set()     # hosts that a page has asked for anything

    async def call(self, method: str, **params: Any) -> dict[str, Any]:  # noqa: ANN401 (JSON)
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=LIMIT_S)
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]  # type: ignore[no-any-return]
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(event["params"]["exceptionDetails"]))
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.complaints.append(event["params"]["entry"]["text"])
        if event.get("method") == "Network.requestWillBeSent":
            host = urlsplit(event["params"]["request"]["url"]).netloc.rpartition("@")[2]
            self.asked |= {host} - {""}  # data: has none

    async def open(self, url: str, password: str | None = None) -> None:
        """Open a page, with a password if it asks for one, as its dialog would send it; wait until it has loaded."""
        self.opened.add(urlsplit(url).netloc)
        await self.call("Network.enable")
        if password is not None:
            credentials = base64.b64encode(f"me:{password}".encode()).decode()
            headers = {"Authorization": f"Basic {credentials}"}
            await self.call("Network.setExtraHTTPHeaders", headers=headers)
        await self.call("Runtime.enable")
        await self.call("Log.enable")
        await self.call("Page.enable")
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def evaluate(self, expression: str) -> Any:  # noqa: ANN401 (JSON)
        """Return what JavaScript comes to, as JSON."""
        done = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until JavaScript comes to something true."""
        async with asyncio.timeout(LIMIT_S):
            while not await self.evaluate(expression):
                await asyncio.sleep(0.02)

    async def press(self, selector: str) -> None:
        """Put the focus on a button and press Enter, as a person without a mouse does."""
        await self.evaluate(f"document.querySelector({selector!r}).focus()")
        assert await self.evaluate(f"document.activeElement.matches({selector!r})"), f"{selector} takes no focus"
        await self.key("Enter", "\r")

    async def key(self, key: str, text: str = "") -> None:
        """Press a key and let it go."""
        codes = {"Enter": 13, "ArrowUp": 38, "ArrowDown": 40, "ArrowLeft": 37, "ArrowRight": 39, "Escape": 27}
        settings = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **settings)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **settings)

    async def text(self, selector: str) -> str:
        """Return what an element says."""
        return await self.evaluate(f"document.querySelector({selector!r}).textContent")  # type: ignore[no-any-return]

    async def prefer(self, scheme: str) -> None:
        """Ask for light or dark colours, as the settings of a system do."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def screenshot(
        self, path: Path, scheme: str = "light", size: tuple[int, int] = (1360, 900), *, is_whole: bool = True
    ) -> None:
        """Save a picture of the whole page, or of what a window of that size shows of it."""
        await self.prefer(scheme)
        width, height = size
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        taken = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)
        path.write_bytes(base64.b64decode(taken["data"]))


@asynccontextmanager
async def browsing() -> AsyncIterator[Page]:
    """Start a browser and yield its first tab; nothing of it is left behind."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [chromium(), *FLAGS, f"--user-data-dir={folder}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            port = await _port(Path(folder) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as response:
                    tabs = await response.json(content_type=None)
                (url,) = [tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"]
                async with session.ws_connect(url, max_msg_size=0) as socket:
                    yield Page(socket)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # the command may be a script that waits for the browser
            process.wait(LIMIT_S)


async def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    """Wait until the browser has written where it listens."""
    async with asyncio.timeout(LIMIT_S):
        while not (file.exists() and file.read_text().count("\n")):
            assert process.poll() is None, "the browser has ended"
            await asyncio.sleep(0.02)
    return int(file.read_text().splitlines()[0])
