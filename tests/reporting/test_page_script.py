"""The script of pages, run by Node on a document that keeps elements as plain objects."""

import json
import shutil
import subprocess

import pytest

from embodied.reporting.page import (
    ASSETS,
    COLORS,
    RATE,
    Row,
    Rows,
    Series,
    cell,
    histogram,
    lines,
    page,
    rows_chart,
    section,
    table,
    text,
)

EVIL = '</script><b onclick=y>{{data}}<!-- & "'
DOCUMENT = """
class Element {
  constructor(name) { Object.assign(this, { name, attributes: {}, children: [], style: {}, on: {} }); }
  setAttribute(key, value) { this.attributes[key] = String(value); }
  getAttribute(key) { return this.attributes[key]; }
  append(...children) { this.children.push(...children); }
  insertBefore(child) { this.children.push(child); }
  addEventListener(name, run) { this.on[name] = run; }
  getBoundingClientRect() { return { left: 0, top: 0, width: 440, height: 244 }; }
  remove() {}
  set textContent(words) { this.children = [words]; }
}
const [script, data] = JSON.parse(require("fs").readFileSync(0)), main = new Element("main"), svgs = [];
const create = (name) => { const made = new Element(name); if (name === "svg") svgs.push(made); return made; };
const found = { getElementById: () => ({ textContent: data }), querySelector: () => main };
const document = { ...found, createElement: create, createElementNS: (_, name) => create(name) };
new Function("document", script)(document);
for (const svg of svgs) svg.on.pointermove({ clientX: 430, clientY: 20 });
process.stdout.write(JSON.stringify(main, (key, value) => (key === "on" ? undefined : value)));
"""


class Drawn:
    """Elements that the script made of a page, and their words."""

    def __init__(self, *blocks):
        shown = page(EVIL, [section(EVIL, *blocks, note=EVIL)], EVIL, [EVIL])
        given = json.dumps([(ASSETS / "report.js").read_text(), json.dumps(shown)])
        done = subprocess.run(["node", "-e", DOCUMENT], input=given, capture_output=True, text=True, timeout=60)
        assert not done.returncode, done.stderr
        self.elements, self.words = [], []
        self.walk(json.loads(done.stdout))
        assert not [word for word in self.words if "could not be drawn" in word]

    def walk(self, element):
        self.elements.append(element)
        for child in element["children"]:
            self.walk(child) if isinstance(child, dict) else self.words.append(child)

    def of(self, style):
        """Elements of a class."""
        return [one for one in self.elements if style in one["attributes"].get("class", "").split()]


pytestmark = pytest.mark.skipif(not shutil.which("node"), reason="needs Node.js")


def test_charts_have_titled_axes_bands_dots_and_numbers_under_the_pointer():
    curve = Series("training", [0, 50, 100], [0.2, 0.4, 0.75], [0.1, 0.3, 0.7], [0.3, 0.5, 0.8])
    dots = Series("evaluation", [100], [0.7], [0.6], [0.9], points=True, color=1)
    drawn = Drawn(lines("success", [curve, dots], x="env steps", **RATE))
    assert [title["children"] for title in drawn.of("title")] == [["env steps"], ["success"]]
    assert len(drawn.of("band")) == len(drawn.of("whisker")) == len(drawn.of("dot")) - 1 == 1, "a dot in the legend too"
    assert {"0%", "100%"} <= {*drawn.words}
    (box,) = drawn.of("readout")
    assert box["children"] == ["training: 75% [70%, 80%] at 100\nevaluation: 70% [60%, 90%] at 100"]
    many = [Series(str(number), [0, 1], [0, number], color=number) for number in range(2 * COLORS)]
    styles = [one["attributes"]["class"] for one in Drawn(lines("return", many)).of("line")]
    assert len({*styles}) == 2 * COLORS, "no two lines look alike"


def test_counts_and_rows_are_drawn_to_scale():
    counts = Drawn(histogram("Length", {"failure": [3] * 4, "success": [3, 5, 5]}, "env steps", whole=True)).of("bar")
    heights = [float(bar["attributes"]["height"]) for bar in counts]
    assert heights == pytest.approx([156.8, 39.2, 78.4])  # 4, 1 and 2 of at most 5, in 196
    assert [bar["attributes"]["class"] for bar in counts] == ["bar failure", "bar success", "bar success"]
    rows = [Row("gpu:0", {"sim": [(0, 25), (50, 75)], "learner": [(75, 100)]})]
    sim, learner = Drawn(rows_chart("devices", [Rows("", rows, 100.0)], "seconds")).of("spans")
    pieces = [one["attributes"]["d"].split("M")[1:] for one in (sim, learner)]
    lengths = [float(piece.partition("h")[2]) for piece in (*pieces[0], *pieces[1])]
    assert lengths == pytest.approx([lengths[0]] * 3, abs=0.25)
    assert sim["attributes"]["class"] != learner["attributes"]["class"]


def test_an_activity_has_one_colour_in_all_charts_of_a_page():
    others = {f"activity {number}": [(0, 1)] for number in range(16)}
    bars = [{"step": [(0, 1)]}, {**others, "step": [(0, 1)]}]
    drawn = Drawn(*[rows_chart(EVIL, [Rows("", [Row("sim", bar)], 1.0)], EVIL) for bar in bars])
    first, *_, last = [one["attributes"]["class"] for one in drawn.of("spans")]
    assert first == last


def test_markup_from_runs_stays_text():
    """In every kind of block; tokens are marked the more the less likely they are."""
    turn = {"said": [{"role": EVIL, "parts": [{"text": EVIL, "more": 0}]}], "words": EVIL, "cut_off": True}
    turn |= {"tokens": [EVIL, "a", "b", "c", "d"], "logprobs": [-0.01, -0.5, -2.0, -3.0, None]}
    talk = {"outcome": "failure", "name": EVIL, "words": EVIL, "cut_off": True, "answer": EVIL, "facts": EVIL}
    talk |= {"open": False, "error": EVIL, "turns": [turn | {"facts": {"text": EVIL, "more": 3}}]}
    drawn = Drawn(
        text(EVIL, (EVIL, "a%22b")),
        table([EVIL], [[cell(EVIL, EVIL, href="x.html", color=1)], [EVIL]]),
        {"kind": "videos", "videos": [{"src": "a.mp4", "words": EVIL, "outcome": "failure", "label": EVIL}]},
        {"kind": "conversations", "items": [talk], "filter": "outcome", "columns": 1, "legend": True},
        lines(EVIL, [Series(EVIL, [0], [1]), Series("b", [0], [1], color=1)]),
        rows_chart(EVIL, [Rows(EVIL, [Row("", {EVIL: [(0, 1)]})], 1.0)], EVIL),
    )
    assert sum(EVIL in word for word in drawn.words) > 20
    assert not {"script", "onclick"} & {one["name"] for one in drawn.elements}
    assert not [one for one in drawn.elements if one["name"] == "b" or "onclick" in one["attributes"]]
    levels = [len(drawn.of(f"p{level}")) for level in range(1, 5)]
    assert levels == [2, 2, 2, 2], "a token of each, and the legend"
