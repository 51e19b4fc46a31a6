"""Datasets of others that are not what they should be: each is refused in a line that names the file and what to do."""

import json
import os
import shutil

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
from damaged import INFO, LEARN, cell, cut, every, first_rows, gone, info, refused, rows, text, without  # noqa: E402

from embodied.core.errors import ConfigError, EmbodiedError  # noqa: E402
from embodied.core.types import ActionSpec, EnvSpec  # noqa: E402
from embodied.datasets import DatasetWriter, features_of, frame_of, read_dataset  # noqa: E402
from embodied.sft import main as sft  # noqa: E402

SPEC = EnvSpec(ActionSpec(2), state_dim=6, has_success=True)  # that of the toy env
SEEN = EnvSpec(ActionSpec(2), state_dim=6, images={"front": (32, 48, 3)})
STATS, TASKS = "meta/stats.json", "meta/tasks.parquet"
EPISODES, DATA = "meta/episodes/chunk-000/file-000.parquet", "data/chunk-000/file-000.parquet"
VIDEO = "videos/observation.images.front/chunk-000/file-000.mp4"
FROM = "videos/observation.images.front/from_timestamp"


def write(path, spec):
    rng = np.random.default_rng(0)
    with DatasetWriter(path, 20, features_of(spec)) as writer:
        for length in (6, 9, 7):
            obs = {"state": rng.normal(size=(1, 6))}
            if spec.images:
                obs["images"] = {"front": rng.integers(0, 255, (1, 32, 48, 3), np.uint8)}
            writer.add_episode(
                (frame_of(obs, 0, np.zeros(2), 0.0, False, None) | more(spec) for _ in range(length)), "go"
            )
    return path


def more(spec):
    return {"next.success": False} if spec.has_success else {}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return write(tmp_path_factory.mktemp("sound") / "toy", SPEC)


@pytest.fixture(scope="module")
def filmed(tmp_path_factory):
    return write(tmp_path_factory.mktemp("filmed") / "toy", SEEN)


def feature(name, **changes):
    def damage(path):
        content = json.loads((path / INFO).read_text())
        content["features"][name] |= changes
        (path / INFO).write_text(json.dumps(content))

    return damage


def twice(table):
    return {key: column + column[:1] for key, column in table.items()}


def elsewhere(file):
    """A link to a file beside the dataset."""

    def damage(path):
        shutil.move(path / file, path.parent / "elsewhere")
        (path / file).symlink_to(path.parent / "elsewhere")

    return damage


def looping(path):
    (path / DATA).unlink()
    (path / DATA).symlink_to(path / DATA)


def folder_for(file):
    def damage(path):
        (path / file).unlink()
        (path / file).mkdir()

    return damage


