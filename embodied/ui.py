"""Watch runs in a browser, live: python -m embodied.ui [RUNS ...]

Serves the list of all runs below some folders, and the page of each: curves as rows come, videos as evaluations end,
conversations, timings, the prediction beside the measurement. Tick several runs to compare them.

usage: python -m embodied.ui [RUNS ...] [port=8080] [--help]

  RUNS                          folders with runs, or runs' own folders; default: runs
  port=N                        port to listen at; 0: a free one, which is printed

Only programs of this machine can connect, without a token; nothing can be changed from a page. From elsewhere:
ssh -L 8080:localhost:8080 MACHINE. Ctrl-C ends it, and no run.
"""

# The server makes pages when they are asked for, and gives the files that they link to:
#
#     GET /                       the list of runs
#     GET /?run=FOLDER&run=...    the comparison of these runs
#     GET /FOLDER/                the page of a run, an evaluation, a group or a share
#     GET /FOLDER/FILE            a file that pages link to: a video, a transcript, results; parts of it by Range
#
# A URL's path is the path on this machine, so links between runs are as in written pages. A page that is asked for as
# JSON (Accept: application/json) is its data, which the open page draws again without a reload. Nothing changes a file.
# Other users of the machine can connect, too, so only files of the kinds in TYPES are given: no weights, no logs, and
# nothing outside the named folders.
#
# A thousand runs are listed in a second: of a run, run.json is read, the newest results.json, and the ends of the other
# files. Runs that have ended are read once. An unreadable run is a row that says why.

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, quote, unquote_to_bytes

from embodied.core.errors import ConfigError, EmbodiedError, printable
from embodied.core.files import as_path, encode, in_words, read_object, reading
from embodied.core.yaml_text import read_yaml
from embodied.records.results import PARTIAL, RESULTS, check_info
from embodied.reporting.page import DATA, Block, cell, for_browsers, html, page, percent, relative, section, table, text
from embodied.reporting.run_page import REPORT, page_of, what_is_played
from embodied.reporting.runs import IN_TRAINING
from embodied.reporting.sections import figure_cells
from embodied.run import launch
from embodied.run.run_folder import was_killed
from embodied.run.run_group import GROUP
from embodied.serving.config import FOREIGN_HOST, is_loopback
from embodied.sharing.run_turns import RECORD


def main(argv: list[str] | None = None) -> int:
    return launch.run(start, argv, __doc__)


def start(argv: list[str]) -> int:
    ports = [word.removeprefix("port=") for word in argv if word.startswith("port=")]
    roots = [as_path(word) for word in argv if not word.startswith("port=")] or [as_path("runs")]
    port = ports[-1] if ports else "8080"
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"port={port} is no port; name a number up to 65535 (0: a free one)")
    for root in roots:
        if not root.is_dir():
            train = "python -m embodied.train recipe=pointmass_ppo"
            raise ConfigError(f"{root} is not a folder; name one with runs, or make one: {train}")
    try:
        server = PageServer(roots, int(port))
    except OSError as err:
        raise ConfigError(f"port={port}: {err.strerror or err}; choose another (port=0: a free one)") from None
    with server, suppress(KeyboardInterrupt):
        print(f"runs        {', '.join(map(str, server.roots))}")
        print(f"listening   http://{HOST}:{server.server_port}/", flush=True)
        server.serve_forever()
    return 0


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
                beside = folders[0] if len(folders) == 1 else Path("/")
                shown = page_of(folders, beside)[0] if folders else self.runs.page(beside)
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
            hidden = any(name.startswith(".") for name in found.relative_to(root).parts)
            if not hidden and found.exists():
                return found
        except (StopIteration, ValueError, OSError, RuntimeError):
            pass
        raise NotServed(404, f"{path} is not there, or not in {', '.join(map(str, self.roots))}")


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


