"""The page on a task of one's own, followed from a user's folder: checked, trained, filmed, evaluated and more."""

import json
import subprocess

import imageio_ffmpeg
import numpy as np
import pytest
from pages import Page, apart, newest, runner

pytest.importorskip("mani_skill")

PAGE = Page("own_task.md")
CHECK, TRAIN, EVALUATE, BENCHMARK, PLAN, CHECK_OWN, TRAIN_OWN, CHECK_GYM, TRAIN_GYM, CHECK_CAMERA, TRAIN_CAMERA = (
    PAGE.commands
)
SHORT = ["run.iterations=1", "env.num_envs=8", "algo.rollout_decisions=5", "algo.minibatch_size=20"]
SHORT += ['placement={"sim,policy": "cpu:0", learner: "cpu:1"}']
SHORT += ["env.max_episode_steps=6", "eval.episodes=3", "eval.videos=1", "eval.failure_videos=0"]
SMALL = ["env.num_envs=8", "algo.rollout_decisions=5", "algo.minibatch_size=20", "env.max_episode_steps=10"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder with the files of the page, and nothing else."""
    return PAGE.write(tmp_path_factory.mktemp("mine"))


def test_the_task_has_about_sixty_lines():
    lines = [line for line in PAGE.files["my_tasks.py"].splitlines() if line.strip()]
    assert len([line for line in lines if not line.startswith(("import", "from", "#"))]) <= 60


@pytest.fixture
def here(folder, monkeypatch, capsys):
    return runner(folder, monkeypatch, capsys)


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
    apart(TRAIN, folder, *SHORT)
    assert "success_once" in apart(EVALUATE, folder, "eval.episodes=3", "eval.videos=0")
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
    apart(CHECK, folder)
    apart(TRAIN, folder, "run.env_steps=40000", "eval.videos=1")
    results = json.loads(max(newest(folder, "ring").glob("eval/v*/results.json")).read_text())
    assert results["overall"]["success_once"]["rate"] > 0.7, results["overall"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_placements_are_benchmarked_and_planned(folder):
    told = apart(BENCHMARK, folder, *SMALL, "rounds=2", "seconds=2")
    assert "collocated" in told and "bench.html" in told
    assert "plan.html" in apart(PLAN, folder, *SMALL)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_own_robots_controllers_and_rewards_are_checked_and_trained(folder):
    told = apart(CHECK_OWN, folder)
    assert "controls arm_only (chosen)" in told and "robots fist_panda (chosen)" in told
    assert "rewards near (chosen)" in told and "actions 7 numbers" in told and "contract kept" in told
    apart(TRAIN_OWN, folder, *SHORT)


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
