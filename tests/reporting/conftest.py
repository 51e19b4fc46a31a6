"""Reading pages: parsed and checked, or shown by a headless Chromium where there is one, over its debugging pipe."""

import base64
import hashlib
import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser

import pytest

from embodied.reporting.html import VOID

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DEADLINE_S = 60
AS_3_AND_4 = """import fcntl, os, sys
spare = [fcntl.fcntl(int(word), fcntl.F_DUPFD, 20) for word in sys.argv[1:3]]
for fd, number in zip(spare, (3, 4)):
    os.dup2(fd, number)
os.execv(sys.argv[3], sys.argv[3:])
"""

HOVER = """(() => {
  const chart = document.querySelector("svg[data-x]");
  const box = chart.getBoundingClientRect();
  const at = { clientX: box.left + box.width * 0.98, clientY: box.top + 20, bubbles: true };
  chart.dispatchEvent(new PointerEvent("pointermove", at));
  return document.querySelector(".readout").textContent;
})()"""


class Browser:
    """One page. `call` sends a command of the DevTools protocol, `run` a script whose value comes back."""

    def __init__(self, folder):
        ours, theirs = os.pipe(), os.pipe()  # commands, answers
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
        command += [f"--user-data-dir={folder}", "--mute-audio", "--autoplay-policy=no-user-gesture-required"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", AS_3_AND_4, str(ours[0]), str(theirs[1]), *command],
            pass_fds=(ours[0], theirs[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self.commands, self.answers = ours[1], theirs[0]
        self.buffer, self.number, self.events, self.session = b"", 0, [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def _read(self):
        deadline = time.monotonic() + DEADLINE_S
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.answers], [], [], max(deadline - time.monotonic(), 0))
            assert ready, "Chromium did not answer"
            part = os.read(self.answers, 1 << 20)
            assert part, "Chromium ended"
            self.buffer += part
        text, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(text)

    def open(self, path, width, height, dark=False):
        """Show a file as a phone or a desktop would; returns once it is loaded."""
        self.events.clear()
        phone = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def check(self, dark):
        """The page fits the screen, is as dark as it should be, complains of nothing and asks the net for nothing."""
        across, visible = self.run("[document.documentElement.scrollWidth, window.innerWidth]")
        assert across <= visible, "the page is wider than the screen"
        shade = self.run("getComputedStyle(document.body).backgroundColor")
        assert (int(re.search(r"\d+", shade)[0]) < 60) == dark
        assert not self.complaints()
        assert not [url for url in self.requests() if not url.startswith(("file:", "data:"))]

    def run(self, script):
        told = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def hover(self):
        """What the first chart says under a pointer at its right end."""
        return self.run(HOVER)

    def requests(self):
        events = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in events]

    def complaints(self):
        """What the console shows in red: refused loads, broken scripts."""
        kinds = ("Log.entryAdded", "Runtime.exceptionThrown")
        return [event["params"] for event in self.events if event.get("method") in kinds]

    def screenshot(self, path, whole=False):
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        os.close(self.commands)  # Chromium leaves when its commander is gone
        os.close(self.answers)
        try:
            self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


class Checker(HTMLParser):
    """Fails on tags that are not closed in order; keeps attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, name, attributes):
        self.attributes += [(name, key, value) for key, value in attributes]
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        self.text += data if self.open[-1:] not in (["style"], ["script"]) else ""


def self_contained(text):
    """The page, parsed; it asks for nothing from elsewhere and runs only its own script."""
    page = Checker(text)
    assert "http://" not in text and "https://" not in text
    assert not re.search(r"@import|url\(", text)
    sources = [value for _, key, value in page.attributes if key in ("src", "href")]
    assert not [source for source in sources if re.match(r"//|\w+:(?!video/mp4|image/png)", source)]
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", text, re.S)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(digests) == 1 and f"script-src &#x27;sha256-{digests[0]}" in text
    assert not [key for _, key, _ in page.attributes if key.startswith("on")]
    return page


@pytest.fixture(scope="session")
def page_checker():
    return self_contained
