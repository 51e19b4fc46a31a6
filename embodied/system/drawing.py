"""Probes drawing as a run will draw: as many processes as planned, beside matrix products on the same GPUs.

Drivers of data-centre GPUs hang, abort or repeat pictures if several processes draw while the GPU computes; a frame
that one process draws on an idle GPU shows none of it. A drawer is a child process (`probes.draw`) that plays the env
of the recipe for ten seconds, and compares each picture with the picture that software drew of the same state. Results
are remembered in the user's cache, for each driver, set of GPUs, env and size of images.

    result = ask(config.env, seats_of(plan), say=print)  # remembered, or probed now
    if not result.on_gpus: ...
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, get_args

import numpy as np

from embodied.core.files import cache_folder, replace_text
from embodied.core.options import version_of
from embodied.envs import env_class
from embodied.system.machine import END_S, Done, kill

Seat = Mapping[str, str]  # a drawer's environment variables, `run.devices.environment`
VISIBLE = "CUDA_VISIBLE_DEVICES"
PICTURES = 16  # decisions of the episode that is played
FLAT = 1.0  # a picture with a smaller deviation of grey values is blank
MOST_OFF = 8.0  # mean difference from software's picture in grey levels; antialiasing and textures differ
STILL = 0.02  # two states whose pictures differ less are not told apart
KEPT_S, RETRY_S = 7 * 86400.0, 86400.0  # success and failure are remembered
POLL_S = 0.05
SOFTWARE = ("llvmpipe", "lavapipe", "softpipe", "swrast", "swiftshader")
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Limits:
    """Deadlines in seconds, and how long all drawers draw together."""

    build: float = 180.0
    first: float = 60.0  # the first picture, for which shaders are compiled
    next: float = 20.0
    together: float = 10.0


@dataclass(frozen=True)
class Result:
    """What a probe found."""

    drawers: int
    gpus: int
    by: str = ""  # the renderer, as its driver names it
    picture_s: float = 0.0  # median seconds of a decision's pictures, while all draw
    software_s: float = 0.0  # the same by software on one core; 0: it does not draw here, so nothing was compared
    off: float = 0.0  # largest mean difference from software's pictures, in grey levels
    problem: str = ""
    one_each: str | None = None  # the problem of one drawing process per GPU, "" if that works; None: not tried
    at: float = 0.0  # time of the probe

    @property
    def on_gpus(self) -> bool:
        """True if a run may draw on these GPUs while they compute."""
        return not self.problem and not self.by_software

    @property
    def by_software(self) -> bool:
        return any(word in self.by.lower() for word in SOFTWARE)

    def describe(self) -> str:
        """The finding in a line."""
        who = f"{self.drawers} process{'es' * (self.drawers > 1)} on {self.gpus} GPU{'s' * (self.gpus > 1)}"
        if self.problem:
            return f"{who} beside matrix products: {self.problem}"
        if self.by_software:
            return f"{who} draw by software on cores ({self.by}), although there is a GPU: its driver does not draw"
        times = f"{1000 * self.picture_s:.3g} ms for a decision's images, {1000 * self.software_s:.3g} by software"
        slow = "; software is faster" * (self.picture_s > self.software_s)
        return f"{who} draw beside matrix products ({self.by}): {times}{slow}"

    def ways_out(self, options: Any) -> str:
        """What to try if it does not work. `options`: the class of the env's options."""
        ways = ["env.renderer=cores draws on cores"]
        if "warp" in get_args(options.model_fields["renderer"].annotation):
            ways.append("env.renderer=warp draws without a graphics driver (docs/libero.md)")
        if self.one_each == "":
            place = """sim: {devices: "cpu:0", render: "gpu:0"}"""
            ways.insert(0, f"one drawing process per GPU works: a placement with {place} (docs/gpu.md)")
        return "; or ".join([*ways, "env.renderer=gpu draws on GPUs all the same"])


# What a run asks


def ask(env: Any, seats: Sequence[Seat], say: Callable[[str], object] = lambda line: None) -> Result:
    """The remembered result for drawers on these seats, else that of a probe now, announced with `say`."""
    if drawing := recorded(env, seats):
        return drawing
    say(
        f"drawing     can {len(seats)} process{'es' * (len(seats) > 1)} draw on GPUs that compute? They try for "
        f"{Limits.together:g} s (env.renderer=gpu|cores: without asking)"
    )
    return record(env, seats, probe(env, seats))


def recorded(env: Any, seats: Sequence[Seat]) -> Result | None:
    """The result of the last days that holds for these seats; None if drawing must be probed."""
    result = newest(env, seats)
    if result and (len(seats) >= result.drawers if result.problem else len(seats) <= result.drawers):
        return result
    return None


