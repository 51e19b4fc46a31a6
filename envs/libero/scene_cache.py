"""The scenes of a worker, loaded once for all of its envs (training and evaluation play the same tasks).

A scene that some row plays stays; others go when a new one is wanted and as many as allowed are loaded. Per thread:
workers of one process do not share, since MuJoCo's data and OpenGL's contexts belong to one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading

from embodied.envs.libero.images import Painter
from embodied.envs.libero.scene import Scene
from embodied.envs.libero.tasks import task_files


class _Shelf(threading.local):
    def __init__(self) -> None:
        self.scenes: dict[tuple[str, tuple[str, ...], bool], Scene] = {}
        self.painters: dict[Scene, Painter] = {}


_shelf = _Shelf()


def scene(task: str, shown: tuple[str, ...], fast_images: bool, most: int) -> Scene:
    """The scene of a task, loaded if it is not here; idle ones make room until at most `most` are loaded."""
    key = (task, shown, fast_images)
    if key not in _shelf.scenes:
        for other in list(_shelf.scenes):
            if len(_shelf.scenes) >= most:
                drop_if_idle(other)
        _shelf.scenes[key] = Scene(task_files(task), shown)
        if most == 1:
            forget_files()
    return _shelf.scenes[key]


def painter(scene: Scene, largest: int, fast: bool) -> Painter:
    """Draws images of up to `largest` pixels a side."""
    before = _shelf.painters.get(scene)
    if before is None or before.largest < largest:
        if before is not None:
            before.close()
        _shelf.painters[scene] = Painter(scene, largest, fast)
    return _shelf.painters[scene]


def drop_idle() -> None:
    for key in list(_shelf.scenes):
        drop_if_idle(key)


def drop_if_idle(key: tuple[str, tuple[str, ...], bool]) -> None:
    idle = _shelf.scenes[key]
    if len(idle.rows):
        return
    if idle in _shelf.painters:
        _shelf.painters.pop(idle).close()
    _shelf.scenes.pop(key).close()


def forget_files() -> None:
    """MuJoCo keeps meshes and textures it read (a quarter of a gigabyte) for models to come; drop them."""
    import mujoco

    mujoco.mj_clearCache(mujoco.mj_getCache())
    with contextlib.suppress(OSError, AttributeError):  # not glibc: the memory stays with this process
        ctypes.CDLL("libc.so.6").malloc_trim(0)
