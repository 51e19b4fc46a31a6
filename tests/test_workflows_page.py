"""The page on workflows of one's own: its programs run as printed, and a role of one's own is a role like ours."""

import json
import os
import re
import shlex
from collections import defaultdict
from importlib import import_module

import numpy as np
import pytest
from pages import Page, apart, newest

import embodied
from embodied import train
from embodied.config.recipe import load
from embodied.envs import import_class
from embodied.learners import learner_worker
from embodied.placement.topology import one_machine
from embodied.policies.policy_folder import read_weights
from embodied.run import launch
from embodied.sharing.runs import placement_for
from embodied.workflows import roles_of_run
from embodied.workflows.rl_loop import EmbodiedLoop

PAGE = Page("workflows.md")
PROGRAMS = {name: text for name, text in PAGE.files.items() if name.endswith(".py")}
INLINE, LOCAL, RAY, MODE, TRAIN, RESUME, EVALUATE, BENCHMARK, PLAN, *ROLES = (
    line for kind, text in PAGE.blocks if kind == "bash" for line in text.splitlines()
)
SHORT = ["env.num_envs=4", "algo.rollout_decisions=8", "algo.minibatch_size=16", "run.env_steps=null"]
SHORT += ["env.max_episode_steps=6", "eval.episodes=2", "eval.videos=0"]
PLANTED = """
import os, signal
import numpy as np
from my_reward import *

class Redness(RewardWorker):
    def worth(self, part):
        (images,) = part.obs["images"].values()
        return torch.from_numpy(redness(images).ravel())

    def learn(self, parts):
        return 0.0

class Fragile(RewardWorker):
    calls = 0

    def relay(self, parts):
        self.calls += 1
        if self.calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().relay(parts)

def redness(images):
    return (images[..., 0] - images[..., 1].astype(np.float64)).mean((1, 2)) / 255

class RednessLoop(ScoredLoop):
    roles = (*EmbodiedLoop.roles, Role("reward", "planted:Redness", arguments, relays=True))

class KilledSimLoop(ScoredLoop):
    def iterate(self, iteration, total):
        if iteration == 1:
            os.kill(self.workers.sims.process().wait()[0][1], signal.SIGKILL)
        return super().iterate(iteration, total)

class FragileLoop(ScoredLoop):
    roles = (*EmbodiedLoop.roles, Role("reward", "planted:Fragile", arguments, relays=True, saved=True))
"""


