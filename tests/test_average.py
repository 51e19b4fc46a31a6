"""algo.average: evaluations play the mean of the last weights, checkpoints hold it, and training does not notice."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied import evaluate
from embodied.algorithms.config import PPOConfig
from embodied.learners.model import PolicyOptimizer
from embodied.policies.policy_folder import AVERAGE, POLICY, read_weights
from embodied.runtime.collective import Alone
from embodied.train import main

SHORT = [
    *("eval.episodes=4", "eval.videos=0", "run.iterations=3", "run.save_every=1", "run.eval_every=2", "run.keep=null"),
    "run.env_steps=null",
]
ROBOTS = ["recipe=pointmass_ppo", "env.num_envs=8", "env.max_episode_steps=8", "algo.rollout_decisions=16"]
ROBOTS = [*ROBOTS, "algo.minibatch_size=32", "algo.lr=0.01", *SHORT, "cluster.backend=inline"]
LANGUAGE = ["recipe=sums_grpo", "run.start_from=null", "algo.groups=2", "env.num_envs=16", "algo.filter=none", *SHORT]
LANGUAGE += ["algo.entropy_coef=0.01"]  # all answers of an untrained model are wrong
SHARDED = [
    "learner.shard=true",
    "policy.dtype=bfloat16",
    'placement={sim: "cpu:0", policy: "cpu:0", learner: "cpu:0-1*2"}',
]


def trained(folder: Path, *words: str) -> Path:
    given = {word.partition("=")[0]: word for word in words}  # a later one counts
    assert main([*given.values(), f"run.dir={folder}"]) == 0
    (run,) = folder.iterdir()
    return run


def weights(run: Path, version: int, part: str) -> dict[str, np.ndarray]:
    return read_weights(run / "checkpoints" / f"v{version:06d}" / part)


def losses(run: Path) -> list[list[float]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [[row[name] for name in sorted(row) if name.startswith("train/") and name != "train_s"] for row in rows]


def results(run: Path, evaluation: str) -> dict:
    return json.loads((run / "eval" / evaluation / "results.json").read_text())


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(ROBOTS, id="robots"),
        pytest.param([*ROBOTS, "pipeline.schedule=async", "pipeline.async_level=2"], id="async"),
        pytest.param([*LANGUAGE, "cluster.backend=inline"], id="language"),
        pytest.param([*LANGUAGE, *SHARDED], id="shards", marks=pytest.mark.slow),
    ],
)
def test_the_mean_is_evaluated_and_saved_and_training_goes_on_with_the_weights(words, tmp_path):
    run, plain = trained(tmp_path / "mean", *words, "algo.average=2"), trained(tmp_path / "plain", *words)
    rounded = 1e-2 if SHARDED[1] in words else 1e-5  # two runs of language engines are equal up to rounding
    for row, other in zip(losses(run), losses(plain), strict=True):
        np.testing.assert_allclose(row, other, rtol=rounded, atol=1e-4)
    mean: dict[str, np.ndarray] = {}
    for version in range(1, 4):
        now, kept = weights(run, version, POLICY), weights(run, version, AVERAGE)
        trains = [name for name in now if name.endswith(("weight", "bias", "log_std"))]
        for name in trains:
            np.testing.assert_allclose(now[name], weights(plain, version, POLICY)[name], rtol=rounded, atol=1e-4)
            mean[name] = now[name] if version == 1 else mean[name] + (now[name] - mean[name]) / min(version, 2)
            np.testing.assert_allclose(kept[name], mean[name], rtol=rounded, atol=rounded)
        assert all(np.array_equal(now[name], kept[name]) for name in now.keys() - {*trains})
    assert any(not np.array_equal(now[name], kept[name]) for name in now)
    assert evaluate.main([f"checkpoint={run}", "eval.episodes=4", "eval.videos=0", "cluster.backend=inline"]) == 0
    of_run, by_hand = results(run, "v000003"), results(run, "v000003-evaluate")
    assert Path(of_run["policy"]["folder"]).name == Path(by_hand["policy"]["folder"]).name == AVERAGE
    assert of_run["overall"]["return"] == pytest.approx(by_hand["overall"]["return"], rel=1e-4)


def test_a_resumed_run_goes_on_with_its_mean(tmp_path):
    whole = trained(tmp_path / "whole", *ROBOTS, "algo.average=4")
    part = trained(tmp_path / "part", *ROBOTS, "algo.average=4", "run.iterations=2")
    assert main([f"resume={part}", "run.iterations=3"]) == 0
    for name, mean in weights(whole, 3, AVERAGE).items():
        np.testing.assert_array_equal(weights(part, 3, AVERAGE)[name], mean)


class Linear(torch.nn.Linear):
    def parameter_groups(self):
        return {"policy": [*self.parameters()], "value": []}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_is_kept_in_float32_and_shown_and_hidden_without_a_trace(dtype, tmp_path):
    torch.manual_seed(0)
    policy = Linear(3, 2).to(dtype)
    optimizer = PolicyOptimizer(policy, PPOConfig(average=10), Alone())
    optimizer.show_mean(True)  # there is none yet
    seen = []
    for number in range(4):
        for master in optimizer.masters:
            master.add_(0.1)
        for p, master in zip(optimizer.params, optimizer.masters, strict=True):
            p.data.copy_(master)
        seen.append([master.clone() for master in optimizer.masters])
        optimizer.add_to_mean(1 / (number + 1))
    before = [p.clone() for p in optimizer.params]
    optimizer.show_mean(True)
    for place, p in enumerate(optimizer.params):
        mean = torch.stack([masters[place] for masters in seen]).mean(0)
        torch.testing.assert_close(p.detach().float(), mean, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)
    optimizer.show_mean(False)
    assert all(torch.equal(p, old) for p, old in zip(optimizer.params, before, strict=True))
    optimizer.save(tmp_path / "learner")
    other = PolicyOptimizer(Linear(3, 2).to(dtype), PPOConfig(average=10), Alone())
    other.load(tmp_path / "learner")
    without = PolicyOptimizer(Linear(3, 2).to(dtype), PPOConfig(), Alone())
    without.load(tmp_path / "learner")
    assert {key.rpartition("/")[2] for key, _ in other.state_tensors()} > {"mean"}
    assert "mean" not in {key.rpartition("/")[2] for key, _ in without.state_tensors()}
