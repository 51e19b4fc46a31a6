"""Simulators in an interpreter of their own: the same results as in process, and its failures."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import bare_environment
import numpy as np
import pytest
from pydantic import TypeAdapter

from embodied.core.arrays import leaves
from embodied.core.errors import ConfigError, DeadlineExceeded, Unusable
from embodied.core.types import EpisodeSpec
from embodied.envs import check_vector_env, env_class, make_env
from embodied.envs.config import EnvConfig
from embodied.envs.interpreter.env import Process, of_child

ROWS = 4
OWN = """
import os, sys
import gymnasium, numpy as np
from gymnasium import spaces
print("the own env is here")
if "{fault}":
    print("it ends at once", file=sys.stderr)
    os._exit(3)

class Own(gymnasium.Env):
    observation_space = spaces.Box(-2, 2, (2,), np.float32)
    action_space = spaces.Box(-0.1, 0.1, (1,), np.float32)
    def __init__(self, start=1.0):
        self.start = start
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-self.start, self.start)
        return np.array([self.place, os.getpid() * 0], np.float32), {{}}
    def step(self, action):
        self.place += action[0]
        return np.array([self.place, 1], np.float32), -abs(self.place), False, False, {{}}
"""
ENVS = {
    "pointmass": {"name": "pointmass", "cameras": ["top"], "image_size": 96, "instruction": True},
    "gym": {"name": "gym:CartPole-v1"},
    "own": {"name": "own_env:Own", "max_episode_steps": 20, "kwargs": {"start": 0.5}},
}


def config(python=sys.executable, **options):
    return TypeAdapter(EnvConfig).validate_python({**options, "python": python})


@pytest.fixture
def own_env(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(fault="", module="own_env"):
        Path(f"{module}.py").write_text(OWN.format(fault=fault))

    yield write
    sys.modules.pop("own_env", None)


def played(env):
    """All that an env returns in a few decisions."""
    action, rng = env.env_spec.action, np.random.default_rng(0)
    episodes = [EpisodeSpec("any", -1, seed, seed) for seed in range(ROWS)]
    yield from leaves(env.reset(options={"episodes": episodes})[0])
    for _ in range(30):
        if action.discrete:
            actions = rng.integers(action.num_choices, size=(ROWS, 3, 1))
        else:
            actions = rng.uniform(-1, 1, (ROWS, 3, action.dim)).astype(np.float32)
        result = env.step_chunk(actions)
        yield from leaves(result.obs)
        yield from (result.rewards, result.terminated, result.truncated, result.mask)


@pytest.fixture(params=["bare", *(pytest.param(name, marks=pytest.mark.slow) for name in ("another", "3.9"))])
def python(request, tmp_path_factory):
    """Interpreters that have numpy and gymnasium and nothing else: of these versions, of others, and Python 3.9."""
    made_with = shutil.which("python3.9") if request.param == "3.9" else sys.executable
    folder = tmp_path_factory.getbasetemp() / f"venv-{request.param}"
    if not folder.exists() and request.param == "bare":
        bare_environment.make(folder)
    elif not folder.exists():
        if not made_with or subprocess.run([made_with, "-m", "venv", folder], check=False, timeout=120).returncode:
            pytest.skip("no such Python here")  # or a shim of one
        pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", "gymnasium==1.1.1", "numpy==1.26.4"]
        if subprocess.run(pip, check=False, timeout=300).returncode:
            pytest.skip("the packages cannot be installed here")
    return str(folder / "bin" / "python")


@pytest.mark.parametrize("name", ENVS)
def test_an_env_in_its_own_interpreter_gives_the_same_numbers(name, own_env, python):
    own_env()
    there = config(python, **ENVS[name])
    here = there.model_copy(update={"python": None})
    assert env_class(there).protocols(there) == env_class(here).protocols(here)
    env, same = make_env(there, ROWS), make_env(here, ROWS)
    assert env.env_spec == same.env_spec
    for one, other in zip(played(env), played(same), strict=True):
        np.testing.assert_array_equal(one, other)
    check_vector_env(env)
    env.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_libero_in_its_own_interpreter_gives_the_same_numbers_and_pictures():
    there = config(name="libero", cameras=["agentview", "wrist"], image_size=64, task=["libero_goal/3", "libero_10/0"])
    env, same = make_env(there, 2), make_env(there.model_copy(update={"python": None}), 2)
    assert env.env_spec == same.env_spec
    drawn = [EpisodeSpec(task, -1, 7, at) for at, task in enumerate(there.task)]
    stored = [EpisodeSpec(task, 25, 7, at) for at, task in enumerate(there.task)]
    rng = np.random.default_rng(0)
    for episodes in (drawn, stored):
        for one, other in zip(*(leaves(each.reset(options={"episodes": episodes})[0]) for each in (env, same))):
            np.testing.assert_array_equal(one, other)
        for _ in range(5):
            actions = rng.uniform(-1, 1, (2, 4, 7)).astype(np.float32)
            here, apart = same.step_chunk(actions), env.step_chunk(actions)
            for one, other in zip(leaves(apart.obs), leaves(here.obs), strict=True):
                np.testing.assert_array_equal(one, other)
            np.testing.assert_array_equal(apart.rewards, here.rewards)
    np.testing.assert_array_equal(env.render_rows(np.arange(2)), same.render_rows(np.arange(2)))
    env.close()
    same.close()


def test_tensors_are_refused_in_a_line(own_env):
    Path("tensor_env.py").write_text(TENSORS)
    env = make_env(config(name="tensor_env:Tensors"), ROWS)
    with pytest.raises(Exception, match="tensors cannot leave the simulator's process") as refused:
        env.reset(seed=0)
    assert "\n" not in str(refused.value)


TENSORS = """
import torch
from embodied.core.types import ActionSpec, EnvSpec
from embodied.envs.vector_env import VectorEnv

