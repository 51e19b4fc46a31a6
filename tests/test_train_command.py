"""The commands as a user runs them on a toy env, with real files."""

import contextlib
import importlib
import io
import json
import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from episode_files import check_same_episodes
from safetensors.numpy import load_file

from embodied import evaluate, train
from embodied.policies.policy_folder import read_blobs
from embodied.records.timeline import read_trace
from embodied.run.ending import Interruption
from embodied.train import main
from embodied.workflows.rl_loop import EmbodiedLoop

TINY = {
    "recipe": "pointmass_ppo",
    "env.num_envs": 8,
    "env.dtype": "float64",
    "policy.dtype": "float64",
    "policy.hidden": "[16,16]",
    "policy.normalize_observations": "true",
    "algo.rollout_decisions": 16,
    "algo.minibatch_size": 32,
    "algo.epochs": 2,
    "run.iterations": 6,
    "run.eval_every": 3,
    "run.save_every": 2,
    "eval.episodes": 8,
    "eval.videos": 1,
}


def tiny(*changes):
    """The arguments of a run of a second or two, with some of them replaced."""
    return [f"{key}={value}" for key, value in (TINY | dict(change.split("=") for change in changes)).items()]


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """The command in this process, from the test's folder, with one thread."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def call(module, *args, code=0):
        returned = importlib.import_module(f"embodied.{module}").main(list(args))
        output = "".join(capsys.readouterr())
        assert returned == code, output
        return output

    yield call
    torch.set_num_threads(threads)


def only_run(folder: Path) -> Path:
    (path,) = (folder / "runs").iterdir()
    return path


def evaluation_folder(output: str, cwd: Path) -> Path:
    """The folder of the evaluation that printed this."""
    return cwd / next(line.split()[-1] for line in output.splitlines() if "results.json" in line).rpartition("/")[0]


def weights(run_folder: Path, version: int) -> dict:
    return load_file(run_folder / "checkpoints" / f"v{version:06d}" / "policy" / "model.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder, said = tmp_path_factory.mktemp("finished"), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(said):
        assert main(tiny("cluster.backend=inline")) == 0
    return said.getvalue(), only_run(folder)


def test_a_run_says_what_it_does_and_leaves_a_whole_folder(finished):
    output, path = finished
    first = output.split("iteration 1/6")[0]
    assert "pointmass" in first and str(path.name) in first and "inline" in first
    assert "nothing is pinned or isolated" in first
    assert "evaluating v000003 on 8 episodes" in output and "evaluating v000006 on 8 episodes" in output
    assert f"python -m embodied.evaluate checkpoint={path.relative_to(path.parent.parent)}" in output.replace(
        f"{path.parent.parent}/", ""
    )
    info = json.loads((path / "run.json").read_text())
    assert info["state"] == "finished" and info["provenance"]["packages"]["torch"]
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["env_steps"] == 6 * 8 * 16
    assert all(row["train/logprob_gap"] < 1e-9 and row["train/grad_norm"] > 0 for row in rows)
    saved = sorted(p.name for p in (path / "checkpoints").iterdir())
    assert saved == ["latest", "v000003", "v000004", "v000006"]  # the third was evaluated; the second was one too many
    (events,) = (path / "tensorboard").glob("events.out.tfevents.*")
    assert events.read_bytes().count(b"train/grad_norm") == 6
    assert "iteration 6/6" in (path / "logs" / "driver.log").read_text()
    spans = read_trace(path / "trace.json")
    assert {span.iteration for span in spans} == {1, 2, 3, 4, 5}
    for row, rollout, first in zip(rows, *([s for s in spans if s.name == n] for n in ("rollout", "first backward"))):
        assert rollout.end_s < first.start_s
        assert row["time/first_backward_s"] == pytest.approx(first.start_s - rollout.start_s, abs=5)  # a busy machine
    names = {(span.worker.partition("-")[0], span.name) for span in spans}
    assert names >= {("driver", "rollout"), ("driver", "save"), ("learner", "learn"), ("learner", "publish")}
    assert names >= {("sim", "play"), ("sim", "step"), ("sim", "wait"), ("policy", "act")}
    (line,) = (line for line in output.splitlines() if line.startswith("  time "))
    assert all(f"{role}: " in line for role in ("sim", "policy", "learner")) and "idle" in line
    results = json.loads((path / "eval" / "v000006" / "results.json").read_text())
    assert results["overall"]["episodes"] == 8 and results["protocol"]["env"]["name"] == "pointmass"
    assert len((path / "eval" / "v000006" / "episodes.csv").read_text().splitlines()) == 9
    page = (path / "report.html").read_text()
    assert (
        "finished" in page
        and "6 iterations" in page
        and "v000006/videos/episode-000" in page
        and "sim+policy-0" in page
    )
    assert (path / "eval" / "v000006" / "report.html").is_file()
    (video,) = (path / "eval" / "v000006" / "videos").glob("episode-000_*_reach_seed*.mp4")
    assert video.stat().st_size > 500


@pytest.mark.parametrize("change", ["env.num_envs=3", "env.num_envs=1", "cluster.backend=local"])
def test_which_episodes_an_evaluation_plays_and_their_outcome_do_not_depend_on_where(finished, tmp_path, call, change):
    _, path = finished
    output = call("evaluate", f"checkpoint={path}", "eval.videos=0", change)
    check_same_episodes(evaluation_folder(output, tmp_path), path / "eval" / "v000006")


@pytest.fixture
def stopped_in_the_third(monkeypatch):
    """Inside `with stopped_in_the_third(signal):` a run's driver gets it in the third iteration."""
    iterate = EmbodiedLoop.iterate

    @contextlib.contextmanager
    def stopped(number):
        def struck(loop, iteration, total):
            if iteration == 2:
                os.kill(os.getpid(), number)
            return iterate(loop, iteration, total)

        with monkeypatch.context() as patched:
            patched.setattr(EmbodiedLoop, "iterate", struck)
            yield

    return stopped


