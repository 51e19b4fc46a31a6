"""The time of resets: random draws for many PushCube rows, and whole resets of each task's rows, with what waits.

    python -m benchmarks.reset_draws [--rows 1024 4096] [--tasks StackCube-v1 PullCubeTool-v1 --envs 64]

CPU time of one thread, the minimum over rounds: with generators built for each row, as ManiSkill does, and for all rows
at once. Both draw the same numbers; otherwise the benchmark ends with an error.

With `--tasks`, on CPU scenes: a reset of all rows, drawn row by row and together. `waits` counts reads of tensors and
masks as indexes, in ManiSkill's code as well: on a GPU the host waits in each. Then a simulator leaves after half an
episode (its state is saved and it is closed), is built again, and its open episodes are played again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from benchmarks.common import RESULTS, code_commit, machine, markdown, packages, write_json
from embodied.core.rng import episode_seed
from embodied.core.types import EpisodeList
from embodied.envs.maniskill.config import ManiSkillConfig
from embodied.envs.maniskill.cpu_batch import EpisodeDraws, RowsOfUniforms
from embodied.envs.maniskill.env import ManiSkillEnv

JOINTS, PLACES = 9, 2  # normal and uniform numbers per row of PushCube-v1
ROUNDS = 20


def specs(rows: int) -> np.ndarray:
    return np.array([spec.seed for spec in EpisodeList(0, "train", ("PushCube-v1",)).first(rows)])


def specs_one_by_one(rows: int) -> np.ndarray:
    episode_seed.cache_clear()
    return np.array([episode_seed(0, "train", turn) for turn in range(rows)])


def states(seeds: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
    draws = EpisodeDraws(seeds)
    rows = RowsOfUniforms(draws, torch.device("cpu"))
    return draws.normals(JOINTS), rows.rand((len(seeds), PLACES))


def states_one_by_one(seeds: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
    normals = np.stack([np.random.RandomState(seed).normal(size=JOINTS) for seed in seeds.tolist()])
    generators = [torch.Generator().manual_seed(seed) for seed in seeds.tolist()]
    return normals, torch.stack([torch.rand(PLACES, generator=generator) for generator in generators])


def cpu_ms(work: Callable[[], Any], rounds: int) -> float:
    spent = []
    for _ in range(rounds):
        started = time.process_time()
        work()
        spent.append(1000 * (time.process_time() - started))
    return min(spent)


def figures(rows: int, rounds: int = ROUNDS) -> dict[str, float]:
    """Milliseconds for this number of rows."""
    seeds = specs(rows)
    same = zip((seeds, *states(seeds)), (specs_one_by_one(rows), *states_one_by_one(seeds)), strict=True)
    if not all(np.array_equal(ours, theirs) for ours, theirs in same):
        raise SystemExit("rows drawn together differ from rows with a generator each: this is a bug")
    return {
        "seeds_one_by_one": cpu_ms(lambda: specs_one_by_one(rows), min(rounds, 3)),
        "seeds": cpu_ms(lambda: specs(rows), rounds),
        "states_one_by_one": cpu_ms(lambda: states_one_by_one(seeds), min(rounds, 3)),
        "states": cpu_ms(lambda: states(seeds), rounds),
    }


WAITS = "cpu item tolist numpy __array__ __bool__ __int__ __float__ __index__ nonzero".split()


class Waits(TorchFunctionMode):
    """Counts the calls in which a host waits for its GPU, with tensors on the CPU in the GPU's place."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        parts = args[1] if name in ("__getitem__", "__setitem__") else ()
        parts = parts if isinstance(parts, tuple) else (parts,)
        masked = any(getattr(part, "dtype", None) == torch.bool and part.ndim for part in parts)
        self.count += masked or name in WAITS
        return func(*args, **(kwargs or {}))


def whole_resets(task: str, num_envs: int, rounds: int = 5) -> dict[str, float]:
    """Milliseconds and waits of a reset of all rows, drawn row by row and together, and of leaving and returning."""
    config = ManiSkillConfig(task=task, backend="cpu_batched")
    env = ManiSkillEnv(config, num_envs)
    found: dict[str, float] = {"together_is_equal": env.envs[0].draws_together}
    for way in (False, True):
        env.envs[0].draws_together = way
        with Waits() as waits:
            env.reset(seed=0)
        spent = cpu_ms(lambda: env.reset(seed=1), rounds)
        name = "together" if way else "one_by_one"
        found |= {f"{name}_ms": spent, f"{name}_waits": waits.count}
    half = env.env_spec.max_episode_steps // 2
    env.step_chunk(np.zeros((num_envs, half, env.env_spec.action.dim), np.float32))
    states: list[Any] = []
    found["leaves_ms"] = cpu_ms(lambda: (states.append(env.get_state()), env.close()), 1)
    back: list[Any] = []
    found["returns_ms"] = cpu_ms(lambda: back.append(ManiSkillEnv(config, num_envs)), 1)
    found["played_again_ms"] = cpu_ms(lambda: back[0].set_state(states[0]), 1)
    back[0].close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--tasks", nargs="+", default=[])
    parser.add_argument("--envs", type=int, default=64)
    torch.set_num_threads(1)
    options = parser.parse_args()
    if options.tasks:
        resets = {task: whole_resets(task, options.envs) for task in options.tasks}
        columns = list(resets[options.tasks[0]])
        print(
            markdown(
                ["task", *columns], [[task, *(f"{ms[name]:.0f}" for name in columns)] for task, ms in resets.items()]
            )
        )
        about = {"commit": code_commit(), "machine": machine(), "packages": packages(), "envs": options.envs}
        return write_json(RESULTS / "resets.json", about | {"tasks": resets})
    found = {rows: figures(rows) for rows in options.rows}
    names = ("seeds_one_by_one", "states_one_by_one", "seeds", "states")
    table = [[str(rows), *(f"{ms[name]:.1f}" for name in names)] for rows, ms in found.items()]
    print(markdown(["rows", "seeds, ms", "states, ms", "seeds together, ms", "states together, ms"], table))
    about = {"commit": code_commit(), "machine": machine(), "packages": packages()}
    write_json(RESULTS / "reset_draws.json", about | {"cpu_ms": {str(rows): ms for rows, ms in found.items()}})


if __name__ == "__main__":
    main()
