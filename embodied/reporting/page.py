"""Report pages: their contents as plain JSON, and the HTML file in which a browser draws them.

Python gathers tables, series and words. `assets/report.js` draws them, so that axes, colours and legends have one home.
A page has sections, and a section has blocks. The "kind" of a block names the function of the script that draws it.

returns = Series("training", x=[0, 1], y=[0.2, 0.4])
results = section("Results", table(["task", "success"], [["PushCube-v1", "88%"]]), lines("return", [returns]))
write_page(folder / "report.html", page("my run", [results]))

The data lie in the page and beside it, as report.data.json beside report.html. All text from runs stays text: neither
Python nor the script ever reads it as markup. A browser without scripts shows the tables.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any
from urllib.parse import quote

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from embodied import assets
from embodied.core.conversations import is_content, parts_of
from embodied.core.files import replace_text
from embodied.core.types import EpisodeResult
from embodied.records.results import check

ASSETS = Path(assets.__file__).resolve().parent
DATA = ".data.json"  # suffix of the file beside the page
COLORS = 8  # distinct line colours; further lines repeat them, dashed
MOST_POINTS = 240  # of a line; of more points, neighbours are averaged, with a band from lowest to highest
MOST_PIECES, BINS = 200, 1000  # pieces of one name in a row; beyond that the axis is divided into bins
RATE = {"unit": "share", "limits": (0.0, 1.0)}  # options of a chart of rates: percent from 0 to 100

Block = dict[str, Any]


@dataclass(frozen=True)
class Series:
    """One curve. `low` and `high` bound each point: a band behind a line, a whisker on a dot."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    points: bool = False  # measured now and then: dots instead of a line
    color: int = 0
    faint: bool = False  # a single run behind the mean of several


@dataclass(frozen=True)
class Row:
    """A named row of a chart: by name of the activity, its pieces from start to end."""

    name: str
    bars: Mapping[str, Sequence[tuple[float, float]]]
    note: str = ""
    whisker: tuple[float, float] | None = None


@dataclass(frozen=True)
class Rows:
    """Rows on an axis from 0 to `high`, with a vertical line at `end`; `columns` name the units of the axis."""

    title: str
    rows: Sequence[Row]
    high: float
    end: float | None = None
    columns: Sequence[str] = ()


# Blocks


def text(words: str, link: tuple[str, str] | None = None, note: bool = True) -> Block:
    """A paragraph, and a link (words, address) after it."""
    return {"kind": "text", "text": words, "link": link, "note": note}


def bullets(items: Sequence[str]) -> Block | None:
    return {"kind": "list", "items": items} if items else None


def fold(summary: str, words: str) -> Block | None:
    """A long text behind its summary."""
    return {"kind": "fold", "summary": summary, "text": words} if words else None


def tiles(figures: Sequence[tuple[str, str, str]]) -> Block | None:
    """The most important figures, one per tile: (name, figure, remark)."""
    return {"kind": "tiles", "tiles": figures} if figures else None


def table(head: Sequence[object], rows: Sequence[Sequence[object]], numeric: bool = True) -> Block:
    """A cell is a word, a number or a dict from `cell`; if `numeric`, all columns but the first hold numbers."""
    return {"kind": "table", "head": head, "rows": rows, "numeric": numeric}


def cell(words: object, more: str = "", **how: object) -> Block:
    """A table's cell with a small remark; `how` adds a colour, a link, a state, or numbers for readers of the data."""
    return {"text": words, "more": more, **how}


def words_of(value: object) -> tuple[str, str]:
    """The words of a cell, and its remark."""
    return (str(value["text"]), value["more"]) if isinstance(value, dict) else (str(value), "")


def named_table(head: str, rows: Sequence[tuple[object, Mapping[str, object]]]) -> Block:
    """A table of rows that may have different columns."""
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    return table([head, *names], [[key, *[row.get(name, "-") for name in names]] for key, row in rows])


Columns = Sequence[tuple[str, str, Callable[[Any], str]]]  # title, key of the values, their text


