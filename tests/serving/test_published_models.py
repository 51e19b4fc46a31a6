"""Serving a folder as others publish it: the protocol is chosen, told and kept, and no simulator is needed."""

import json

import numpy as np
import pytest
from safetensors.torch import save_file

from embodied import serve
from embodied.data import ActionSpec, EnvSpec
from embodied.errors import ConfigError
from embodied.policies import make_policy
from embodied.policies.config import OpenVLAConfig, OpenVLAOFTConfig, Pi0Config
from embodied.policies.folder import CONFIG, WEIGHTS
from embodied.policies.pi0.folder import TIED
from embodied.policies.pi0.network import WORDS
from embodied.policies.pi0.settings import TINY
from embodied.serving.config import ServeConfig

CAMERAS = ["agentview", "wrist"]
SPEC = EnvSpec(ActionSpec(7), state_dim=8, images=dict.fromkeys(CAMERAS, (64, 64, 3)), instruction=True)
RANGES = {"q01": [-0.9] * 7, "q99": [0.9] * 7, "mask": [True] * 6 + [False]}
FELT = {"q01": [-1.0] * 8, "q99": [1.0] * 8}
FIGURES = {key: [0.1 + (key in ("std", "q99"))] * 8 + [0.0] * 24 for key in ("mean", "std", "q01", "q99")}


def publish(folder, config):
    made = make_policy(config, SPEC, 0)
    if config.name == "pi0":
        (folder / "assets" / "libero").mkdir(parents=True)
        save_file({TIED if name == WORDS else name: w for name, w in made.model.state_dict().items()}, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(TINY))
        figures = {"state": FIGURES, "actions": {key: numbers[:7] for key, numbers in FIGURES.items()}}
        (folder / "assets" / "libero" / "norm_stats.json").write_text(json.dumps({"norm_stats": figures}))
        return folder
    made.save_published(folder)
    content = json.loads((folder / CONFIG).read_text())
    content["norm_stats"] = {f"libero_{name}": {"action": RANGES, "proprio": FELT} for name in ("goal", "spatial")}
    (folder / CONFIG).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("config", "keys", "cameras", "felt", "chunk"),
    [
        (OpenVLAConfig(name="openvla", camera="agentview"), "gripper=libero", CAMERAS[:1], None, 1),
        (OpenVLAOFTConfig(name="openvla_oft", head="l1", proprio=True), "crop_area=0.9", CAMERAS, 8, 8),
        (Pi0Config(name="pi0"), "relative_actions=6", CAMERAS, 8, 5),
    ],
)
def test_a_published_folder_is_asked_as_its_authors_do(config, keys, cameras, felt, chunk, tmp_path, capsys):
    folder = publish(tmp_path / "there", config)
    asked = ["env.name=libero", "env.task=libero_spatial"]
    policy = serve.load(ServeConfig(checkpoint=str(folder)), [*asked, "policy.dtype=float32"])
    told = capsys.readouterr().out
    assert keys in told and "env.mirrored=true" in told and f"from {folder}" in told
    spec = policy.spec
    assert (list(spec.images), spec.state_dim, spec.action.dim) == (cameras, felt, 7)
    frames = {name: np.full((1, 48, 48, 3), 99, np.uint8) for name in cameras}
    obs = {"images": frames, "state": np.zeros((1, 8), np.float32), "instruction": ["pick it up"]}
    noise = np.full((1, policy.noise_spec().width), 0.5)
    assert policy.act(obs, noise, 0.0).actions.shape == (1, chunk, 7)


def test_a_published_folder_does_not_say_for_which_env(tmp_path):
    folder = publish(tmp_path / "there", OpenVLAConfig(name="openvla", camera="agentview"))
    with pytest.raises(ConfigError, match=r"env\.name=libero"):
        serve.load(ServeConfig(checkpoint=str(folder)), [])


def test_a_protocol_is_only_for_published_folders(tmp_path):
    make_policy(OpenVLAConfig(name="openvla", camera="agentview"), SPEC, 0).save_pretrained(tmp_path / "ours")
    with pytest.raises(ConfigError, match=r"env\.name=libero has no effect"):
        serve.load(ServeConfig(checkpoint=str(tmp_path / "ours")), ["env.name=libero"])
