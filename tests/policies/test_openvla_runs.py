"""Whole training runs of the tiny preset in one process: a toy env, its images and its instruction."""

import json
from importlib.util import find_spec

import numpy as np
import pytest
from bridge_files import needs
from episode_files import check_same_episodes

from embodied import collect, evaluate, sft, train
from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies import make_policy
from embodied.policies.config import OpenVLAConfig, OpenVLAOFTConfig

SHORT = (
    "recipe=pointmass_ppo_openvla_tiny run.iterations=2 env.num_envs=4 algo.rollout_decisions=4 "
    "algo.minibatch_size=8 cluster.backend=inline eval.episodes=2 eval.videos=0"
).split()


def test_it_trains_and_its_checkpoint_evaluates_alike(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main([*SHORT, "env.max_episode_steps=6", "policy.temperature=1.6"]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row["train/logprob_gap"] for row in rows) < 1e-4
    assert all(row["train/grad_norm"] > 0 and np.isfinite(row["train/value_loss"]) for row in rows)
    assert ", random weights (tiny)\n" in capsys.readouterr().out
    assert evaluate.main([f"checkpoint={run}", "eval.videos=0", "cluster.backend=inline"]) == 0
    assert f", weights of {run / 'checkpoints' / 'v000002' / 'policy'}\n" in capsys.readouterr().out
    check_same_episodes(run / "eval" / "v000002", run / "eval" / "v000002-evaluate", rel=1e-5)


OFT = (
    "recipe=pointmass_grpo_openvla_oft_tiny run.iterations=2 env.num_envs=4 env.max_episode_steps=6 algo.groups=2 "
    "algo.group_size=2 algo.filter=none algo.minibatch_size=2 cluster.backend=inline eval.episodes=2 eval.videos=0"
).split()


@pytest.mark.parametrize(
    "options",
    [
        ["algo.logprob_level=action_dim", "policy.temperature=1.6"],
        pytest.param(
            ["algo.logprob_level=action", "policy.head=l1", "algo.kl_coef=0.1", "policy.lora_rank=2"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["algo.logprob_level=chunk", "policy.film=true", "algo.kl_coef=0.1", "policy.proprio=false"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["recipe=maniskill_grpo_openvla_oft_tiny", "env.reward=own", "env.reward_mode=normalized_dense"],
            marks=[pytest.mark.slow, pytest.mark.skipif(find_spec("mani_skill") is None, reason="needs ManiSkill")],
        ),
    ],
)
def test_chunks_train_at_every_level_and_with_a_reference(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.main([*options[:1], *OFT[1:], *options[1:]] if "recipe" in options[0] else [*OFT, *options]) == 0
    (metrics,) = (tmp_path / "runs").glob("*/metrics.jsonl")  # beside what was found out about the task's physics
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert max(row["train/logprob_gap"] for row in rows) < 1e-4
    assert all(row["train/grad_norm"] > 0 for row in rows)
    if "algo.kl_coef=0.1" in options:
        assert rows[-1]["train/reference_kl"] != 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        ["policy.name=openvla_oft", "policy.chunk=4", "policy.head=l1", "policy.proprio=true"],
        ["policy.name=openvla_oft", "policy.chunk=4", "policy.proprio=true", "policy.lora_rank=4"],
        ["policy.name=openvla"],
    ],
)
def test_each_family_imitates_and_rl_goes_on_from_there(policy, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    assert collect.main([*OFT[:1], "cluster.backend=inline", "out=demos", "collect.episodes=8"]) == 0
    told = ["recipe=pointmass_ppo_openvla_tiny", *OFT[8:], *policy]
    assert sft.main([*told, "sft.data=demos", "sft.epochs=3", "sft.minibatch_size=16", "sft.lr=3e-4"]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    losses = [json.loads(line)["train/loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    short = ["run.iterations=1", "algo.rollout_decisions=4", "env.num_envs=4", "algo.minibatch_size=16"]
    assert train.main([*told, *short, f"run.start_from={run}"]) == 0


def publish(folder, config):
    """A model of random weights as others publish theirs, trained on two data sets."""
    made = make_policy(config, EnvSpec(ActionSpec(7), images={"camera": (64, 64, 3)}, instruction=True), 0)
    made.save_published(folder)
    about = json.loads((folder / "config.json").read_text())
    low, high = [-0.03] * 3 + [-0.1] * 3 + [0.0], [0.03] * 3 + [0.1] * 3 + [1.0]
    ranges = {"action": {"q01": low, "q99": high, "mask": [True] * 6 + [False]}}
    about["norm_stats"] = {"bridge_orig": ranges, "another": ranges}
    (folder / "config.json").write_text(json.dumps(about))
    return folder


@pytest.mark.slow
@needs("PutOnPlateInScene25Main-v3")
@pytest.mark.parametrize(
    ("recipe", "config", "few"),
    [
        ("maniskill_ppo_openvla", OpenVLAConfig(name="openvla"), ["algo.rollout_decisions=4", "pipeline.stages=1"]),
        (
            "maniskill_grpo_openvla_oft",
            OpenVLAOFTConfig(name="openvla_oft"),
            ["algo.groups=1", "algo.group_size=2", "policy.lora_path=null"],
        ),
    ],
)
def test_recipes_at_full_size_train_a_small_model_that_is_published_alike(recipe, config, few, tmp_path, monkeypatch):
    folder = publish(tmp_path / "published", config)
    monkeypatch.chdir(tmp_path)
    told = [f"recipe={recipe}", f"policy.pretrained={folder}", "policy.dtype=float32", "env.image_size=64", *few]
    short = ["run.iterations=1", "run.env_steps=null", "env.num_envs=1", "env.max_episode_steps=8"]
    assert (
        train.main(
            [*told, *short, "algo.minibatch_size=2", "cluster.backend=inline", "eval.episodes=1", "eval.videos=0"]
        )
        == 0
    )
    (run,) = (tmp_path / "runs").iterdir()
    (row,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert row["train/logprob_gap"] < 1e-4
    (report,) = run.glob("eval/*/results.json")
    assert list(json.loads(report.read_text())["per_task"]) == ["PutOnPlateInScene25Main-v3"]
