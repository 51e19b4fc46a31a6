"""The page on a task of one's own, followed from a user's folder: checked, trained, filmed, evaluated and more."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest

pytest.importorskip("mani_skill")

PAGE = (Path(__file__).parents[1] / "docs" / "own_task.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.M | re.S)
COMMANDS = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
CHECK, TRAIN, EVALUATE, BENCHMARK, PLAN, CHECK_OWN, TRAIN_OWN, CHECK_GYM, TRAIN_GYM, CHECK_CAMERA, TRAIN_CAMERA = (
    COMMANDS
)
SHORT = ["run.iterations=1", "env.num_envs=8", "algo.rollout_decisions=5", "algo.minibatch_size=20"]
SHORT += ['placement={"sim,policy": "cpu:0", learner: "cpu:1"}']
SHORT += ["env.max_episode_steps=6", "eval.episodes=3", "eval.videos=1", "eval.failure_videos=0"]
SMALL = ["env.num_envs=8", "algo.rollout_decisions=5", "algo.minibatch_size=20", "env.max_episode_steps=10"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder with the files of the page, and nothing else."""
    folder = tmp_path_factory.mktemp("mine")
    for kind, text in BLOCKS:
        if kind == "python":
            (folder / text.splitlines()[0].removeprefix("# ")).write_text(text)
    return folder


def run(command, folder, *more, code=0):
    """In a process of its own, as a user does; what it printed."""
    replaced = {word.partition("=")[0] for word in more}
    words = [word for word in shlex.split(command) if word.partition("=")[0] not in replaced]
    if "-DATE" in command:
        newest = max((folder / "runs").glob("ring-*"), key=lambda path: path.stat().st_mtime)
        words = [word.replace("runs/ring-DATE", str(newest.relative_to(folder))) for word in words]
    done = subprocess.run(
        [sys.executable, *words[1:], *more],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return " ".join((done.stdout if code == 0 else done.stderr).split())


def test_the_task_has_about_sixty_lines():
    task = next(text for kind, text in BLOCKS if text.startswith("# my_tasks.py"))
    lines = [line for line in task.splitlines() if line.strip() and not line.startswith(("import", "from", "#"))]
    assert len(lines) <= 60


@pytest.fixture
def here(folder, monkeypatch, capsys):
    """The same in this process, which has imported the simulator already."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)

    def here(command, *more, code=0):
        replaced = {word.partition("=")[0] for word in more}
        _, _, module, *words = shlex.split(command)
        words = [word for word in words if word.partition("=")[0] not in replaced]
        assert importlib.import_module(module).main([*words, *more]) == code
        told = capsys.readouterr()
        return " ".join((told.out if code == 0 else told.err).split())

    return here


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # ManiSkill's and SAPIEN's own
def test_the_task_is_checked_trained_and_filmed(folder, here):
    told = here(CHECK)
    assert "contract kept" in told and "batched equals single envs" in told and "40 an episode" in told
    assert "cameras base_camera (128x128), render_camera (512x512)" in told
    assert "physics cpu_batched" in here(TRAIN, *SHORT, "cluster.backend=inline")
    (video,) = (folder / "runs").glob("ring-*/eval/v*/videos/*.mp4")
    first, *_, last = frames(video)
    assert first.std() > 20 and (first != last).any()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_trained_task_is_evaluated(folder):
    run(TRAIN, folder, *SHORT)
    assert "success_once" in run(EVALUATE, folder, "eval.episodes=3", "eval.videos=0")
    (results,) = (folder / "runs").glob("ring-*/eval/*-evaluate/results.json")
    assert list(json.loads(results.read_text())["per_task"]) == ["my_tasks:SphereToRing-v1"]


def frames(video):
    """[T, 256, 256, 3] of a film as the recipe makes them."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(video), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    raw = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    return np.frombuffer(raw, np.uint8).reshape(-1, 256, 256, 3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_task_is_learned(folder):
    run(CHECK, folder)
    run(TRAIN, folder, "run.env_steps=40000", "eval.videos=1")
    newest = max((folder / "runs").glob("ring-*"), key=lambda path: path.stat().st_mtime)
    results = json.loads(max(newest.glob("eval/v*/results.json")).read_text())
    assert results["overall"]["success_once"]["rate"] > 0.7, results["overall"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_placements_are_benchmarked_and_planned(folder):
    told = run(BENCHMARK, folder, *SMALL, "rounds=2", "seconds=2")
    assert "collocated" in told and "bench.html" in told
    assert "plan.html" in run(PLAN, folder, *SMALL)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_own_robots_controllers_and_rewards_are_checked_and_trained(folder):
    told = run(CHECK_OWN, folder)
    assert "controls arm_only (chosen)" in told and "robots fist_panda (chosen)" in told
    assert "rewards near (chosen)" in told and "actions 7 numbers" in told and "contract kept" in told
    run(TRAIN_OWN, folder, *SHORT)


@pytest.mark.filterwarnings("ignore")
def test_a_dry_run_names_what_the_own_robot_has(here):
    wrong = TRAIN_OWN.replace("arm_only", "arm_onl")
    assert "the robot has arm_only; did you mean 'arm_only'?" in here(wrong, "--dry-run", code=2)


@pytest.mark.parametrize(
    ("check", "train", "observed"),
    [
        (CHECK_GYM, TRAIN_GYM, "observed state of 2 numbers"),
        (CHECK_CAMERA, TRAIN_CAMERA, "observed images of top [64, 64, 3]"),
    ],
)
def test_own_gymnasium_envs_and_cameras_are_checked_trained_and_filmed(check, train, observed, folder, here):
    told = here(check)
    assert observed in told and "success reported in every step" in told and "contract kept" in told
    assert "success_once" in here(train, *SHORT, "cluster.backend=inline")
    name = train.partition("run.name=")[2]
    assert len([*(folder / "runs").glob(f"{name}-*/eval/v*/videos/*.mp4")]) == 1


def test_a_gymnasium_env_without_a_step_limit_names_the_key(here):
    bare = CHECK_GYM.replace(" env.max_episode_steps=40", "")
    assert "set env.max_episode_steps=" in here(bare, code=2)
