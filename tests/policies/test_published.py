"""Evaluating a folder as others publish it: the protocol is chosen, printed and played."""

import json
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file

from embodied.config.recipe import load
from embodied.core.types import ActionSpec, EnvSpec
from embodied.evaluate import main
from embodied.policies import make_policy
from embodied.policies.config import OpenVLAConfig, OpenVLAOFTConfig

CAMERAS = {"agentview": (64, 64, 3), "wrist": (64, 64, 3)}
SPEC = EnvSpec(ActionSpec(7), state_dim=8, images=CAMERAS, instruction=True)
PLAIN = EnvSpec(ActionSpec(7), images={"agentview": (64, 64, 3)}, instruction=True)
ACTION = {"q01": [-0.9] * 7, "q99": [0.9] * 7, "mask": [True] * 6 + [False]}
PROPRIO = {"q01": [-1.0] * 8, "q99": [1.0] * 8}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One of each family, the second with its parts in .pt files."""
    root = tmp_path_factory.mktemp("published")
    plain, parts = root / "plain", root / "parts"
    make_policy(OpenVLAConfig(name="openvla"), PLAIN, 0).save_published(plain)
    options = {"head": "l1", "proprio": True, "dtype": "bfloat16"}
    make_policy(OpenVLAOFTConfig(name="openvla_oft", **options), SPEC, 0).save_published(parts, shard_bytes=4_000_000)
    for path in parts.glob("*--0_checkpoint.safetensors"):
        torch.save(load_file(path), path.with_suffix(".pt"))
        path.unlink()
    for folder in (plain, parts):
        config = json.loads((folder / "config.json").read_text())
        config.pop("openvla_oft", None)
        config["norm_stats"] = {f"libero_{name}": {"action": ACTION, "proprio": PROPRIO} for name in ("goal", "10")}
        (folder / "config.json").write_text(json.dumps(config))
    more = {"libero_spatial_no_noops": {"action": ACTION, "proprio": PROPRIO}}
    (parts / "dataset_statistics.json").write_text(json.dumps(more))
    return {"openvla": plain, "openvla_oft": parts}


def told(out):
    return dict(line.strip().split("=", 1) for line in out.splitlines() if line.strip().startswith(("policy.", "env.")))


needs_libero = pytest.mark.skipif(find_spec("libero") is None, reason="needs LIBERO")


@needs_libero
def test_the_protocol_of_a_benchmark_is_chosen_and_told(folders, capsys):
    assert (
        main([f"checkpoint={folders['openvla_oft']}", "env.name=libero", "env.task=libero_spatial", "--dry-run"]) == 0
    )
    keys = told(capsys.readouterr().out)
    assert keys["policy.statistics"] == "libero_spatial_no_noops" and keys["policy.gripper"] == "libero"
    assert keys["policy.crop_area"] == "0.9" and keys["policy.cameras"] == "[agentview, wrist]"
    assert keys["policy.rlds_images"] == "true"
    assert keys["env.mirrored"] == "true" and keys["env.cameras"] == "[agentview, wrist]"
    asked = ["env.name=libero", "env.task=libero_goal", "policy.crop_area=1.0", "--dry-run"]
    assert main([f"checkpoint={folders['openvla']}", *asked]) == 0
    keys = told(capsys.readouterr().out)
    assert keys["policy.statistics"] == "libero_goal" and "policy.crop_area" not in keys
    assert keys["policy.rlds_images"] == "true"
    assert keys["env.cameras"] == "[agentview]"


def test_recipes_with_published_settings_have_them():
    for recipe in ("libero_published_openvla", "libero_published_openvla_oft"):
        assert load([f"recipe={recipe}"], entry="evaluate").config.policy.rlds_images
    for recipe in ("libero_grpo_openvla_oft", "maniskill_grpo_openvla_oft"):
        assert load([f"recipe={recipe}"]).config.algo.deviation == "sample"  # RLinf's


@needs_libero
def test_parts_that_are_not_there_change_the_protocol(folders, capsys):
    asked = ["policy.name=openvla_oft", "env.name=libero", "env.task=libero_goal", "--dry-run"]
    assert main([f"checkpoint={folders['openvla']}", *asked]) == 0
    keys = told(capsys.readouterr().out)
    assert keys["policy.cameras"] == "[agentview]" and keys["policy.stop_token"] == "false"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["env.name=pointmass"], "protocols for env.name=libero"),
        ([], "does not say for which env"),
        (["env.name=libero", "policy.statistics=nope"], "there are: libero_10, libero_goal"),
        (["env.name=libero", "env.num_env=3"], "env.num_envs"),
    ],
)
def test_what_is_missing_is_said(folders, options, reason, capsys):
    assert main([f"checkpoint={folders['openvla']}", *options, "--dry-run"]) == 2
    assert reason in capsys.readouterr().err


@needs_libero
def test_a_model_on_the_hub_is_evaluated_like_its_folder(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    here = tmp_path / "models--lab--vla"
    for part in ("refs", "snapshots"):
        (here / part).mkdir(parents=True)
    (here / "refs" / "main").write_text("0123abc")
    (here / "snapshots" / "0123abc").symlink_to(folders["openvla"])
    asked = ["env.name=libero", "env.task=libero_goal", "policy.crop_area=0.8", "--dry-run"]
    assert main(["checkpoint=lab/vla", *asked]) == 0
    keys = told(capsys.readouterr().out)
    assert keys["policy.statistics"] == "libero_goal" and keys["policy.crop_area"] == "0.8"
    for name, reason in (("lab/other", "the Hugging Face hub did not give it"), ("a--b/c", "Cannot have -- or ..")):
        assert main([f"checkpoint={name}", *asked]) == 2
        assert reason in capsys.readouterr().err


@needs_libero
@pytest.mark.slow
def test_a_published_folder_plays_libero(folders, tmp_path, capsys):
    short = ["eval.protocol=as-trained-v1", "env.max_episode_steps=16", "env.fast_images=true", "env.num_envs=1"]
    told = ["env.name=libero", "env.task=libero_spatial/0", "eval.episodes=1", "eval.videos=0", f"run.dir={tmp_path}"]
    assert main([f"checkpoint={folders['openvla_oft']}", *told, *short, "cluster.backend=inline"]) == 0
    (results,) = tmp_path.glob("*/results.json")
    content = json.loads(results.read_text())
    assert content["overall"]["success_once"]["count"] == 0 and content["policy"]["family"] == "openvla_oft"


@needs_libero
def test_a_head_for_actions_without_the_state_is_upstreams_with_its_cameras_and_stop_token(tmp_path, capsys):
    make_policy(OpenVLAOFTConfig(name="openvla_oft", head="l1", proprio=False), SPEC, 0).save_published(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("openvla_oft")
    (tmp_path / "config.json").write_text(json.dumps(config | {"norm_stats": {"libero_goal": {"action": ACTION}}}))
    assert main([f"checkpoint={tmp_path}", "env.name=libero", "env.task=libero_goal", "--dry-run"]) == 0
    keys = told(capsys.readouterr().out)
    assert keys["policy.cameras"] == "[agentview, wrist]" and "policy.stop_token" not in keys
