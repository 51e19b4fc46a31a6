"""Loads MuJoCo, robosuite and LIBERO into a process, once and quietly.

They change settings of the process when they are imported, so this happens before anything else imports them, also
before a user's module (`own_modules.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import io
import logging
import os
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

FILE_CACHE_BYTES = 500 << 20  # MuJoCo's default
RESET_DEPENDENT = ("body_pos", "body_quat", "site_rgba")  # parts of MuJoCo's model that resets and visual states change

_loading = threading.RLock()


def simulator() -> tuple[Any, Any]:
    """Load LIBERO once, since this changes settings of the process."""
    with _loading:
        return load_simulator()


@cache
def load_simulator() -> tuple[Any, Any]:
    """MuJoCo's module and a function from a task file to robosuite's env, without cameras.

    robosuite opens a log file with a fixed name and prints advice when it is imported, and picks a renderer for the
    whole process; we render ourselves (rendering.py), so all of this is prevented.
    """
    is_first = "mujoco" not in sys.modules
    before = os.environ.get("MUJOCO_GL")
    os.environ["MUJOCO_GL"] = "disabled"
    try:
        with quiet():
            import mujoco

            calm_robosuite()
            from libero.libero.envs.env_wrapper import ControlEnv
    finally:
        os.environ.pop("MUJOCO_GL")
        if before is not None:
            os.environ["MUJOCO_GL"] = before
    mujoco.set_mju_user_warning(print_warning)
    files = FileCache(is_empty=is_first)

    from robosuite.environments import base

    class Sim(base.MjSim):
        """Remembers the model as it was built, before any reset changed it."""

        def __init__(self, model: Any) -> None:
            super().__init__(model)
            self.pristine = {name: getattr(model, name).copy() for name in RESET_DEPENDENT}
            files.is_empty &= not files.is_on
            # MuJoCo keeps the description of the last model that it built, with all meshes and textures (0.4 GB of a
            # LIBERO task), in case a program saves it as XML. Building an empty model frees it.
            mujoco.MjModel.from_xml_string("<mujoco/>")

    base.MjSim = Sim

    def new_env(bddl: str, keep_files: bool) -> Any:
        with contextlib.nullcontext() if keep_files else files.switched_off():
            return ControlEnv(bddl_file_name=bddl, has_offscreen_renderer=False, use_camera_obs=False).env

    return mujoco, new_env


class FileCache:
    """MuJoCo's cache of meshes and textures for later models, which takes up to half a gigabyte.

    MuJoCo 3.3 can crash when a filled cache shrinks, so only an empty one is switched off.
    """

    def __init__(self, is_empty: bool) -> None:
        import mujoco

        self._library = ctypes.CDLL(str(next(Path(mujoco.__file__).parent.glob("libmujoco.*"))))
        self.is_empty = is_empty and hasattr(self._library, "mj_globalCache")  # not in versions that have another cache
        self.is_on = True

    @contextlib.contextmanager
    def switched_off(self) -> Iterator[None]:
        """Models built in this block leave no files in the cache."""
        if not self.is_empty:
            yield
            return
        self._resize(0)
        self.is_on = False
        try:
            yield
        finally:
            self._resize(FILE_CACHE_BYTES)
            self.is_on = True

    def _resize(self, size: int) -> None:
        cache = self._library.mj_globalCache
        cache.restype = ctypes.c_void_p
        self._library.mj_setCacheSize(ctypes.c_void_p(cache()), ctypes.c_size_t(size))


def calm_robosuite() -> None:
    """Set robosuite's switches before its import, which reads them."""
    if "robosuite" in sys.modules:
        return
    folder = importlib.util.find_spec("robosuite").submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location("robosuite.macros", f"{folder}/macros.py")
    macros = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(macros)
    macros.FILE_LOGGING_LEVEL = None
    macros.MUJOCO_GPU_RENDERING = False
    sys.modules["robosuite.macros"] = macros
    sys.modules["robosuite.macros_private"] = types.ModuleType("robosuite.macros_private")


def print_warning(message: str) -> None:
    """Print a warning of MuJoCo. Its own handler would write MUJOCO_LOG.TXT into the working directory."""
    print(f"MuJoCo: {message}", file=sys.stderr)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """One thread at a time: stdout belongs to the process."""
    with _loading, warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
        yield
