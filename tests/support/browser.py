"""Headless Chromium, told what to do over its DevTools protocol."""

import base64
import json
import shutil
import subprocess
import time
from contextlib import contextmanager, suppress
from itertools import count

from websockets.sync.client import connect

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-extensions --mute-audio"
DEADLINE_S = 120.0


class Tab:
    """A page in the browser."""

    def __init__(self, socket):
        self.socket, self.numbers, self.session, self.errors = socket, count(1), {}, []
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.do(f"{domain}.enable")

    def do(self, method, **words):
        """Call a method of the protocol and return its result; errors of the page are kept in `errors`."""
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": words, **self.session}))
        while True:
            told = json.loads(self.socket.recv(timeout=DEADLINE_S))
            if told.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(told["params"])
            if told.get("id") == number:
                assert "error" not in told, told
                return told["result"]

    def open(self, address):
        self.do("Page.navigate", url=address)
        self.until(f"location.href === {json.dumps(address)} && document.readyState === 'complete'")

    def ask(self, script):
        """The value of an expression in the page."""
        told = self.do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def until(self, script):
        """Ask until the answer is true, and return it; a page that is being loaded may lack what is asked about."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            with suppress(AssertionError):
                if answer := self.ask(script):
                    return answer
        raise TimeoutError(f"never true: {script}")

    def press(self, key, **more):
        for kind in ("keyDown", "keyUp"):
            self.do("Input.dispatchKeyEvent", type=kind, key=key, code=key, **more)

    def look(self, width, height, scheme="light"):
        """Show the page in a window of this size, with this colour scheme."""
        scheme = {"name": "prefers-color-scheme", "value": scheme}
        self.do("Emulation.setEmulatedMedia", features=[scheme])
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self):
        return base64.b64decode(self.do("Page.captureScreenshot", format="png")["data"])


@contextmanager
def browser(folder):
    """A tab of a fresh browser, which keeps its files in the folder."""
    words = [CHROMIUM, *FLAGS.split(), "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = next(line for line in process.stderr if "DevTools listening on " in line)
            with connect(line.partition(" on ")[2].strip(), max_size=None) as socket:
                yield Tab(socket)
        finally:
            process.terminate()
            process.stderr.close()