class Tensors(VectorEnv):
    def __init__(self, config, num_envs):
        super().__init__(config, num_envs, EnvSpec(ActionSpec(1), state_dim=1, max_episode_steps=5, has_success=False))
    def _reset_rows(self, rows, episodes):
        pass
    def _observe(self):
        return {"state": torch.zeros(self.num_envs, 1)}
"""


def test_states_frames_experts_and_rewards_pass_through():
    there = config(name="pointmass", reward="difference", cameras=["near"])
    env, same = make_env(there, ROWS), make_env(there.model_copy(update={"python": None}), ROWS)
    seen = []
    for one in (env, same):
        one.reset(seed=1)
        actions = one.expert().act()[:, None]
        frames = []
        result = one.step_chunk(np.repeat(actions, 3, 1), lambda moved: frames.append(env_frame(one)))  # noqa: B023
        state = one.get_state()
        one.step_chunk(actions)
        again = one.set_state(state)
        seen.append([actions, *frames, result.rewards, *state.values(), *leaves(again), *one.last_step()])
    for one, other in zip(*seen, strict=True):
        np.testing.assert_array_equal(one, other)
    env.close()


def test_the_envs_of_a_worker_share_a_process_until_the_last_is_closed():
    env, other = make_env(config(name="pointmass"), ROWS), make_env(config(name="pointmass"), 2)
    assert env._process is other._process
    assert (len(env.reset(seed=0)[0]["state"]), len(other.reset(seed=0)[0]["state"])) == (ROWS, 2)
    env.close()
    other.step_chunk(np.zeros((2, 1, 2), np.float32))
    other.close()
    assert env._process.process.returncode == -signal.SIGKILL


def env_frame(env):
    return env.render_rows(np.array([0, 2]))


LOADED = """
import importlib, sys
from embodied.envs.config import ENV_CONFIGS
from embodied.envs.interpreter import wire
from embodied.envs.text import text_env
for options in ENV_CONFIGS.values():
    if options.env and not options.speaks:
        importlib.import_module(options.env.partition(":")[0])
