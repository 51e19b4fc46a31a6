"""LIBERO's own env plays episodes, in a process of its own: python libero_itself.py TASK CHUNKS OUT. Ours plays the
same episodes with the same random actions in chunks, with another episode interleaved in a second row."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

CHUNK, SIDE, SETTLING, STATES, TIMEOUT_S = 8, 64, 10, (0, 17), 900.0
CAMERAS = {"agentview": "agentview_image", "wrist": "robot0_eye_in_hand_image"}
NO_OP = [0.0, 0, 0, 0, 0, 0, -1]


def random_actions(chunks: int) -> np.ndarray:
    return np.random.default_rng(5).uniform(-1, 1, (len(STATES), chunks * CHUNK, 7)).astype(np.float32)


def theirs(task: str, chunks: int, out: Path) -> None:
    """LIBERO's own env after its hard reset, observed where chunks end."""
    from libero.libero.envs import OffScreenRenderEnv

    from embodied.envs.libero.tasks import task_files
    from embodied.envs.mujoco.env import Draws

    files = task_files(task)
    states = files.initial_states()
    env = OffScreenRenderEnv(bddl_file_name=str(files.bddl), camera_heights=SIDE, camera_widths=SIDE)
    kept: dict[str, list] = {name: [] for name in ("states", *CAMERAS, "hand", "fingers")}
    for at, state in enumerate(STATES):
        with Draws(at).used():
            env.reset()
        env.set_init_state(states[state])
        for step, action in enumerate([*[NO_OP] * SETTLING, *random_actions(chunks)[at]]):
            obs, *_ = env.step(np.asarray(action, np.float64))
            kept["states"].append(env.get_sim_state())
            if step >= SETTLING and (step - SETTLING) % CHUNK == CHUNK - 1:
                for name, key in CAMERAS.items():
                    kept[name].append(obs[key][::-1])
                kept["hand"].append(obs["robot0_eef_pos"])
                kept["fingers"].append(obs["robot0_gripper_qpos"])
    np.savez(out, **{name: np.array(rows) for name, rows in kept.items()})
    env.close()


def ours(task: str, chunks: int) -> dict[str, np.ndarray]:
    from embodied.core.types import EpisodeSpec
    from embodied.envs import make_env
    from embodied.envs.libero.config import LiberoConfig

    options = {"cameras": tuple(CAMERAS), "image_size": SIDE, "state": "proprio", "on_success": "continue"}
    env = make_env(LiberoConfig(name="libero", task=task, **options), len(STATES))
    kept: dict[str, list] = {"states": [[] for _ in STATES], **{name: [] for name in (*CAMERAS, "state")}}
    scene = env._scene(task)
    step = scene.step

    def remembering(row, action):
        success = step(row, action)
        data = row.data._data
        kept["states"][env._rows.index(row)].append(np.concatenate([[data.time], data.qpos, data.qvel]))
        return success

    scene.step = remembering
    env.reset(options={"episodes": [EpisodeSpec(task, state, at, at) for at, state in enumerate(STATES)]})
    for chunk in np.split(random_actions(chunks), chunks, axis=1):
        obs = env.step_chunk(chunk).obs
        for name in CAMERAS:
            kept[name].append(obs["images"][name])
        kept["state"].append(obs["state"])
    env.close()
    return {
        "states": np.concatenate(kept["states"]),
        **{name: np.concatenate(np.swapaxes(kept[name], 0, 1)) for name in (*CAMERAS, "state")},
    }


def compare(task: str, chunks: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "theirs.npz"
        command = [sys.executable, "-W", "ignore", __file__, task, str(chunks), str(out)]
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=TIMEOUT_S)
        with np.load(out) as stored:
            reference = dict(stored)
    mine = ours(task, chunks)
    seen = np.concatenate([reference["hand"], reference["fingers"]], axis=1).astype(np.float32)
    return {
        "states": float(np.abs(mine["states"] - reference["states"]).max()),
        "observed": float(np.abs(mine["state"][:, [0, 1, 2, 6, 7]] - seen).max()),
        **{name: int(np.abs(mine[name].astype(int) - reference[name]).max()) for name in CAMERAS},
    }


if __name__ == "__main__":
    theirs(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
