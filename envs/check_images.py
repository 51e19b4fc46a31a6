"""The rules of `check_vector_env` for envs that leave their images to `_paint`: what is painted, and when.

A row is painted when it began, at the border of a chunk if it moved, and where its episode ends inside a chunk: once
for every time that something new is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from embodied.envs.base import VectorEnv
    from embodied.envs.check import Checker

STEPS = 3


def images_are_painted_where_promised(check: Checker, fail: Callable[[str, str], None]) -> None:
    env, everybody = check.env, np.arange(check.num)
    with painted_rows(env) as counts:
        check.reset(check.first)
        if not counts.any():
            return  # its images come with its observations
        expect(fail, counts, np.ones(check.num, int), "a reset of all rows")
        moved = env.step_chunk(check.actions(STEPS)).mask.any(axis=1)
        expect(fail, counts, moved.astype(int), f"a chunk of {STEPS} steps")
        check.reset_rows(everybody == 1, check.others)
        expect(fail, counts, (everybody == 1).astype(int), "a reset of row 1")
        check.stagger()
        counts[:] = 0
        size = check.spec.max_episode_steps - check.lead + 1  # the others end inside, row 1 goes on
        moved = env.step_chunk(check.actions(size)).mask.any(axis=1)
        expect(fail, counts, moved.astype(int), "a chunk in which episodes end")
        env.step_chunk(check.actions(1))
        expect(fail, counts, np.where(everybody == 1, counts, 0), "a step of rows that are done")
    again = env._paint(everybody)
    for camera, frames in env._paint(everybody[:1]).items():
        if not np.array_equal(frames[0], again[camera][0]):
            fail("images", f"row 0 painted alone by {camera!r} looks different from row 0 painted with the others")


def expect(fail: Callable[[str, str], None], counts: np.ndarray, wanted: np.ndarray, when: str) -> None:
    if not np.array_equal(counts, wanted):
        fail("images", f"{when} paints rows {counts.tolist()} times, it must be {wanted.tolist()}")
    counts[:] = 0


@contextmanager
def painted_rows(env: VectorEnv) -> Iterator[np.ndarray]:
    """How often each row is painted from now on."""
    counts = np.zeros(env.num_envs, int)
    paint = env._paint

    def counted(rows: np.ndarray):
        counts[rows] += 1
        return paint(rows)

    env._paint = counted
    try:
        yield counts
    finally:
        del env._paint
