"""What an evaluation keeps besides its numbers: films of the first episodes and of failures, and a dataset."""

import re
import subprocess
import sys
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest

from embodied import check, evaluate
from embodied.records.results import read_results
from embodied.records.videos import Caption, captioned
from embodied.workflows.evaluator import Evaluator

INLINE = ["recipe=pointmass_ppo", "cluster.backend=inline", 'placement={"sim,policy": "cpu:0", learner: "cpu:0"}']
SWITCH = [*INLINE, "env.name=scripted:Switch", "env.on_success=continue", "env.num_envs=4", "run.dir=runs"]
EVEN = ["checkpoint=scripted:SucceedsOnEvenSeeds", *SWITCH, "eval.episodes=14"]
KEPT = [*SWITCH, "eval.episodes=5", "eval.dataset=true", "eval.videos=0"]


@pytest.fixture(autouse=True)
def scripted(monkeypatch, tmp_path):
    """`scripted:Switch` and its policies can be named; results go to a folder of the test's own."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "support"))
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("scripted", None)


def run(*arguments):
    """The folder of the results, and the episodes."""
    before = set(Path("runs").glob("*"))
    assert evaluate.main(list(arguments)) == 0
    (folder,) = set(Path("runs").glob("*")) - before
    return folder, read_results(folder)[1]


def films(folder):
    return sorted(path.name for path in (folder / "videos").glob("*"))


def frames_of(path, height, width):
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24"]
    done = subprocess.run([*command, "-"], capture_output=True, check=True)
    return np.frombuffer(done.stdout, np.uint8).reshape(-1, height, width, 3)


def test_the_first_episodes_are_filmed_and_failures_up_to_a_number():
    folder, episodes = run(*EVEN, "eval.videos=2", "eval.failure_videos=3")
    failed = [one.index for one in episodes if not one.success_once]
    assert len(failed) > 4 and failed != list(range(len(failed)))
    wanted = sorted({0, 1, *failed[:3]})
    names = {one.index: f"{'success' if one.success_once else 'failure'}_switch_seed{one.seed}" for one in episodes}
    task = episodes[0].task
    assert films(folder) == [f"episode-{i:03d}_{names[i].replace('switch', task)}.mp4" for i in wanted]
    from scripted import STEPS, Switch

    assert Switch.rendered == len(wanted) * (STEPS + 1)


def test_failures_on_film_already_count_and_nothing_is_filmed_where_no_videos_are_wanted():
    fails = ["checkpoint=scripted:Fails", *SWITCH, "eval.episodes=6"]
    assert len(films(run(*fails, "eval.videos=3", "eval.failure_videos=2")[0])) == 3
    assert films(run(*fails, "eval.videos=0", "eval.failure_videos=2")[0]) == []


@pytest.mark.parametrize(
    ("kind", "warning"), [("Undrawn", "has no method render_rows"), ("Undrawable", "render_rows raised RuntimeError")]
)
def test_episodes_that_cannot_be_filmed_count(kind, warning, capsys):
    folder, episodes = run(
        "checkpoint=scripted:Fails", *[word.replace("Switch", kind) for word in SWITCH], "eval.episodes=6"
    )
    assert [one.success_once for one in episodes] == [False] * 6 and films(folder) == []
    assert len(re.findall(f"(?m)^warning: no videos: .*{warning}", capsys.readouterr().out)) == 1


def test_an_encoder_that_dies_costs_the_films_and_no_episode(tmp_path, monkeypatch, capsys):
    encoder = tmp_path / "ffmpeg"
    encoder.write_text('#!/bin/sh\nfor draft; do :; done\ntouch "$draft-of-a-killed-worker"\nexit 9\n')
    encoder.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(encoder))
    folder, episodes = run("checkpoint=scripted:Fails", *SWITCH, "eval.episodes=6")
    assert [one.success_once for one in episodes] == [False] * 6 and films(folder) == []
    assert len(re.findall("(?m)^warning: no videos: ffmpeg ended with code 9", capsys.readouterr().out)) == 1


@pytest.fixture
def made_once(monkeypatch):
    """A check first makes an env of the user's own in a process that takes seconds to start."""
    monkeypatch.setattr(check, "try_own_objects", lambda *_: None)


