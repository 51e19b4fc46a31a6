"""Reports of runs whose files hold what nobody expects: a page that names the file, or a line; never a traceback."""

import importlib
import json
import shutil

import pytest

from embodied.records.results import COLUMNS
from embodied.report import main as report

QUICK = ["recipe=pointmass_ppo", "run.iterations=2", "eval.episodes=2", "eval.videos=0", "cluster.backend=inline"]
SMALL = ["env.num_envs=4", "policy.hidden=[8]", "algo.rollout_decisions=8", "algo.minibatch_size=16"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    assert importlib.import_module("embodied.train").main([*QUICK, *SMALL, f"run.dir={folder}"]) == 0
    (path,) = folder.iterdir()
    return path


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made, tmp_path / made.name)


def put(file, key, value):
    """A JSON file, or each line of one, with this value at a place like a.b."""

    def damage(run):
        (path,) = run.glob(file)

        def changed(line):
            content = place = json.loads(line)
            *parents, last = key.split(".")
            for parent in parents:
                place = place[parent]
            if value is GONE:
                place.pop(last, None)
            else:
                place[last] = value
            return json.dumps(content)

        text = path.read_text()
        lines = text.splitlines() if file.endswith("jsonl") else [text]
        path.write_text("\n".join(map(changed, lines)) + "\n")

    return damage


def text(file, content):
    def damage(run):
        (path,) = run.glob(file)
        path.write_text(content) if isinstance(content, str) else path.write_bytes(content)

    return damage


def cell(column, value):
    def damage(run):
        (path,) = run.glob(EPISODES)
        head, *rows = path.read_text().splitlines()
        at = COLUMNS.index(column)
        odd = [",".join([*row.split(",")[:at], value, *row.split(",")[at + 1 :]]) for row in rows]
        path.write_text("\n".join([head, *odd]) + "\n")

    return damage


GONE = object()
METRICS, RESULTS, EPISODES, RUN = "metrics.jsonl", "eval/v000002/results.json", "eval/v000002/episodes.csv", "run.json"
TRACE = "trace.json"
FILES = (METRICS, RESULTS, EPISODES, RUN, "config.yaml", TRACE)
ODD = [None, "x", [], {}, -1, 1e308, float("nan"), True, GONE]
KEYS = {
    METRICS: ["iteration", "env_steps", "policy_version", "train_s", "train/policy_loss", "time/rollout_s"],
    RESULTS: [
        *["overall", "overall.success_once", "overall.success_once.interval", "overall.return", "overall.episodes"],
        *["per_task", "policy_version", "protocol", "protocol.eval", "protocol.env", "provenance", "overall.errors"],
    ],
    RUN: ["state", "started", "ended", "provenance", "placement", "placement.hosts", "cause", "resumed", "processes"],
}
TEXTS = ["", "[]", "3", "{", "[" * 100_000, "\0", b"\xff\xfe", "{}", "[1]\n[2]\n"]
CELLS = [("index", "x"), ("success_once", "maybe"), ("length", "nan"), ("error", "a,b"), ("error", "x" * 200_000)]


def spans(**odd):
    """A trace on one line: a worker with two spans, the second with other values."""
    named = [{"name": name, "ph": "M", "pid": 0, "tid": 0, "args": {"name": "sim-0"}} for name in NAMES]
    span = {"name": "step", "cat": "sim", "ph": "X", "pid": 0, "tid": 0, "ts": 0, "dur": 9, "args": {"iteration": 1}}
    return json.dumps([*named, span, {key: value for key, value in (span | odd).items() if value is not GONE}])


NAMES = ("process_name", "thread_name")
TRACES = {
    "a viewer's": json.dumps({"traceEvents": json.loads(spans())}),
    **{f"{key} {value!r:.12}": spans(**{key: value}) for key in ("ts", "dur", "tid", "name", "args") for value in ODD},
    **{f"iteration {value!r:.12}": spans(args={"iteration": value}) for value in ODD if value is not GONE},
}
DAMAGES = {
    **{f"{f} {k} {v!r:.12}": put(f, k, v) for f, keys in KEYS.items() for k in keys for v in ODD},
    **{f"{f} is {t[:9]!r}": text(f, t) for f in FILES for t in TEXTS},
    **{f"config.yaml says {t}": text("config.yaml", t) for t in ("env: 3", "policy: [1]", "env: {task: [3]}")},
    **{f"{EPISODES} {column} {value:.12}": cell(column, value) for column, value in CELLS},
    **{f"{TRACE} {kind}": text(TRACE, content) for kind, content in TRACES.items()},
}


def test_a_report_counts_the_files_that_it_could_not_read(copy, capsys):
    noise = bytes(range(256)) * 8
    for count, file in enumerate((TRACE, METRICS, RESULTS), 1):
        (copy / file).write_bytes(noise)
        assert report([str(copy)]) == 0
        assert f"{count} file{'s' * (count > 1)} could not be read" in capsys.readouterr().err
        assert f"{file} cannot be read" in (copy / "report.html").read_text()


@pytest.mark.parametrize("first", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 2, 4, 5, 6, 7, 8, 9))])
def test_a_report_of_odd_rows_is_a_page_or_a_line(copy, made, capfd, first):
    wrong = []
    for kind in sorted(DAMAGES)[first::10]:
        for file in FILES:
            shutil.copy(made / file, copy / file)
        DAMAGES[kind](copy)
        for runs in ([copy], [copy, made]):
            try:
                code = report([*map(str, runs), f"out={copy / 'page.html'}"])
            except Exception as err:
                wrong.append(f"{kind} ({len(runs)}): {type(err).__name__}: {err}")
                continue
            said = capfd.readouterr().err
            if code not in (0, 1, 2) or (code and str(copy) not in said) or len(said.splitlines()) > 3:
                wrong.append(f"{kind}: {code} {said}")
    assert not wrong, "\n".join(wrong)
