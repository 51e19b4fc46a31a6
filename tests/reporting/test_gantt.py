"""The drawing of a predicted iteration, as a page holds it and as a file."""

import re
from collections import Counter
from xml.etree import ElementTree

import pytest

from embodied.placement.event_replay import Schedule
from embodied.plan import MOST_ROWS, draw
from embodied.reporting.svg import as_file


def schedule(seconds, **spans):
    """Of devices gpu_0 and so on, each with its (component, start, end)."""
    made = Schedule(seconds, devices=list(spans))
    for device, bars in spans.items():
        for bar in bars:
            made.add(device, *bar)
    return made


def parts(drawing, kind):
    """Elements of a name; those of a file have the names of SVG."""
    return list(ElementTree.fromstring(as_file(drawing)).iter(f"{{http://www.w3.org/2000/svg}}{kind}"))


def texts(drawing):
    return [element.text for element in parts(drawing, "text")]


def test_a_device_has_a_row_a_component_a_colour_and_every_schedule_the_same_time_axis():
    work = {"gpu_0": [("sim", 0, 1), ("policy", 1, 2), ("sim", 2, 3)], "gpu_1": [("learner", 2, 4), ("mine", 4, 4.5)]}
    drawing = draw({"hybrid": schedule(5.0, **work), "collocated": schedule(10.0, gpu_0=[("sim", 0, 10)])})
    assert texts(drawing)[:5] == ["sim", "policy", "learner", "mine", "hybrid; 5 s"]
    assert Counter(texts(drawing))["gpu_0"] == 2 and Counter(texts(drawing))["gpu_1"] == 1
    assert Counter(texts(drawing))["10"] == 2 and texts(drawing)[-1] == "seconds of an iteration"
    bars = {path[0].text: path.attrib for path in parts(drawing, "path")[4:6]}
    pieces = {name: re.findall(r"M(\S+) (\d+)h(\d+\.?\d*)", bar["d"]) for name, bar in bars.items()}
    (first, second), (policy,) = pieces["gpu_0: sim"], pieces["gpu_0: policy"]
    assert float(policy[0]) - float(first[0]) == pytest.approx(float(first[2]), abs=0.2)
    assert first[1:] == second[1:] == policy[1:]
    assert [bar["class"] for bar in bars.values()] == ["spans c0", "spans c1"]
    ends = [float(line.get("x1")) for line in parts(drawing, "line") if line.get("class") == "edge"]
    start = float(first[0])
    assert (ends[0] - start) / (ends[1] - start) == pytest.approx(0.5, abs=0.001)


def test_thousands_of_bars_are_a_small_file_and_a_cluster_shows_its_kinds_of_devices():
    busy = [(name, i + half, i + half + 0.5) for i in range(20_000) for name, half in (("sim", 0), ("policy", 0.5))]
    assert len(draw({"one": schedule(20_000.0, gpu_0=busy)})) < 60_000
    cluster = draw({"one": schedule(1.0, **{f"n:{i}": [("sim" if i < 150 else "policy", 0, 1)] for i in range(300)})})
    rows = [text for text in texts(cluster) if text.startswith("n:")]
    assert len(rows) == MOST_ROWS and {"n:0", "n:149", "n:150", "n:299"} <= {*rows}
