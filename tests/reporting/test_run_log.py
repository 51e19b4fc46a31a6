"""What `run.log` writes: evaluations beside the training's numbers, in metrics.jsonl, TensorBoard and W&B."""

import json
import struct
import subprocess
import sys

import pytest

from embodied import train
from embodied.core.errors import ConfigError
from embodied.records.loggers import check_log, mode
from embodied.records.progress import RunLog

RATE = {"rate": 0.5, "interval": [0.1, 0.9], "count": 1, "of": 2}
OVERALL = {"success_once": RATE, "success_at_end": None, "return": 1.5, "length": 20.0, "episodes": 2, "errors": 0}
RUN = "recipe=pointmass_ppo cluster.backend=inline env.num_envs=4 algo.rollout_decisions=8 eval.episodes=2".split()
RUN += ["algo.minibatch_size=32", "eval.videos=0", "run.iterations=3", "run.eval_every=2"]


def points(folder):
    """(step, tag, value) of TensorBoard's files."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    events = [event for path in sorted(folder.iterdir()) for event in EventFileLoader(str(path)).Load()]
    return [(event.step, one.tag, one.tensor.float_val[0]) for event in events for one in event.summary.value]


def row(iteration, version):
    return {"iteration": iteration, "policy_version": version, "env_steps": 10 * iteration, "return": 0.25}


def test_an_evaluation_is_in_the_row_of_its_version_and_a_point_of_the_curves(tmp_path):
    log = RunLog(tmp_path)
    assert log.begin(["tensorboard"]) == []
    for number in (1, 2, 3):
        log.row(row(number, min(number, 2)))  # the third iteration had nothing to learn
    log.evaluated(2, {"overall": OVERALL})
    log.row(row(4, 3))
    log.evaluated(0, {"overall": OVERALL})  # of no iteration
    log.close()
    figures = {"eval/success_once": 0.5, "eval/return": 1.5, "eval/length": 20.0, "eval/episodes": 2}
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [row(1, 1), row(2, 2), row(3, 2) | figures, row(4, 3)]
    found = points(tmp_path / "tensorboard")
    assert {(30, name, value) for name, value in figures.items()} <= set(found)
    assert (40, "run/return", 0.25) in found and len([tag for _, tag, _ in found if tag.startswith("eval/")]) == 4


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_package_is_refused_before_a_run_with_how_to_get_it(name, tmp_path, monkeypatch):
    """Its folder in the working directory, which wandb makes itself, is not taken for it."""
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(ConfigError, match=rf"run.log=\['tensorboard', '{name}'\] needs .* pip install {name}, or 'emb"):
        check_log(("tensorboard", name))
    check_log(("tensorboard",))


def test_nothing_is_sent_unless_the_user_has_asked_for_it():
    assert mode({}) == "offline"
    assert mode({"WANDB_API_KEY": "x"}) == "online"
    assert mode({"WANDB_API_KEY": "x", "WANDB_MODE": "offline"}) == "offline"
    assert mode({"WANDB_MODE": "disabled"}) == "disabled"


@pytest.mark.filterwarnings("ignore")
def test_wandb_keeps_the_same_curves_in_the_runs_folder(tmp_path, monkeypatch, capsys):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert train.main([*RUN, f"run.dir={tmp_path}", "run.log=[tensorboard, wandb]"]) == 0
    (run,) = tmp_path.glob("pointmass_ppo-*")
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    assert f"wandb       offline; to send it: wandb sync {file.parent}" in capsys.readouterr().out
    history = history_of(file.read_bytes())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [(one["env_steps"], "eval/success_once" in one) for one in history]
    first, second, third = (row["env_steps"] for row in rows)
    assert steps == [(first, False), (second, False), (second, True), (third, False), (third, True)]
    assert [one["train/lr"] for one in history if "train/lr" in one] == [row["train/lr"] for row in rows]


def history_of(data):
    """What was logged, from a .wandb file: records with their checksum (4 bytes), length (2) and kind (1) before them,
    in blocks of 32 KiB behind 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    found, at, whole = [], 7, b""
    while at < len(data):
        if (left := -at % 32768) and left < 7:
            at += left
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record.FromString(whole)
            whole = b""
            if record.HasField("history"):
                items = record.history.item
                found.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return found


def test_writing_curves_imports_neither_torch_nor_tensorflow(tmp_path):
    program = (
        "import sys, embodied.train; from pathlib import Path\n"
        "from embodied.records.loggers import TensorBoardLogger\n"
        "TensorBoardLogger(Path(sys.argv[1])).add(1, {'a': 1.0}); print({'torch', 'tensorflow'} & set(sys.modules))"
    )
    told = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert told.stdout == "set()\n"
