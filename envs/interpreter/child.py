"""Runs in the interpreter `env.python`: builds an env there and answers the calls of its sim host (`env.py`).

The interpreter is Python 3.9 or later and needs numpy and gymnasium, and whatever the simulator needs. Our own source
is taken from where the host has it, and no package beside it: only the import of `embodied` is redirected. Options come
validated from the host, so a stand-in with fields and nothing else takes the place of pydantic while our `config.py`
files are imported. What the simulator prints goes to the host's log.

If its socket listens, it serves all that connect (`env.SharedProcess`) and ends with the last connection.
"""

import builtins
import contextlib
import ctypes
import importlib.machinery
import importlib.metadata
import importlib.util
import itertools
import os
import select
import signal
import socket
import sys
import types
import weakref


def main():
    package, descriptor, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    del sys.argv[1:]
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # the kernel kills it when its parent dies, even a stopped one
    if os.getppid() != parent:
        os._exit(1)
    os.dup2(2, 1)
    given = connection = socket.socket(fileno=descriptor)
    shared = given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if shared:
        connection, _ = given.accept()  # the parent's
    connection.sendall(b"embodied\n")
    problem = missing()
    if problem:
        connection.sendall(f"{problem}\n".encode())
        return
    fill_in()
    load(package)
    with_stand_in(importlib.import_module, "embodied.envs.config")
    from embodied.envs.interpreter.wire import VERSION

    greeting = f"{VERSION}\n".encode()
    connection.sendall(greeting)
    if shared:
        serve_all(given, Server(connection), b"embodied\n" + greeting)
    else:
        Server(connection).serve()


MESSAGE_S = 10.0  # for a whole message of one of several connections


def serve_all(listener, first, greeting):
    """Answer calls of several connections, one after the other, until the last connection is closed."""
    servers = {first.wire.connection: first}
    while servers:
        for ready in select.select([listener, *servers], [], [])[0]:
            if ready is listener:
                connection, _ = listener.accept()
                connection.settimeout(MESSAGE_S)
                with contextlib.suppress(OSError):
                    connection.sendall(greeting)
                servers[connection] = Server(connection, first.things)
            else:
                try:
                    servers[ready].answer(MESSAGE_S)
                except Exception:  # it has ended, or it is stopped
                    del servers[ready]
                    ready.close()


def missing():
    """The packages that this interpreter lacks, in words."""
    if sys.version_info < (3, 9):  # noqa: UP036  # not the interpreter of the toolkit
        return f"it is Python {sys.version.split()[0]}, and 3.9 or later is needed"
    try:
        import numpy
        from gymnasium.vector import AutoresetMode
    except ImportError as err:
        return (
            f'it lacks numpy or gymnasium ({err}); {sys.executable} -m pip install numpy "gymnasium>=1.1" installs them'
        )
    return "" if numpy and AutoresetMode else "it lacks numpy"


class Zip(zip):
    def __new__(cls, *parts, strict=False):
        parts = [list(column) for column in parts] if strict else parts
        if strict and len({len(column) for column in parts}) > 1:
            raise ValueError("the parts of zip differ in length")
        return super().__new__(cls, *parts)


def pairwise(items):
    first, second = itertools.tee(items)
    next(second, None)
    return zip(first, second)


def fill_in():
    """Give Python 3.9 what our source takes from later versions."""
    if sys.version_info < (3, 10):  # noqa: UP036
        builtins.zip, itertools.pairwise, sys.orig_argv = Zip, pairwise, sys.argv


def load(package):
    """Make `embodied` importable from its folder."""
    init = os.path.join(package, "__init__.py")
    spec = importlib.util.spec_from_file_location("embodied", init, submodule_search_locations=[package])
    module = sys.modules["embodied"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


class Model:
    """Options: the fields that the host sent, or that an env gives when it makes options of ours."""

    def __init__(self, **fields):
        self.__dict__.update(fields)

    def __init_subclass__(cls, **kwargs):
        pass

    def model_copy(self, *, update=None):
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__, **(update or {}))
        return copied


def anything(*args, **kwargs):
    """Stands for pydantic's functions, also for its decorators."""
    return anything


def default_of(default=None, *, default_factory=None, **kwargs):
    """Stands for pydantic's `Field`: the attribute of the class is the default."""
    return default_factory() if default_factory else default


def keep(*args, **kwargs):
    return lambda function: function


def with_stand_in(function, *args):
    """Call a function that imports our options, with the stand-in for pydantic."""
    names = ("pydantic", "pydantic_core")
    real = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    for name in names:
        module = sys.modules[name] = types.ModuleType(name)
        module.__getattr__ = lambda word: keep if word.endswith("_validator") else anything
        module.BaseModel, module.Field = Model, default_of
    try:
        return function(*args)
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(real)


