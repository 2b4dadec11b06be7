"""A Chromium without a window, led by its DevTools protocol over a pair of pipes: nothing but the browser is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # a container's root has no other way; only pages of ours are opened
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_LAUNCH = """import os, sys
reads, writes = map(int, sys.argv[1:3])
os.dup2(reads, 3), os.dup2(writes, 4), os.close(reads), os.close(writes)
os.execv(sys.argv[3], sys.argv[3:])"""
"""The protocol is on descriptors 3 and 4; they come from numbers that aren't in the way."""
SECONDS = 60.0
"""That an answer may take."""


class BrowserError(Exception):
    """The browser, or a script in the page, says no."""


def chromium() -> str | None:
    """Where a Chromium is, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in a browser of its own, with a profile that is thrown away."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="llqr-browser-", ignore_cleanup_errors=True)
        reads, self._to = os.pipe()
        self._from, writes = os.pipe()
        theirs = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (reads, writes)]
        launch = [sys.executable, "-I", "-c", _LAUNCH, *map(str, theirs)]
        self._process = subprocess.Popen(
            [*launch, program, *FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"],
            pass_fds=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for each in (reads, writes, *theirs):
            os.close(each)
        self._number = 0
        self._unread = b""
        self._session = ""
        self.complaints: list[str] = []
        """Errors and warnings that pages wrote to the console, and exceptions that nobody caught."""
        self._events: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._folder.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its answer."""
        self._number += 1
        whole = method.startswith(("Target.", "SystemInfo.", "Browser."))  # of the browser, not of the page
        session = {} if whole else {"sessionId": self._session}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error'].get('message')}")
                return dict(answer["result"])

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._from, 1 << 16) if ready else b""
            if not part:
                raise BrowserError("the browser has gone" if ready else f"the browser said nothing for {SECONDS:g} s")
            self._unread += part
        text, _, self._unread = self._unread.partition(b"\0")
        message = dict(json.loads(text))
        self._hear(message.get("method", ""), message.get("params", {}))
        return message

    def _hear(self, event: str, parameters: dict[str, Any]) -> None:
        self._events.append(event)
        if event == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif event == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(each.get("value")) for each in parameters["args"]))
        elif event == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(parameters["entry"]["text"])

    def open(self, path: Path) -> float:
        """Open a file and wait for it to be loaded and painted; the seconds that it took."""
        begun = time.monotonic()
        self.load(path)
        self.painted()
        return time.monotonic() - begun

    def load(self, path: Path) -> None:
        """Open a file and wait for it to be loaded."""
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._message()

    def painted(self) -> None:
        """Wait until what scripts have asked to be drawn is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page, awaited."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def resize(self, width: int, height: int, scale: float = 1.0, mobile: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )

    def media(self, media: str = "", **features: str) -> None:
        """As on paper, or as a system with other preferences shows it: prefers_color_scheme="dark"."""
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", media=media, features=named)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """mousePressed, mouseReleased, mouseMoved or mouseWheel."""
        pressed = {"button": "left", "clickCount": 1} if kind in ("mousePressed", "mouseReleased") else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **{**pressed, **more})

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.mouse("mouseMoved", *start)
        self.mouse("mousePressed", *start)
        for part in (0.3, 0.7, 1.0):
            place = [a + part * (b - a) for a, b in zip(start, end, strict=True)]
            self.mouse("mouseMoved", *place, button="left", buttons=1)
        self.mouse("mouseReleased", *end)
        self.painted()

    def key(self, key: str, modifiers: int = 0) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if kind == "keyDown" and len(key) == 1 else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, modifiers=modifiers, **text)
        self.painted()

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """What is on the screen, or the whole page, as PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        path.write_bytes(base64.b64decode(answer["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def pdf(self, path: Path) -> None:
        """As it would be printed."""
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"]))

    @property
    def processor_seconds(self) -> float:
        """That all of the browser's processes have used, which others on the machine don't change much."""
        return sum(float(each["cpuTime"]) for each in self.call("SystemInfo.getProcessInfo")["processInfo"])

    @property
    def version(self) -> str:
        return str(self.call("Browser.getVersion")["product"])
