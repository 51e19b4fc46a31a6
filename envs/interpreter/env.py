"""A simulator in an interpreter of its own: `env.python=FOLDER/bin/python`.

`ForeignEnv` is an env like any other for whoever plays it. It starts `child.py` in that interpreter, where the real env
lives, and passes every call on (`wire.py`). The envs of a sim worker share a process, as they share scenes and contexts
in process. Questions to the env's class are answered there too, so commands never import its packages. A death of the
process is an error after which the sim worker is replaced; a hang is found by `faults.hang_s` as for envs in process,
since the sim worker waits for the answer.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from embodied.core import errors
from embodied.core.arrays import Observation, is_tensor
from embodied.core.types import ChunkResult
from embodied.envs.capabilities import Expert
from embodied.envs.interpreter import locked
from embodied.envs.interpreter.wire import VERSION, Ended, Wire
from embodied.envs.vector_env import VectorEnv

CHILD = Path(__file__).with_name("child.py")
PACKAGE = Path(errors.__file__).parents[1]
# The working directory is the first place in which Python finds modules; a script's own folder would be this one.
BOOT = "import sys; path = sys.argv.pop(1); exec(compile(open(path).read(), path, 'exec'))"
START_S = 120.0  # for the interpreter's start, and for an answer about the env's class
WAIT_S = 3600.0  # for an answer; in runs `faults.hang_s` ends the wait earlier
END_S = 10.0  # for the simulator to clean up
LAST_LINES = 5
LOCAL = threading.local()


class ProcessDied(errors.Unusable):
    """The process of a simulator has died."""


class Process:
    """A process of the interpreter, and calls to it.

    process = Process(config)
    process.call("build", config, 4)
    """

    def __init__(self, config: Any) -> None:
        self.what = f"env.python={config.python}"
        self.python = locked.python_of(config.lock) if config.python == "auto" else config.python
        self.process: subprocess.Popen | None = None
        self.lock = threading.RLock()
        self.envs: set[int] = set()  # numbers of the envs that it holds
        connection = self._connection()
        self.wire = Wire(connection)
        self.end = weakref.finalize(self, end, self.process, self.wire)
        try:
            self._greet(connection)
            self.call("begin", config.name)
        except BaseException:
            self.end()
            raise

    def _connection(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = self._started(theirs.fileno(), stderr=subprocess.PIPE)
            except errors.ConfigError:
                ours.close()
                raise
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self.printer = threading.Thread(target=pass_on, args=(self.process.stderr, self.last), daemon=True)
        self.printer.start()
        return ours

    def _started(self, descriptor: int, **more: Any) -> subprocess.Popen:
        try:
            return subprocess.Popen(
                [*map(str, [self.python, "-c", BOOT, CHILD, PACKAGE, descriptor, os.getpid()])],
                stdin=subprocess.DEVNULL,
                pass_fds=[descriptor],
                start_new_session=True,  # Ctrl-C goes to the host only
                env={**os.environ, "PYTHONPATH": os.pathsep.join(own_folders())},
                **more,
            )
        except OSError as err:
            raise errors.ConfigError(f"{self.what}: {err.strerror}; name the file FOLDER/bin/python") from None

    def call(
        self,
        name: str,
        *args: Any,
        tick: Callable[[], None] = lambda: None,
        on_frame: Any = None,
        wait_s: float = WAIT_S,
    ) -> Any:
        """The result of a call. Meanwhile a frame or a sign of life may come. A process that is silent for `wait_s`
        is ended."""
        with self.lock:
            try:
                self.wire.send([name, args])
                while True:
                    answer = self.wire.receive(wait_s)
                    if "tick" in answer:
                        tick()
                    elif "frame" in answer:
                        on_frame(answer["frame"])
                        self.wire.send(["go_on", ()])
                    else:
                        break
            except Ended:
                raise ProcessDied(f"{self.what}: {self._end_in_words()}") from None
            except errors.DeadlineExceeded:
                self.end()
                raise
        if "raised" in answer:
            raise self._error(*answer["raised"])
        return answer["value"]

    def end_if_unused(self) -> None:
        if not self.envs:
            self.end()

    def _greet(self, connection: socket.socket) -> None:
        """Wait until the interpreter says that it has what it needs."""
        connection.settimeout(START_S)
        try:
            with connection.makefile("rb", buffering=0) as lines:
                if lines.readline() != b"embodied\n":
                    raise errors.ConfigError(f"{self.what} is no Python interpreter: {self._end_in_words()}")
                said = lines.readline().decode().strip()
        except TimeoutError:
            raise errors.ConfigError(f"{self.what} did not start within {START_S:g} seconds") from None
        if not said:
            raise errors.ConfigError(f"{self.what}: {self._end_in_words()}")
        if not said.isdigit():
            raise errors.ConfigError(f"{self.what}: {said}")
        if int(said) != VERSION:
            raise errors.ConfigError(
                f"{self.what} speaks version {said} of the protocol, this is {VERSION}: it has another embodied-loop; "
                "use the same version in both"
            )

    def _end_in_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        self.printer.join(END_S)
        code = self.process.returncode
        how = f"died with signal {-code}" if code and code < 0 else f"ended with exit code {code}"
        said = " | ".join(self.last)
        return f"its process {how}{f'; its last lines: {said}' * bool(said)}"

    def _error(self, kind: str, text: str) -> Exception:
        if kind == "NotImplementedError":
            return errors.ConfigError(f"{self.what}: the env does not implement {text}")
        if kind == "ValueError":
            return ValueError(text)
        error_class = getattr(errors, kind, None) if kind else None
        return error_class(text) if error_class else RuntimeError(f"{self.what}: {text}")


STARTED: list[subprocess.Popen] = []  # processes that end by themselves; kept so that Python waits for them


class SharedProcess(Process):
    """A process that all processes of this user with the same key call. The first that needs it starts it and gets what
    it prints; it ends with that one, or when nobody is connected."""

    def __init__(self, config: Any, key: str) -> None:
        self.place = socket_folder() / f"{crc32(f'{PACKAGE} {key}'.encode()):08x}"
        super().__init__(config)

    def _connection(self) -> socket.socket:
        with Path(f"{self.place}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it listens, which takes no time
            with suppress(OSError):
                return connected(self.place)
            self.place.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(self.place))
                listener.listen()
                STARTED[:] = [started for started in STARTED if started.poll() is None]
                STARTED.append(self._started(listener.fileno()))
            return connected(self.place)

    def _greet(self, connection: socket.socket) -> None:
        try:
            super()._greet(connection)
        except (OSError, errors.ConfigError) as err:  # or it was about to end
            raise ProcessDied(f"{self.what}: {err}") from None

    def _end_in_words(self) -> str:
        return "the process that draws for all has ended; its last lines are in the log of the one that started it"


def connected(place: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(place))
    except OSError:
        connection.close()
        raise
    return connection


def socket_folder() -> Path:
    """The user's own folder for sockets, whose paths must be short."""
    folder = Path(tempfile.gettempdir()) / f"embodied-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise errors.EmbodiedError(f"{folder} is no private folder of this user; remove it")
    return folder