def newest(env: Any, seats: Sequence[Seat]) -> Result | None:
    """The result of the last days for any number of drawers on the GPUs of these seats."""
    try:
        result = Result(**json.loads(place_of(env, seats).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return result if abs(time.time() - result.at) < (RETRY_S if result.problem else KEPT_S) else None


def record(env: Any, seats: Sequence[Seat], result: Result) -> Result:
    """Remember a result; a cache that cannot be written is no reason to stop."""
    result = replace(result, at=time.time())
    with contextlib.suppress(OSError):
        path = place_of(env, seats)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(asdict(result), indent=1))
    return result


def place_of(env: Any, seats: Sequence[Seat]) -> Path:
    """The file of results for this driver, these GPUs, this env's packages and its images."""
    packages = [(name, version_of(name)) for name in env.needs.packages]
    driver = DRIVER.read_text() if DRIVER.exists() else ""
    gpus = sorted(seat.get(VISIBLE, "") for seat in one_per_gpu(seats))
    what = json.dumps([driver, gpus, env.name, str(env.python), packages, sorted(env.observed_images.items())])
    return cache_folder() / "drawing" / f"{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"


def one_per_gpu(seats: Sequence[Seat]) -> list[Seat]:
    return [*{seat.get(VISIBLE, ""): seat for seat in seats}.values()]


# The probe


def probe(env: Any, seats: Sequence[Seat], limits: Limits = Limits()) -> Result:
    """Draw on all seats at once; if that fails, once more with one process per GPU."""
    gpus = one_per_gpu(seats)
    result = Result(len(seats), len(gpus))
    with tempfile.TemporaryDirectory(prefix="drawing-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "env.json").write_text(env_class(env).on_cores(env).model_dump_json())
        problem, lines = run(folder, {"software": ("draw", {})}, replace(limits, together=math.inf))
        if problem:
            return replace(result, problem=f"there is nothing to compare with, since {problem}")
        software_s = median(line["s"] for line in lines)
        problem, lines = run(folder, drawers_on(seats), limits)
        one_each = run(folder, drawers_on(gpus), limits)[0] if problem and len(seats) > len(gpus) else None
    seconds, off = ([line[key] for line in lines] or [0.0] for key in ("s", "off"))
    result = replace(result, picture_s=median(seconds), software_s=software_s, off=max(off))
    return replace(result, by=lines[0]["by"] if lines else "", problem=problem, one_each=one_each)


def drawers_on(seats: Sequence[Seat]) -> dict[str, tuple[str, Seat]]:
    """Name -> probe and environment: matrix products on each GPU, and a drawer on every seat."""
    computing = {f"computing-{i}": ("multiply", seat) for i, seat in enumerate(one_per_gpu(seats))}
    return computing | {f"drawer-{i}": ("draw", seat) for i, seat in enumerate(seats)}


def run(folder: Path, work: Mapping[str, tuple[str, Seat]], limits: Limits) -> tuple[str, list[dict[str, Any]]]:
    """Run these probes until each has drawn for `limits.together` seconds beside the others, or has ended. Returns the
    first problem, and what the drawers said of their pictures. Whatever hangs is killed."""
    (folder / "stop").unlink(missing_ok=True)
    children: list[Child] = []
    try:
        for name, (what, seat) in work.items():
            children.append(Child(folder, name, what, seat))
        problem = watch(children, limits) or first_problem(children, limits)
        (folder / "stop").touch()
        return problem, [line for child in children if child.draws for line in child.lines[1:]]
    finally:
        for child in children:
            child.end()


def watch(children: Sequence[Child], limits: Limits) -> str:
    """Wait until all have worked together for long enough, or have done their work; returns the first problem. Each has
    to go on after the end, since a drawer that hangs in the last seconds hangs too."""
    until = math.inf
    while not all(child.is_done or child.since > until for child in children):
        if problem := first_problem(children, limits):
            return problem
        if until == math.inf and all(len(child.lines) > 1 for child in children):
            until = time.monotonic() + limits.together
        time.sleep(POLL_S)
    return ""


def first_problem(children: Sequence[Child], limits: Limits) -> str:
    return next(filter(None, (child.problem(limits) for child in children)), "")


class Child:
    """A process that draws or multiplies, and the lines that it has written: its renderer, then one per picture."""

    def __init__(self, folder: Path, name: str, what: str, seat: Seat) -> None:
        self.name, self.draws = name, what == "draw"
        self.lines: list[dict[str, Any]] = []
        self.since, self._rest = time.monotonic(), ""
        self.errors = folder / f"{name}.err"
        path = folder / f"{name}.lines"
        path.write_text("")
        self._reader = path.open()
        command = [sys.executable, "-W", "ignore", "-m", "embodied.system.probes", what, str(folder), name]
        same = {"OMP_NUM_THREADS": "1", "LP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        same["EMBODIED_PARENT"] = str(os.getpid())  # for `probes.follow_parent`
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, **same, **seat},
                start_new_session=True,
            )

    @property
    def is_done(self) -> bool:
        """True for software's drawer once its pictures are stored; others work until they are stopped."""
        return self.name == "software" and self.process.poll() == 0

    def problem(self, limits: Limits) -> str:
        """What is wrong with it so far, in words."""
        code = self.process.poll()
        *whole, self._rest = (self._rest + self._reader.read()).split("\n")
        for line in map(json.loads, whole):
            self.lines.append(line)
            self.since = time.monotonic()
            if fault := line.get("fault"):
                return f"{self.name} {fault} (number {len(self.lines) - 1})"
        drawn = len(self.lines) - 1
        what = "picture" if self.draws else "product"
        where = "before it began" if drawn < 0 else f"at {what} {drawn + 1}"
        if code is not None and not self.is_done:
            ended = Done(code, err=self.errors.read_text(errors="replace")).problem or "its process ended"
            return f"{self.name}: {ended}, {where}"
        allowed = (limits.build, limits.first, limits.next)[min(drawn + 1, 2)]
        if code is None and time.monotonic() - self.since > allowed:
            return f"{self.name} hangs {where}: nothing for {allowed:g} s"
        return ""

    def end(self) -> None:
        """End the process; a driver may hold even a killed process for a while, which is not waited for."""
        kill(self.process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        self._reader.close()


# Inside a drawer


def read_env(folder: Path, by_software: bool) -> Any:
    """The options of the env that is drawn."""
    from pydantic import TypeAdapter

    from embodied.envs.config import EnvConfig

    env = TypeAdapter(EnvConfig).validate_json((folder / "env.json").read_text())
    chosen = {"renderer": "cores" if by_software else "gpu"} if "renderer" in type(env).model_fields else {}
    return env.model_copy(update=chosen)


def pictures(env: Any) -> Iterator[tuple[np.ndarray, float]]:
    """The images after each of an episode's first decisions (uint8, in a row), and the seconds of drawing them."""
    from embodied.core.types import EpisodeList

    action = env.env_spec.action
    moves = np.zeros((1, 1, action.dim), int) if action.discrete else np.full((1, 1, action.dim), 0.5, np.float32)
    begun = EpisodeList(0, "eval", env.tasks(env.config)).first(1)
    env.reset(options={"reset_mask": np.array([True]), "episodes": begun})
    for _ in range(PICTURES):
        stepped: list[float] = []
        obs = env.step_chunk(moves, lambda moved, at=stepped: at.append(time.perf_counter())).obs
        if not stepped:  # the episode is over
            return
        seen = [obs["images"][name][0] for name in sorted(env.env_spec.images)] or [env.render_rows(np.array([0]))[0]]
        yield np.concatenate([np.asarray(image).ravel() for image in seen]), time.perf_counter() - stepped[-1]


def judge(picture: np.ndarray, before: Sequence[np.ndarray], expected: np.ndarray | None) -> tuple[float, str]:
    """How far the next picture after `before` is from software's `expected` ones [decisions, pixels], in grey levels,
    and what is wrong with it."""
    if expected is None:
        return 0.0, "is blank" if picture.std() < FLAT else ""
    place = len(before)
    wanted = expected[place]
    if picture.shape != wanted.shape:
        return 255.0, f"has {picture.size} numbers, {wanted.size} by software"
    distances = np.abs(expected.astype(np.int16) - picture).mean(axis=1)
    off, nearest = float(distances[place]), int(distances.argmin())
    if picture.std() < FLAT <= wanted.std():
        return off, "draws a blank picture"
    moved = place > 0 and distance(wanted, expected[place - 1]) > STILL
    if moved and np.array_equal(picture, before[-1]):
        return off, "draws the picture before once more"
    if off > MOST_OFF:
        return off, f"draws a wrong picture, {off:.0f} grey levels from software's"
    apart = distance(wanted, expected[nearest])
    if apart > STILL and off - distances[nearest] > apart / 2:
        return off, f"draws the picture of another time, {nearest - place:+d} decisions away"
    return off, ""


def distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one.astype(np.int16) - other).mean())
