"""LeRobot's layouts 2.0 and 2.1 are read and learned from as 3.0 is, also under other names of features."""

import json
import shutil

import numpy as np
import pytest

pytest.importorskip("pyarrow")
import pyarrow.parquet as pq
from written_datasets import CAMERA, INFO, LEARN, SEEN, SPEC, written

from embodied.core.errors import ConfigError
from embodied.core.types import ActionSpec, EnvSpec
from embodied.datasets import read_dataset
from embodied.datasets.quantiles import main as figures
from embodied.policies import make_policy
from embodied.policies.openvla.config import OpenVLAOFTConfig
from embodied.sft import main as sft


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return written(tmp_path_factory.mktemp("sound"), SPEC)


@pytest.fixture(scope="module")
def filmed(tmp_path_factory):
    return written(tmp_path_factory.mktemp("filmed"), SEEN)


def same(one, other):
    assert (one.task, one.index, one.actions.tolist()) == (other.task, other.index, other.actions.tolist())
    assert np.array_equal(one.obs["state"], other.obs["state"]) and one.columns.keys() == other.columns.keys()


def test_episodes_are_those_of_the_newer_layout(filmed):
    ours, theirs = read_dataset(filmed / "older"), read_dataset(filmed / "new")
    assert len(ours) == 3 and [len(episode) for episode in ours] == [6, 9, 7]
    for one, other in zip(ours, theirs, strict=True):
        same(one, other)
        seen, wanted = (episode.obs["images"]["front"].astype(int) for episode in (one, other))
        assert seen.shape == wanted.shape and np.abs(seen - wanted).max() <= 6  # encoded twice


def test_its_figures_are_counted_for_models_that_want_quantiles(sound, tmp_path, capsys):
    path = shutil.copytree(sound / "older", tmp_path / "toy")
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
    source = filmed / ("new" if newer else "older")
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
    path = rename(shutil.copytree(sound / "older", tmp_path / "toy"))
    told = [*LEARN, f"run.dir={tmp_path / 'runs'}", "eval.episodes=1", "eval.videos=0", f"sft.data={path}"]
    assert sft(told) == 2 and "sft.names={action: NAME}" in capsys.readouterr().err
    assert sft([*told, "sft.names={action: actions, state: state}"]) == 0
    assert figures([str(path), "action=actions", "state=state"]) == 0
    assert {"action", "observation.state"} <= read_dataset(path, names={"action": "actions"}).stats.keys()


@pytest.mark.parametrize("newer", [False, True])
def test_figures_without_quantiles_get_them(sound, tmp_path, newer):
    """As LeRobot 2.0 stores them, and 3.0 did at first."""
    path = shutil.copytree(sound / ("new" if newer else "older"), tmp_path / "toy")
    stats = read_dataset(sound / "new").stats | {"more": {"min": np.array([3.0])}}
    kept = {name: {k: v.tolist() for k, v in each.items() if k[0] != "q"} for name, each in stats.items()}
    (path / "meta/stats.json").write_text(json.dumps(kept))
    spec = EnvSpec(ActionSpec(2), images={"front": (64, 64, 3)}, instruction=True)
    config = OpenVLAOFTConfig(name="openvla_oft", statistics=str(path))
    with pytest.raises(ConfigError, match=r"it has no 'q01'; .*quantiles .* writes it"):
        make_policy(config, spec)
    assert figures([str(path)]) == 0 and make_policy(config, spec).statistics.low.tolist()
    now = json.loads((path / "meta/stats.json").read_text())
    assert now["more"] == {"min": [3.0]} and "q01" in now["action"]
