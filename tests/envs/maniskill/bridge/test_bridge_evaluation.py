"""A folder as others publish OpenVLA, evaluated on a bridge twin: the protocol is chosen and printed, and it plays."""

import json

import pytest
from bridge_files import needs

from embodied.core.types import ActionSpec, EnvSpec
from embodied.evaluate import main
from embodied.policies import make_policy
from embodied.policies.openvla.config import OpenVLAConfig, OpenVLAOFTConfig

TASK = "PutCarrotOnPlateInScene-v1"
SPEC = EnvSpec(ActionSpec(7), images={"3rd_view_camera": (224, 224, 3)}, instruction=True)
RANGE = {"q01": [-0.03] * 3 + [-0.1] * 3 + [0.0], "q99": [0.03] * 3 + [0.1] * 3 + [1.0], "mask": [True] * 6 + [False]}
pytestmark = [needs(TASK), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def published(tmp_path):
    def write(config):
        folder = tmp_path / "model"
        make_policy(config, SPEC, 0).save_published(folder)
        about = json.loads((folder / "config.json").read_text())
        about["norm_stats"] = {name: {"action": RANGE} for name in ("bridge_orig", "fractal20220817_data")}
        (folder / "config.json").write_text(json.dumps(about))
        return folder

    return write


def told(out):
    return dict(line.strip().split("=", 1) for line in out.splitlines() if line.strip().startswith(("policy.", "env.")))


def test_the_protocol_of_the_bridge_is_chosen_and_printed(published, capsys):
    folder = published(OpenVLAConfig(name="openvla"))
    assert main([f"checkpoint={folder}", f"env.task={TASK}", "--dry-run"]) == 0
    keys = told(capsys.readouterr().out)
    assert keys["policy.statistics"] == "bridge_orig" and keys["policy.gripper"] == "bridge"
    assert keys["env.cameras"] == "[3rd_view_camera]" and "224" in keys["env.image_size"]
    assert "env.action_units" not in keys  # metres and radians


@pytest.mark.parametrize("family", [pytest.param("openvla", marks=[pytest.mark.slow]), "openvla_oft"])
def test_a_published_model_plays_the_carrot_task(family, published, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    kind = {"openvla": OpenVLAConfig, "openvla_oft": OpenVLAOFTConfig}[family]
    folder = published(kind(name=family))
    few = ["eval.episodes=2", "eval.videos=0", "env.num_envs=2", "env.max_episode_steps=10", "cluster.backend=inline"]
    assert main([f"checkpoint={folder}", f"env.task={TASK}", f"policy.name={family}", *few]) == 0
    (results,) = tmp_path.rglob("results.json")
    found = json.loads(results.read_text())
    assert found["protocol"]["name"] == "bridge-v1" and found["overall"]["episodes"] == 2
    assert found["overall"]["success_once"]["rate"] == 0  # random weights