def pass_on(lines: Any, last: deque[str]) -> None:
    """Pass on what a process prints, and remember its last lines."""
    with lines:
        for line in lines:
            text = line.decode(errors="replace")
            last.append(text.strip())
            sys.stderr.write(text)


def end(process: subprocess.Popen | None, wire: Wire) -> None:
    if process is not None:
        process.kill()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:  # on a busy machine a large process takes its time to end
            STARTED.append(process)
    wire.close()


def own_folders() -> list[str]:
    """The folders of Python's path that hold the user's modules, not this interpreter's packages."""
    ours = [Path(folder).resolve() for folder in (sys.prefix, sys.base_prefix)]
    folders = [Path(folder).resolve() for folder in sys.path if folder]
    return [str(folder) for folder in folders if not any(folder.is_relative_to(prefix) for prefix in ours)]


@cache
def questioned(process_id: int, name: str, python: Path | str) -> dict[str, Process]:
    """The place of the process that answers questions."""
    return {}


def question(config: Any, name: str, *args: Any) -> Any:
    """Ask the interpreter. One process answers all questions about an env; when it has died, another one."""
    place = questioned(os.getpid(), config.name, config.python)
    if "process" not in place or place["process"].process.poll() is not None:
        place["process"] = Process(config)
    return place["process"].call(name, of_child(config), *args, wait_s=START_S)


def shared_process(config: Any) -> Process:
    """The process of this thread's envs of this kind, started if there is none."""
    key = (config.name, config.python, config.lock)
    process = LOCAL.__dict__.setdefault("processes", weakref.WeakValueDictionary()).get(key)
    if process is None or process.process.poll() is not None:
        process = LOCAL.processes[key] = Process(config)
    return process