UP = "../" * 12 + "tmp/data.parquet"
DAMAGES = {
    "info gone": (gone(INFO), f"no LeRobot dataset: there is no {INFO}"),
    "info cut": (cut(INFO), "info.json cannot be read: "),
    "info a list": (text(INFO, "[]"), "info.json cannot be read: it holds no mapping"),
    "info nested": (text(INFO, "[" * 100_000), "info.json cannot be read: "),
    "info a folder": (folder_for(INFO), f"there is no {INFO}"),
    "info elsewhere": (elsewhere(INFO), "info.json leaves the dataset's folder"),
    "no version": (info(codebase_version="gone"), "layout None"),
    "version a list": (info(codebase_version=["v3.0"]), "has LeRobot's layout"),
    "fps 0": (info(fps=0), "info.json: fps is 0, not a number of frames"),
    "fps text": (info(fps="20"), "info.json: fps is '20'"),
    "fps gone": (info(fps="gone"), "info.json: fps is None"),
    "features gone": (info(features="gone"), "info.json: features should say"),
    "a feature is text": (info(features={"action": "float32"}), "info.json: features should say"),
    "shape negative": (feature("action", shape=[-2]), "info.json: features should say"),
    "actions are text": (feature("action", dtype="string"), "info.json: action is of 'string'"),
    "data path upwards": (info(data_path=UP), "leaves the dataset's folder"),
    "data path absolute": (info(data_path="/etc/passwd"), "leaves the dataset's folder"),
    "data path all memory": (
        info(data_path="{chunk_index:>999999999}"),
        "only {chunk_index}, {file_index} are filled in",
    ),
    "data path an attribute": (info(data_path="{chunk_index.__class__}"), "only {chunk_index}, {file_index}"),
    "data path with a zero byte": (info(data_path="data\0"), "cannot be a file's name"),
    "more episodes promised": (
        info(total_episodes=10**12),
        "describes 3, meta/info.json says total_episodes=1000000000000",
    ),
    "more frames promised": (info(total_frames=23), "describes 22, meta/info.json says total_frames=23"),
    "stats gone": (gone(STATS), "stats.json cannot be read: No such file"),
    "stats text": (text(STATS, '{"action": {"mean": ["a", "b"]}}'), "stats.json cannot be read: the figures of action"),
    "stats NaN": (text(STATS, '{"action": {"mean": [NaN, 0]}}'), "stats.json cannot be read: the figures of action"),
    "tasks gone": (gone(TASKS), "tasks.parquet cannot be read: "),
    "tasks without texts": (rows(TASKS, lambda _: {"task_index": [0]}), "tasks.parquet cannot be read: "),
    "tasks without numbers": (
        rows(TASKS, lambda _: {"text": ["go"]}),
        "tasks.parquet cannot be read: it has no 'task_index'",
    ),
    "task a number": (
        rows(TASKS, lambda _: {"task_index": [0], "text": [3]}),
        "tasks.parquet cannot be read: it should",
    ),
    "task twice": (rows(TASKS, lambda _: {"task_index": [0, 0], "text": ["a", "b"]}), "it should say one text"),
    "no such task": (rows(DATA, every("task_index", 7)), "tasks.parquet has no task 7"),
    "episodes gone": (gone(EPISODES), "meta/episodes has no episodes"),
    "episodes no parquet": (text(EPISODES, "hello"), "file-000.parquet cannot be read: "),
    "episode missing": (rows(EPISODES, first_rows(2)), "files are missing"),
    "episode twice": (rows(EPISODES, twice), "describes episode 0 twice"),
    "no episode index": (rows(EPISODES, without("episode_index")), "cannot be read: it has no 'episode_index'"),
    "length 0": (rows(EPISODES, cell("length", 0)), "has 0 frames from 0 to 6"),
    "length huge": (rows(EPISODES, cell("length", 10**15)), "has length=1000000000000000, not a count"),
    "length null": (rows(EPISODES, cell("length", None)), "has length=None, not a count"),
    "file negative": (rows(EPISODES, cell("data/file_index", -1)), "has data/file_index=-1, not a count"),
    "file absent": (rows(EPISODES, every("data/file_index", 5)), "file-005.parquet cannot be read: "),
    "begins elsewhere": (
        rows(EPISODES, lambda table: cell("dataset_to_index", 59, 2)(cell("dataset_from_index", 52, 2)(table))),
        "file-000.parquet cannot be read: it has no rows 52 to 59",
    ),
    "data gone": (gone(DATA), "file-000.parquet cannot be read: "),
    "data cut": (cut(DATA), "file-000.parquet cannot be read: "),
    "data damaged inside": (
        lambda path: (path / DATA).write_bytes(b"PAR1" + os.urandom(500) + (path / DATA).read_bytes()[504:]),
        "file-000.parquet cannot be read: ",
    ),
    "data short": (
        rows(DATA, first_rows(10)),
        "file-000.parquet cannot be read: rows 6 to 15 do not match episode 1",
    ),
    "data elsewhere": (elsewhere(DATA), "file-000.parquet leaves the dataset's folder"),
    "data a loop": (looping, "file-000.parquet cannot be"),
    "no actions": (rows(DATA, without("action")), "file-000.parquet cannot be read: it has no 'action'"),
    "action NaN": (rows(DATA, cell("action", [0.0, float("nan")], 8)), "action holds NaN or infinity in frame 2"),
    "state NaN": (rows(DATA, cell("observation.state", [float("nan")] * 6, 3)), "observation.state holds NaN"),
    "action null": (rows(DATA, cell("action", None, 3)), "file-000.parquet cannot be read: "),
    "action wider": (rows(DATA, every("action", [0.0] * 3)), "action is float64 [3], meta/info.json says [2]"),
    "action text": (rows(DATA, every("action", ["a", "b"])), "file-000.parquet cannot be read: action is object"),
    "frames of others": (rows(DATA, every("episode_index", 1)), "rows 0 to 6 do not match episode 0"),
    "frames out of order": (rows(DATA, cell("frame_index", 3, 1)), "frame_index does not count from 0 to 5"),
}
FILMS = {
    "film gone": (gone(VIDEO), "file-000.mp4 cannot be read: "),
    "film cut": (cut(VIDEO), "file-000.mp4 has 4 of the 9 frames"),
    "film of fewer frames": (rows(EPISODES, cell(FROM, 9.0, 2)), "file-000.mp4 has 0 of the 7 frames"),
    "film no film": (text(VIDEO, "#EXTM3U\n#EXTINF:1,\n/etc/passwd\n"), "file-000.mp4 cannot be read: "),
    "film elsewhere": (elsewhere(VIDEO), "file-000.mp4 leaves the dataset's folder"),
    "film of another size": (feature("observation.images.front", shape=[16, 24, 3]), "of the 6 frames of [16, 24, 3]"),
    "film of as many pixels": (feature("observation.images.front", shape=[48, 32, 3]), "0 of the 6 frames of [48, 32"),
    "film from NaN on": (rows(EPISODES, cell(FROM, float("nan"))), f"has {FROM}=nan, not a time"),
    "video path upwards": (info(video_path="../{video_key}.mp4"), "leaves the dataset's folder"),
    "video path wide": (info(video_path="{video_key:>999999999}"), "only {chunk_index}, {file_index}, {video_key}"),
    "video path gone": (info(video_path=None), "info.json: video_path is 'None', not a path"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_the_command_refuses_a_damaged_dataset_in_a_line(sound, tmp_path, capfd, kind):
    damage, reason = DAMAGES[kind]
    path = shutil.copytree(sound, tmp_path / "toy")
    damage(path)
    code = sft([*LEARN, f"sft.data={path}", f"run.dir={tmp_path / 'runs'}"])
    assert code in (1, 2) and refused(capfd.readouterr().err, reason, path)


@pytest.mark.parametrize("kind", ["data gone", "data cut"])
def test_a_file_that_is_not_whole_is_refused_before_anything_is_read(sound, tmp_path, kind):
    damage, reason = DAMAGES[kind]
    path = shutil.copytree(sound, tmp_path / "toy")
    damage(path)
    with pytest.raises(ConfigError) as caught:
        read_dataset(path).check_whole()
    assert refused(str(caught.value), reason, path)


@pytest.mark.parametrize("kind", FILMS)
def test_damaged_films_are_refused_in_a_line(filmed, tmp_path, kind):
    damage, reason = FILMS[kind]
    path = shutil.copytree(filmed, tmp_path / "toy")
    damage(path)
    with pytest.raises(EmbodiedError) as caught:
        list(read_dataset(path))
    assert refused(str(caught.value), reason, path)


def test_a_sound_dataset_is_learned_from_and_one_of_the_hubs_cache_is_read(sound, tmp_path):
    cache = shutil.copytree(sound, tmp_path / "datasets--me--toy" / "snapshots" / "abc")
    blobs = cache.parent.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(file for file in cache.rglob("*") if file.is_file())):
        shutil.move(file, blobs / str(number))
        file.symlink_to(blobs / str(number))
    assert [len(episode) for episode in read_dataset(cache)] == [6, 9, 7]
    told = [f"run.dir={tmp_path / 'runs'}", "eval.episodes=1", "eval.videos=0", f"sft.data={cache}"]
    assert sft([*LEARN, *told]) == 0
