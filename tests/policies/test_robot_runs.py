"""Whole training runs of tiny published families in one process: a toy env, its images and its instruction."""

import json
from importlib.util import find_spec

import numpy as np
import pytest
from bridge_files import needs
from episode_files import check_same_episodes
from tiny_vla import build, change_json, metrics_of

from embodied import collect, evaluate, sft, train
from embodied.core.types import ActionSpec, EnvSpec

INLINE = ["cluster.backend=inline", "placement=collocated", "env.num_envs=4", "eval.episodes=2", "eval.videos=0"]
PPO = ["algo.rollout_decisions=4", "algo.minibatch_size=8"]
GRPO = ["algo={name: grpo, groups: 2, group_size: 2, minibatch_size: 4, filter: none}"]
SHORT = [*INLINE, "run.iterations=2", "env.max_episode_steps=6"]
OPENVLA, PI0 = "recipe=pointmass_ppo_openvla_tiny", "recipe=pointmass_ppo_pi0_tiny"
OFT, FEW = "recipe=pointmass_grpo_openvla_oft_tiny", ["algo.groups=2", "algo.group_size=2", "algo.filter=none"]
SMOL = [PI0, "policy.name=smolvla", "policy.chunk=4", "policy.steps=2"]


def trained(folder, *told, rewarded=True):
    """The run of this command, and its rows. Groups without a reward have no gradient."""
    assert train.main([*told]) == 0
    run = max((path.parent for path in folder.glob("runs/*/metrics.jsonl")), key=lambda run: run.stat().st_mtime)
    rows = metrics_of(run)
    assert max(row["train/logprob_gap"] for row in rows) < 1e-4
    norms = [row["train/grad_norm"] for row in rows]
    assert np.isfinite(norms).all() and (not rewarded or min(norms) > 0)
    return run, rows


@pytest.mark.parametrize("told", [[OPENVLA, "policy.temperature=1.6"], [PI0]], ids=["openvla", "pi0"])
def test_a_run_of_a_published_family_and_its_checkpoint_evaluate_alike(told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run, rows = trained(tmp_path, told[0], *SHORT, *PPO, *told[1:])
    assert all(np.isfinite(row["train/value_loss"]) for row in rows)
    assert ", random weights (tiny)\n" in capsys.readouterr().out
    assert evaluate.main([f"checkpoint={run}", "eval.videos=0", "cluster.backend=inline"]) == 0
    assert f", weights of {run / 'checkpoints' / 'v000002' / 'policy'}\n" in capsys.readouterr().out
    check_same_episodes(run / "eval" / "v000002", run / "eval" / "v000002-evaluate", rel=1e-5)


slow = pytest.mark.slow
needs_maniskill = pytest.mark.skipif(find_spec("mani_skill") is None, reason="needs ManiSkill")
BRIDGE = ["recipe=maniskill_grpo_openvla_oft_tiny", *FEW, "env.reward=own", "env.reward_mode=normalized_dense"]


@pytest.mark.parametrize(
    "told",
    [
        [PI0, *PPO, "policy.name=pi05", "policy.exploration=flow_noise", "policy.train=expert"],
        [OFT, *FEW, "algo.minibatch_size=2", "algo.logprob_level=action_dim", "policy.temperature=1.6"],
        pytest.param(
            [OFT, *FEW, "algo.logprob_level=action", "policy.head=l1", "algo.kl_coef=0.1", "policy.lora_rank=2"],
            marks=slow,
        ),
        pytest.param(
            [OFT, *FEW, "algo.logprob_level=chunk", "policy.film=true", "algo.kl_coef=0.1", "policy.proprio=false"],
            marks=slow,
        ),
        pytest.param(BRIDGE, marks=[slow, needs_maniskill]),
    ],
)
def test_published_families_train_with_other_options(told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, rows = trained(tmp_path, told[0], *SHORT, *told[1:])
    if "algo.kl_coef=0.1" in told:
        assert rows[-1]["train/reference_kl"] != 0


@pytest.mark.parametrize(
    ("told", "ways"),
    [
        ([*SMOL, "policy.statistics=demos"], [PPO, GRPO]),
        pytest.param([PI0, "policy.statistics=demos"], [PPO], marks=slow),
        pytest.param([OPENVLA], [PPO], marks=slow),
        pytest.param([OFT, "policy.chunk=4", "policy.head=l1", "policy.proprio=true"], [FEW], marks=slow),
        pytest.param([OFT, "policy.chunk=4", "policy.proprio=true", "policy.lora_rank=4"], [FEW], marks=slow),
    ],
    ids=["smolvla", "pi0", "openvla", "l1", "adapters"],
)
def test_a_policy_learns_from_demonstrations_and_continues_with_rl_without_them(told, ways, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    usual = [*told[:1], *INLINE, "env.max_episode_steps=8", *told[1:]]
    assert collect.main([PI0, *INLINE[:3], "out=demos", "collect.episodes=3"]) == 0
    assert sft.main([*usual, "sft.data=demos", "sft.epochs=6", "sft.minibatch_size=8", "sft.lr=1e-3"]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    losses = [row["train/loss"] for row in metrics_of(run)]
    assert losses[-1] < 0.9 * losses[0]
    (tmp_path / "demos").rename(tmp_path / "gone")
    told = [option for option in usual if not option.startswith("policy.statistics")]
    for way in ways:
        trained(tmp_path, *told, *way, "run.iterations=1", f"run.start_from={run}")


def publish(folder, name):
    """A model of random weights as others publish theirs, trained on two data sets."""
    spec = EnvSpec(ActionSpec(7), images={"camera": (64, 64, 3)}, instruction=True)
    build(name, spec=spec).save_published(folder)
    low, high = [-0.03] * 3 + [-0.1] * 3 + [0.0], [0.03] * 3 + [0.1] * 3 + [1.0]
    ranges = {"action": {"q01": low, "q99": high, "mask": [True] * 6 + [False]}}
    change_json(folder / "config.json", norm_stats={"bridge_orig": ranges, "another": ranges})
    return folder


@slow
@needs("PutOnPlateInScene25Main-v3")
@pytest.mark.parametrize(
    ("recipe", "name", "few"),
    [
        ("maniskill_ppo_openvla", "openvla", ["algo.rollout_decisions=4", "pipeline.stages=1"]),
        ("maniskill_grpo_openvla_oft", "openvla_oft", ["algo.groups=1", *FEW[1:2], "policy.lora_path=null"]),
    ],
)
def test_recipes_at_full_size_train_a_small_model_that_is_published_alike(recipe, name, few, tmp_path, monkeypatch):
    told = [f"policy.pretrained={publish(tmp_path / 'published', name)}", "policy.dtype=float32", "env.image_size=64"]
    told.append("policy.preset=tiny")  # else its memory is planned for a model of full size
    monkeypatch.chdir(tmp_path)
    short = ["run.iterations=1", "run.env_steps=null", "env.num_envs=1", "env.max_episode_steps=8", "eval.episodes=1"]
    short += ["algo.minibatch_size=2", "cluster.backend=inline", "eval.videos=0"]
    run, _ = trained(tmp_path, f"recipe={recipe}", *told, *few, *short, rewarded="ppo" in recipe)
    (report,) = run.glob("eval/*/results.json")
    assert list(json.loads(report.read_text())["per_task"]) == ["PutOnPlateInScene25Main-v3"]