def test_a_run_stopped_by_sigterm_and_resumed_equals_one_that_was_not_stopped(
    finished, tmp_path, call, stopped_in_the_third
):
    with stopped_in_the_third(signal.SIGTERM):
        call("train", *tiny("cluster.backend=inline"), code=143)
    assert (only_run(tmp_path) / "checkpoints" / "latest").read_text() == "v000003\n"
    check_resumed(only_run(tmp_path), finished[1], call)


def check_resumed(path, whole, call):
    assert json.loads((path / "run.json").read_text())["state"] == "stopped"
    assert "resumed from" in call("train", f"resume={path}", "run.iterations=6")
    ours, theirs = weights(path, 6), weights(whole, 6)
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    assert untimed_metrics(path) == untimed_metrics(whole)


def untimed_metrics(run):
    """The rows of metrics.jsonl without what a clock tells."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: number for name, number in row.items() if not name.endswith("_s")} for row in rows]


def test_ctrl_c_saves_and_exits_130(tmp_path, call, stopped_in_the_third):
    with stopped_in_the_third(signal.SIGINT):
        assert "resume" in call("train", *tiny("cluster.backend=inline"), code=130)
    assert (only_run(tmp_path) / "checkpoints" / "latest").read_text() == "v000003\n"


@pytest.mark.parametrize(("before", "code"), [(signal.SIG_DFL, 129), (signal.SIG_IGN, 0)])
def test_a_closed_terminal_asks_to_stop_unless_nohup_said_not_to(before, code):
    of_the_tests = signal.signal(signal.SIGHUP, before)
    try:
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interruption.exit_code == code
    finally:
        signal.signal(signal.SIGHUP, of_the_tests)


def test_resume_auto_continues_the_newest_run_and_leaves_a_finished_one_as_it_is(tmp_path, call):
    quick = ["resume=auto", "cluster.backend=inline", "eval.episodes=1", "eval.videos=0"]
    call("train", *tiny(*quick, "run.iterations=2"))
    path = only_run(tmp_path)
    before = {file: file.read_bytes() for file in (path / "checkpoints").rglob("*") if file.is_file()}
    metrics = (path / "metrics.jsonl").read_text()
    output = call("train", *tiny(*quick, "run.iterations=2"))
    assert "resumed from" in output and only_run(tmp_path) == path
    assert before == {file: file.read_bytes() for file in (path / "checkpoints").rglob("*") if file.is_file()}
    assert (path / "metrics.jsonl").read_text() == metrics
    assert json.loads((path / "run.json").read_text())["state"] == "finished"
    call("train", *tiny(*quick, "run.iterations=3"))
    assert only_run(tmp_path) == path and (path / "checkpoints" / "v000003").is_dir()


def test_resume_auto_keeps_what_the_run_was_started_with(tmp_path, call):
    """A shorter command line goes on with the same run, not with the recipe's own numbers."""
    call("train", *tiny("cluster.backend=inline", "algo.lr=1e-4", "run.iterations=2", "eval.episodes=1"))
    call("train", "recipe=pointmass_ppo", "resume=auto", "run.iterations=3")
    rows = [json.loads(line) for line in (only_run(tmp_path) / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    assert {row["train/lr"] for row in rows} == {1e-4}  # the recipe has 3e-4
    told, before = ((only_run(tmp_path) / name).read_text() for name in ("config.yaml", "config-1.yaml"))
    assert "iterations: 3" in told and told == before.replace("iterations: 2", "iterations: 3")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["policy.hidden=[8,8]"], "policy.hidden=[16, 16] there, [8, 8] here"),
        (["env.num_envs=4"], "env.num_envs=8 there, 4 here"),
        (["algo.name=grpo"], "algo.name=ppo there, grpo here"),
        (["env.name=gym:CartPole-v1", "env.task=null"], "env.name=pointmass there, gym:CartPole-v1 here"),
    ],
)
def test_options_that_would_change_what_a_resumed_run_trains_are_refused(finished, call, changes, said):
    _, path = finished
    before = (path / "run.json").read_text()
    output = call("train", f"resume={path}", "run.iterations=9", *changes, code=2)
    assert said in output and "run.start_from" in output
    assert (path / "run.json").read_text() == before


