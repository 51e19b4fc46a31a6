"""RGB LIBERO with action chunks of 8, beside gymnasium's AsyncVectorEnv over LIBERO's own single envs.

    python -m benchmarks.libero_throughput [--task libero_spatial/0] [--envs 2] [--chunks 4] [--rounds 2]

Both sides play the same episodes with the same actions, one process per env, and hand back both cameras where chunks
end, where their pixels must be equal. Sides take turns and never run at once, since each env takes two gigabytes.
CPU seconds are compared as well: they say the same on a machine with other work.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from functools import partial
from statistics import median

import gymnasium
import numpy as np

from benchmarks.common import RESULTS, code_commit, environment, machine, markdown, packages, write_json

CHUNK, SIDE, SETTLING, TIMEOUT_S = 8, 128, 10, 900.0
CAMERAS = {"agentview": "agentview_image", "wrist": "robot0_eye_in_hand_image"}
NO_OP = np.array([0.0, 0, 0, 0, 0, 0, -1])


def actions_of(env: int, chunks: int) -> np.ndarray:
    return np.random.default_rng(env).uniform(-1, 1, (chunks, CHUNK, 7)).astype(np.float32)


class SingleLibero(gymnasium.Env):
    """LIBERO's own env as its users wrap it: stored states, upright images, an observation every step."""

    def __init__(self, task: str, state: int) -> None:
        from libero.libero.envs import OffScreenRenderEnv

        from embodied.envs.libero.tasks import task_files

        files = task_files(task)
        self._state, self._seed = files.initial_states()[state], state
        self._env = OffScreenRenderEnv(bddl_file_name=str(files.bddl), camera_heights=SIDE, camera_widths=SIDE)
        image = gymnasium.spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
        cpu = gymnasium.spaces.Box(0, np.inf, (), np.float64)
        self.observation_space = gymnasium.spaces.Dict({**dict.fromkeys(CAMERAS, image), "cpu_s": cpu})
        self.action_space = gymnasium.spaces.Box(-1, 1, (7,), np.float32)

    def reset(self, *, seed=None, options=None):
        from embodied.envs.libero.scene import Draws

        super().reset(seed=seed)
        with Draws(self._seed).used():
            self._env.reset()
        self._env.set_init_state(self._state)
        for _ in range(SETTLING):
            obs, *_ = self._env.step(NO_OP)
        return self._seen(obs), {}

    def step(self, action):
        obs, reward, done, _ = self._env.step(np.asarray(action, np.float64))
        return self._seen(obs), float(reward), bool(done), False, {}

    def _seen(self, obs):
        return {
            **{name: obs[key][::-1].copy() for name, key in CAMERAS.items()},
            "cpu_s": np.array(time.process_time()),
        }


def gymnasium_side(task: str, envs: int, chunks: int) -> dict:
    vector = gymnasium.vector.AsyncVectorEnv(
        [partial(SingleLibero, task, env) for env in range(envs)], context="spawn", shared_memory=True
    )
    obs, _ = vector.reset()
    actions = np.stack([actions_of(env, chunks) for env in range(envs)], axis=1)
    images, started, before = [], time.perf_counter(), obs["cpu_s"].sum()
    for chunk in actions:
        for step in range(CHUNK):
            obs, *_ = vector.step(chunk[:, step])
        images.append(np.stack([obs[name] for name in CAMERAS]))
    wall_s, cpu_s = time.perf_counter() - started, float(obs["cpu_s"].sum() - before)
    vector.close()
    return {"wall_s": wall_s, "cpu_s": cpu_s, "images": np.array(images)}


def play(task: str, env: int, chunks: int, fast: bool, pipe, together) -> None:
    """One of our processes."""
    from embodied.core.types import EpisodeSpec
    from embodied.envs import make_env
    from embodied.envs.config import LiberoConfig

    options = {"cameras": tuple(CAMERAS), "image_size": SIDE, "fast_images": fast, "on_success": "continue"}
    vector = make_env(LiberoConfig(name="libero", task=task, **options), 1)
    vector.reset(options={"episodes": [EpisodeSpec(task, env, env, env)]})
    together.wait(TIMEOUT_S)
    before = time.process_time()
    for chunk in actions_of(env, chunks):
        images = vector.step_chunk(chunk[None]).obs["images"]
        pipe.send_bytes(np.stack([images[name] for name in CAMERAS]).tobytes())
    pipe.send_bytes(np.array(time.process_time() - before).tobytes())
    vector.close()


def our_side(task: str, envs: int, chunks: int, fast: bool) -> dict:
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(envs + 1)
    pipes, workers = [], []
    for env in range(envs):
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=play, args=(task, env, chunks, fast, theirs, together), daemon=True)
        worker.start()
        pipes.append(ours)
        workers.append(worker)
    together.wait(TIMEOUT_S)
    started = time.perf_counter()
    shape = (len(CAMERAS), 1, SIDE, SIDE, 3)
    images = [
        np.concatenate([np.frombuffer(pipe.recv_bytes(), np.uint8).reshape(shape) for pipe in pipes], axis=1)
        for _ in range(chunks)
    ]
    wall_s = time.perf_counter() - started
    cpu_s = sum(float(np.frombuffer(pipe.recv_bytes(), np.float64)[0]) for pipe in pipes)
    for worker in workers:
        worker.join(TIMEOUT_S)
    return {"wall_s": wall_s, "cpu_s": cpu_s, "images": np.array(images)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="libero_spatial/0")
    parser.add_argument("--envs", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    os.environ.update(environment())
    task, envs, chunks = arguments.task, arguments.envs, arguments.chunks
    sides = {
        "AsyncVectorEnv": lambda: gymnasium_side(task, envs, chunks),
        "ours": lambda: our_side(task, envs, chunks, fast=False),
        "ours, fast_images": lambda: our_side(task, envs, chunks, fast=True),
    }
    told: dict[str, list[dict]] = {name: [] for name in sides}
    for turn in range(arguments.rounds):
        for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
            told[name].append(sides[name]())
            print(name, {key: round(told[name][-1][key], 2) for key in ("wall_s", "cpu_s")}, flush=True)
    equal = all(np.array_equal(a["images"], b["images"]) for a in told["AsyncVectorEnv"] for b in told["ours"])
    base = told["AsyncVectorEnv"]
    rows, found = [], {}
    for name, runs in told.items():
        steps = envs * chunks * CHUNK
        ratio = {key: median(a[key] / b[key] for a, b in zip(base, runs, strict=True)) for key in ("wall_s", "cpu_s")}
        speed = [steps / run["wall_s"] for run in runs]
        found[name] = {"steps_per_s": speed, "cpu_s": [run["cpu_s"] for run in runs], "times": ratio}
        rows.append([name, f"{median(speed):.1f}", f"{ratio['wall_s']:.2f}", f"{ratio['cpu_s']:.2f}"])
    print(markdown(["side", "env steps/s", "times as fast", "times less CPU"], rows))
    print(f"pixels where chunks end are equal: {equal}")
    here = {"commit": code_commit(), "machine": machine(), "packages": packages()}
    write_json(RESULTS / "libero_throughput.json", {**here, "task": task, "equal_pixels": equal, "sides": found})


if __name__ == "__main__":
    main()
