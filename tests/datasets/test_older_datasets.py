"""LeRobot's layout 2.1: read as 3.0 is, and refused in a line where it is damaged."""

import json
import shutil
import subprocess

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402
from damaged import INFO, LEARN, cut, gone, info, refused, rows, text  # noqa: E402
from imageio_ffmpeg import get_ffmpeg_exe  # noqa: E402

from embodied.core.errors import ConfigError, EmbodiedError  # noqa: E402
from embodied.core.types import ActionSpec, EnvSpec  # noqa: E402
from embodied.datasets import DatasetWriter, features_of, frame_of, read_dataset  # noqa: E402
from embodied.datasets.quantiles import main as figures  # noqa: E402
from embodied.policies import make_policy  # noqa: E402
from embodied.policies.config import OpenVLAOFTConfig  # noqa: E402
from embodied.sft import main as sft  # noqa: E402

SPEC = EnvSpec(ActionSpec(2), state_dim=6, has_success=True)  # that of the toy env
SEEN = EnvSpec(ActionSpec(2), state_dim=6, images={"front": (64, 96, 3)})
CAMERA = "observation.images.front"
DATA = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
VIDEO = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
EPISODES, TASKS = "meta/episodes.jsonl", "meta/tasks.jsonl"


def write_new(path, spec):
    draw = np.random.default_rng(0)
    with DatasetWriter(path, 20, features_of(spec)) as writer:
        for number, length in enumerate((6, 9, 7)):
            obs = [{"state": draw.normal(size=(1, 6)).astype(np.float32)} for _ in range(length)]
            for step, seen in enumerate(obs):
                if spec.images:
                    seen["images"] = {"front": np.full((1, 64, 96, 3), 20 * step + number, np.uint8)}
            more = {"next.success": False} if spec.has_success else {}
            frames = [frame_of(seen, 0, draw.uniform(-1, 1, 2), 0.0, False, None) | more for seen in obs]
            writer.add_episode(frames, f"go {number % 2}")
    return path


def write_older(new, path):
    """The same episodes in the published layout 2.1, two to a chunk."""
    dataset = read_dataset(new)
    info = json.loads((new / INFO).read_text())
    info |= {"codebase_version": "v2.1", "chunks_size": 2, "total_chunks": 2, "data_path": DATA, "video_path": VIDEO}
    films = [name for name, feature in info["features"].items() if feature["dtype"] == "video"]
    (path / "meta").mkdir(parents=True)
    (path / INFO).write_text(json.dumps(info, indent=4))
    tasks = {text: index for index, text in dataset.tasks.items()}
    lines = [json.dumps({"task_index": index, "task": text}) + "\n" for text, index in tasks.items()]
    (path / TASKS).write_text("".join(lines))
    table = pq.read_table(new / "data/chunk-000/file-000.parquet")
    entries = []
    for number, (entry, episode) in enumerate(zip(dataset.entries, dataset, strict=True)):
        place = {"episode_chunk": number // 2, "episode_index": number}
        file = path / DATA.format(**place)
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.slice(entry["dataset_from_index"], len(episode)), file)
        for name in films:
            file = path / VIDEO.format(video_key=name, **place)
            file.parent.mkdir(parents=True, exist_ok=True)
            film(file, episode.obs["images"][name.rpartition(".")[2]])
        entries.append(json.dumps({"episode_index": number, "tasks": [episode.task], "length": len(episode)}) + "\n")
    (path / EPISODES).write_text("".join(entries))
    (path / "meta/episodes_stats.jsonl").write_text("".join('{"episode_index": 0, "stats": {}}\n' for _ in entries))
    return path


def film(path, frames):
    """As LeRobot encodes them."""
    size = f"{frames.shape[2]}x{frames.shape[1]}"
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", "20", "-i", "-"]
    encode = ["-c:v", "libsvtav1", "-g", "2", "-crf", "30", "-pix_fmt", "yuv420p", "-y", str(path)]
    subprocess.run([get_ffmpeg_exe(), "-v", "error", *raw, *encode], input=frames.tobytes(), check=True, timeout=60)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    return write_older(write_new(folder / "new", SPEC), folder / "toy")


@pytest.fixture(scope="module")
def filmed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("filmed")
    return write_older(write_new(folder / "new", SEEN), folder / "toy")


def same(one, other):
    assert (one.task, one.index, one.actions.tolist()) == (other.task, other.index, other.actions.tolist())
    assert np.array_equal(one.obs["state"], other.obs["state"]) and one.columns.keys() == other.columns.keys()


def test_episodes_are_those_of_the_newer_layout(filmed):
    ours, theirs = read_dataset(filmed), read_dataset(filmed.parent / "new")
    assert len(ours) == 3 and [len(episode) for episode in ours] == [6, 9, 7]
    for one, other in zip(ours, theirs, strict=True):
        same(one, other)
        seen, wanted = (episode.obs["images"]["front"].astype(int) for episode in (one, other))
        assert seen.shape == wanted.shape and np.abs(seen - wanted).max() <= 6  # encoded twice


