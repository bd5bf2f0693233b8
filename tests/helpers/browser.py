"""Drives a Chromium without a window through its DevTools, over two pipes: nothing but the browser is needed."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def chromium() -> str | None:
    """Return the path of a Chromium, None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One browser with one page.

    Args:
        program: what `chromium` returned.
        folder: for the profile, which is thrown away with it.
    """

    def __init__(self, program: str, folder: Path) -> None:
        to_browser, ours = os.pipe()
        theirs, from_browser = os.pipe()
        # The browser reads from its descriptor 3 and writes to 4; high numbers keep the copies out of each other's way.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 200) for fd in (to_browser, from_browser)]
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--mute-audio",
            "--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank",
        ]
        shell = f'exec "$0" "$@" 3<&{high[0]} 4>&{high[1]}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", shell, program, *flags], pass_fds=high, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (*high, to_browser, from_browser):
            os.close(fd)
        self._write, self._read = os.fdopen(ours, "wb", 0), os.fdopen(theirs, "rb", 0)
        self._rest = b""
        self._count = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._write.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._read.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the answer to one command; what the page complains of meanwhile goes into `complaints`."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        while True:
            said = self._receive()
            if said.get("id") == self._count:
                assert "error" not in said, said
                result: dict[str, Any] = said["result"]
                return result
            self._note(said)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._read.fileno(), 1 << 16)
            assert piece, "the browser is gone"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, said: dict[str, Any]) -> None:
        parameters = said.get("params", {})
        if said.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"]))
        if said.get("method") == "Log.entryAdded" and parameters["entry"]["level"] in ("warning", "error"):
            self.complaints.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")

    def open(self, url: str, width: int = 1100, height: int = 900, scheme: str = "light") -> None:
        """Load a page, as wide and high as a screen in CSS pixels, and wait until it is there."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.complaints.clear()
        self.call("Page.navigate", url=url)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """Return what an expression comes to; promises are waited for."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, condition: str, seconds: float = 20.0) -> None:
        """Wait until a condition holds in the page."""
        waiting = (
            f"new Promise((yes, no) => {{ const end = performance.now() + {1000 * seconds}; const look = () => {{"
            f" if ({condition}) yes(true); else if (performance.now() > end) yes(false); else setTimeout(look, 10); }};"
            " look(); })"
        )
        assert self.evaluate(waiting), f"never came true: {condition}"

    def press(self, key: str, code: int, modifiers: int = 0) -> None:
        """Press a key; modifiers as DevTools counts them (2 is Ctrl)."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, modifiers=modifiers
            )

    def screenshot(self, file: Path) -> None:
        """Write the whole page as a PNG."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(taken["data"]))
