"""Datasets of others that are not what they should be: each is refused in a line that names the file and what to do."""

import os
import shutil

import pytest

pytest.importorskip("pyarrow")
from written_datasets import (
    INFO,
    LEARN,
    OLDER_DATA,
    OLDER_EPISODES,
    OLDER_TASKS,
    SEEN,
    SPEC,
    cell,
    cut,
    elsewhere,
    every,
    feature,
    first_rows,
    gone,
    info,
    line,
    refused,
    rows,
    text,
    without,
    written,
)

from embodied.core.errors import ConfigError, EmbodiedError
from embodied.datasets import read_dataset
from embodied.sft import main as sft

STATS, TASKS = "meta/stats.json", "meta/tasks.parquet"
EPISODES, DATA = "meta/episodes/chunk-000/file-000.parquet", "data/chunk-000/file-000.parquet"
VIDEO = "videos/observation.images.front/chunk-000/file-000.mp4"
FROM = "videos/observation.images.front/from_timestamp"
FIRST, LAST = (OLDER_DATA.format(episode_chunk=number // 2, episode_index=number) for number in (0, 2))


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return written(tmp_path_factory.mktemp("sound"), SPEC)


@pytest.fixture(scope="module")
def filmed(tmp_path_factory):
    return written(tmp_path_factory.mktemp("filmed"), SEEN)


def looping(path):
    (path / DATA).unlink()
    (path / DATA).symlink_to(path / DATA)


def folder_for_info(path):
    (path / INFO).unlink()
    (path / INFO).mkdir()


NEW = {
    "info gone": (gone(INFO), f"no LeRobot dataset: there is no {INFO}"),
    "info cut": (cut(INFO), "info.json cannot be read: "),
    "info nested": (text(INFO, "[" * 100_000), "info.json cannot be read: "),
    "info a folder": (folder_for_info, f"there is no {INFO}"),
    "info elsewhere": (elsewhere(INFO), "info.json leaves the dataset's folder"),
    "another version": (info(codebase_version="v1.6"), "layout v1.6, this reads v3.0, v2.1 and v2.0; LeRobot converts"),
    "version a list": (info(codebase_version=["v3.0"]), "has LeRobot's layout"),
    "fps text": (info(fps="20"), "info.json: fps is '20', not a number of frames"),
    "a feature is text": (info(features={"action": "float32"}), "info.json: features should say"),
    "shape negative": (feature("action", shape=[-2]), "info.json: features should say"),
    "actions are text": (feature("action", dtype="string"), "info.json: action is of 'string'"),
    "data path upwards": (info(data_path="../" * 12 + "tmp/data.parquet"), "leaves the dataset's folder"),
    "data path all memory": (info(data_path="{chunk_index:>999999999}"), "only {chunk_index}, {file_index} are filled"),
    "data path an attribute": (info(data_path="{chunk_index.__class__}"), "only {chunk_index}, {file_index}"),
    "data path with a zero byte": (info(data_path="data\0"), "cannot be a file's name"),
    "more frames promised": (info(total_frames=23), "describes 22, meta/info.json says total_frames=23"),
    "stats text": (text(STATS, '{"action": {"mean": ["a", "b"]}}'), "stats.json cannot be read: the figures of action"),
    "tasks gone": (gone(TASKS), "tasks.parquet cannot be read: "),
    "tasks without numbers": (rows(TASKS, lambda _: {"text": ["go"]}), "tasks.parquet cannot be read: it has no 'task"),
    "task twice": (rows(TASKS, lambda _: {"task_index": [0, 0], "text": ["a", "b"]}), "it should say one text"),
    "no such task": (rows(DATA, every("task_index", 7)), "tasks.parquet has no task 7"),
    "episodes gone": (gone(EPISODES), "meta/episodes has no episodes"),
    "episode missing": (rows(EPISODES, first_rows(2)), "files are missing"),
    "episode twice": (rows(EPISODES, lambda t: {k: c + c[:1] for k, c in t.items()}), "describes episode 0 twice"),
    "no episode index": (rows(EPISODES, without("episode_index")), "cannot be read: it has no 'episode_index'"),
    "length 0": (rows(EPISODES, cell("length", 0)), "has 0 frames from 0 to 6"),
    "length huge": (rows(EPISODES, cell("length", 10**15)), "has length=1000000000000000, not a count"),
    "file absent": (rows(EPISODES, every("data/file_index", 5)), "file-005.parquet cannot be read: "),
    "begins elsewhere": (
        rows(EPISODES, lambda table: cell("dataset_to_index", 59, 2)(cell("dataset_from_index", 52, 2)(table))),
        "file-000.parquet cannot be read: it has no rows 52 to 59",
    ),
    "data cut": (cut(DATA), "file-000.parquet cannot be read: "),
    "data damaged inside": (
        lambda path: (path / DATA).write_bytes(b"PAR1" + os.urandom(500) + (path / DATA).read_bytes()[504:]),
        "file-000.parquet cannot be read: ",
    ),
    "data short": (rows(DATA, first_rows(10)), "file-000.parquet cannot be read: rows 6 to 15 do not match episode 1"),
    "data a loop": (looping, "file-000.parquet cannot be"),
    "no actions": (rows(DATA, without("action")), "file-000.parquet cannot be read: it has no 'action'"),
    "action NaN": (rows(DATA, cell("action", [0.0, float("nan")], 8)), "action holds NaN or infinity in frame 2"),
    "action wider": (rows(DATA, every("action", [0.0] * 3)), "action is float64 [3], meta/info.json says [2]"),
    "action text": (rows(DATA, every("action", ["a", "b"])), "file-000.parquet cannot be read: action is object"),
    "frames of others": (rows(DATA, every("episode_index", 1)), "rows 0 to 6 do not match episode 0"),
    "frames out of order": (rows(DATA, cell("frame_index", 3, 1)), "frame_index does not count from 0 to 5"),
}
OLDER = {
    "no chunks": (info(chunks_size=0), "info.json: chunks_size is 0, not a number of episodes"),
    "a path of the newer layout": (
        info(data_path="data/{chunk_index}.parquet"),
        "only {episode_chunk}, {episode_index}",
    ),
    "older episodes gone": (gone(OLDER_EPISODES), "episodes.jsonl cannot be read: No such file"),
    "older episodes cut": (cut(OLDER_EPISODES), "episodes.jsonl cannot be read: line 2 is no JSON"),
    "older episodes a list": (text(OLDER_EPISODES, "[1]\n"), "episodes.jsonl cannot be read: line 1 holds no mapping"),
    "an episode without number": (line(OLDER_EPISODES, 1, episode_index=None), "has episode_index=None, not a count"),
    "an older task twice": (line(OLDER_TASKS, 1, task_index=0), "tasks.jsonl: line 2 gives no text"),
    "data of another": (lambda path: shutil.copy(path / FIRST, path / LAST), "episode_000002.parquet cannot be read: "),
}
FILMS = {
    "film gone": (gone(VIDEO), "file-000.mp4 cannot be read: "),
    "film cut": (cut(VIDEO), "file-000.mp4 has "),
    "film of fewer frames": (rows(EPISODES, cell(FROM, 9.0, 2)), "file-000.mp4 has 0 of the 7 frames"),
    "film no film": (text(VIDEO, "#EXTM3U\n#EXTINF:1,\n/etc/passwd\n"), "file-000.mp4 cannot be read: "),
    "film elsewhere": (elsewhere(VIDEO), "file-000.mp4 leaves the dataset's folder"),
    "film of as many pixels": (feature("observation.images.front", shape=[96, 64, 3]), "0 of the 6 frames of [96, 64"),
    "film from NaN on": (rows(EPISODES, cell(FROM, float("nan"))), f"has {FROM}=nan, not a time"),
    "video path wide": (info(video_path="{video_key:>999999999}"), "only {chunk_index}, {file_index}, {video_key}"),
    "video path gone": (info(video_path=None), "info.json: video_path is 'None', not a path"),
}


@pytest.mark.parametrize("kind", [*NEW, *OLDER, *FILMS])
def test_a_damaged_dataset_is_refused_in_a_line(sound, filmed, tmp_path, kind):
    damage, reason = {**NEW, **OLDER, **FILMS}[kind]
    path = shutil.copytree(
        (filmed if kind in FILMS else sound) / ("older" if kind in OLDER else "new"), tmp_path / "toy"
    )
    damage(path)
    with pytest.raises(EmbodiedError) as caught:
        list(read_dataset(path))
    assert refused(str(caught.value), reason, path)


@pytest.mark.parametrize("damage", [gone(DATA), cut(DATA)])
def test_a_file_that_is_not_whole_is_refused_before_anything_is_read(sound, tmp_path, damage):
    path = shutil.copytree(sound / "new", tmp_path / "toy")
    damage(path)
    with pytest.raises(ConfigError) as caught:
        read_dataset(path).check_whole()
    assert refused(str(caught.value), "file-000.parquet cannot be read: ", path)


def test_a_dataset_in_the_cache_of_the_hub_is_learned_from(sound, tmp_path):
    cache = shutil.copytree(sound / "new", tmp_path / "datasets--me--toy" / "snapshots" / "abc")
    blobs = cache.parent.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(file for file in cache.rglob("*") if file.is_file())):
        shutil.move(file, blobs / str(number))
        file.symlink_to(blobs / str(number))
    told = [f"run.dir={tmp_path / 'runs'}", "eval.episodes=1", "eval.videos=0", f"sft.data={cache}"]
    assert sft([*LEARN, *told]) == 0
