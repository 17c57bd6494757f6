"""A real chromium, driven through a pair of pipes with the DevTools protocol: nothing else to install."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
ENTER, ESCAPE = 13, 27
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
)


class Browser:
    """One page. `errors` holds what its scripts threw and what its console called an error."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        command = f"exec {CHROMIUM} {' '.join(OPTIONS)} --user-data-dir={profile} --remote-debugging-pipe"
        self.process = subprocess.Popen(
            ["bash", "-c", f"{command} about:blank 3<&{to_read} 4>&{to_write}"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._number, self._left = 0, b""
        self._session: str | None = None
        self.errors: list[str] = []
        self._attach()

    def _attach(self) -> None:
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(one for one in targets if one["type"] == "page")
        told = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = told["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """A command of the protocol; its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _receive(self, timeout_s: float = 60) -> dict[str, Any]:
        while b"\0" not in self._left:
            assert select.select([self._from], [], [], timeout_s)[0], "the browser does not answer"
            part = os.read(self._from, 1 << 20)
            assert part, "the browser is gone"
            self._left += part
        text, _, self._left = self._left.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        told = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(told["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        """Go to an address and wait until the page is ready."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """What an expression, or the promise it gives, comes to."""
        told = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def until(self, expression: str, timeout_s: float = 180) -> Any:
        """Wait until an expression is true; its value."""
        start = time.monotonic()
        while time.monotonic() - start < timeout_s:
            if value := self.js(expression):
                return value
            time.sleep(0.02)
        raise AssertionError(
            f"never: {expression}\n{self.errors}\n{self.js('document.body.innerText')[:2000]}"
        )

    def write(self, selector: str, text: str) -> None:
        """Replace a field's text as if typed."""
        self.js(f"(() => {{ const e = document.querySelector({selector!r}); e.focus(); e.select?.(); }})()")
        self.call("Input.insertText", text=text)

    def set(self, selector: str, value: object) -> None:
        """Set a slider or a choice, and tell the page so."""
        self.js(
            f"(() => {{ const e = document.querySelector({selector!r}); e.value = {json.dumps(str(value))};"
            "e.dispatchEvent(new Event('input', {bubbles: true}));"
            "e.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element."""
        x, y = self.js(
            f"(() => {{ const e = document.querySelector({selector!r});"
            "e.scrollIntoView({block: 'center'});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        self.drag((x, y))

    def drag(self, *points: tuple[float, float]) -> None:
        """Press the mouse at the first point, move through the others, let go."""
        at = {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=points[0][0], y=points[0][1], **at)
        for x, y in points[1:]:
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, buttons=1, **at)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=points[-1][0], y=points[-1][1], **at)

    def key(self, key: str, code: int, *, control: bool = False) -> None:
        """Press a key."""
        told = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 2 if control else 0}
        if len(key) == 1:
            told["text"] = key
        self.call("Input.dispatchKeyEvent", type="keyDown", **told)
        self.call("Input.dispatchKeyEvent", type="keyUp", **told)

    def drop(self, file: Path, selector: str) -> None:
        """Drop a file on an element."""
        x, y = self.js(
            f"(() => {{ const e = document.querySelector({selector!r});"
            "e.scrollIntoView({block: 'nearest'}); const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        data = {"items": [], "files": [str(file)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)

    def look(self, width: int, height: int, *, theme: str = "dark", phone: bool = False) -> None:
        """The size of the window, and the colours that the system asks for."""
        scale = 2 if phone else 1
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=phone,
        )
        media = [{"name": "prefers-color-scheme", "value": theme}]
        self.call("Emulation.setEmulatedMedia", features=media)

    def screenshot(self, *, whole: bool = False) -> bytes:
        """The page as PNG."""
        told = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(told["data"])

    def close(self) -> None:
        """End the browser."""
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._to)
        os.close(self._from)