def grid(what: str, columns: Columns, rows: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The head and the texts of named rows, without columns of which no row knows a value."""
    filled = [column for column in columns if any(row[column[1]] is not None for row in rows.values())]
    texts = {
        name: ["" if row[key] is None else text(row[key]) for _, key, text in filled] for name, row in rows.items()
    }
    return [what, *(title for title, _, _ in filled)], [[name, *cells] for name, cells in texts.items()]


def facts_table(facts: Mapping[str, object]) -> Block:
    """A row for each fact that is known."""
    return table([], [[name, value] for name, value in facts.items() if value], numeric=False)


def lines(
    title: str,
    series: Sequence[Series],
    y: str = "",
    x: str = "env steps",
    unit: str = "",
    limits: tuple[float, float] | None = None,
    from_zero: bool = False,
) -> Block | None:
    """A chart of curves; None without any number. `y` and `x` title the axes; `unit` is "share" for percentages."""
    drawn = [asdict(thinned(curve)) for curve in map(finite, series) if curve.x]
    axes = {"x": x, "y": y or title, "unit": unit, "limits": limits, "from_zero": from_zero}
    return {"kind": "lines", "title": title, **axes, "series": drawn} if drawn else None


def histogram(
    title: str, groups: Mapping[str, Sequence[float]], x: str, whole: bool = False, y: str = "episodes"
) -> Block | None:
    """Stacked counts of the values of each group, integers if `whole`; None without any value."""
    values = {name: [value for value in group if math.isfinite(value)] for name, group in groups.items()}
    values = {name: group for name, group in values.items() if group}
    return {"kind": "histogram", "title": title, "x": x, "y": y, "whole": whole, "groups": values} if values else None


def rows_chart(title: str, charts: Sequence[Rows], x: str, unit: str = "", names: Sequence[str] = ()) -> Block:
    """Charts of rows under each other. The legend begins with `names`, and other activities follow by appearance."""
    drawn = [
        asdict(replace(chart, rows=[replace(row, bars=merge_pieces(row.bars, chart.high)) for row in chart.rows]))
        for chart in charts
    ]
    return {"kind": "rows", "title": title, "x": x, "unit": unit, "names": names, "charts": drawn}


def section(title: str, *blocks: Block | None, note: str = "") -> Block | None:
    """Blocks under a title; None without any block."""
    shown = [block for block in blocks if block]
    return {"title": title, "note": note, "blocks": shown} if shown else None


def page(
    title: str, sections: Sequence[Block | None], words: str = "", problems: Sequence[str] = (), **more: object
) -> Block:
    """A whole page. `more`: a heading that differs from the title, the state of a run, a command, a footer."""
    shown = [block for block in sections if block]
    return {"title": title, "heading": title, "words": words, "problems": problems, **more, "sections": shown}


# Numbers


def finite(curve: Series) -> Series:
    """The series without points that have no finite number."""
    keep = [i for i, y in enumerate(curve.y) if y is not None and math.isfinite(y)]
    values = {name: getattr(curve, name) for name in ("x", "y", "low", "high")}
    return replace(curve, **{name: [numbers[i] for i in keep] if numbers else [] for name, numbers in values.items()})


def thinned(curve: Series) -> Series:
    """The series with at most MOST_POINTS points: the means of neighbours, with a band that spans them."""
    if curve.points or len(curve.x) <= MOST_POINTS:
        return curve
    size = math.ceil(len(curve.x) / MOST_POINTS)
    parts = [slice(i, i + size) for i in range(0, len(curve.x), size)]
    return replace(
        curve,
        x=[curve.x[indices][-1] for indices in parts],
        y=[fmean(curve.y[indices]) for indices in parts],
        low=[min(curve.low[indices] or curve.y[indices]) for indices in parts],
        high=[max(curve.high[indices] or curve.y[indices]) for indices in parts],
    )


def merge_pieces(bars: Mapping[str, Sequence[tuple[float, float]]], high: float) -> dict[str, Sequence]:
    """A row's pieces, reduced: each bin of the axis shows the activity that fills most of it, or none. Activities of
    few pieces stay as they are and are drawn last, on top."""
    many = [name for name, pieces in bars.items() if len(pieces) > MOST_PIECES]
    few = {name: pieces for name, pieces in bars.items() if name not in many}
    edges = np.linspace(0.0, high, BINS + 1)
    busy = [busy_time(bars[name], edges) for name in many]
    longest = np.argmax([high / BINS - sum(busy), *busy], 0) if many else None  # 0: idle
    merged = {}
    for number, name in enumerate(many, 1):
        changes = np.flatnonzero(np.diff([0, *(longest == number), 0]))
        merged[name] = [(float(edges[first]), float(edges[end])) for first, end in changes.reshape(-1, 2)]
    return merged | few


def busy_time(pieces: Sequence[tuple[float, float]], edges: np.ndarray) -> np.ndarray:
    """The seconds of the pieces within each bin."""
    spans = np.array(sorted(pieces))
    lengths = spans[:, 1] - spans[:, 0]
    after = np.cumsum(lengths)
    times = np.maximum.accumulate(spans.ravel())
    return np.diff(np.interp(edges, times, np.stack([after - lengths, after], 1).ravel()))


def short(value: float) -> str:
    """A number in few characters: 1.5M, 20k, 0.25, 3e-4."""
    if value == 0:
        return "0"
    size = abs(value)
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            return f"{value / (1e3 if name == 'k' else unit):.4g}{name}"
    if size < 1e-3:
        mantissa, _, exponent = f"{value:.3g}".partition("e")
        return f"{mantissa}e{int(exponent)}" if exponent else f"{value:.3g}"
    return f"{value:.4g}"


def percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def relative(path: Path, beside: Path) -> str:
    """A link to a file from a page in the folder `beside`."""
    return quote(os.fsencode(os.path.relpath(path.resolve(), beside.resolve())))


# The files


def write_page(out: Path, shown: Block, live_s: float = 0) -> None:
    """Write the page, and its data beside it. A browser reloads the page every `live_s` seconds."""
    shown = for_browsers(shown)
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out.with_suffix(DATA), json.dumps(shown) + "\n")
    replace_text(out, html({**shown, "live_s": live_s}))


def for_browsers(shown: Block) -> Block:
    """The page as plain JSON. Browsers read no NaN, and drawings need no more than seven digits."""
    encoded = json.dumps(shown, default=str)
    return json.loads(encoded, parse_constant=lambda _: None, parse_float=lambda number: float(f"{float(number):.7g}"))


def live_s_of(out: Path) -> float:
    """The seconds after which a written page reloads itself; 0 if it does not, or is not there."""
    with suppress(OSError, ValueError):
        if found := re.search(r'"live_s":([\d.]+)', out.read_text(encoding="utf-8")):
            return float(found[1])
    return 0


def html(shown: Block) -> str:
    """The page as text. Its policy allows only our own script, and only files beside the page to be loaded."""
    script, style, template = (
        (ASSETS / f"report.{kind}").read_text(encoding="utf-8") for kind in ("js", "css", "html")
    )
    parts = {
        "title": escape(shown["title"]),
        "digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "style": style,
        "script": script,
        "data": json.dumps(shown, separators=(",", ":")).replace("<", "\\u003c"),
        "tables": without_script(shown),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], template)


def without_script(shown: Block) -> str:
    """The words and tables of a page as HTML."""
    words = [shown.get("state", ""), shown["words"], *shown["problems"]]
    parts = [f"<h1>{escape(shown['heading'])}</h1>", *(f"<p>{escape(str(line))}</p>" for line in words)]
    for shown_section in shown["sections"]:
        parts.append(f"<h2>{escape(shown_section['title'])}</h2><p>{escape(shown_section['note'])}</p>")
        for block in shown_section["blocks"]:
            if block["kind"] == "text":
                parts.append(f"<p>{escape(block['text'])}</p>")
            elif block["kind"] in ("table", "tiles"):
                rows = block.get("tiles") or [block["head"], *block["rows"]]
                parts += ["<table>", *(f"<tr>{''.join(map(plain_cell, row))}</tr>" for row in rows), "</table>"]
    return "\n".join(parts)


def plain_cell(value: object) -> str:
    return f"<td>{escape(' '.join(words_of(value)).rstrip())}</td>"


MOST_SAMPLES = 150  # of training, approximately
PAGE_TOKENS = 60_000  # marked tokens of a page; later answers are plain text
MOST_CHARACTERS = 20_000  # of an answer or a prompt; the file has the rest
LARGEST_SIDE = 320  # largest side in pixels of a picture in a page
SNIPPET = 60  # characters of the last answer, and of its facts, in a folded line

Number = float | int


class Message(TypedDict):
    role: str
    content: str | list[dict[str, str]]


class TurnShown(TypedDict):
    said: str | list[Message]
    answer: str
    tokens: list[str]
    logprobs: list[Number | None]
    truncated: bool
    reward: Number | None
    facts: dict[str, Any]


class TranscriptShown(TypedDict):
    turns: Annotated[list[TurnShown], Field(min_length=1)]


class SampleShown(TranscriptShown):
    iteration: int
    version: int
    index: int
    task: str
    success: bool | None
    reward: Number | None
    truncated: bool | None
    tokens: int


def can_be_shown(line: dict[str, Any], kind: type = TranscriptShown) -> bool:
    """True if a line of transcripts.jsonl or samples.jsonl has all fields that a page shows."""
    try:
        check(line, kind)
    except ValueError:
        return False
    return True


def conversations(items: Sequence[Block], filter_by: str = "", columns: int = 1, legend: bool = True) -> Block:
    """`filter_by`: "outcome", or "samples" for iterations and rewards; `columns`: how many stand side by side."""
    how = {"filter": filter_by, "columns": columns, "legend": legend}
    return {"kind": "conversations", **how, "items": items}


class Conversations:
    """Gathers conversations for a page, with tokens and log-probs while there is room."""

    def __init__(self) -> None:
        self.left = PAGE_TOKENS

    def show(self, episode: EpisodeResult, transcript: dict[str, Any], kind: str, name: str, unfolded: bool) -> Block:
        """Add an evaluation's conversation; `kind` is its outcome, and `name` identifies it."""
        words = [f"reward {short(episode.total_reward)}", f"{episode.tokens:,} tokens"]
        how = {"open": unfolded, "error": episode.error, "cut_off": bool(episode.truncated)}
        return self.talk(transcript["turns"], words, outcome=kind, name=name, **how)

    def sample(self, sample: dict[str, Any]) -> Block:
        """Add a conversation of training, with the numbers for the page's filter."""
        success, reward = sample["success"], sample["reward"] or 0.0
        words = [f"reward {short(reward)}", f"{sample['tokens']:,} tokens"]
        how = {"iteration": sample["iteration"], "reward": reward, "cut_off": bool(sample["truncated"])}
        how["outcome"] = "played" if success is None else "success" if success else "failure"
        name = f"iteration {sample['iteration']}, version {sample['version']}, episode {sample['index']}"
        return self.talk(sample["turns"], words, name=name, **how)

    def talk(self, turns: Sequence[dict[str, Any]], words: list[str], **how: object) -> Block:
        words += [f"{len(turns)} turns"] if len(turns) > 1 else []
        last = {"answer": snippet(turns[-1]["answer"]), "facts": snippet(facts_of(turns[-1]))}
        return {"words": ", ".join(words), **last, **how, "turns": [self.turn(turn) for turn in turns]}

    def turn(self, turn: dict[str, Any]) -> Block:
        """The prompt, the answer and the env's response; with tokens if they are known and the page has room."""
        said, tokens, logprobs = turn["said"], turn["tokens"], turn["logprobs"]
        messages = [{"role": "prompt", "content": said}] if isinstance(said, str) else said
        numbers = [logprob for logprob in logprobs if logprob is not None]
        words = [f"reward {short(turn['reward'])}"] if turn["reward"] is not None else []
        words += [f"{len(logprobs):,} tokens"] if logprobs else []
        words += [f"mean log-prob {sum(numbers) / len(numbers):.2f}"] if numbers else []
        marked = bool(tokens) and len(tokens) == len(logprobs) and self.left >= len(tokens)
        self.left -= len(tokens) * marked
        answer = {"tokens": tokens, "logprobs": logprobs} if marked else {"answer": clip_text(turn["answer"])}
        return {
            "said": [{"role": message["role"], "parts": contents(message)} for message in messages],
            **answer,
            "words": ", ".join(words),
            "cut_off": turn["truncated"],
            "facts": clip_text(facts_of(turn)),
        }


def samples_shown(samples: Sequence[dict[str, Any]]) -> list[Block]:
    """Conversations of training by iteration, the latest first. Of many iterations, evenly spaced ones are shown."""
    whole = [sample for sample in samples if can_be_shown(sample, SampleShown)]
    iterations = sorted({sample["iteration"] for sample in whole}, reverse=True)
    step = max(1, -(-len(whole) // MOST_SAMPLES))
    wanted = {*iterations[::step], *iterations[-1:]}
    room = Conversations()
    ordered = sorted(whole, key=lambda sample: (-sample["iteration"], sample["index"]))
    shown = [room.sample(sample) for sample in ordered if sample["iteration"] in wanted]
    if not shown:
        return []
    counted = [text(f"{len(shown)} of {len(whole)} are shown.")] if len(shown) < len(whole) else []
    return [*counted, conversations(shown, "samples", legend=False)]


def contents(message: Any) -> list[Block]:
    """The texts and pictures of a message."""
    return [
        clip_text(part["text"]) if part["type"] == "text" else picture(part["image"])
        for part in parts_of(message)
        if is_content([part])
    ]


@lru_cache(MOST_SAMPLES)
def picture(name: str) -> Block:
    """A small copy of a picture in the page; its name if it cannot be loaded."""
    from embodied.core.pictures import PictureError, data_url, load_picture, short_name

    try:
        pixels = load_picture(name)
    except PictureError as err:
        return {"text": f"[{err}]"}
    step = -(-max(pixels.shape) // LARGEST_SIDE)
    return {"src": data_url(pixels[::step, ::step]), "text": short_name(name)}


def facts_of(turn: dict[str, Any]) -> str:
    return "; ".join(f"{key}: {value}" for key, value in turn["facts"].items())


def snippet(words: str) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(words[: 4 * SNIPPET].split())
    return line[:SNIPPET] + ("\u2026" if len(line) > SNIPPET or len(words) > 4 * SNIPPET else "")


def clip_text(words: str) -> Block:
    """The text, or its beginning and the number of characters after it."""
    return {"text": words[:MOST_CHARACTERS], "more": max(0, len(words) - MOST_CHARACTERS)}
