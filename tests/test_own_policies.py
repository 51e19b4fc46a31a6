"""A policy class of the user's own, with parameters and buffers, that of docs/own_policy.md: every way to name it."""

import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from embodied import collect, evaluate, report, serve, train
from embodied.core.errors import ConfigError
from embodied.policies import load_policy
from embodied.records.results import read_results
from embodied.serving.config import ServeConfig

ROOT = Path(__file__).parents[1]
PAGES = "".join((ROOT / "docs" / f"{page}.md").read_text() for page in ("own_task", "own_policy"))
INLINE = ["cluster.backend=inline"]  # where it is no matter that hosts find the class
ONE_HOST = "placement={'sim,policy': cpu:0, learner: cpu:0}"
SHORT = ["run.iterations=2", "eval.episodes=4", "eval.videos=0"]
NORMALISED = '''
"""The page's policy with an observation normaliser, a count that is no float, and a mask."""
import numpy as np
import torch

import my_nets
from embodied.policies.networks import ObservationNormalizer, state_moments


class Normalised(my_nets.Linear):
    def __init__(self, config, spec):
        super().__init__(config, spec)
        self.normalizer = ObservationNormalizer(spec.state_dim)
        self.register_buffer("merged", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(spec.state_dim, dtype=torch.bool))

    def normal(self, obs):
        return {**obs, "state": self.normalizer(torch.as_tensor(np.array(obs["state"]))).numpy()}

    def act(self, obs, noise, temperature=1.0):
        return super().act(self.normal(obs), noise, temperature)

    def value(self, obs):
        return super().value(self.normal(obs))

    def observation_moments(self, obs):
        return state_moments(obs["state"])

    def merge_observation_moments(self, rows):
        self.normalizer.merge(rows)
        self.merged += 1
        self.seen.fill_(True)
'''