def of_child(config: Any) -> Any:
    """The options as the env gets them."""
    return config.model_copy(update={"python": None})


def asked(method: str) -> Any:
    """A class method that the env's class answers in its interpreter."""
    return classmethod(lambda cls, config, *args: question(config, "ask", method, args))


def foreign_class(config: Any) -> type[ForeignEnv]:
    """The class of this config's env: a `ForeignEnv` that knows its class attributes."""
    return type("ForeignEnv", (ForeignEnv,), question(config, "describe"))


class ForeignEnv(VectorEnv):
    tasks = asked("tasks")
    protocols = asked("protocols")
    plays_together = asked("plays_together")
    longest_episode = asked("longest_episode")
    check = asked("check")
    remarks = asked("remarks")
    rehearse = asked("rehearse")
    check_expert = asked("check_expert")

    @classmethod
    def versions(cls, config: Any) -> dict[str, str]:
        return question(config, "versions")

    @classmethod
    def resolve(cls, config: Any) -> Any:
        return cls._changed(config, "resolve")

    @classmethod
    def on_cores(cls, config: Any) -> Any:
        return cls._changed(config, "on_cores")

    @classmethod
    def plain_config(cls, config: Any) -> Any:
        return cls._changed(config, "plain_config")

    @classmethod
    def _changed(cls, config: Any, method: str) -> Any:
        fields = question(config, "ask", method, ())
        return config.model_copy(update={**fields, "python": config.python})

    def __init__(self, config: Any, num_envs: int) -> None:
        self._process = shared_process(config)
        try:
            self._number, spec, dtype, self._saves_state = self._process.call("build", of_child(config), num_envs)
        except BaseException:
            self._process.end_if_unused()
            raise
        self._process.envs.add(self._number)
        super().__init__(config.model_copy(update={"reward": "own"}), num_envs, spec, np.dtype(dtype).type)
        self.config = config  # the reward is given in the interpreter

    def _ask(self, method: str, *args: Any) -> Any:
        return self._process.call("call", self._number, method, args)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        obs, info = self._process.call("start", self._number, seed, options)
        self._success = info.get("success", self._success)
        return obs, info

    def step_chunk(self, actions: np.ndarray, on_frame: Callable[[np.ndarray], None] | None = None) -> ChunkResult:
        if is_tensor(actions):
            actions = actions.detach().cpu().numpy()
        result = self._process.call("step_chunk", self._number, actions, on_frame is not None, on_frame=on_frame)
        if result.success is not None:
            self._success = result.success[:, -1]
        return result

    def observe(self, rows: np.ndarray | None = None) -> Observation:
        return self._ask("observe", rows)

    def last_step(self) -> tuple[np.ndarray, np.ndarray]:
        return self._ask("last_step")

    def render_rows(self, rows: np.ndarray) -> np.ndarray:
        return self._ask("render_rows", rows)

    def video_problem(self) -> str:
        return self._ask("video_problem")

    def drawn_by(self) -> str:
        return self._ask("drawn_by")

    def facts(self) -> dict[str, str]:
        return self._ask("facts")

    @property
    def saves_state(self) -> bool:
        return self._saves_state

    def get_state(self) -> dict[str, np.ndarray]:
        return self._ask("get_state")

    def set_state(self, state: dict[str, np.ndarray]) -> Observation:
        return self._ask("set_state", state)

    def expert(self, kind: str = "scripted", tick: Callable[[], None] = lambda: None) -> Expert:
        return ForeignExpert(self._process, self._number, kind, tick)

    def close_extras(self, **kwargs: Any) -> None:
        with suppress(errors.EmbodiedError, RuntimeError, OSError):  # OSError: its process was ended before
            self._process.call("close", self._number)
        self._process.envs.discard(self._number)
        self._process.end_if_unused()


class ForeignExpert:
    """An expert in the interpreter."""

    def __init__(self, process: Process, env: int, kind: str, tick: Callable[[], None]) -> None:
        self._process, self._tick = process, tick
        self._number = process.call("expert", env, kind, tick=tick)

    def begin(self, rows: np.ndarray) -> None:
        self._process.call("expert_begin", self._number, rows, tick=self._tick)

    def act(self) -> np.ndarray:
        return self._process.call("expert_act", self._number, tick=self._tick)