def test_training_that_diverges_says_so(tmp_path, call):
    output = call("train", *tiny("algo.lr=1e30", "cluster.backend=inline"), code=1)
    assert "algo.lr" in output and "Traceback" not in output
    state = json.loads((only_run(tmp_path) / "run.json").read_text())
    assert state["state"] == "failed" and "algo.lr" in state["cause"]
    assert not list(only_run(tmp_path).glob("checkpoints/v*"))


def test_a_full_disk_is_a_message_and_a_failed_run(tmp_path, call):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    of_the_tests = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, before[1]))
    try:
        output = call("train", *tiny("cluster.backend=inline", "eval.videos=0"), code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, of_the_tests)
    assert "Traceback" not in output, output
    assert "error:" in output and "run.dir" in output
    assert not list((only_run(tmp_path) / "checkpoints").glob("v*"))


# Runs in bfloat16: acting and learning agree, and what is saved is what acted


ARGUMENTS = (
    "recipe=pointmass_ppo env.num_envs=8 policy.hidden=[32,32] policy.normalize_observations=true "
    "algo.rollout_decisions=32 algo.minibatch_size=256 algo.epochs=1 cluster.backend=inline run.iterations=2 "
    "eval.episodes=4 eval.videos=0"
).split()


@pytest.mark.parametrize(
    ("option", "stored"), [("learner.precision=bf16", "float32"), ("policy.dtype=bfloat16", "bfloat16")]
)
def test_acting_and_learning_compute_alike(tmp_path, monkeypatch, option, stored):
    monkeypatch.chdir(tmp_path)
    eight_rows = [
        'placement={sim: "cpu:0", "policy,learner": "cpu:0"}',
        "pipeline.stages=1",
        "learner.micro_batch_size=8",
    ]
    assert train.main([*ARGUMENTS, *eight_rows, option]) == 0  # act and are learned from at once
    (run,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["train/logprob_gap"] for row in rows]
    assert max(gaps) < 1e-5 and np.isfinite(gaps).all()
    policy = run / "checkpoints" / "v000002" / "policy"
    assert {blob.spec.dtype for name, blob in read_blobs(policy).items() if "weight" in name} == {stored}
    assert evaluate.main([f"checkpoint={run}", "eval.videos=0", "cluster.backend=inline"]) == 0
    check_same_episodes(run / "eval" / "v000002", run / "eval" / "v000002-evaluate", rel=1e-5)


# GRPO as a user runs it: it learns, and it says when there is nothing to learn from


SHORT = ["cluster.backend=inline", "eval.videos=0", "policy.hidden=[16,16]"]


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_has_nothing_to_learn_from_saves_and_says_why(tmp_path, capsys):
    hopeless = ["env.reward=success", "env.max_episode_steps=1", "env.num_envs=8", "algo.groups=2", "eval.episodes=2"]
    given = ["recipe=pointmass_grpo", f"run.dir={tmp_path}", "algo.max_empty=3", "algo.filter=resample", *hopeless]
    assert main([*given, "algo.max_rounds=2", "seed=2", *SHORT]) == 1
    told = capsys.readouterr().err
    assert "nothing to learn from in the last 3 iterations (algo.max_empty)" in told
    assert "equal, mean return" in told and "start from a policy that sometimes succeeds" in told
    (run,) = tmp_path.iterdir()
    record = json.loads((run / "run.json").read_text())
    assert record["state"] == "stopped" and "nothing to learn" in record["cause"]
    rows = metrics(run)
    assert (run / "checkpoints" / f"v{len(rows):06d}" / "manifest.json").is_file()
    assert [row["groups/used"] for row in rows[-3:]] == [0, 0, 0]
    assert all(row["groups/rounds"] == 2 and row["groups/dropped_equal"] >= 3 for row in rows[-3:])
    assert list(run.glob("eval/*/results.json"))


def test_a_run_in_which_every_episode_succeeds_is_finished_early(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("embodied.envs.pointmass.env.REACH", 10.0)
    easy = ["env.reward=success", "env.num_envs=8", "algo.groups=2", "algo.max_empty=2", "eval.episodes=2"]
    assert main(["recipe=pointmass_grpo", f"run.dir={tmp_path}", *easy, *SHORT]) == 0
    (run,) = tmp_path.iterdir()
    assert json.loads((run / "run.json").read_text())["state"] == "finished" and len(metrics(run)) == 2
    assert "every episode of the last iterations succeeded" in capsys.readouterr().out