@pytest.mark.usefixtures("made_once")
def test_check_says_what_an_env_does_without(capsys):
    assert check.main(["env.name=scripted:Undrawn", "run.dir=runs"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "Undrawn has no method render_rows" in told and "resets, ends and chunks are as they have to be" in told


def test_rates_do_not_wait_for_films_of_failures(capsys, monkeypatch):
    fails = ["checkpoint=scripted:Fails", *SWITCH, "eval.episodes=6", "eval.videos=1", "eval.failure_videos=3"]
    run(*fails)
    output = capsys.readouterr().out
    said = ("success_once", "results.json", "2 failures to film", "1 of 2 failures filmed", "2 of 2", "  video  ")
    places = [output.index(text) for text in said]
    assert places == sorted(places), output

    def interrupted(*about):
        raise KeyboardInterrupt

    monkeypatch.setattr(Evaluator, "film", interrupted)
    assert evaluate.main(fails) == 130
    output = capsys.readouterr().out
    assert "success_once" in output and "the results are whole" in output and "without rates" not in output


def test_failures_of_tasks_that_are_played_apart_are_filmed_after_the_results_of_all(capsys):
    tasks = ["checkpoint=scripted:Fails", *SWITCH, "env.task=[a,b]", "eval.episodes=6"]
    folder, _ = run(*tasks, "eval.videos=1", "eval.failure_videos=2")
    output = capsys.readouterr().out
    assert 0 < output.index("results.json") < output.index("2 failures to film") < output.index("1 failure to film")
    assert [name.split("_")[:3] for name in films(folder)] == [
        [f"episode-00{number}", "failure", "ab"[number % 2]] for number in range(4)
    ]


def test_cameras_stand_beside_the_scene_and_the_caption_below():
    wide = 64
    folder, _ = run(*EVEN, "eval.videos=1", "eval.failure_videos=0", "env.kwargs={images: true}", "eval.cameras=true")
    (film,) = films(folder)
    shown = frames_of(folder / "videos" / film, 32, wide)
    assert len(shown) == 7
    for step, frame in enumerate(shown):
        assert np.abs(frame[8, [8, 56]].astype(int) - 30 * step).max() <= 3
    folder, _ = run(*EVEN, "eval.videos=1", "eval.failure_videos=0", "eval.overlay=true")
    (film,) = films(folder)
    low = len(captioned(np.zeros((32, 32, 3), np.uint8), Caption("SUCCESS", ("",) * 4, "switch")))
    shown = frames_of(folder / "videos" / film, low, 32)
    assert len(shown) == 7 and "_success_" in film
    greener = [int(frame[35:47, :, 1].max()) - int(frame[35:47, :, 0].max()) for frame in shown]
    assert greener[0] < 10 < greener[-1]  # the outcome stands first


def test_inside_a_chunk_only_the_cameras_of_filmed_episodes_are_drawn():
    cameras = ["checkpoint=scripted:DecidesThreeSteps", "env.kwargs={images: true}", "eval.cameras=true"]
    run(*SWITCH, *cameras, "eval.episodes=4", "eval.videos=1", "eval.failure_videos=0")
    from scripted import Switch

    assert Switch.painted == 4 * 3 + 4  # all four rows at three borders; steps 1, 2, 4 and 5 of the filmed one


def test_a_mosaic_shows_all_films_framed_by_outcome():
    folder, episodes = run(*EVEN, "eval.videos=3", "eval.failure_videos=0", "eval.mosaic=true")
    shown = frames_of(folder / "videos/mosaic.mp4", 320, 320)
    assert len(shown) == 7
    for at, one in enumerate(episodes[:3]):
        red, green, _ = shown[0][at // 2 * 160 + 2, at % 2 * 160 + 80].astype(int)
        assert (green > red) == one.success_once


@pytest.mark.parametrize("side", [32, 64, 128, 512])
def test_a_caption_begins_with_the_outcome_and_fits_below_the_frame(side):
    frame = np.full((side, side, 3), 200, np.uint8)
    words = "put the black bowl between the plate and the ramekin on the plate, then open the drawer " * 3
    numbers = ("step 123", "reward -10.25", "return 1234", "value 0.92")
    shown = {
        outcome: captioned(frame, Caption(outcome, numbers, words))
        for outcome in ("SUCCESS at step 123, lost", "FAILURE", "no success yet")
    }
    assert len({one.shape for one in shown.values()}) == 1, "all frames of a video are equally large"
    for one in shown.values():
        assert one.shape[1] == side and (one[:side] == 200).all()
        assert (one[side:, -2:] == one[-1, -1]).all(), "nothing is cut off by the edge"
    first = {
        outcome[:2]: one[side : side + 12 + side // 32].reshape(-1, 3).max(axis=0) for outcome, one in shown.items()
    }
    assert first["SU"][1] > first["SU"][0] and first["FA"][0] > first["FA"][1]
    assert np.ptp(first["no"].astype(int)) < 3


def recorded(folder):
    from embodied.datasets import read_dataset

    return read_dataset(folder / "dataset")


@pytest.mark.parametrize("policy", ["SucceedsOnEvenSeeds", "DecidesThreeSteps"])
def test_a_dataset_holds_every_step_of_every_episode(policy):
    pytest.importorskip("pyarrow")
    folder, episodes = run(*KEPT, f"checkpoint=scripted:{policy}", "env.kwargs={images: true}")
    kept = recorded(folder)
    assert len(kept) == len(episodes) and not (folder / "episode_buffers").exists()
    for one, episode in zip(episodes, kept):
        assert (len(episode), episode.success, episode.task) == (one.length, one.success_once, one.task)
        assert episode.rewards.sum() == pytest.approx(one.total_reward)
        assert episode.obs["state"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]
        assert np.abs(episode.obs["images"]["eye"][:, 8, 8, 0].astype(int) - 30 * np.arange(6)).max() <= 3
        assert episode.done.tolist() == [False] * 5 + [True]
        assert np.abs(episode.actions).max() <= 1


def test_a_dataset_does_not_depend_on_how_many_envs_play():
    pytest.importorskip("pyarrow")
    first, again = (recorded(run(*KEPT, "checkpoint=random", f"eval.num_envs={n}")[0]) for n in (2, 5))
    for one, other in zip(first, again, strict=True):
        assert np.array_equal(one.obs["state"], other.obs["state"]) and np.array_equal(one.actions, other.actions)


@pytest.mark.usefixtures("made_once")
def test_check_writes_what_a_policy_sees(capsys):
    from PIL import Image

    asked = ["env.name=scripted:Switch", "env.kwargs={images: true}", "images=true", "run.dir=runs"]
    assert check.main(asked) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("images"))
    assert "8 PNG files: " in line
    files = sorted(Path("runs/images").glob("*/*.png"))
    assert len(files) == 2 * check.ROWS and np.asarray(Image.open(files[0])).ndim == 3
    assert check.main([*asked[:1], "images=true"]) == 2
    assert "no camera is observed; EnvSpec(images=...) declares them" in capsys.readouterr().err