DEEPEST = 4  # folders between a named folder and a run
TAIL_BYTES = 30_000  # of metrics.jsonl; a row is shorter
RUN, WHOLE = "run.json", ("config.yaml", "metrics.jsonl")  # a folder with WHOLE and without RUN is unfinished
MARKS = (RUN, GROUP, RECORD, RESULTS, PARTIAL, *WHOLE)  # files by which a folder is known, the first that it has
HEAD = ("run", "recipe", "task", "state", "success", "env steps", "age")
IN_ENV = re.compile(r"^  (name|task): .+$", re.MULTILINE)
COMPARE = "Compare the ticked runs"
NO_RUNS = "No runs yet in {}. python -m embodied.train recipe=pointmass_ppo makes one."


@dataclass(frozen=True)
class Entry:
    """A row of the list."""

    folder: Path
    state: str
    recipe: str = "-"
    task: str = "-"
    problem: str = ""
    success: object = "-"
    steps: str = "-"
    began: datetime | None = None


@dataclass
class RunList:
    """The runs below these folders."""

    roots: Sequence[Path]
    read: dict[Path, tuple[tuple[int, ...], Entry]] = field(default_factory=dict)  # ended runs, by their files' times

    def page(self, beside: Path) -> Block:
        """The page; its links are relative to the folder `beside`."""
        marked, pages = find_folders(self.roots)
        now = datetime.now(UTC)
        entries = sorted(
            (self.entry(*one) for one in marked), key=lambda one: one.began or now, reverse=True
        )  # newest first
        running = sum(entry.state == "running" for entry in entries)
        where = ", ".join(map(str, self.roots))
        listed = table(HEAD, [row_of(entry, now, beside) for entry in entries], numeric=False) | {"form": COMPARE}
        shared = os.path.commonpath(self.roots)
        others = [
            text("", (str(path.relative_to(shared)), relative(path, beside)), note=False) for path in sorted(pages)
        ]
        return page(
            "Runs - Embodied Loop",
            [section("", listed if entries else text(NO_RUNS.format(where))), section("Other pages", *others)],
            f"{sum(mark in (RUN, *WHOLE) for _, mark in marked)} runs, {running} running \u00b7 {where}",
            heading="Runs",
        )

    def entry(self, folder: Path, mark: str) -> Entry:
        """The entry of a folder known by this file; an ended run is read again only if a file changed."""
        times = tuple(modified(folder / name) for name in (mark, "metrics.jsonl", "eval"))
        if folder in self.read and self.read[folder][0] == times:
            return self.read[folder][1]
        try:
            entry = read_entry(folder, mark)
        except Exception as err:  # whatever is wrong with one run, the others are listed
            entry = Entry(folder, "unreadable", problem=str(err) or type(err).__name__)
        if entry.state != "running":
            self.read[folder] = times, entry
        return entry


def find_folders(roots: Sequence[Path]) -> tuple[list[tuple[Path, str]], list[Path]]:
    """The folders of runs, evaluations, groups and shares, each with the file by which it is known; and the pages of
    benchmarks, plans and comparisons."""
    marked: dict[Path, str] = {}
    pages: dict[Path, None] = {}
    for root in roots:
        for folder, names in walk(root, DEEPEST):
            if mark := next((mark for mark in MARKS if mark in names), None):
                marked[folder] = mark
            for name in names:
                if name.endswith(DATA) and (html := f"{name.removesuffix(DATA)}.html") in names and html != REPORT:
                    pages[folder / html] = None
    return list(marked.items()), list(pages)


def walk(folder: Path, deepest: int) -> Iterator[tuple[Path, set[str]]]:
    """Every folder and the names of its files. Not inside runs and evaluations, hidden folders and links."""
    try:
        with os.scandir(folder) as found:
            entries = [entry for entry in found if not entry.name.startswith(".")]
    except OSError:  # it went away, or may not be read
        return
    inside = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    names = {entry.name for entry in entries}.difference(inside)
    yield folder, names
    if deepest and names.isdisjoint((RUN, RESULTS, PARTIAL, *WHOLE)):
        for name in inside:
            yield from walk(folder / name, deepest - 1)


def modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def read_entry(folder: Path, mark: str) -> Entry:
    """The entry of a folder; raises EmbodiedError if a file cannot be read."""
    if mark in WHOLE:
        return Entry(folder, "incomplete", problem=f"{RUN} is missing: it has just begun, or was not copied whole")
    with reading(folder / mark):
        began = datetime.fromtimestamp((folder / mark).stat().st_mtime, UTC)
        if mark == RECORD:
            return Entry(folder, "shared devices", began=began)
        content = read_object(folder / mark)
        if mark == RESULTS:
            task = what_is_played(content.get("protocol", {}).get("env", {}))
            return Entry(folder, "evaluation", task=task, success=success_of(content), began=began)
        if mark == RUN:
            return read_run_entry(folder, content)
        state = "group" if mark == GROUP else "partial evaluation"
        return Entry(folder, state, str(content.get("name", "-")), began=began)


def read_run_entry(folder: Path, info: dict[str, Any]) -> Entry:
    check_info(info)
    last = last_row(folder / "metrics.jsonl")
    words = map(str, info.get("provenance", {}).get("command", ()))
    recipe = info.get("recipe") or next((word[7:] for word in words if word.startswith("recipe=")), "-")
    success: object = "-"
    if results := newest_results(folder / "eval"):
        success = success_of(read_object(results))
    elif (rate := last.get("success_once")) is not None:
        success = cell(percent(rate), "in training")
    return Entry(
        folder,
        "killed" if was_killed(folder, info) else info.get("state", "-"),
        str(recipe),
        task_of(folder / "config.yaml"),
        info.get("cause", "") if info.get("state") in ("failed", "stopped") else "",
        success,
        f"{last['env_steps']:,}" if "env_steps" in last else "-",
        datetime.fromisoformat(info["started"]).astimezone(UTC) if "started" in info else None,
    )


def last_row(path: Path) -> dict[str, Any]:
    """The last whole row of metrics.jsonl; empty if there is none."""
    if not path.is_file():
        return {}
    with reading(path), path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
        rows = [line for line in file.read().splitlines() if line.startswith(b"{") and line.endswith(b"}")]
        return json.loads(rows[-1]) if rows else {}


def newest_results(folder: Path) -> Path | None:
    """The results of the newest evaluation during training, or of the last by name."""
    names = sorted(path.parent.name for path in folder.glob(f"*/{RESULTS}"))
    names = [name for name in names if IN_TRAINING.fullmatch(name)] or names
    return folder / names[-1] / RESULTS if names else None


def success_of(results: dict[str, Any]) -> object:
    """An evaluation's success with its interval; the return if the env has no success."""
    cells = figure_cells(results["overall"])
    named = {"return": cell(cells["return"], "return")} if "return" in cells else {}
    return next(
        (cells[name] for name in ("success_once", "success (avg@k)") if name in cells), named.get("return", "-")
    )


def task_of(path: Path) -> str:
    """The task in a resolved recipe. Only its lines are parsed, since a whole recipe takes 20 ms."""
    if not path.is_file():
        return "-"
    with reading(path):
        _, _, env = f"\n{path.read_text(encoding='utf-8')}".partition("\nenv:\n")
        env = re.split(r"^\S", env, maxsplit=1, flags=re.MULTILINE)[0]
        return what_is_played(read_yaml("\n".join(line[0].strip() for line in IN_ENV.finditer(env))) or {})


def row_of(entry: Entry, now: datetime, beside: Path) -> list[object]:
    link = f"{relative(entry.folder, beside)}/"
    name = cell(printable(entry.folder.name), href=link, pick=str(entry.folder))
    age = "-" if entry.began is None else age_words((now - entry.began).total_seconds())
    state = cell(entry.state, entry.problem, state=entry.state)
    return [name, entry.recipe, entry.task, state, entry.success, entry.steps, age]


def age_words(seconds: float) -> str:
    for name, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{max(seconds, 0):.0f} s"


if __name__ == "__main__":
    raise SystemExit(main())