print(*(module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "embodied"), sep="\\n")
"""


def later_than_3_9(source):
    """What of a module Python 3.9 cannot read or run."""
    tree = ast.parse(source, feature_version=(3, 9))
    later = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.Match, ast.TryStar))]
    for node in ast.walk(tree):
        for part in ("annotation", "returns"):
            if getattr(node, part, None) is not None:
                setattr(node, part, None)  # never evaluated
    for node in ast.walk(tree):
        kinds = node.args[1:2] if isinstance(node, ast.Call) and getattr(node.func, "id", "") in CHECKS else []
        union = isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)
        if union and any(
            isinstance(side, ast.Subscript) or TYPE.fullmatch(ast.unparse(side)) for side in (node.left, node.right)
        ):
            kinds.append(node)
        later += [ast.unparse(kind) for kind in kinds if isinstance(kind, ast.BinOp)]
        if isinstance(node, ast.keyword) and node.arg in ("slots", "kw_only"):
            later.append(node.arg)
    return later


CHECKS = ("isinstance", "issubclass")
TYPE = re.compile(r"str|int|float|bool|bytes|list|tuple|dict|set|None|(\w+\.)*[A-Z][a-z]\w*")


def test_python_3_9_reads_what_a_simulators_process_loads():
    assert later_than_3_9("a: int | None = 1 | 2") == []
    for text in ("isinstance(1, a | b)", "Both = int | None", "def a(b=list[int] | None): pass"):
        assert later_than_3_9(text)
    files = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True).stdout.split()
    later = {file: found for file in files if (found := later_than_3_9(Path(file).read_text()))}
    assert len(files) > 40 and not later


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file or directory"),
        ("echo hello >&2; exit 4", "is no Python interpreter: .* exit code 4; its last lines: hello"),
        (f'exec {sys.executable} -S "$@"', "lacks numpy or gymnasium"),
        (f"exec {sys.executable} -c 'import os, sys, time; os.write(int(sys.argv[1]), b\"embodied\\n99\\n\"); "
         "time.sleep(60)' $5", "speaks version 99"),
    ],
    ids=["missing", "no_python", "no_gymnasium", "other_version"],
)  # fmt: skip
def test_an_unusable_interpreter_is_refused_in_a_line(tmp_path, text, words):
    python = tmp_path / "python" if text is None else script(tmp_path / "python", text)
    with pytest.raises(ConfigError, match=words) as refused:
        env_class(config(python, name="pointmass"))
    assert "\n" not in str(refused.value)


def test_an_env_that_dies_at_import_shows_its_last_lines(own_env):
    own_env("dies", "dying_env")
    with pytest.raises(Unusable, match=r"exit code 3; its last lines: .*it ends at once"):
        env_class(config(name="dying_env:Own"))


def test_a_text_env_is_refused():
    with pytest.raises(ConfigError, match="is a text env"):
        env_class(config(name="talking_env:Digits"))


def test_a_killed_simulator_is_an_error_after_which_the_worker_is_replaced():
    env = make_env(config(name="pointmass"), ROWS)
    env.reset(seed=0)
    os.kill(env._process.process.pid, signal.SIGKILL)
    with pytest.raises(Unusable, match="died with signal 9"):
        env.step_chunk(np.zeros((ROWS, 1, 2), np.float32))


def test_a_silent_process_is_ended_at_its_deadline():
    there = config(name="pointmass")
    process = Process(there)
    os.kill(process.process.pid, signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded, match=r"within 0.2 seconds"):
        process.call("describe", of_child(there), wait_s=0.2)
    assert process.process.returncode == -signal.SIGKILL


HOST = """
import sys, time
from embodied.envs import make_env
from embodied.envs.pointmass.config import PointMassConfig
env = make_env(PointMassConfig(name="pointmass", python=sys.executable), 2)
print(env._process.process.pid, flush=True)
time.sleep(600)
"""


def test_a_stopped_simulator_dies_with_its_killed_host():
    with subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True) as host:
        child = int(host.stdout.readline())
        os.kill(child, signal.SIGSTOP)
        host.kill()
    until = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < until