@pytest.fixture(autouse=True)
def mine(monkeypatch, tmp_path):
    """The files of both pages in a folder of the user's, who works there."""
    for kind, text in re.findall(r"^```(python|yaml)\n(.*?)^```", PAGES, re.M | re.S):
        assert kind
        (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
    (tmp_path / "normalised.py").write_text(NORMALISED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("my_nets", "my_sims", "normalised", "my_seeing", "watched_seeing"):
        sys.modules.pop(name, None)


def run(command, *arguments, code=0):
    assert command.main(list(arguments)) == code


def trained(*more):
    run(train, "recipe=my_linear.yaml", *SHORT, *more)
    return max(Path("runs").glob("my_linear-*"), key=lambda path: path.stat().st_mtime)


@pytest.mark.parametrize("policy", [pytest.param("my_nets:Linear", marks=pytest.mark.slow), "normalised:Normalised"])
def test_an_own_policy_is_evaluated_like_in_its_run_and_begins_others(policy, capsys):
    first = trained(f"policy.name={policy}", "policy.kwargs={std: 0.3}", "run.save_every=1")
    run(evaluate, f"checkpoint={first}", "eval.episodes=4", "eval.videos=0")
    during = (first / "eval/v000002/episodes.csv").read_bytes()
    assert (first / "eval/v000002-evaluate/episodes.csv").read_bytes() == during
    begun = trained(f"policy.name={policy}", "policy.kwargs={std: 0.3}", f"run.start_from={first}", *INLINE)
    assert json.loads((begun / "run.json").read_text())["started_from"]["family"] == policy
    run(train, f"resume={first}", "run.iterations=3", *INLINE)
    run(report, str(first))
    assert "v000003" in capsys.readouterr().out


def test_a_policy_folder_runs_no_code_that_only_it_names(monkeypatch, capsys):
    """On the hub, or copied out of its run: the module in the working directory is imported once the user names it."""
    first = trained(*INLINE)
    bare = Path("from_a_stranger").resolve()
    (first / "checkpoints" / "v000002" / "policy").rename(bare)
    Path("my_nets.py").write_text(Path("my_nets.py").read_text() + "\nprint('the stranger runs')\n")
    named, few = "policy.name=my_nets:Linear", ["env.name=pointmass", "eval.episodes=2", "eval.videos=0", *INLINE]

    def forget():
        sys.modules.pop("my_nets", None)
        capsys.readouterr()

    for module in ("policies.hub", "run.policy_source"):
        monkeypatch.setattr(f"embodied.{module}.fetch", lambda name: bare)
    for checkpoint in (str(bare), "lab/policy"):
        forget()
        run(evaluate, f"checkpoint={checkpoint}", *few, code=2)
        run(serve, f"checkpoint={checkpoint}", code=2)
        with pytest.raises(ConfigError, match="add its name: load_policy"):
            load_policy(bare)
        out, err = capsys.readouterr()
        assert "the stranger runs" not in out and err.count(f"add {named}") == 2
        run(evaluate, f"checkpoint={checkpoint}", named, *few)
        assert "the stranger runs" in capsys.readouterr().out
    forget()
    assert serve.load(ServeConfig(checkpoint=str(bare)), [named]).spec.state_dim == 6
    assert load_policy(bare, "my_nets:Linear").spec.state_dim == 6
    run(evaluate, "checkpoint=random", named, *few, code=2)
    assert "policy.name=my_nets:Linear has no effect" in capsys.readouterr().err


def test_an_own_class_without_a_checkpoint_plays_with_the_weights_a_run_would_begin_with(capsys):
    few = ["recipe=my_linear.yaml", *INLINE, "eval.episodes=4", "eval.videos=0"]
    run(evaluate, "checkpoint=[my_nets:Linear,random]", *few)
    found, episodes = read_results(Path("runs/compare/Linear"))
    assert found["policy_version"] == 0 and not any(episode.error for episode in episodes)
    run(train, *few, "run.iterations=1", "algo.lr=1e-30")
    (same,) = Path("runs").glob("my_linear-*/eval/v000001")
    assert np.allclose([one.total_reward for one in read_results(same)[1]], [one.total_reward for one in episodes])


def test_options_of_an_own_policy_come_from_the_recipe_or_the_command_line(capsys):
    sampled = ["recipe=my_linear.yaml", *INLINE, "eval.temperature=1", "eval.episodes=4", "eval.videos=0"]
    rewards = []
    for options in ([], ["policy.kwargs={std: 0.3}"], ["policy.kwargs={std: 0.9}"]):
        run(evaluate, "checkpoint=my_nets:Linear", *sampled, *options, f"run.dir=runs/{len(rewards)}")
        rewards.append([one.total_reward for one in read_results(Path(f"runs/{len(rewards)}/evaluate-Linear"))[1]])
    assert rewards[0] == rewards[1] != rewards[2]
    run(evaluate, "checkpoint=my_nets:Linear", *sampled, "policy.hidden=[8]", code=2)
    assert "policy.hidden is a key of policy.name=mlp" in capsys.readouterr().err
    run(evaluate, "checkpoint=random", *sampled, "policy.kwargs={std: 0.3}", code=2)
    assert "policy.kwargs has no effect in evaluate" in capsys.readouterr().err


def test_episodes_of_an_own_policy_become_demonstrations():
    pytest.importorskip("pyarrow")
    what = ["checkpoint=my_nets:Linear", "recipe=my_linear.yaml", "collect.episodes=2", "collect.keep=all"]
    run(collect, *what, *INLINE, "out=demos")
    assert json.loads(Path("demos/meta/source.json").read_text())["policy"]["family"] == "my_nets:Linear"


BROKEN = '''
import numpy as np

import my_nets


class NaN(my_nets.Linear):
    """Gives no usable action for episodes that begin with a high goal."""

    def act(self, obs, noise, temperature=1.0):
        output = super().act(obs, noise, temperature)
        output.actions[obs["state"][:, 1] > self.config.kwargs["above"]] = np.nan
        return output
'''


def test_an_evaluation_of_nothing_but_errors_fails_with_their_cause_and_keeps_what_it_found(tmp_path, capsys):
    (tmp_path / "broken.py").write_text(BROKEN)
    asked = ["checkpoint=broken:NaN", "env.name=my_sims:Lift", ONE_HOST, "eval.episodes=1", "eval.videos=0"]
    run(evaluate, *asked, "policy.kwargs={std: 0.3, above: 0}", code=1)
    told = capsys.readouterr()
    assert "NaN was not evaluated, every episode ended in an error" in told.err
    assert "the policy's actions are NaN or infinite" in told.err and "Traceback" not in told.err
    found, episodes = read_results(Path("runs/evaluate-NaN"))
    assert found["overall"]["errors"] == 1 and len(episodes) == 1 and Path("runs/evaluate-NaN/report.html").is_file()


INCOMPLETE = {
    "Bare": ("pass", "has no method noise_spec and no act"),
    "NotDrawn": ("initialise = Policy.initialise", "has no method initialise (initialise: Draw the initial weights"),
    "Odd": (
        "def __init__(self, *a):\n        super().__init__(*a)\n        self.register_buffer('z', torch.zeros(2) * 1j)",
        "keeps z, which is torch.complex64",
    ),
    "Fixed": (
        "def __init__(self, *a):\n        super().__init__(*a)\n        self.actor = self.critic = None",
        "has no parameters, so there is nothing to train",
    ),
}


@pytest.mark.parametrize("name", INCOMPLETE)
def test_a_mistake_in_an_own_policy_is_named_in_one_line(name, tmp_path, capsys):
    body, told = INCOMPLETE[name]
    base = "Policy" if name == "Bare" else "my_nets.Linear"
    text = f"import torch, my_nets\nfrom embodied.policies.base import Policy\n\n\nclass {name}({base}):\n    {body}\n"
    (tmp_path / "lacking.py").write_text(text)
    sys.modules.pop("lacking", None)
    inline = ["cluster.backend=inline", 'placement={"sim,policy": "cpu:0", learner: "cpu:0"}']
    run(
        train,
        "recipe=my_linear.yaml",
        f"policy.name=lacking:{name}",
        "policy.kwargs={std: 0.3}",
        *SHORT,
        *inline,
        code=2,
    )
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1


WATCHED = '''
"""The page's policy, which writes down what it is shown."""
import json

import my_seeing

SEEN = {}


def kind(part):
    if isinstance(part, dict):
        return {name: kind(one) for name, one in part.items()}
    if isinstance(part, list):
        return ["texts", len(part), type(part[0]).__name__]
    return [type(part).__name__, str(part.dtype), list(part.shape)]


class Watched(my_seeing.Seeing):
    def act(self, obs, noise, temperature=1.0):
        out = super().act(obs, noise, temperature)
        SEEN["act"] = {"obs": kind(obs), "noise": kind(noise), "actions": kind(out.actions), "values": kind(out.values)}
        return out

    def value(self, obs):
        SEEN["value"] = {"obs": kind(obs)}
        return super().value(obs)

    def forward(self, inputs):
        SEEN.setdefault("forward", []).append({"obs": kind(inputs["obs"]), "actions": kind(inputs["actions"])})
        return super().forward(inputs)
'''


def test_observations_are_what_the_page_says():
    Path("watched_seeing.py").write_text(WATCHED)
    (command,) = re.findall(r"^python -m embodied.train (.*my_seeing.*)", PAGES, re.M)
    command = command.replace("my_seeing:Seeing", "watched_seeing:Watched")
    more = ["cluster.backend=inline", "env.image_size=[24,40]", "env.privileged=true"]
    assert train.main([*shlex.split(command), *SHORT, *more]) == 0
    seen = sys.modules["watched_seeing"].SEEN
    rows = seen["act"]["obs"]["state"][2][0]
    wanted = {
        "state": ["ndarray", "float32", [rows, 4]],
        "images": {"top": ["ndarray", "uint8", [rows, 24, 40, 3]]},
        "instruction": ["texts", rows, "str"],
    }
    for_the_critic = {"privileged": ["ndarray", "float32", [rows, 2]]}
    assert wanted.items() <= seen["act"]["obs"].items() <= (wanted | for_the_critic).items()
    assert seen["act"]["noise"][2] == [rows, 2]
    assert seen["act"]["actions"][2] == [rows, 1, 2] and seen["act"]["values"][2] == [rows]
    assert set(seen["value"]["obs"]) == {"state", "images", "instruction", "privileged"}
    assert seen["value"]["obs"]["privileged"][2] == [seen["value"]["obs"]["state"][2][0], 2]
    learned = [one for one in seen["forward"] if one["actions"][2][0] != rows][-1]
    items = learned["actions"][2][0]
    assert learned["obs"]["instruction"] == ["texts", items, "str"]
    assert learned["obs"]["images"]["top"] == ["Tensor", "torch.uint8", [items, 24, 40, 3]]
    assert learned["obs"]["state"] == ["Tensor", "torch.float32", [items, 4]]
