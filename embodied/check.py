"""Check an env before training in it: python -m embodied.check env.task=my_tasks:MyTask-v1

Builds the env, lists its observations and options, and plays some episodes to check the contract of envs. For ManiSkill
it also tests whether batched physics gives the same results for this task on this machine.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from pydantic import Field

from embodied import let_call
from embodied.config.command_line import from_python
from embodied.config.recipe import RunConfig, load
from embodied.core.errors import ConfigError, DeadlineExceeded
from embodied.core.options import Strict
from embodied.envs import env_class, interpreter_of
from embodied.envs.config import played_task
from embodied.envs.own_modules import file_name
from embodied.run import launch
from embodied.run.devices import check_simulator, machines
from embodied.run.rehearsal import names_own_objects, try_own_objects

ROWS = 4
STEPS = 8  # random steps between two images
CLOSE_S = 10.0  # seconds to close an env after the limit
TELL_S = 10.0  # between two lines about a step in progress
ATOL = 1e-5  # tolerance: a row's numbers may depend slightly on the rows simulated with it


class Options(Strict):
    images: bool = False
    limit_s: float = Field(1800.0, gt=0, le=1e6)


def main(argv: list[str] | None = None) -> int:
    return launch.run(find, argv)


def call(*words: str | Mapping[str, Any]) -> dict[str, str]:
    """Check an env from Python, like the command: `embodied.check("env.name=my_envs:A")`. Returns findings by topic.
    Raises an error if the env breaks the contract."""
    return find(from_python(words))


def find(argv: list[str]) -> dict[str, str] | None:
    """Check the env's tasks and print the findings; None for --help and --cfg."""
    options, rest = launch.own_options(Options, argv)
    loaded = load(["run.iterations=1", *rest], entry="check")
    if loaded is None:
        return None
    for line in launch.notes(loaded):
        print(line)
    kind = env_class(loaded.config.env)
    with bounded(options.limit_s) as stage:
        for task in kind.tasks(loaded.config.env) if not kind.mixes_tasks else [loaded.config.env.task]:
            check(loaded.config.with_values("env", task=task), stage, options.images)
    return stage.findings


class OutOfTime(BaseException):
    """The time limit is over. A BaseException, so that an env's `except Exception` does not catch it."""


@dataclass
class CheckStage:
    """The check's current step, and its findings by topic."""

    doing: str = "loading the env"
    findings: dict[str, str] = field(default_factory=dict)

    def show(self, name: str, text: str) -> None:
        """Print a finding; without a name it belongs to the last one."""
        topic = name or [*self.findings][-1]
        self.findings[topic] = "\n".join(filter(None, [self.findings.get(topic), text]))
        launch.say("\n".join(wrap(f"{name:<11} {text}", launch.WIDTH, subsequent_indent=" " * 12)))

    def print_progress(self, over: threading.Event) -> None:
        """Print the step in progress and the time since the start now and then, until it is `over`."""
        begun = time.monotonic()
        while not over.wait(TELL_S):
            launch.say(f"... {time.monotonic() - begun:.0f} s: {self.doing}")


