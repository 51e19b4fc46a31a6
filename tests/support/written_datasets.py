"""Small datasets in LeRobot's layouts, and functions that damage their files."""

import json
import shutil
import subprocess

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from imageio_ffmpeg import get_ffmpeg_exe

from embodied.core.types import ActionSpec, EnvSpec
from embodied.datasets import DatasetWriter, features_of, frame_of, read_dataset

# One learner, because of two that fail either may be the first to say so.
ONE_LEARNER = 'placement={"sim,policy": "cpu:0", learner: "cpu:0"}'
LEARN = [
    "recipe=pointmass_ppo",
    "cluster.backend=inline",
    ONE_LEARNER,
    "env.num_envs=2",
    "policy.hidden=[4]",
    "sft.epochs=1",
]
INFO = "meta/info.json"
SPEC = EnvSpec(ActionSpec(2), state_dim=6, has_success=True)  # that of the toy env
SEEN = EnvSpec(ActionSpec(2), state_dim=6, images={"front": (64, 96, 3)})
CAMERA = "observation.images.front"
OLDER_DATA = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
OLDER_VIDEO = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
OLDER_EPISODES, OLDER_TASKS = "meta/episodes.jsonl", "meta/tasks.jsonl"


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
    info |= {
        "codebase_version": "v2.1",
        "chunks_size": 2,
        "total_chunks": 2,
        "data_path": OLDER_DATA,
        "video_path": OLDER_VIDEO,
    }
    films = [name for name, feature in info["features"].items() if feature["dtype"] == "video"]
    (path / "meta").mkdir(parents=True)
    (path / INFO).write_text(json.dumps(info, indent=4))
    tasks = {text: index for index, text in dataset.tasks.items()}
    lines = [json.dumps({"task_index": index, "task": text}) + "\n" for text, index in tasks.items()]
    (path / OLDER_TASKS).write_text("".join(lines))
    table = pq.read_table(new / "data/chunk-000/file-000.parquet")
    entries = []
    for number, (entry, episode) in enumerate(zip(dataset.entries, dataset, strict=True)):
        place = {"episode_chunk": number // 2, "episode_index": number}
        file = path / OLDER_DATA.format(**place)
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.slice(entry["dataset_from_index"], len(episode)), file)
        for name in films:
            file = path / OLDER_VIDEO.format(video_key=name, **place)
            file.parent.mkdir(parents=True, exist_ok=True)
            film(file, episode.obs["images"][name.rpartition(".")[2]])
        entries.append(json.dumps({"episode_index": number, "tasks": [episode.task], "length": len(episode)}) + "\n")
    (path / OLDER_EPISODES).write_text("".join(entries))
    (path / "meta/episodes_stats.jsonl").write_text("".join('{"episode_index": 0, "stats": {}}\n' for _ in entries))
    return path


def film(path, frames):
    """As LeRobot encodes them."""
    size = f"{frames.shape[2]}x{frames.shape[1]}"
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", "20", "-i", "-"]
    encode = ["-c:v", "libsvtav1", "-g", "2", "-crf", "30", "-pix_fmt", "yuv420p", "-y", str(path)]
    subprocess.run([get_ffmpeg_exe(), "-v", "error", *raw, *encode], input=frames.tobytes(), check=True, timeout=60)


def written(folder, spec):
    """`new` in layout 3.0 and `older` in 2.1, with the same three episodes of 6, 9 and 7 frames."""
    write_older(write_new(folder / "new", spec), folder / "older")
    return folder


# Damages


def info(**changes):
    """info.json with these keys."""

    def damage(path):
        content = json.loads((path / INFO).read_text()) | changes
        (path / INFO).write_text(json.dumps({key: value for key, value in content.items() if value != "gone"}))

    return damage


def text(file, content):
    return lambda path: (path / file).write_text(content)


def cut(file, share=0.5):
    def damage(path):
        content = (path / file).read_bytes()
        (path / file).write_bytes(content[: int(share * len(content))])

    return damage


def gone(file):
    return lambda path: (path / file).unlink()


def rows(file, change):
    """A parquet file with other columns."""

    def damage(path):
        table = pq.read_table(path / file).to_pydict()
        pq.write_table(pa.table(change(table)), path / file)

    return damage


def cell(name, value, row=0):
    """A column with another value in one row."""

    def change(table):
        return table | {name: [value if number == row else old for number, old in enumerate(table[name])]}

    return change


def without(name):
    return lambda table: {key: column for key, column in table.items() if key != name}


def every(name, value):
    return lambda table: table | {name: [value] * len(table[name])}


def first_rows(count):
    return lambda table: {key: column[:count] for key, column in table.items()}


def refused(said, reason, path):
    assert reason in said and "Traceback" not in said and str(path) in said, said
    assert len(said.strip().splitlines()) == 1, said
    return True


def elsewhere(file):
    """A link to a file beside the dataset."""

    def damage(path):
        shutil.move(path / file, path.parent / "elsewhere")
        (path / file).symlink_to(path.parent / "elsewhere")

    return damage


def feature(name, **changes):
    def damage(path):
        content = json.loads((path / INFO).read_text())
        content["features"][name] |= changes
        (path / INFO).write_text(json.dumps(content))

    return damage


def line(file, number, **changes):
    def damage(path):
        lines = [json.loads(each) for each in (path / file).read_text().splitlines()]
        lines[number] |= changes
        (path / file).write_text("".join(json.dumps(each) + "\n" for each in lines))

    return damage
