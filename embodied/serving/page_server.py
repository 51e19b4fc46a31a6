"""The server of `python -m embodied.ui`: pages of runs, made when they are asked for, and the files they link to.

GET /                       the list of runs
GET /?run=FOLDER&run=...    the comparison of these runs
GET /FOLDER/                the page of a run, an evaluation, a group or a share
GET /FOLDER/FILE            a file that pages link to: a video, a transcript, results; parts of it by Range

A URL's path is the path on this machine, so links between runs are as in written pages. A page that is asked for as
JSON (Accept: application/json) is its data, which the open page draws again without a reload.

Only programs of this machine can connect. Nothing changes a file. Other users of the machine can connect, too, so only
files of the kinds in TYPES are given: no weights, no logs, and nothing outside the named folders.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, quote, unquote_to_bytes

from embodied.core.errors import EmbodiedError
from embodied.core.files import encode, in_words
from embodied.reporting.page import Block, for_browsers, html, page
from embodied.reporting.run_list import RunList
from embodied.reporting.run_page import REPORT, page_of
from embodied.serving.config import FOREIGN_HOST, is_loopback

HOST = "127.0.0.1"
EVERY_S, SHARE = 2.0, 20  # an open page asks again after EVERY_S, and after SHARE times the seconds that it takes
SILENT_S, MAKING_S = 60.0, 60.0  # limits for a client that says nothing, and for waiting until other pages are made
PLAIN, PIECE = "text/plain; charset=utf-8", 1 << 16
TYPES = {".mp4": "video/mp4", ".html": "text/html; charset=utf-8", ".json": "application/json"}
TYPES |= {".jsonl": PLAIN, ".csv": PLAIN}
SAFE = {
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Vary": "Accept",
}
FRAMES = "frame-ancestors 'none'"
ALONE = f"sandbox allow-scripts allow-downloads; {FRAMES}"  # for pages on disk, which anybody may have written
RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class NotServed(Exception):
    """A request that gets no page: the status and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class PageServer(ThreadingHTTPServer):
    """Serves the runs below some folders."""

    daemon_threads = True

    def __init__(self, roots: Sequence[Path], port: int) -> None:
        self.roots = [root.resolve() for root in roots]
        self.runs, self.making = RunList(self.roots), Lock()
        super().__init__((HOST, port), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or never spoke, is no error."""

    def make(self, folders: Sequence[Path]) -> Block:
        """The page of these folders, or the list; one at a time."""
        if not self.making.acquire(timeout=MAKING_S):
            raise NotServed(503, "other pages take too long; try again")
        try:
            began = time.perf_counter()
            try:
                shown = page_of(folders, beside_of(folders))[0] if folders else self.runs.page(Path("/"))
            except EmbodiedError as err:
                raise NotServed(404, str(err)) from err
            except Exception as err:  # a page that cannot be made must not end the list of others
                raise NotServed(500, f"this page could not be made: {type(err).__name__}: {in_words(err)}") from err
            home = {"home": "/"} if folders else {}
            live_s = max(EVERY_S, SHARE * (time.perf_counter() - began))
            return for_browsers(shown) | home | {"live_s": round(live_s, 1), "served": True}
        finally:
            self.making.release()

    def place(self, path: str) -> Path:
        """The file or folder of a path, links resolved. Raises NotServed outside the named folders."""
        try:
            found = Path("/", path.lstrip("/")).resolve()
            root = next(root for root in self.roots if found.is_relative_to(root))
            hidden = any(part.startswith(".") for part in found.relative_to(root).parts)
            if not hidden and found.exists():
                return found
        except (StopIteration, ValueError, OSError, RuntimeError):
            pass
        raise NotServed(404, f"{path} is not there, or not in {', '.join(map(str, self.roots))}")


def beside_of(folders: Sequence[Path]) -> Path:
    return folders[0] if len(folders) == 1 else Path("/")


class Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version, server_version, sys_version = "HTTP/1.1", "embodied", ""
    timeout = SILENT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed."""

    def do_GET(self) -> None:
        try:
            if not all(map(is_loopback, self.headers.get_all("Host", [""]))):
                raise NotServed(403, FOREIGN_HOST)
            path, _, query = self.path.partition("?")
            self.answer(os.fsdecode(unquote_to_bytes(path)), parse_qs(query).get("run", []))
        except NotServed as err:
            self.give_page(page("Not here", [], problems=[str(err)], home="/"), err.status)

    do_HEAD = do_GET

    def answer(self, path: str, picked: list[str]) -> None:
        """Answer a request for this path, or for the list or a comparison of the picked runs."""
        if path == "/" and len(picked) != 1:
            return self.give_page(self.server.make([self.server.place(run) for run in picked]))
        found = self.server.place(picked[0] if path == "/" else path)
        if found.name == REPORT:
            found = found.parent
        if found.is_file():
            return self.give_file(found)
        if path != (there := f"{found}/".replace("//", "/")):
            return self.give(302, {"Location": quote(os.fsencode(there))}, b"")
        self.give_page(self.server.make([found]))

    def give_page(self, shown: Block, status: int = 200) -> None:
        as_data = "application/json" in self.headers.get("Accept", "")
        body, kind = (json.dumps(shown), "application/json") if as_data else (html(shown), TYPES[".html"])
        self.give(status, {"Content-Type": kind, "Content-Security-Policy": FRAMES}, encode(body))

    def give_file(self, path: Path) -> None:
        """The file, or the part in the Range header, by which browsers seek in videos."""
        if (kind := TYPES.get(path.suffix)) is None:
            raise NotServed(404, f"{path}: files of this kind are not served")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            first, end = asked_range(self.headers.get("Range", ""), size)
            whole = (first, end) == (0, size)
            headers = {"Content-Type": kind, "Accept-Ranges": "bytes", "Content-Security-Policy": ALONE}
            if first >= end and not whole:
                return self.give(416, {"Content-Range": f"bytes */{size}"}, b"")
            headers |= {} if whole else {"Content-Range": f"bytes {first}-{end - 1}/{size}"}
            file.seek(first)
            self.give(200 if whole else 206, headers, pieces(file, end - first), end - first)

    def give(self, status: int, headers: dict[str, str], body: bytes | Iterator[bytes], length: int = 0) -> None:
        self.send_response(status)
        length = len(body) if isinstance(body, bytes) else length
        for name, value in {**SAFE, **headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        if self.headers.get("Content-Length") or self.headers.get("Transfer-Encoding"):  # a body that nobody reads
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            for piece in [body] if isinstance(body, bytes) else body:
                self.wfile.write(piece)


def asked_range(header: str, size: int) -> tuple[int, int]:
    """The first byte and the end of the part that a Range header asks for; the whole file without one that we know."""
    asked = RANGE.fullmatch(header)
    if not asked or asked[0] == "bytes=-":
        return 0, size
    first, last = asked.groups()
    if not first:
        return max(size - int(last), 0), size
    return int(first), min(int(last) + 1, size) if last else size


def pieces(file: Any, length: int) -> Iterator[bytes]:
    """The next `length` bytes of a file, which may grow meanwhile."""
    while length > 0 and (piece := file.read(min(PIECE, length))):
        length -= len(piece)
        yield piece