@contextmanager
def bounded(limit_s: float) -> Iterator[CheckStage]:
    """Inside, raise DeadlineExceeded with the current step after `limit_s`; end the process if an env does not return
    to Python."""
    stage = CheckStage()

    def limit_message(where: str) -> str:
        return f"not finished after limit_s={limit_s:g} seconds, while {stage.doing}{where}; try a larger limit_s"

    def give_up(_: int, frame: Any) -> None:
        raise OutOfTime(limit_message(f", at {frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""))

    def end() -> None:
        print(f"error: {limit_message(', which cannot be interrupted')}", file=sys.stderr, flush=True)
        os._exit(DeadlineExceeded.exit_code)

    over = threading.Event()
    threading.Thread(target=stage.print_progress, args=(over,), daemon=True).start()
    last, before = threading.Timer(limit_s + CLOSE_S, end), signal.signal(signal.SIGALRM, give_up)
    last.daemon = True
    last.start()
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield stage
    except OutOfTime as err:
        raise DeadlineExceeded(str(err)) from None
    finally:
        over.set()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        last.cancel()


def check(config: RunConfig, stage: CheckStage, images: bool = False) -> None:
    """Print the findings about one task, line by line; with `images`, write the policy's images."""
    kind = env_class(config.env)
    check_simulator(config, machines(config))
    kind.check(config.env)
    task = played_task(config.env.name, config.env.task)
    stage.show("task", task)
    for versions in interpreter_of(config.env).values():
        stage.show("interpreter", ", ".join(f"{name} {version}" for name, version in versions.items()))
    if names_own_objects(config, ()) and not kind.speaks:  # a conversation says in which line it hangs
        stage.doing = f"making {task} once, in a process of its own"
        try_own_objects(config, config.env, ())
    if kind.speaks:
        stage.doing = f"holding conversations with {task}"
        return converse(kind, config.env, launch.proofs(config), stage)
    from embodied.envs.env_checker import check_vector_env

    stage.doing = f"building {task}"
    with kind.explain_errors(config.env):
        env = kind(kind.plain_config(config.env), ROWS)
        try:
            for name, text in {**env.facts(), **describe_env(env)}.items():
                stage.show(name, text)
            if images:
                stage.show("images", write_images(env, config.run.dir / "images" / file_name(str(config.env.task))))
            if problem := env.video_problem():
                stage.show("video", f"none can be made here: {problem}")
            stage.doing = f"playing episodes of {task} to see whether it keeps the contract"
            check_vector_env(env, ATOL)
            tested = ["resets", "ends", "chunks"] + ["frames"] * (not problem) + ["saved states"] * env.saves_state
            kept = f"{', '.join(tested[:-1])} and {tested[-1]} are as they have to be"
            stage.show("contract", f"kept, with {ROWS} envs: {kept}")
        finally:
            env.close()
    stage.doing = f"playing {task} in a batch and as single envs, to compare them"
    for number, line in enumerate(kind.prove(config.env, launch.proofs(config))):
        stage.show("" if number else "physics", line)


def write_images(env: Any, folder: Path) -> str:
    """Write the images of every camera and row, at reset and after some random steps. Returns a line with their
    folder."""
    from PIL import Image

    spec = env.env_spec
    if not spec.images:
        how = (
            "name some with env.cameras=[...]"
            if hasattr(env.config, "cameras")
            else "EnvSpec(images=...) declares them"
        )
        raise ConfigError(f"images=true: no camera is observed; {how}")
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    begun = env.reset(seed=0)[0]
    chosen = rng.integers(spec.action.num_choices or 1, size=(ROWS, STEPS, spec.action.dim))
    moved = rng.uniform(-1, 1, (ROWS, STEPS, spec.action.dim)).astype(np.float32)
    later = env.step_chunk(chosen if spec.action.discrete else moved).obs
    for when, obs in (("begin", begun), (f"after-{STEPS}-steps", later)):
        for camera, seen in obs["images"].items():
            for row, image in enumerate(np.asarray(seen)):
                Image.fromarray(image).save(folder / f"{file_name(camera)}-{row}-{when}.png")
    return f"what a policy sees, {2 * ROWS * len(spec.images)} PNG files: {folder}"


def converse(kind: Any, env: Any, folder: Path, stage: CheckStage) -> None:
    """Print a text env's messages, and whether it keeps its contract."""
    from embodied.envs.text.text_env_checker import check_text_env

    seen = check_text_env(kind, env)
    turns, held_out = kind.longest_episode(env), kind.held_out(env)
    stage.show("said", seen.said)
    stage.show("solution", "not known: there is nothing to imitate" if seen.solution is None else repr(seen.solution))
    stage.show("turns", f"at most {turns} answer{'s' * (turns > 1)} in a conversation")
    stage.show("held out", f"{held_out} prompt{'s' * (held_out > 1)} for evaluations")
    kept = "prompts, odd answers, rewards and ends are as they have to be"
    stage.show("contract", f"kept, with {seen.conversations} conversations: {kept}")
    for remark in kind.remarks(env, folder):
        stage.show("note", remark)


def describe_env(env: Any) -> dict[str, str]:
    """The env's observations, actions, episode length and success, as text."""
    spec = env.env_spec
    action = f"{spec.action.num_choices} choices" if spec.action.discrete else f"{spec.action.dim} numbers from -1 to 1"
    parts = [f"state of {spec.state_dim} numbers"] * bool(spec.state_dim)
    parts += [f"{spec.privileged_dim} numbers for the learner only"] * bool(spec.privileged_dim)
    parts += [f"images of {camera} {list(shape)}" for camera, shape in spec.images.items()]
    parts += ["an instruction"] * spec.instruction
    unknown = "not reported: evaluations report returns only, and env.reward=success cannot be trained with"
    return {
        "observed": ", ".join(parts),
        "actions": action,
        "episodes": f"at most {spec.max_episode_steps} env steps here",
        "success": "reported in every step" if spec.has_success else unknown,
    }


let_call(__name__)
if __name__ == "__main__":
    raise SystemExit(main())
