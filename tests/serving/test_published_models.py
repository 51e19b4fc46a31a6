"""Serving a folder as others publish it: the protocol is chosen, told and kept, and no simulator is needed."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from served_robot import served

from embodied import serve
from embodied.core.robot_messages import pack_typed, unpack
from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies import make_policy
from embodied.policies.openvla.config import OpenVLAConfig, OpenVLAOFTConfig
from embodied.policies.pi0.config import Pi0Config
from embodied.policies.pi0.policy import TIED, TINY, WORDS
from embodied.policies.policy_folder import CONFIG, WEIGHTS
from embodied.serving.config import ServeConfig

CAMERAS = ["agentview", "wrist"]
SPEC = EnvSpec(ActionSpec(7), state_dim=8, images=dict.fromkeys(CAMERAS, (64, 64, 3)), instruction=True)
RANGES = {"q01": [-0.9] * 7, "q99": [0.9] * 7, "mask": [True] * 6 + [False]}
FELT = {"q01": [-1.0] * 8, "q99": [1.0] * 8}
FIGURES = {key: [0.1 + (key in ("std", "q99"))] * 8 + [0.0] * 24 for key in ("mean", "std", "q01", "q99")}


def publish(folder, config, layout="openpi"):
    made = make_policy(config, SPEC, 0)
    if layout == "lerobot":
        return publish_lerobot(folder, made)
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


def publish_lerobot(folder, made):
    folder.mkdir()
    weights = {f"model.{TIED if name == WORDS else name}": w for name, w in made.model.state_dict().items()}
    save_file(weights, folder / WEIGHTS)
    variants = {key: TINY[key] for key in ("paligemma_variant", "action_expert_variant")}
    sizes = {"chunk_size": 8, "n_action_steps": 4, "num_inference_steps": 3, "max_action_dim": 8, "max_state_dim": 32}
    (folder / CONFIG).write_text(json.dumps({"type": made.config.name, **sizes, **variants}))
    step = {"registry_name": "normalizer_processor", "state_file": "policy_preprocessor_step_5.safetensors"}
    (folder / "policy_preprocessor.json").write_text(json.dumps({"steps": [step]}))
    told = {"observation.state": 8, "action": 7}
    figures = {f"{part}.{key}": numbers[:count] for part, count in told.items() for key, numbers in FIGURES.items()}
    save_file({name: torch.tensor(numbers) for name, numbers in figures.items()}, folder / step["state_file"])
    return folder


@pytest.mark.parametrize(
    ("config", "layout", "keys", "cameras", "felt", "chunk"),
    [
        (OpenVLAConfig(name="openvla", camera="agentview"), "", "gripper=libero", CAMERAS[:1], None, 1),
        (OpenVLAOFTConfig(name="openvla_oft", head="l1", proprio=True), "", "crop_area=0.9", CAMERAS, 8, 8),
        (Pi0Config(name="pi0"), "openpi", "relative_actions=6", CAMERAS, 8, 5),
        (Pi0Config(name="pi05"), "lerobot", "chunk=4", CAMERAS, 8, 4),
    ],
)
def test_a_published_folder_is_asked_as_its_authors_do(config, layout, keys, cameras, felt, chunk, tmp_path, capsys):
    folder = publish(tmp_path / "there", config, layout)
    asked = ["env.name=libero", "env.task=libero_spatial"]
    policy = serve.load(ServeConfig(checkpoint=str(folder)), [*asked, "policy.dtype=float32"])
    told = capsys.readouterr().out
    assert keys in told and "env.mirrored=true" in told and f"from {folder}" in told
    assert "relative_actions" not in told or layout == "openpi"  # lerobot's actions are as they are,
    assert layout != "lerobot" or (policy.config.state_in_prompt and policy.horizon == 8)  # and its Pi0.5 reads states
    assert layout != "lerobot" or policy.config.steps == 3
    spec = policy.spec
    assert (list(spec.images), spec.state_dim, spec.action.dim) == (cameras, felt, 7)
    frames = {name: np.full((1, 48, 48, 3), 99, np.uint8) for name in cameras}
    obs = {"images": frames, "state": np.zeros((1, 8), np.float32), "instruction": ["pick it up"]}
    noise = np.full((1, policy.noise_spec().width), 0.5)
    assert policy.act(obs, noise, 0.0).actions.shape == (1, chunk, 7)
    pytest.importorskip("msgpack")
    client = pytest.importorskip("websockets.sync.client")
    with served(policy) as (address, _), client.connect(address) as connection:  # and as vla-eval's SimplerEnv does
        greeting = unpack(connection.recv(timeout=60))["payload"]["observation_params"]
        assert (greeting.get("send_wrist_image", False), greeting.get("send_state", False)) == (
            len(cameras) > 1,
            felt is not None,
        )
        pictures = dict(zip(("primary", "wrist_of_it"), (frame[0] for frame in frames.values()), strict=False))
        asked = {"images": pictures, "states": obs["state"][0], "task_description": "pick it up", "task_name": "x"}
        connection.send(pack_typed("observation", asked, 7))
        answer = unpack(connection.recv(timeout=60))
    assert answer["seq"] == 7 and answer["payload"]["actions"].shape == (7,)


def test_a_policy_on_the_hub_is_served_like_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    config = OpenVLAConfig(name="openvla", camera="agentview")
    for repository, save in (("ours", make_policy(config, SPEC, 3).save_pretrained), ("others", None)):
        folder = tmp_path / f"models--lab--{repository}"
        save(folder / "snapshots" / "0123abc") if save else publish(folder / "snapshots" / "0123abc", config)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("0123abc")
    ours = serve.load(ServeConfig(checkpoint="lab/ours"), [])
    assert torch.equal(ours.value_head[0].weight, make_policy(config, SPEC, 3).value_head[0].weight)
    told = ["env.name=libero", "env.task=libero_spatial", "policy.dtype=float32"]
    others = serve.load(ServeConfig(checkpoint="lab/others"), told)
    assert others.data_set == "libero_spatial" and "models--lab--others" in capsys.readouterr().out
