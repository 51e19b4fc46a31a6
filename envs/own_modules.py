"""The user's own modules: imports them with clear error messages, and finds the simulator that runs their classes.

`my_tasks:SphereToRing-v1` names something a module registers when it is imported, `my_tasks:SphereToRing` a class in
it. The kind of a class follows from the names of its bases, so nothing here imports a simulator. Only the user's module
does, and a simulator that has to be prepared before its import is prepared at that moment.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from embodied.core.errors import ConfigError, EmbodiedError, in_a_line, nearest
from embodied.envs.config import ENV_CONFIGS, EXTERNAL, kind_of, unknown_env

MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def prepare_sapien() -> None:
    from embodied.core.vulkan_driver import ensure_vulkan

    ensure_vulkan()


def prepare_libero() -> None:
    """robosuite reads its switches while it is imported."""
    from embodied.envs.mujoco.loading import simulator

    if not getattr(LOCAL, "preparing_libero", False):
        LOCAL.preparing_libero = True
        simulator()


# package -> its preparation before the import
PREPARE = {"sapien": prepare_sapien, "robosuite": prepare_libero, "libero": prepare_libero}
LOCAL = threading.local()


def import_module(name: str, option: str) -> ModuleType:
    """A module by its name, also from the working directory; `option` names it in messages."""
    if not MODULE.fullmatch(name) or name.endswith(".py"):
        raise ConfigError(f"{option}: {name!r} is not the name of a module{as_module(name)}")
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))
    try:
        with prepared():
            return importlib.import_module(name)
    except ModuleNotFoundError as err:
        if err.name is None or not f"{name}.".startswith(f"{err.name}."):
            raise ConfigError(f"{option}: importing {name} failed: {err}{place(err)}") from err
        raise ConfigError(
            f"{option}: there is no module {err.name}; install it or start from the folder that holds it "
            f"(this is {Path.cwd()})"
        ) from None
    except EmbodiedError:
        raise
    except (Exception, SystemExit) as err:
        raise ConfigError(f"{option}: importing {name} failed: {in_a_line(err)}{place(err)}") from err


def import_all(config: Any) -> None:
    """Import the modules of `env.modules`: robots, controllers, tasks that register themselves."""
    for name in config.modules:
        import_module(name, "env.modules")


def import_class(where: str, key: str = "env.name") -> Any:
    """Imports the class or function `my_pkg.my_module:Name`, the value of this key."""
    if not EXTERNAL.fullmatch(where):
        raise ConfigError(unknown_env(where) if key == "env.name" else f"{key}={where!r} is not my_pkg.my_module:name")
    module_name, _, name = where.partition(":")
    module = import_module(module_name, f"{key}={where!r}")
    if not hasattr(module, name):
        callables = [word for word, value in vars(module).items() if callable(value)]
        raise ConfigError(f"{key}={where!r}: {module.__file__} has no {name}{nearest(name, callables)}")
    return getattr(module, name) or registered_with_libero(module, name)


def reward_class(config: Any) -> Any:
    """The function or class that `env.reward` names. Refuses `env.reward_kwargs` that it does not take, before an
    object is made."""
    kind, kwargs, what = import_class(config.reward, "env.reward"), config.reward_kwargs, f"env.reward={config.reward}"
    if not inspect.isclass(kind):
        if kwargs:
            raise ConfigError(f"{what} is no class, and env.reward_kwargs={kwargs} are arguments of one; leave it out")
        return kind
    if not any("__call__" in vars(base) for base in kind.__mro__):
        raise ConfigError(
            f"{what} is a class without a method __call__(self, env, actions, step), which returns the reward of "
            "every row (docs/own_task.md)"
        )
    try:
        inspect.signature(kind).bind(**kwargs)
    except TypeError as err:
        raise ConfigError(f"{what} does not take env.reward_kwargs={kwargs}: {err}") from None
    except ValueError:  # a class of another language has no signature
        pass
    return kind


def own_reward(config: Any) -> Any:
    """The function of `env.reward`, or an object of its class, made with `env.reward_kwargs`."""
    kind = reward_class(config)
    with explain_errors(f"env.reward={config.reward}", "be made"):
        return kind(**config.reward_kwargs) if inspect.isclass(kind) else kind


def registered_with_libero(module: ModuleType, name: str) -> type | None:
    """The class that LIBERO's decorator for problems has replaced by None."""
    envs = sys.modules.get("libero.libero.envs")
    kind = envs.TASK_MAPPING.get(name.lower()) if envs else None
    return kind if kind and kind.__module__ == module.__name__ else None


