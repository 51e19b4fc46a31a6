"""Reading pages: their HTML is checked, their data are searched."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from embodied.reporting.page import DATA, write_page

VOID = {"meta"}


class Checker(HTMLParser):
    """Fails on tags that are not closed in order, and keeps the text of each element."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts = [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, name, attributes):
        assert not [key for key, value in attributes if key.startswith("on") or key in ("src", "href")]
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def of(self, name):
        return [text for element, text in self.texts if element == name]


class Told:
    """What a page holds: `data`, its words as one `text`, and the words of a browser without scripts, `plain`."""

    def __init__(self, text, data):
        html = Checker(text)
        embedded, script = html.of("script")
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}'" in text and "default-src 'none'" in text
        assert not re.search(r"@import|url\(|https?://(?!www.w3.org/2000/svg)", text.replace(embedded, ""))
        self.data, self.plain = json.loads(data), " ".join(html.of("td") + html.of("p") + html.of("h1"))
        assert json.loads(embedded) | {"live_s": 0} == self.data | {"live_s": 0} and "</script" not in embedded
        self.text = "\n".join(words_in(self.data))

    def blocks(self, kind):
        return [block for part in self.data["sections"] for block in part["blocks"] if block["kind"] == kind]

    def chart(self, title):
        (chart,) = [chart for chart in self.blocks("lines") if chart["title"] == title]
        return {series["name"]: series for series in chart["series"]}

    @property
    def conversations(self):
        return [item for block in self.blocks("conversations") for item in block["items"]]


def words_in(part):
    """Every text in JSON, names of activities and groups among them, in order."""
    if isinstance(part, dict):
        names = [name for key in ("bars", "groups") for name in part.get(key, ())]
        return names + [word for value in part.values() for word in words_in(value)]
    return [word for one in part for word in words_in(one)] if isinstance(part, list) else [str(part)]


@pytest.fixture
def page_checker(tmp_path_factory):
    """Reads a page that was written, or that is given as its data."""

    def check(page):
        out = page
        if isinstance(page, dict):
            out = tmp_path_factory.mktemp("page") / "page.html"
            write_page(out, page)
        return Told(out.read_text(), out.with_suffix(DATA).read_text())

    return check
