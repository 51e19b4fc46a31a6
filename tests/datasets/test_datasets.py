"""Datasets in LeRobot's layout: what was written is read back, frame by frame, and nothing is there by halves."""

import json

import numpy as np
import pytest

from embodied.core.errors import EmbodiedError
from embodied.core.types import ActionSpec, EnvSpec

pytest.importorskip("pyarrow")

from embodied.datasets import DatasetWriter, EpisodeBuffer, features_of, frame_of, read_dataset

SPEC = EnvSpec(ActionSpec(3), state_dim=5, images={"front": (32, 48, 3)}, has_success=True)
STATE = EnvSpec(ActionSpec(3), state_dim=5, has_success=True)
BITS = [(row * 8, column * 12) for row in range(4) for column in range(4)]


def numbered(number, size=(32, 48)):
    """An image that shows a number in sixteen squares."""
    image = np.full((*size, 3), 20, np.uint8)
    for bit, (y, x) in enumerate(BITS):
        if number >> bit & 1:
            image[y : y + 8, x : x + 12] = (220, 60, 200)
    return image


def number_in(image):
    return sum(1 << bit for bit, (y, x) in enumerate(BITS) if image[y + 4, x + 6, 0] > 120)


def frames(episode, length, images=True):
    rng = np.random.default_rng(episode)
    for step in range(length):
        obs = {"state": rng.normal(size=(2, 5))}
        if images:
            obs["images"] = {"front": np.stack([numbered(0), numbered(100 * episode + step)])}
        last = step == length - 1
        yield frame_of(obs, 1, rng.normal(size=3), float(step), done=last, success=last and episode == 1)


