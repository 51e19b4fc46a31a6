"""HTML that is safe by construction: all text is escaped, except what `tag` made.

A page holds its own style and script and loads nothing; its policy makes the browser refuse anything from elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
import os
from html import escape
from pathlib import Path
from urllib.parse import quote

from embodied import assets

ASSETS = Path(assets.__file__).resolve().parent
VOID = {"meta", "br", "hr", "img", "input", "source"}


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element, as in `tag("a", "x < y", href="...")`.

    Children that are None are left out; `class_` and `stroke_width` are spelt
    `class` and `stroke-width`; attributes that are None or False are left out, True ones have no value.
    """
    pairs = [(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items()]
    written = "".join(
        f" {key}" if value is True else f' {key}="{escape(str(value))}"'
        for key, value in pairs
        if value is not None and value is not False
    )
    if name in VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: object) -> Html:
    """The children one after the other, with text escaped."""
    there = (child for child in children if child is not None)
    return Html("".join(one if isinstance(one, Html) else escape(str(one), quote=False) for one in there))


def table(head: list[object], rows: list[list[object]], numeric: bool = True) -> Html:
    """A table that scrolls sideways on a narrow screen; all columns but the first hold numbers."""
    names = tag("thead", tag("tr", *[tag("th", cell) for cell in head]))
    body = tag("tbody", *[tag("tr", *[tag("td", cell) for cell in row]) for row in rows])
    return tag("div", tag("table", names, body, class_="numbers" if numeric else None), class_="scroll")


def facts_table(facts: dict[str, object]) -> Html:
    """A row for each fact that is known."""
    rows = [tag("tr", tag("th", name), tag("td", value)) for name, value in facts.items() if value]
    return tag("div", tag("table", tag("tbody", *rows), class_="facts"), class_="scroll")


def tile_list(found: list[tuple[str, str, str]]) -> Html:
    """The most important figures, one per tile: (what, the figure, what else there is to say of it)."""
    return tag("ul", *[tag("li", tag("span", a), tag("b", b), tag("span", c)) for a, b, c in found], class_="tiles")


def problem(text: str) -> Html:
    return tag("p", text, class_="problem")


def relative(path: Path, beside: Path) -> str:
    """A link to a file from a page in the folder `beside`."""
    return quote(os.path.relpath(path.resolve(), beside.resolve()))


def section(title: str, *children: object, note: str = "") -> Html:
    return tag("section", tag("h2", title), tag("p", note, class_="note") if note else None, *children)


def page(title: str, *body: object) -> str:
    """A whole document. Its policy allows only our own script, and only files beside the page to be loaded."""
    style = (ASSETS / "report.css").read_text(encoding="utf-8")
    script = (ASSETS / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; media-src data: 'self' file:; "
        "img-src data:"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(style)),
    )
    whole = tag("html", head, tag("body", tag("main", *body), tag("script", Html(script))), lang="en")
    return f"<!doctype html>\n{whole}\n"