def simulator_of(kind: Any) -> str | None:
    """The `env.name` that runs this class as a task; None if it is not a simulator's task."""
    if not inspect.isclass(kind):
        return None
    bases = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    return next((name for name, options in ENV_CONFIGS.items() if options.task_base in bases), None)


def as_a_task(name: Any) -> str | None:
    """The simulator whose task `env.name=my_tasks:Class` is; then it means env.name=SIMULATOR env.task=my_tasks:Class.
    None if the class is an env itself, or the name is not a class."""
    return simulator_of(import_class(name)) if isinstance(name, str) and names_a_class(name) else None


def names_a_class(name: str) -> bool:
    """True if this `env.name` is a class of the user, not gym:<id> or similar."""
    return EXTERNAL.fullmatch(name) is not None and kind_of({"name": name}) == "external"


def is_own(task: str) -> bool:
    """True if a task's name contains one of the user's modules."""
    return ":" in task


def own_task(task: str) -> tuple[ModuleType, str]:
    """The imported module and the name in `my_tasks:Name`."""
    module, _, name = task.partition(":")
    option = f"env.task={task!r}"
    if not name.strip():
        raise ConfigError(f"{option}: name the task too: {module or 'my_tasks'}:MyTask-v1, or the name of its class")
    return import_module(module, option), name


def tasks_in(module: ModuleType, simulator: str) -> dict[str, type]:
    """The classes that are tasks of this simulator and are defined in this module."""
    classes = {name: value for name, value in vars(module).items() if simulator_of(value) == simulator}
    return {name: value for name, value in classes.items() if value.__module__ == module.__name__}


def own_modules(env: Any) -> list[str]:
    """All modules of the user that this env section names, to be sent to other machines."""
    tasks = [env.task] if isinstance(env.task, str) else list(env.task)
    named = tasks if env.task_base else []
    named += [where for where in (env.name, env.reward) if names_a_class(where)]
    named += [reward.name for reward in getattr(env, "rewards", ())]
    return list(dict.fromkeys([*env.modules, *(where.partition(":")[0] for where in named if is_own(where))]))


def file_name(task: str) -> str:
    """A task's name as a part of a file name."""
    return "".join(c if c.isalnum() or c in "-." else "-" for c in task)


def as_module(name: str) -> str:
    """A hint with the module's name, if the name is a file's path."""
    path = name.removeprefix("./").removesuffix(".py")
    meant = path.replace("/", ".").strip(".")
    looks_like_file = name.endswith(".py") or "/" in name
    return (
        f"; a module is named without folders and .py: {meant}" if looks_like_file and MODULE.fullmatch(meant) else ""
    )


@contextmanager
def explain_errors(what: str, does: str = "be built or stepped") -> Iterator[None]:
    """Turns a mistake in the user's code into one line with its place; `what` names it, as `env.task=my_tasks:Lift`."""
    try:
        yield
    except EmbodiedError:
        raise
    except (Exception, SystemExit) as err:
        raise ConfigError(f"{what} cannot {does}: {in_a_line(err)}{line_of(err)}") from err


def line_of(err: BaseException) -> str:
    """The deepest line outside of packages; failing that, of other packages than ours."""
    ours = str(Path(inspect.getfile(EmbodiedError)).parents[1])
    frames = [f for f in traceback.extract_tb(err.__traceback__) if not f.filename.startswith(ours)]
    of_module = [f for f in frames if "site-packages" not in f.filename]
    frame = (of_module or frames or [None])[-1]
    return f" ({frame.filename}, line {frame.lineno})" if frame else ""


def place(err: BaseException) -> str:
    last = traceback.extract_tb(err.__traceback__)[-1]
    return "" if "importlib" in last.filename else f" ({last.filename}, line {last.lineno})"


class Preparing(MetaPathFinder):
    """Finds nothing. It is called before other finders, and prepares a simulator that is about to be imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in PREPARE and name not in self.loaded_packages():
            self.loaded_packages().add(name)
            PREPARE[name]()

    def loaded_packages(self) -> set[str]:
        return LOCAL.__dict__.setdefault("begun", set())


@contextmanager
def prepared() -> Iterator[None]:
    finder = Preparing()
    sys.meta_path.insert(0, finder)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Failed to find system libvulkan")  # SAPIEN has one of its own
            yield
    finally:
        sys.meta_path.remove(finder)
        finder.loaded_packages().clear()
