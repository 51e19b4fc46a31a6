"""docs/published.md: its commands are planned with small folders in official layouts; its numbers are the product's."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_vla import change_json, publish

from embodied.collect import main as collect
from embodied.config.recipe import load
from embodied.config.recipe_files import recipe_names
from embodied.core.types import ActionSpec, EnvSpec
from embodied.evaluate import main as evaluate
from embodied.learners.memory_estimate import Memory
from embodied.policies import make_policy
from embodied.policies.openvla.config import OpenVLAConfig, OpenVLAOFTConfig
from embodied.policies.pi0.config import Pi0Config
from embodied.policies.pi0.policy import TIED, TINY, WORDS
from embodied.run import memory_check, published_models
from embodied.run.published_models import recipes_to_train
from embodied.sft import main as sft
from embodied.train import main as train

PAGE = (Path(__file__).parents[1] / "docs" / "published.md").read_text()
SHELL = "\n".join(re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S))
COMMANDS = re.findall(r"^python -m embodied\.(evaluate|sft|train) (.*)", SHELL, re.M)
MAINS = {"evaluate": evaluate, "sft": sft, "train": train}
VIEWS = {"agentview": (64, 64, 3), "wrist": (64, 64, 3)}
ARM = EnvSpec(ActionSpec(7), state_dim=8, images=VIEWS, instruction=True)
ONE = EnvSpec(ActionSpec(7), images={"agentview": (64, 64, 3)}, instruction=True)
RANGES = {"action": {"q01": [-0.9] * 7, "q99": [0.9] * 7, "mask": [True] * 6 + [False]},
          "proprio": {"q01": [-1.0] * 8, "q99": [1.0] * 8}}  # fmt: skip
FIGURES = {key: [0.1 + (key in ("std", "q99"))] * 8 + [0.0] * 24 for key in ("mean", "std", "q01", "q99")}


def prismatic(folder, config, spec, *data_sets):
    """OpenVLA's layout, with components in .pt files where the model has some."""
    make_policy(config, spec, 0).save_published(folder, shard_bytes=4_000_000)
    for path in folder.glob("*--0_checkpoint.safetensors"):
        torch.save(load_file(path), path.with_suffix(".pt"))
        path.unlink()
    content = json.loads((folder / "config.json").read_text())
    content.pop("openvla_oft", None)
    (folder / "config.json").write_text(json.dumps(content | {"norm_stats": dict.fromkeys(data_sets, RANGES)}))


def pi(folder, name, below):
    """openpi's PyTorch layout, with statistics in the folder `below`."""
    made = make_policy(Pi0Config(name=name), ARM, 0)
    (folder / below).mkdir(parents=True)
    weights = {TIED if key == WORDS else key: tensor for key, tensor in made.model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(TINY))
    figures = {"state": FIGURES, "actions": {key: numbers[:7] for key, numbers in FIGURES.items()}}
    (folder / below / "norm_stats.json").write_text(json.dumps({"norm_stats": figures}))


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A working directory with every folder that the page names."""
    root = tmp_path_factory.mktemp("published")
    models = root / "models"
    plain, oft = OpenVLAConfig(name="openvla"), OpenVLAOFTConfig(name="openvla_oft", head="l1", proprio=True)
    prismatic(models / "openvla-spatial", plain, ONE, "libero_spatial")
    prismatic(models / "openvla-bridge", plain, ONE, "bridge_orig")
    prismatic(models / "openvla-7b", plain, ONE, "bridge_orig", "fractal")
    prismatic(models / "oft-spatial", oft, ARM, "libero_spatial_no_noops")
    for name, data in {"oft-traj1": "libero_10_no_noops", "oft-bridge": "bridge_orig"}.items():
        prismatic(models / name, OpenVLAOFTConfig(name="openvla_oft"), ONE, data)
    pi(models / "pi0-sft", "pi0", "physical-intelligence/libero")
    pi(models / "pi05-libero", "pi05", "assets/physical-intelligence/libero")
    change_json(publish(models / "smolvla", "smolvla", ARM) / "config.json", chunk_size=50, n_action_steps=1)
    made = ["recipe=pointmass_ppo", f"out={root / 'demos' / 'libero'}", "collect.episodes=10", "env.num_envs=2"]
    assert collect([*made, "cluster.backend=inline"]) == 0
    meta = root / "demos" / "libero" / "meta"  # by the names that openpi's data set has
    content, figures = (json.loads((meta / name).read_text()) for name in ("info.json", "stats.json"))
    features = content["features"]
    for ours, theirs, width in (("action", "actions", 7), ("observation.state", "state", 8)):  # as wide as LIBERO's
        features[theirs] = features.pop(ours) | {"shape": [width], "names": None}
        figures[theirs] = {key: (numbers * width)[:width] for key, numbers in figures.pop(ours).items()}
    features |= {key: {"dtype": "image", "shape": [256, 256, 3], "names": None} for key in ("image", "wrist_image")}
    (meta / "info.json").write_text(json.dumps(content))
    (meta / "stats.json").write_text(json.dumps(figures))
    return root


@pytest.mark.parametrize(("command", "told"), COMMANDS)
def test_a_command_of_the_page_can_be_planned(command, told, here, monkeypatch, capsys):
    pytest.importorskip("libero")
    pytest.importorskip("mani_skill")
    from embodied.envs.maniskill.bridge import put_on_plate

    with_all = put_on_plate.variants  # the textures of their 16 objects have 0.6 GB
    monkeypatch.setattr(
        put_on_plate,
        "variants",
        lambda which: {name: replace(each, objects=(0,)) for name, each in with_all(which).items()},
    )
    monkeypatch.chdir(here)
    counted = Memory(7, 1, weights=15e9, training=1e9, activations=1e9)  # which takes seconds for each of these
    monkeypatch.setattr(
        memory_check, "measured_memory", lambda config, _: counted if memory_check.is_large(config) else None
    )
    words = shlex.split(told)
    assert MAINS[command](words if "--dry-run" in words else [*words, "--dry-run"]) == 0, capsys.readouterr().err
    planned = capsys.readouterr().out
    assert "models/" in planned
    assert "cluster.machines=8xH100" not in words or "learner on gpu:0-7" in planned, "all that the command names"


def test_the_page_names_every_family_and_every_published_recipe():
    assert {command for command, _ in COMMANDS} == {"evaluate", "sft", "train"}
    named = {word.partition("=")[2] for _, told in COMMANDS for word in told.split() if word.startswith("recipe=")}
    assert {recipe for model in published_models.published_models().values() for recipe in model.train} <= named


def test_the_models_have_recipes_and_stand_in_the_page():
    for model in published_models.published_models().values():
        assert {model.evaluate, *model.train} <= {*recipe_names()} and model.source
        assert set(model.train) <= set(recipes_to_train(model.evaluate))
        assert load([f"recipe={model.evaluate}"], entry="evaluate").config.policy.name == model.family
        row = re.search(rf"^\| `{model.name}` \|.*", PAGE, re.M)
        assert row, model.name
        for suite, rate in model.rates.items():
            assert model.hub_id(suite) in PAGE.replace("SUITE", suite.replace("_", "-")), model.hub_id(suite)
            assert f"{rate:g}" in row[0]