LENGTHS = (7, 1, 12, 5)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Four episodes of two tasks, in video files of at most a kilobyte or one episode."""
    path = tmp_path_factory.mktemp("data") / "push"
    with DatasetWriter(path, 30, features_of(SPEC), video_mb=1e-3) as writer:
        for episode, length in enumerate(LENGTHS):
            writer.add_episode(frames(episode, length), task=f"task {episode % 2}", success=episode == 1)
    return path


def test_every_episode_is_read_back_with_its_borders_exact(dataset):
    found = read_dataset(dataset)
    assert [len(episode) for episode in found] == list(LENGTHS)
    for number, episode in enumerate(found):
        wrote = list(frames(number, LENGTHS[number]))
        assert episode.task == f"task {number % 2}" and episode.success is (number == 1)
        assert episode.obs["instruction"] == [episode.task] * len(wrote)
        state = np.stack([frame["observation.state"] for frame in wrote]).astype(np.float32)
        assert np.array_equal(episode.obs["state"], state)
        assert np.array_equal(episode.actions, np.stack([frame["action"] for frame in wrote]).astype(np.float32))
        assert episode.rewards.tolist() == list(range(len(wrote)))
        assert np.flatnonzero(episode.done).tolist() == [len(wrote) - 1]
        shown = [number_in(image) for image in episode.obs["images"]["front"]]
        assert shown == [100 * number + step for step in range(len(wrote))]


def test_images_are_decoded_only_when_wanted(dataset):
    for video in sorted(dataset.rglob("*.mp4")):
        assert video.stat().st_size
    episode = read_dataset(dataset, images=False)[2]
    assert "images" not in episode.obs and len(episode) == 12


def test_the_files_are_where_lerobot_looks_for_them(dataset):
    import pyarrow.parquet as pq

    info = json.loads((dataset / "meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0" and info["fps"] == 30
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (4, sum(LENGTHS), 2)
    entries = pq.read_table(dataset / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    ends = np.cumsum(LENGTHS)
    assert [entry["dataset_to_index"] for entry in entries] == ends.tolist()
    assert [entry["dataset_from_index"] for entry in entries] == (ends - LENGTHS).tolist()
    key = "videos/observation.images.front"
    assert len({entry[f"{key}/file_index"] for entry in entries}) > 1
    for entry in entries:
        path = info["video_path"].format(
            video_key="observation.images.front", chunk_index=0, file_index=entry[f"{key}/file_index"]
        )
        assert (dataset / path).is_file()
        lasts = entry[f"{key}/to_timestamp"] - entry[f"{key}/from_timestamp"]
        assert lasts == pytest.approx(entry["length"] / 30)
    rows = pq.read_table(dataset / "data/chunk-000/file-000.parquet").to_pydict()
    assert rows["index"] == list(range(sum(LENGTHS)))
    assert rows["frame_index"] == [step for length in LENGTHS for step in range(length)]
    note = json.loads(pq.read_schema(dataset / "meta/tasks.parquet").metadata[b"pandas"])
    assert note["index_columns"] == ["__index_level_0__"]


def test_statistics_are_those_of_all_frames(dataset):
    found = read_dataset(dataset, images=False)
    states = np.concatenate([episode.obs["state"] for episode in found]).astype(np.float64)
    stats = found.stats["observation.state"]
    for figure, value in {"mean": states.mean(0), "std": states.std(0), "min": states.min(0)}.items():
        np.testing.assert_allclose(stats[figure], value, atol=1e-9)
    assert stats["count"].tolist() == [sum(LENGTHS)]
    pixels = np.concatenate([[numbered(100 * e + t) for t in range(n)] for e, n in enumerate(LENGTHS)]) / 255
    images = found.stats["observation.images.front"]
    np.testing.assert_allclose(images["mean"].ravel(), pixels.mean(axis=(0, 1, 2)), atol=1e-9)
    np.testing.assert_allclose(images["std"].ravel(), pixels.std(axis=(0, 1, 2)), atol=1e-9)
    assert images["q01"].shape == (3, 1, 1)


def test_drafts_of_several_rows_are_taken_up_in_any_order(tmp_path):
    features = features_of(STATE)
    drafts = [EpisodeBuffer(tmp_path / f"draft-{number}", 20, features) for number in range(3)]
    for step in zip(*[frames(number, 4, images=False) for number in range(3)]):
        for draft, frame in zip(drafts, step):
            draft.add(frame)
    folders = [draft.finish("go", success=None) for draft in drafts]
    with DatasetWriter(tmp_path / "set", 20, features) as writer:
        for number in (2, 0, 1):
            writer.add_buffer(folders[number])
    assert {path.name for path in tmp_path.iterdir()} == {"set", *(folder.name for folder in folders)}
    first = read_dataset(tmp_path / "set")[0]
    assert np.array_equal(
        first.actions, np.stack([frame["action"] for frame in frames(2, 4, images=False)]).astype(np.float32)
    )


def test_data_files_end_between_episodes_and_are_found_again(tmp_path):
    with DatasetWriter(tmp_path / "set", 20, features_of(STATE), data_mb=1e-4) as writer:
        for number in range(5):
            writer.add_episode(frames(number, 3, images=False), "go")
    assert len(list((tmp_path / "set/data").rglob("*.parquet"))) > 1
    for number, episode in enumerate(read_dataset(tmp_path / "set")):
        wanted = np.stack([frame["action"] for frame in frames(number, 3, images=False)]).astype(np.float32)
        assert np.array_equal(episode.actions, wanted)


def test_a_dataset_is_whole_or_absent(tmp_path):
    def broken():
        yield from frames(0, 3, images=False)
        raise RuntimeError("the robot fell over")

    def record():
        with DatasetWriter(tmp_path / "set", 20, features_of(STATE)) as writer:
            writer.add_episode(frames(0, 3, images=False), "go")
            writer.add_episode(broken(), "go")

    with pytest.raises(RuntimeError, match="fell over"):
        record()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "set").mkdir()
    with pytest.raises(EmbodiedError, match="exists already"):
        DatasetWriter(tmp_path / "set", 20, features_of(STATE))


def test_frames_that_do_not_fit_are_refused_by_name(tmp_path):
    with EpisodeBuffer(tmp_path / "draft", 20, features_of(STATE)) as draft:
        frame = next(frames(0, 1, images=False))
        with pytest.raises(ValueError, match=r"lacks \['action'\]"):
            draft.add({name: value for name, value in frame.items() if name != "action"})
        with pytest.raises(ValueError, match="action has 2 numbers, not 3"):
            draft.add({**frame, "action": np.zeros(2)})
        with pytest.raises(ValueError, match=r"next\.reward is not finite"):
            draft.add({**frame, "next.reward": np.nan})
        with pytest.raises(ValueError, match=r"action is '\[\[1\], \[2, 3\]\]', not float32 \[3\]"):
            draft.add({**frame, "action": [[1], [2, 3]]})
        with pytest.raises(ValueError, match=r"next\.done is float64 \[0\.5\], which bool cannot hold"):
            draft.add({**frame, "next.done": [0.5]})
        with pytest.raises(ValueError, match=r"a frame has \['force'\]; the dataset's features are"):
            draft.add({**frame, "force": 1.0})
        with pytest.raises(ValueError, match="a frame is a list, not a dict of"):
            draft.add([frame])
        draft.add(frame)
        with pytest.raises(ValueError, match="task='go' and success='yes'"):
            draft.finish("go", "yes")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("feature", "told"),
    [
        ({"shape": (2,)}, r"feature action is {'shape': \(2,\)}, not like {'dtype': 'float32', 'shape': \(7,\)}"),
        ({"dtype": "flot32", "shape": (2,)}, "feature action is .*flot32.*, not like"),
        ({"dtype": "float32", "shape": 2}, "feature action is .*'shape': 2}, not like"),
        ({"dtype": "float32", "shape": (0,)}, r"feature action is float32 \[0\]; it must be a vector of numbers"),
        ("float32", "feature action is 'float32', not like"),
    ],
)
def test_a_feature_that_is_not_described_is_refused_by_name(feature, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        DatasetWriter(tmp_path / "set", 20, {"action": feature})
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_of_numpy_is_written_by_its_name(tmp_path):
    with DatasetWriter(tmp_path / "set", 20, {"action": {"dtype": np.float32, "shape": (1,)}}) as writer:
        writer.add_episode([{"action": 1.0}], "go", success=np.bool_(True))
    dataset = read_dataset(tmp_path / "set")
    assert dataset.features["action"]["dtype"] == "float32" and dataset[0].success is True


def test_an_invalid_dataset_is_refused_and_leaves_no_folder(tmp_path):
    wrong = features_of(STATE) | {"observation.images.front": {"dtype": "video", "shape": (3, 64, 64)}}
    with pytest.raises(ValueError, match=r"observation\.images\.front has shape \[3, 64, 64\]; a video's is"):
        DatasetWriter(tmp_path / "set", 20, wrong)
    with pytest.raises(ValueError, match="an episode needs at least one frame"):
        with DatasetWriter(tmp_path / "set", 20, features_of(STATE)) as writer:
            writer.add_episode([], task="nothing")
    assert not (tmp_path / "set").exists()