def test_roles_of_a_recipe_are_placed_and_shared(tmp_path):
    found = []
    for command in ROLES:
        loaded = load(shlex.split(command)[3:])
        _, plan = launch.planned(loaded.config, dry=True, roles=roles_of_run(EmbodiedLoop, loaded.config))
        found.append({role for host in plan.hosts for role in host.roles} - {"sim", "policy", "learner"})
        told = placement_for(loaded.config, one_machine((0, 1, 2, 3)), ["cpu:0", "cpu:1"], [["cpu:0"], ["cpu:1"]], 0)
        assert {role for key in told for role in key.split(",")} == {role for host in plan.hosts for role in host.roles}
    assert found == [{"critic"}, {"reward", "judge"}, {"reference"}, {"reward", "judge", "reference", "critic"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder with the programs of the page, and a scorer whose numbers are known."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "planted.py").write_text(PLANTED)
    return PAGE.write(folder)


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


def options_of(command, replaced):
    """The options of a command of the page that none of `replaced` sets anew."""
    keys = {word.partition("=")[0] for word in replaced}
    return [word for word in shlex.split(command)[3:] if word.partition("=")[0] not in keys]


def metrics(folder, name):
    return [json.loads(line) for line in (newest(folder, name) / "metrics.jsonl").read_text().splitlines()]


def test_both_programs_have_at_most_sixty_lines():
    for text in PROGRAMS.values():
        assert len([line for line in text.splitlines() if line.strip()]) <= 60
        ours = re.findall(r"^from embodied import (.*)$", text, re.M)
        assert {*", ".join(ours).split(", ")} <= {*embodied.__all__}
        modules = re.findall(r"^from embodied\.(\w+)\.(\w+) import", text, re.M)
        assert all(name in import_module(f"embodied.{package}").__all__ for package, name in modules)


def found(told):
    assert re.search(r"found \[ 2.9\d+ -2.0\d+\]", told), told
    return told.partition("found")[2]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the page uses two cores")
def test_the_workflow_finds_the_same_in_one_process_and_in_three(folder):
    assert found(apart(INLINE, folder)) == found(apart(LOCAL, folder)) == found(apart(MODE, folder))


@pytest.mark.slow
def test_the_workflow_finds_the_same_on_ray(folder):
    assert found(apart(RAY, folder)) == found(apart(INLINE, folder))


def learned(here, name, *options):
    """The weights and the reward network's state after a run in this process."""
    words = [word for word in shlex.split(TRAIN)[3:] if not word.startswith(("placement=", "run.name="))]
    assert train.main([*words, *SHORT, "cluster.backend=inline", f"run.name={name}", *options]) == 0
    return state_of(here, name)


def state_of(here, name):
    checkpoint = max(newest(here, name).glob("checkpoints/v*"))
    with np.load(checkpoint / "sims.npz") as arrays:
        kept = {key: arrays[key] for key in arrays.files if key.startswith("reward-0.")}
    return read_weights(checkpoint / "policy") | kept


def test_a_resumed_run_goes_on_with_the_reward_network_as_it_was(here, capsys):
    whole = learned(
        here, "whole", "run.iterations=4", "placement={sim: fake:0, policy: fake:1, 'reward,learner': fake:2}"
    )
    half = learned(
        here, "half", "run.iterations=2", "placement={sim: fake:0, policy: fake:1, 'reward,learner': fake:2}"
    )
    told = capsys.readouterr().out
    assert "1 x reward + learner on fake:2" in told and "reward: pass_rollouts" in told
    command = re.findall(r"resume +(python -m .*half.*)", told)[-1]
    assert "embodied.train program=my_reward:ScoredLoop resume=" in command
    assert train.main([*shlex.split(command)[3:], "run.iterations=4"]) == 0
    resumed = state_of(here, "half")
    assert any(name.startswith("reward-0.optimizer.") for name in whole)
    assert all(np.array_equal(whole[name], resumed[name]) for name in whole)
    assert not all(np.array_equal(whole[name], half[name]) for name in whole if name.startswith("reward-0.net"))
    losses = [row["reward/loss"] for row in metrics(here, "half")]
    assert losses == [row["reward/loss"] for row in metrics(here, "whole")] and len(losses) == 4


APART = {"sim": "fake:0-1*2", "policy": "fake:2", "reward": "fake:3", "learner": "fake:4"}
TWO_REWARDS = {"sim": "fake:0", "policy": "fake:1", "reward": "fake:2-3", "learner": "fake:4-5"}
ONE_LEARNER = {"sim": "fake:0-1", "policy": "fake:1", "reward": "fake:2-3", "learner": "fake:4"}


def test_learners_see_the_numbers_of_the_reward_workers_wherever_these_run(here, monkeypatch):
    redness = import_class("planted:redness", "program")
    seen = []
    build = learner_worker.build_batch

    def watched(trajectory, *about):
        seen.append(trajectory)
        return build(trajectory, *about)

    monkeypatch.setattr(learner_worker, "build_batch", watched)
    rewards, weights = {}, {}
    for name, placement in {"apart": APART, "two": TWO_REWARDS, "one": ONE_LEARNER}.items():
        seen.clear()
        exact = ["env.dtype=float64", "policy.dtype=float64", "run.iterations=3", "program=planted:RednessLoop"]
        weights[name] = learned(here, name, *exact, f"placement={json.dumps(placement)}")
        rows = defaultdict(list)
        for piece in seen:
            np.testing.assert_allclose(piece.rewards[..., 0], redness(piece.obs["images"]["top"]), rtol=0, atol=1e-9)
            for env, played in zip(piece.ids.tolist(), np.split(piece.rewards, np.cumsum(piece.lengths)[:-1])):
                rows[env].append(played)
        rewards[name] = np.array([np.concatenate(rows[env]) for env in range(4)])
    assert rewards["apart"].dtype == np.float64 and rewards["apart"].std() > 0
    for name in ("two", "one"):
        np.testing.assert_allclose(rewards[name], rewards["apart"], rtol=0, atol=1e-9)
        for key, weight in weights["apart"].items():
            np.testing.assert_allclose(weights[name][key], weight, rtol=0, atol=1e-9, err_msg=key)


def test_several_reward_workers_learn_what_one_learns(here):
    one = learned(here, "together", "run.iterations=2", f"placement={json.dumps(APART)}")
    two = learned(here, "shared", "run.iterations=2", f"placement={json.dumps(TWO_REWARDS)}")
    nets = [name for name in one if name.startswith("reward-0.net")]
    assert nets
    for name in nets:
        np.testing.assert_allclose(two[name], one[name], rtol=0, atol=1e-4)


def test_a_killed_reward_worker_ends_the_run_with_its_cause_and_the_resume_command(here, capsys):
    more = "program=planted:FragileLoop run.name=killed run.save_every=1 run.iterations=5 faults.max_restarts=0".split()
    more += ["placement={'sim,policy': cpu:0, reward: cpu:0, learner: cpu:0}"]
    assert train.main([*options_of(TRAIN, more), *SHORT, *more]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "reward-0" in told and "SIGKILL" in told
    assert "python -m embodied.train program=planted:FragileLoop resume=" in told
    assert json.loads((newest(here, "killed") / "run.json").read_text())["state"] == "failed"
    assert len(metrics(here, "killed")) == 2


def test_a_killed_simulator_is_replaced_where_a_mode_has_placed_the_reward_workers(here, capsys):
    more = ["program=planted:KilledSimLoop", "run.name=survives", "run.iterations=3", "placement=collocated"]
    assert train.main([*options_of(TRAIN, more), *SHORT, *more]) == 0
    told = capsys.readouterr().out
    assert "is started again (restart 1" in told and "learner + reward" in told
    assert len(metrics(here, "survives")) == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the page uses two cores")
def test_the_commands_train_resume_evaluate_benchmark_and_plan_with_four_roles(folder):
    told = apart(TRAIN, folder, *SHORT, "run.iterations=3")
    assert "1 x reward on core 1" in told and "reward: pass_rollouts" in told
    assert "reward" in (newest(folder, "scored") / "report.html").read_text()
    assert "resumed from" in apart(RESUME, folder, "run.env_steps=null", "run.iterations=5")
    assert "success_once" in apart(EVALUATE, folder, "eval.episodes=2")
    told = apart(
        BENCHMARK, folder, *SHORT, "run.iterations=1", "modes=[collocated]", "rounds=1", "seconds=8", "out=bench"
    )
    assert "collocated" in told and re.search(r"at work: sim .*, policy .*, learner .*, reward \d+%", told)
    assert "reward" in apart(PLAN, folder, *SHORT, "run.iterations=1")