class Server:
    """Answers calls, one after the other."""

    def __init__(self, connection, things=None):
        from embodied.envs.interpreter import wire

        self.wire, self.ended = wire.Wire(connection, self.options), wire.Ended
        self.things = weakref.WeakValueDictionary() if things is None else things  # by key, of all connections
        self.kind = None
        self.envs, self.experts = [], []

    def options(self, fields):
        made = self.kind.__new__(self.kind)
        made.__dict__.update(fields)
        return made

    def serve(self, nested=False):
        try:
            while self.answer(nested=nested):
                pass
        except self.ended:
            os._exit(0)

    def answer(self, wait_s=None, nested=False):
        """Answer the next call. False: the nested calls are over."""
        name, args = self.wire.receive(wait_s)
        if nested and name == "go_on":
            return False
        try:
            answer = {"value": getattr(self, name)(*args)}
        except BaseException as err:
            answer = {"raised": described(err)}
        try:
            self.wire.send(answer, shared=True)
        except self.ended:
            raise
        except Exception as err:  # it holds something that cannot be sent
            self.wire.send({"raised": described(err)})
        return True

    def begin(self, name):
        """Take the options' class of this env."""
        from embodied.core.plugins import ENVS, OURS
        from embodied.envs.config import ENV_CONFIGS, kind_of

        self.kind = with_stand_in(lambda: [ENV_CONFIGS[kind] for kind in (*OURS[ENVS], kind_of({"name": name}))])[-1]

    def describe(self, config):
        """The class attributes that commands read."""
        from embodied.core.errors import ConfigError

        kind = self.env_class(config)
        if kind.speaks:
            raise ConfigError(
                f"env.name={config.name} is a text env, and env.python runs simulators only; leave it out"
            )
        return {"worker": kind.worker, "mixes_tasks": kind.mixes_tasks, "draws_on_gpus": kind.draws_on_gpus}

    def ask(self, config, method, args):
        """Call a class method."""
        return getattr(self.env_class(config), method)(config, *args)

    def env_class(self, config):
        from embodied.envs import env_class

        return env_class(config)

    def versions(self, config):
        """Versions of Python, of the packages that are loaded, and of those that this env needs."""
        loaded = [module for name, module in sys.modules.copy().items() if "." not in name and name[0] != "_"]
        installed = [module for module in loaded if "-packages" in str(getattr(module, "__file__", ""))]
        found = {module.__name__: getattr(module, "__version__", None) for module in installed}
        for name in filter(None, [*found, *config.needs.packages, config.needs.elsewhere]):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
        found_versions = {name: version for name, version in sorted(found.items()) if isinstance(version, str)}
        return {"python": sys.version.split()[0], **found_versions}

    def build(self, config, num_envs):
        env = self.env_class(config)(config, num_envs)
        self.envs.append(env)
        return len(self.envs) - 1, env.env_spec, env.dtype.str, env.saves_state

    def make(self, key, name, *args):
        """An object that is called like an env: its number. None: nothing has this key yet, so send the arguments."""
        from embodied.envs.own_modules import import_class

        if key not in self.things and not args:
            return None
        thing = self.things.get(key) or import_class(name)(*args)
        self.things[key] = thing
        self.envs.append(thing)
        return len(self.envs) - 1

    def call(self, number, method, args):
        return getattr(self.envs[number], method)(*args)

    def start(self, number, seed, options):
        return self.envs[number].reset(seed=seed, options=options)

    def step_chunk(self, number, actions, frames):
        return self.envs[number].step_chunk(actions, on_frame=self.frame if frames else None)

    def frame(self, moved):
        """An env step of a chunk is over: the host may now ask for frames."""
        self.wire.send({"frame": moved})
        self.serve(nested=True)

    def expert(self, number, kind):
        self.experts.append(self.envs[number].expert(kind, lambda: self.wire.send({"tick": True})))
        return len(self.experts) - 1

    def expert_begin(self, number, rows):
        self.experts[number].begin(rows)

    def expert_act(self, number):
        return self.experts[number].act()

    def close(self, number):
        env, self.envs[number] = self.envs[number], None
        env.close()


def described(err):
    """An exception: its type, its text, and where it was raised."""
    from embodied.core.errors import EmbodiedError, in_a_line
    from embodied.envs.own_modules import line_of

    if isinstance(err, (EmbodiedError, ValueError)):
        return type(err).__name__, str(err)
    if isinstance(err, NotImplementedError):
        import traceback

        return "NotImplementedError", traceback.extract_tb(err.__traceback__)[-1].name
    return "", f"{in_a_line(err)}{line_of(err)}"


if __name__ == "__main__":
    main()