@pytest.mark.parametrize("version", ["v2.0", "v2.1"])
def test_it_is_learned_from_as_the_newer_one_is(sound, tmp_path, version):
    shutil.copytree(sound, tmp_path / "toy")
    info = json.loads((sound / INFO).read_text()) | {"codebase_version": version}
    (tmp_path / "toy" / INFO).write_text(json.dumps(info))
    losses = []
    for number, path in enumerate((tmp_path / "toy", sound.parent / "new")):
        told = [f"run.dir={tmp_path / str(number)}", "eval.episodes=1", "eval.videos=0", f"sft.data={path}"]
        assert sft([*LEARN, *told]) == 0
        (metrics,) = (tmp_path / str(number)).glob("*/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        losses.append([row["train/loss"] for row in rows if "train/loss" in row])
    assert losses[0] == losses[1] and losses[0]


def test_its_figures_are_counted_for_models_that_want_quantiles(sound, tmp_path, capsys):
    path = shutil.copytree(sound, tmp_path / "toy")
    spec = EnvSpec(ActionSpec(2), images={"front": (64, 64, 3)}, instruction=True)
    config = OpenVLAOFTConfig(name="openvla_oft", statistics=str(path))
    with pytest.raises(ConfigError, match=r"python -m embodied\.datasets\.quantiles .* writes it"):
        make_policy(config, spec)
    assert figures([str(path)]) == 0 and figures([str(path)]) == 2 and figures([]) == 2
    assert "has quantiles already" in capsys.readouterr().err
    actions = np.concatenate([episode.actions for episode in read_dataset(path)])
    assert make_policy(config, spec).statistics.low == pytest.approx(np.quantile(actions, 0.01, axis=0), abs=1e-6)
    assert read_dataset(path).stats["action"]["count"] == [22]


OTHERS = {"action": "actions", "observation.state": "state", CAMERA: "image"}


def rename(path):
    """The features' names of others, and pictures described with their colours in front."""
    info = json.loads((path / INFO).read_text())
    info["features"] = {OTHERS.get(name, name): feature for name, feature in info["features"].items()}
    if "image" in info["features"]:
        info["features"]["image"] |= {"shape": [3, 64, 96], "names": ["channels", "height", "width"]}
    (path / INFO).write_text(json.dumps(info))
    for file in [*path.glob("data/*/*.parquet"), *path.glob("meta/episodes/*/*.parquet")]:
        table = pq.read_table(file)
        changed = [
            name.replace(CAMERA, "image") if "/" in name else OTHERS.get(name, name) for name in table.column_names
        ]
        pq.write_table(table.rename_columns(changed), file)
    for folder in path.glob(f"videos/**/{CAMERA}"):
        folder.rename(folder.with_name("image"))
    return path


@pytest.mark.parametrize("newer", [False, True])
def test_features_of_other_names_are_read_by_these(filmed, tmp_path, newer):
    source = filmed.parent / "new" if newer else filmed
    path = rename(shutil.copytree(source, tmp_path / "toy"))
    with pytest.raises(ConfigError, match=r"no feature 'action'; it has .*actions.*sft\.names="):
        read_dataset(path)
    with pytest.raises(ConfigError, match="no feature 'acts'; it has"):
        read_dataset(path, names={"action": "acts"})
    theirs = read_dataset(path, names={"action": "actions", "state": "state", "front": "image"})
    for one, other in zip(read_dataset(source), theirs, strict=True):
        same(one, other)
        assert np.array_equal(one.obs["images"]["front"], other.obs["images"]["front"])


def test_the_command_learns_from_features_of_other_names(sound, tmp_path, capsys):
    path = rename(shutil.copytree(sound, tmp_path / "toy"))
    told = [*LEARN, f"run.dir={tmp_path / 'runs'}", "eval.episodes=1", "eval.videos=0", f"sft.data={path}"]
    assert sft(told) == 2 and "sft.names={action: NAME}" in capsys.readouterr().err
    assert sft([*told, "sft.names={action: actions, state: state}"]) == 0
    assert figures([str(path), "action=actions", "state=state"]) == 0
    assert {"action", "observation.state"} <= read_dataset(path, names={"action": "actions"}).stats.keys()


@pytest.mark.parametrize("newer", [False, True])
def test_figures_without_quantiles_get_them(sound, tmp_path, newer):
    """As LeRobot 2.0 stores them, and 3.0 did at first."""
    path = shutil.copytree(sound.parent / "new" if newer else sound, tmp_path / "toy")
    stats = read_dataset(sound.parent / "new").stats | {"more": {"min": np.array([3.0])}}
    kept = {name: {k: v.tolist() for k, v in each.items() if k[0] != "q"} for name, each in stats.items()}
    (path / "meta/stats.json").write_text(json.dumps(kept))
    spec = EnvSpec(ActionSpec(2), images={"front": (64, 64, 3)}, instruction=True)
    config = OpenVLAOFTConfig(name="openvla_oft", statistics=str(path))
    with pytest.raises(ConfigError, match=r"no q01 and no q99 of action; .*quantiles .* writes them"):
        make_policy(config, spec)
    assert figures([str(path)]) == 0 and make_policy(config, spec).statistics.low.tolist()
    now = json.loads((path / "meta/stats.json").read_text())
    assert now["more"] == {"min": [3.0]} and "q01" in now["action"]


def line(file, number, **changes):
    def damage(path):
        found = [json.loads(each) for each in (path / file).read_text().splitlines()]
        found[number] |= changes
        (path / file).write_text("".join(json.dumps(each) + "\n" for each in found))

    return damage


FIRST, SECOND, LAST = (DATA.format(episode_chunk=number // 2, episode_index=number) for number in range(3))
FILM = VIDEO.format(video_key=CAMERA, episode_chunk=0, episode_index=1)
DAMAGES = {
    "an older version": (info(codebase_version="v1.6"), "has LeRobot's layout v1.6, this reads v3.0, v2.1 and v2.0"),
    "no chunks": (info(chunks_size=0), "info.json: chunks_size is 0, not a number of episodes"),
    "a path of the newer layout": (
        info(data_path="data/{chunk_index}.parquet"),
        "only {episode_chunk}, {episode_index}",
    ),
    "episodes gone": (gone(EPISODES), "episodes.jsonl cannot be read: No such file"),
    "episodes empty": (text(EPISODES, ""), "episodes.jsonl has no episodes"),
    "episodes cut": (cut(EPISODES), "episodes.jsonl cannot be read: line 2 is no JSON"),
    "episodes a list": (text(EPISODES, "[1]\n"), "episodes.jsonl cannot be read: line 1 holds no mapping"),
    "an episode missing": (lambda path: keep(path, 2), "describes 2, meta/info.json says total_episodes=3"),
    "an episode twice": (line(EPISODES, 1, episode_index=0, length=6), "describes episode 0 twice"),
    "an episode without number": (line(EPISODES, 1, episode_index=None), "has episode_index=None, not a count"),
    "a length of 0": (line(EPISODES, 1, length=0), "has 0 frames from 0 to 0"),
    "another length": (
        lambda path: [line(EPISODES, 0, length=7)(path), info(total_frames=23)(path)],
        "rows 0 to 7 do not match",
    ),
    "tasks gone": (gone(TASKS), "tasks.jsonl cannot be read: No such file"),
    "a task twice": (line(TASKS, 1, task_index=0), "tasks.jsonl: line 2 gives no text"),
    "a task less": (line(TASKS, 1, task_index=5), "tasks.jsonl has no task 1"),
    "data gone": (gone(SECOND), "episode_000001.parquet cannot be read: "),
    "data of another": (
        lambda path: shutil.copy(path / FIRST, path / LAST),
        "episode_000002.parquet cannot be read: rows",
    ),
    "NaN": (
        rows(FIRST, lambda table: table | {"action": [[0.0, float("nan")]] * 6}),
        "episode_000000.parquet cannot be read: action holds NaN or infinity in frame 0",
    ),
    "no state": (
        rows(FIRST, lambda table: {name: column for name, column in table.items() if name != "observation.state"}),
        "episode_000000.parquet cannot be read: it has no 'observation.state'",
    ),
}
FILMS = {
    "film gone": (gone(FILM), "episode_000001.mp4 cannot be read: "),
    "film cut": (cut(FILM), "episode_000001.mp4 "),
    "film of another": (
        lambda path: shutil.copy(path / FILM.replace("000001", "000000"), path / FILM),
        "episode_000001.mp4 has 6 of the 9 frames",
    ),
    "video path gone": (info(video_path=None), "info.json: video_path is 'None', not a path"),
    "video path of the newer layout": (
        info(video_path="{video_key}/{file_index}.mp4"),
        "only {episode_chunk}, {episode",
    ),
}


def keep(path, count):
    text = (path / EPISODES).read_text().splitlines(keepends=True)
    (path / EPISODES).write_text("".join(text[:count]))


@pytest.mark.parametrize("kind", [*DAMAGES, *FILMS])
def test_a_damaged_one_is_refused_in_a_line(sound, filmed, tmp_path, kind):
    damage, reason = {**DAMAGES, **FILMS}[kind]
    path = shutil.copytree(filmed if kind in FILMS else sound, tmp_path / "toy")
    damage(path)
    with pytest.raises(EmbodiedError) as caught:
        list(read_dataset(path))
    assert refused(str(caught.value), reason, path)


def test_the_command_refuses_one_too(sound, tmp_path, capfd):
    path = shutil.copytree(sound, tmp_path / "toy")
    cut(EPISODES)(path)
    assert sft([*LEARN, f"sft.data={path}", f"run.dir={tmp_path / 'runs'}"]) == 2
    assert refused(capfd.readouterr().err, "episodes.jsonl cannot be read: line 2 is no JSON", path)
