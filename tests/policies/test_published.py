"""Evaluating a folder as others publish it: the protocol is chosen, printed and played."""

import json
import shutil
from importlib.util import find_spec

import pytest
from tiny_vla import ARM, publish

from embodied.evaluate import main

GOAL = ["env.name=libero", "env.task=libero_goal"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """OpenVLA's, OFT's with its parts in files, OFT's whose statistics have another name, and OFT's without a state."""
    root = tmp_path_factory.mktemp("published")
    folders = {family: publish(root / family, family, ARM) for family in ("openvla", "oft")}
    for folder in folders.values():
        (ranges,) = json.loads((folder / "dataset_statistics.json").read_text()).values()
        names = ("libero_goal", "libero_10", "libero_spatial_no_noops")
        (folder / "dataset_statistics.json").write_text(json.dumps(dict.fromkeys(names, ranges)))
    folders["blind"] = shutil.copytree(folders["oft"], root / "blind")
    (root / "blind" / "proprio_projector--150_checkpoint.pt").unlink()
    return folders


def told(out):
    return dict(line.strip().split("=", 1) for line in out.splitlines() if line.strip().startswith(("policy.", "env.")))


needs_libero = pytest.mark.skipif(find_spec("libero") is None, reason="needs LIBERO")


@needs_libero
@pytest.mark.parametrize(
    ("folder", "asked", "keys"),
    [
        (
            "oft",
            ["env.name=libero", "env.task=libero_spatial"],
            "policy.statistics=libero_spatial_no_noops policy.gripper=libero policy.crop_area=0.9 env.mirrored=true "
            "policy.cameras=[agentview,wrist] policy.rlds_images=true env.cameras=[agentview,wrist]",
        ),
        ("blind", GOAL, "policy.cameras=[agentview,wrist]"),
        (
            "openvla",
            [*GOAL, "policy.crop_area=0.8"],
            "policy.statistics=libero_goal policy.crop_area=0.8 policy.rlds_images=true env.cameras=[agentview]",
        ),
        ("openvla", [*GOAL, "policy.name=openvla_oft"], "policy.cameras=[agentview] policy.stop_token=false"),
    ],
)
def test_the_protocol_of_a_benchmark_or_a_part_of_it_is_chosen_and_printed(folders, folder, asked, keys, capsys):
    assert main([f"checkpoint={folders[folder]}", *asked, "--dry-run"]) == 0
    chosen = told(capsys.readouterr().out)
    expected = dict(key.split("=", 1) for key in keys.split())
    assert {key: chosen.get(key, "").replace(" ", "") for key in expected} == expected
    assert ("policy.stop_token" in chosen) is ("policy.name=openvla_oft" in asked)


@needs_libero
@pytest.mark.slow
def test_a_published_folder_plays_libero(folders, tmp_path, capsys):
    short = ["eval.protocol=as-trained-v1", "env.max_episode_steps=16", "env.fast_images=true", "env.num_envs=1"]
    told = ["env.name=libero", "env.task=libero_spatial/0", "eval.episodes=1", "eval.videos=0", f"run.dir={tmp_path}"]
    assert main([f"checkpoint={folders['oft']}", *told, *short, "cluster.backend=inline"]) == 0
    (results,) = tmp_path.glob("*/results.json")
    content = json.loads(results.read_text())
    assert content["overall"]["success_once"]["count"] == 0 and content["policy"]["family"] == "openvla_oft"
