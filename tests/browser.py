"""One headless Chromium for many pages, spoken to in its DevTools protocol over a pair of pipes: no package needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)
LIMIT = 60  # seconds that one answer may take


class Page:
    """A tab. `console` and `requests` hold what was said and asked for since the last `open`."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session
        self.console: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict:
        return self.browser.call(method, params, self.session)

    def open(self, path: Path) -> None:
        """Load a file and wait until it and everything it asks for is there."""
        self.console.clear()
        self.requests.clear()
        self.browser.loaded.discard(self.session)
        self.call("Page.navigate", url=path.as_uri())
        while self.session not in self.browser.loaded:
            self.browser.listen()

    def view(self, width: int, height: int = 900, scheme: str = "light", media: str = "") -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme_feature = {"name": "prefers-color-scheme", "value": scheme}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme_feature, still])

    def js(self, expression: str) -> Any:
        """The value of an expression, by JSON."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        code = {"Tab": 9}[key]
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def shoot(self, path: Path) -> None:
        """The whole page as PNG."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def heard(self, method: str, params: dict) -> None:
        if method == "Runtime.consoleAPICalled":
            self.console.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif method == "Runtime.exceptionThrown":
            self.console.append(params["exceptionDetails"]["text"])
        elif method == "Log.entryAdded":
            self.console.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self.browser.loaded.add(self.session)


class Browser:
    """Chromium reads commands on its file descriptor 3 and answers on 4, each message ended by a zero byte."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # pipes may themselves be 3 or 4: away from there first, so that neither lands on the other
        moved = [os.dup(fd) for fd in (theirs_in, theirs_out)]
        while min(moved) < 5:
            moved = [os.dup(fd) for fd in moved]
        quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        place = [(os.POSIX_SPAWN_DUP2, moved[0], 3), (os.POSIX_SPAWN_DUP2, moved[1], 4)]
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._pid = os.posix_spawn(CHROMIUM, command, os.environ, file_actions=[*quiet, *place], setpgroup=0)
        for fd in (theirs_in, theirs_out, *moved):
            os.close(fd)
        self._rest = b""
        self._next = 0
        self._answers: dict[int, dict] = {}
        self.pages: dict[str, Page] = {}
        self.loaded: set[str] = set()

    def page(self) -> Page:
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        self.pages[session] = Page(self, session)
        return self.pages[session]

    def call(self, method: str, params: dict, session: str | None = None) -> dict:
        self._next += 1
        id = self._next
        message = {"id": id, "method": method, "params": params} | ({"sessionId": session} if session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        while id not in self._answers:
            self.listen()
        answer = self._answers.pop(id)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def listen(self) -> None:
        """One message: an answer is kept, an event goes to its page."""
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], LIMIT)[0]:
                raise TimeoutError(f"Chromium said nothing for {LIMIT} s")
            more = os.read(self._in, 1 << 20)
            if not more:
                raise EOFError("Chromium closed its pipe")
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        if "id" in message:
            self._answers[message["id"]] = message
        elif message.get("sessionId") in self.pages:
            self.pages[message["sessionId"]].heard(message["method"], message["params"])

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
