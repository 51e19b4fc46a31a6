"""Runs in an interpreter of its own that has `verifiers`: rolls out examples of an environment against our endpoint.

It imports nothing but the standard library and what is there: `embodied` is not. A JSON object a line comes in and goes
out, first what to load:

    {"environment": "gsm8k", "kwargs": {}, "url": "http://127.0.0.1:1", "key": "..."}
    -> {"train": 950, "held_out": 50, "turns": 1, "kind": "SingleTurnEnv", "version": "0.3.1"}, or {"problem": "..."}

then, where there is a url, examples, any number at a time, whose chat requests go to `URL/7/v1`:

    {"begin": 7, "held_out": false, "number": 3} -> {"ended": 7, "reward": 1.0, ...}, or {"ended": 7, "error": "..."}
    {"end": 7}, where nobody wants the rest of it
"""

import asyncio
import json
import logging
import os
import sys
import threading
import time
from contextvars import ContextVar
from copy import deepcopy

WANTED = "verifiers>=0.1.14,<0.4"
SHARE, MOST = 0.05, 500  # held out of a dataset that has no other beside it
END_S = 10.0  # after its worker is gone, a hung environment ends with its process
LONGEST = 1000  # characters of what is for people to read
RAISED = ContextVar("raised", default=None)  # what reward functions of an example raised: the package calls that 0


class Problem(Exception):
    """Why the environment cannot be played, for the user."""


def main():
    commands, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what libraries print is not a reply
    asked = json.loads(commands.readline())

    def say(**reply):
        print(json.dumps(reply, default=str), file=replies)

    try:
        env, version = opened(asked["environment"], asked["kwargs"])
        train, held_out = splits(env)
    except Problem as err:
        return say(problem=str(err))
    logging.getLogger("verifiers").addHandler(RewardErrorHandler(logging.ERROR))
    say(train=len(train), held_out=len(held_out), turns=turns_of(env), kind=type(env).__name__, version=version)
    if asked["url"]:
        asyncio.run(serve(Player(env, train, held_out, asked["url"], asked["key"], say), commands))


# What there is


def opened(name, kwargs):
    """The environment, and the version of the package."""
    try:
        import verifiers
    except ImportError as err:
        mend = f'{sys.executable} -m pip install "{WANTED}"'
        raise Problem(f"{sys.executable} cannot import verifiers ({err}): {mend}") from None
    version = getattr(verifiers, "__version__", "")
    try:
        load = verifiers.load_environment
    except AttributeError:
        mend = f'{sys.executable} -m pip install "{WANTED}"'
        raise Problem(f"verifiers {version} has no load_environment any more: {mend}") from None
    try:
        env = load(name, **kwargs)
    except Exception as err:
        raise Problem(why_not(name, err)) from err
    if any(getattr(one, "requires_group_rollouts", False) for one in (env, *getattr(env, "envs", ()))):
        raise Problem(
            f"{type(env).__name__}: its rubric scores several answers together, and each is scored alone here"
        )
    return env, version


def why_not(name, err):
    """Why an environment could not be loaded, and what mends it."""
    module, cause = name.split("/")[-1].replace("-", "_"), err.__cause__ or err
    if isinstance(cause, ModuleNotFoundError) and cause.name == module:
        return (
            f"there is no module {module}, which is installed like a package ({sys.executable} -m pip install "
            f"{name.split('/')[-1]}) or lies in the working directory as {module}.py with a load_environment"
        )
    return f"{module}.load_environment: {type(cause).__name__}: {cause}"


def splits(env):
    """The examples to train on and those held out. Without an eval_dataset the first are held out; what is held out is
    not trained on, though the dataset repeats it."""
    train, evaluated = ([*(built(env, name) or ())] for name in ("dataset", "eval_dataset"))
    if not train or not evaluated:
        every = train or evaluated
        count = max(1, min(MOST, int(SHARE * len(every))))
        held_out, train = every[:count], every[count:]
    else:
        held_out = evaluated
    prompts = {key(one, "prompt") for one in held_out}
    same = ("prompt",) if len(prompts) == len(held_out) else ("prompt", "answer", "info")  # games ask all the same
    known = {key(one, *same) for one in held_out}
    kept = [one for one in train if key(one, *same) not in known]
    if not kept:
        raise Problem(f"no example is left to train on: all {len(train)} are held out for evaluations too")
    return kept, held_out


def built(env, name):
    build = getattr(env, f"build_{name}", None)
    return build() if build else getattr(env, name)


def key(example, *columns):
    return json.dumps([example.get(column) for column in columns], sort_keys=True, default=str)


def turns_of(env):
    """The most answers of a rollout; 0 if the environment does not say."""
    turns = [turns_of(one) for one in env.envs] if hasattr(env, "envs") else [getattr(env, "max_turns", 0)]
    return 0 if min(turns) < 1 else max(turns)


# Playing


class RewardErrorHandler(logging.Handler):
    """Keeps what the package only logs: that a reward function failed."""

    def emit(self, record):
        raised = RAISED.get()
        if raised is not None and str(record.msg).startswith("Error calling"):
            raised.append(record.getMessage()[:LONGEST])


class Player:
    def __init__(self, env, train, held_out, url, key, say):
        import verifiers
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        self.env, self.examples, self.url, self.say = env, {False: train, True: held_out}, url, say
        self.open = {}
        http = DefaultAsyncHttpxClient(trust_env=False)  # no proxy stands between us
        # An answer takes as long as it takes, and asking twice for one would confuse the other side.
        self.client = AsyncOpenAI(base_url=url, api_key=key, timeout=None, max_retries=0, http_client=http)
        self.wrapped = verifiers.OpenAIChatCompletionsClient

    def do(self, command):
        if "begin" in command:
            number = command["begin"]
            self.open[number] = asyncio.create_task(self.play(number, command["held_out"], command["number"]))
        elif command["end"] in self.open:
            self.open[command["end"]].cancel()

    async def play(self, number, held_out, index):
        """Roll an example out and say what it was worth."""
        RAISED.set(raised := [])
        try:
            client = self.wrapped(self.client.with_options(base_url=f"{self.url}/{number}/v1"))
            example, sampling = deepcopy(self.examples[held_out][index]), deepcopy(self.env.sampling_args)
            output = await self.env.run_rollout(example, client, "policy", sampling)
            self.say(ended=number, **what_counts(output), raised=raised)
        except Exception as err:  # an environment's own code raises anything
            self.say(ended=number, error=f"{type(err).__name__}: {err}"[:LONGEST])
        finally:
            del self.open[number]


def what_counts(output):
    """The fields that we read of a rollout's state."""
    error = output.get("error")
    if error:
        return {"error": str(output.get("error_chain") or error)[:LONGEST]}
    if output["reward"] is None:
        return {"error": "it ended without a reward"}
    metrics = {name: value for name, value in (output.get("metrics") or {}).items() if isinstance(value, int | float)}
    return {"reward": output["reward"], "metrics": metrics, "answer": str(output.get("answer") or "")[:LONGEST]}


async def serve(player, commands):
    """Serve requests until the other side is gone."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def hear():
        for line in commands:
            loop.call_soon_threadsafe(player.do, json.loads(line))
        loop.call_soon_threadsafe(over.set)
        time.sleep(END_S)
        os._exit(1)

    threading.Thread(target=hear, daemon=True).start()
    await over.wait()


if __name__ == "__main__":
    main()
