"""A run that begins with another run's policy."""

import json

import pytest
from safetensors.numpy import load_file

from embodied.config.recipe import load
from embodied.core.errors import ConfigError
from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies import make_policy
from embodied.policies.config import OpenVLAConfig, Pi0Config
from embodied.run.policy_source import check_continues, find_start
from embodied.train import main as train

TINY = [
    "recipe=pointmass_ppo",
    "cluster.backend=inline",
    "env.num_envs=4",
    "policy.hidden=[8]",
    "policy.normalize_observations=true",
    "algo.rollout_decisions=8",
    "algo.minibatch_size=32",
    "run.iterations=1",
    "eval.episodes=2",
    "eval.videos=0",
]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The folder of a run, whose policy later runs begin with."""
    folder = tmp_path_factory.mktemp("first")
    assert train([*TINY, f"run.dir={folder}"]) == 0
    return next(folder.glob("pointmass*"))


def weights(run):
    return load_file(run / "checkpoints/v000001/policy/model.safetensors")


def test_a_run_that_learns_nothing_ends_with_the_weights_it_began_with(first, tmp_path):
    assert train([*TINY, f"run.dir={tmp_path}", f"run.start_from={first}", "algo.lr=0", "seed=9"]) == 0
    (run,) = tmp_path.glob("pointmass*")
    before, after = weights(first), weights(run)
    assert all((before[name] == after[name]).all() for name in before if not name.startswith("normalizer"))
    assert after["normalizer.count"] == 2 * before["normalizer.count"], "its statistics go on"
    assert json.loads((run / "run.json").read_text())["started_from"]["sha256"]


def test_another_policy_is_refused_before_anything_starts(first, tmp_path, capsys):
    wider = [told.replace("hidden=[8]", "hidden=[9]") for told in TINY]
    assert train([*wider, f"run.dir={tmp_path}", f"run.start_from={first}"]) == 2
    assert "policy.hidden=[8] there, [9] here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_run_that_began_from_a_folder_goes_on_and_is_begun_from(tmp_path):
    spec = EnvSpec(ActionSpec(2), images={"top": (64, 64, 3)}, instruction=True)
    run, folder, saved = tmp_path / "run", tmp_path / "published", tmp_path / "saved"
    make_policy(OpenVLAConfig(name="openvla"), spec, 0).save_published(folder)
    loaded = load(["recipe=pointmass_ppo_openvla_tiny", f"policy.pretrained={folder}", "policy.statistics=own"])
    make_policy(loaded.config.policy, spec, 0).save_pretrained(saved)
    run.mkdir()
    (run / "config.yaml").write_text(loaded.yaml)
    check_continues(run, saved, loaded.config)
    other = loaded.config.policy.model_copy(update={"pretrained": "elsewhere"})
    with pytest.raises(ConfigError, match=rf"policy\.pretrained={folder} there, elsewhere here"):
        check_continues(run, saved, loaded.config.model_copy(update={"policy": other}))
    assert find_start(saved, loaded.config.policy).folder == saved
    with pytest.raises(ConfigError, match=rf"policy\.pretrained={saved} there, null here"):
        find_start(saved, loaded.config.policy.model_copy(update={"pretrained": None}))


def test_how_a_policy_learns_may_differ(tmp_path):
    spec = EnvSpec(ActionSpec(3), state_dim=4, images={"top": (16, 16, 3)}, instruction=True)
    there = Pi0Config(name="pi0")
    make_policy(there, spec, 0).save_pretrained(tmp_path)
    here = there.model_copy(update={"train": "expert", "detach_value": True, "noise_level": 0.3, "compile": True})
    assert find_start(tmp_path, here).config == there
    with pytest.raises(ConfigError, match=r"policy.steps=4 there, 2 here"):
        find_start(tmp_path, here.model_copy(update={"steps": 2}))
