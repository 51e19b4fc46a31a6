"""Runs in a separate interpreter that has `verifiers`: rolls out examples of an environment against our endpoint.

It imports only the standard library and packages of that interpreter, not `embodied`. Input and output are one JSON
object a line, first the environment to load:

    {"environment": "gsm8k", "kwargs": {}, "url": "http://127.0.0.1:1", "key": "..."}
    -> {"train": 950, "held_out": 50, "turns": 1, "kind": "SingleTurnEnv", "compares": false, "version": "0.3.1"}, or
    {"problem": "..."}

then, if there is a url, examples, any number at a time. Their chat requests ask the model `policy-7` of `URL/v1`:

    {"begin": 7, "held_out": false, "number": 3} -> {"ended": 7, "reward": 1.0, "runs": [{"run": "a1", ...}], ...},
    {"ended": 7, "error": "..."}, or {"ended": 7, "refused": "..."}
    {"begin": 7, "held_out": false, "number": 3, "runs": 8}: of a rubric that scores eight answers together
    {"end": 7}, to drop the rest of it
"""

import asyncio
import json
import logging
import os
import sys
import threading
import time
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from copy import deepcopy
from itertools import islice

WANTED = "verifiers>=0.1.14,<0.5"
SHARE, MOST = 0.05, 500  # held out if there is no dataset for evaluations
ENDLESS = 10_000  # tasks that are taken from an endless taskset
END_S = 10.0  # this long after its worker has died, a hung environment's process ends
LONGEST = 1000  # characters of texts for people
KEY = "EMBODIED_API_KEY"  # verifiers 0.4 reads our endpoint's key here, and keeps names like this one from tools
RUN_HEADER = "X-Session-ID"  # tells which run of an agent sends a request; verifiers 0.4 sets it
RUN = ContextVar("run", default="")
GROUP = ContextVar("group", default=None)  # whose turn it is, if several answers are scored together
RAISED = ContextVar("raised", default=None)  # exceptions of an example's reward functions, which count as 0


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
        env, version = open_environment(asked["environment"], asked["kwargs"])
    except Problem as err:
        return say(problem=str(err))
    facts = {"turns": env.turns, "kind": env.kind, "compares": env.compares, "version": version}
    say(train=len(env.train), held_out=len(env.held_out), **facts)
    if asked["url"]:
        asyncio.run(serve(env, asked["url"], asked["key"], say, commands))


# Environments and their examples


def open_environment(name, kwargs):
    """The environment, loaded as the installed version of the package requires, and that version."""
    mend = f'{sys.executable} -m pip install "{WANTED}"'
    try:
        import verifiers
    except ImportError as err:
        raise Problem(f"{sys.executable} cannot import verifiers ({err}): {mend}") from None
    version = getattr(verifiers, "__version__", "")
    try:
        if hasattr(verifiers, "load_environment"):
            return DatasetEnvironment(verifiers, name, kwargs), version
        import verifiers.v1 as tasks

        return TasksetEnvironment(tasks, name, kwargs), version
    except ModuleNotFoundError as err:
        if (err.name or "").startswith("verifiers"):
            raise Problem(f"verifiers {version} has neither load_environment nor verifiers.v1: {mend}") from None
        raise Problem(why_not(name, err)) from err
    except Problem:
        raise
    except Exception as err:
        raise Problem(why_not(name, err)) from err


def why_not(name, err):
    """Why an environment could not be loaded, and how to mend it."""
    module, cause = name.split("/")[-1].split("@")[0].replace("-", "_"), err.__cause__ or err
    if isinstance(cause, ModuleNotFoundError) and cause.name == module:
        return (
            f"there is no module {module}, which is installed like a package ({sys.executable} -m pip install "
            f"{name.split('/')[-1]}) or lies in the working directory as {module}.py, with a load_environment or, for "
            "verifiers 0.4, a Taskset in its __all__"
        )
    return " ".join(f"{module} cannot be loaded: {type(cause).__name__}: {cause}".split())


def split_examples(train, evaluated):
    """The training examples and the held-out ones. Without evaluation examples the first are held out; repeated
    held-out examples are not trained on."""
    if not train or not evaluated:
        every = train or evaluated
        count = max(1, min(MOST, int(SHARE * len(every))))
        held_out, train = every[:count], every[count:]
    else:
        held_out = evaluated
    prompts = {key(example, "prompt") for example in held_out}
    same = ("prompt",) if len(prompts) == len(held_out) else ("prompt", "answer", "info")  # games ask all the same
    known = {key(example, *same) for example in held_out}
    kept = [example for example in train if key(example, *same) not in known]
    if not kept:
        raise Problem(f"no example is left to train on: all {len(train)} are held out for evaluations too")
    return kept, held_out


def key(example, *columns):
    return json.dumps([example.get(column) for column in columns], sort_keys=True, default=str)


# verifiers 0.1 to 0.3


class DatasetEnvironment:
    """What `load_environment(name, **kwargs)` returns: datasets, and a rubric."""

    def __init__(self, verifiers, name, kwargs):
        self.env, self.wrapped = verifiers.load_environment(name, **kwargs), verifiers.OpenAIChatCompletionsClient
        every = (self.env, *getattr(self.env, "envs", ()))
        self.compares = any(getattr(inner, "requires_group_rollouts", False) for inner in every)
        for inner in every[1:] or every:
            inner.rollout = in_turn(inner.rollout)
        self.train, self.held_out = split_examples(
            *([*(built(self.env, name) or ())] for name in ("dataset", "eval_dataset"))
        )
        self.kind, self.turns = type(self.env).__name__, turns_of(self.env)
        logging.getLogger("verifiers").addHandler(RewardErrorHandler(logging.ERROR))

    @asynccontextmanager
    async def connected(self, url, key):
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        async def name_run(request):
            request.headers[RUN_HEADER] = RUN.get()

        # no proxy for our endpoint
        http = DefaultAsyncHttpxClient(trust_env=False, event_hooks={"request": [name_run]})
        # There is no time limit for an answer, and a repeated request would confuse our endpoint.
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, timeout=None, max_retries=0, http_client=http)
        self.client = self.wrapped(client)
        yield

    async def roll(self, example, model, runs=None):
        """Play an example; returns its score. With `runs` it is played so often, and all are scored together."""
        RAISED.set(raised := [])
        sampling = deepcopy(self.env.sampling_args)
        if runs is None:
            output = await self.env.run_rollout(deepcopy(example), self.client, model, sampling)
            return what_counts(output) | {"raised": raised}
        GROUP.set(Turns())
        outputs = await self.env.run_group([deepcopy(example) for _ in range(runs)], self.client, model, sampling)
        scores = [what_counts(output) for output in outputs]
        failed = next((score for score in scores if "error" in score), None)
        return failed or {"runs": [{"run": str(at), "raised": raised, **score} for at, score in enumerate(scores)]}


class Turns:
    """Whose turn it is in a group."""

    def __init__(self):
        self.free, self.begun = asyncio.Lock(), 0


def in_turn(roll):
    """Lets the rollouts of a group play one after the other, and names their requests."""

    async def play(*what, **more):
        if (turns := GROUP.get()) is None:
            return await roll(*what, **more)
        async with turns.free:
            RUN.set(str(turns.begun))
            turns.begun += 1
            return await roll(*what, **more)

    return play


def built(env, name):
    build = getattr(env, f"build_{name}", None)
    return build() if build else getattr(env, name)


def turns_of(env):
    """The most answers of a rollout; 0 if the environment does not say."""
    turns = [turns_of(inner) for inner in env.envs] if hasattr(env, "envs") else [getattr(env, "max_turns", 0)]
    return 0 if min(turns) < 1 else max(turns)


class RewardErrorHandler(logging.Handler):
    """Records failures of reward functions, which the package only logs."""

    def emit(self, record):
        raised = RAISED.get()
        if raised is not None and str(record.msg).startswith("Error calling"):
            raised.append(record.getMessage()[:LONGEST])


def what_counts(output):
    """The fields that we read from a rollout's state."""
    error = output.get("error")
    if error:
        return {"error": str(output.get("error_chain") or error)[:LONGEST]}
    if output["reward"] is None:
        return {"error": "it ended without a reward"}
    return as_result(output["reward"], output.get("metrics") or {}, output.get("answer"))


def as_result(reward, metrics, answer):
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    return {"reward": reward, "metrics": numbers, "answer": str(answer or "")[:LONGEST]}


# verifiers 0.4


class TasksetEnvironment:
    """An environment of verifiers 0.4, made from `kwargs` in the form of its [env] block: a taskset, and agents that
    play its tasks.

    Agents chat in this process (`chat`): the package would start a program for each conversation, which needs uv."""

    compares = False  # True: every reward depends on other answers

    def __init__(self, vf, name, kwargs):
        from verifiers.v1.harnesses.null import NullHarness

        NullHarness.launch, NullHarness.setup, NullHarness.SUPPORTS_TOOL_INTERCEPTION = chat, do_nothing, False
        self.vf, config = vf, {**kwargs, "taskset": {"id": name, **kwargs.get("taskset", {})}}
        agents = self.agents(vf.env_config_type(name, kwargs.get("id", "")))
        for agent, default in agents.items():
            config[agent] = self.with_chat(name, default) | config.get(agent, {})
        self.env = vf.load_environment(vf.resolve_env_config(config))
        taskset = self.env.taskset
        here = [agent for agent in agents if getattr(self.env.config, agent).runtime.type == "subprocess"]
        if here and type(taskset).task_type().NEEDS_CONTAINER:
            raise Problem(
                f"its tasks need a container; with Docker try env.kwargs={{{here[0]}: {{runtime: {{type: docker}}}}}}"
            )
        self.train, self.held_out = split_examples(
            [*map(row, taskset if taskset.bounded else islice(taskset, ENDLESS))], []
        )
        self.kind, self.turns = type(self.env).__name__, self.most_turns(agents)

    def agents(self, config):
        """The agents that a config type or a config has, by name."""
        fields = type(config).model_fields if isinstance(config, self.vf.EnvConfig) else config.model_fields
        named = {name: getattr(config, name, field.default) for name, field in fields.items()}
        return {name: agent for name, agent in named.items() if isinstance(agent, self.vf.AgentConfig)}

    def with_chat(self, taskset, default):
        """The default for an agent without a harness: it chats in this process."""
        chats = default.harness is None and self.vf.default_harness_id(taskset) == "bash"
        here = "runtime" not in default.model_fields_set
        return ({"harness": {"id": "null"}} if chats else {}) | ({"runtime": {"type": "subprocess"}} if here else {})

    def most_turns(self, agents):
        """The most answers of a rollout; 0 if the environment does not say."""
        env, taskset = self.env, self.env.taskset
        tools = taskset.toolsets(taskset.config) or type(taskset).task_type().toolsets(taskset.config.task)
        limits = [getattr(env.config, name).max_turns or 0 for name in agents]
        alone = type(env) is self.vf.SingleAgentEnv and env.config.agent_harnesses()["agent"].id == "null" and not tools
        return 1 if alone else 0 if 0 in limits else max(limits)

    @asynccontextmanager
    async def connected(self, url, key):
        os.environ[KEY] = key
        os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"
        self.client = self.vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var=KEY)
        async with self.env.serving():
            yield

    async def roll(self, example, model, runs=None):
        """Roll a task out; returns its reward and other fields. The environment says how many runs it has."""
        context, refused = self.vf.ModelContext(model=model, client=self.client), []

        def watch(trace):
            if trace.agent.config.model == model and not trace.agent.trainable:
                refused.append(trace.agent.name)
                raise RuntimeError(f"{trace.agent.name} asks the policy")

        episode = await self.env.run_episode(example["task"], context, on_trace=watch)
        if refused:
            role = refused[0]
            why = f"its agent {role} is not to be trained, but asks the policy; give it a model of its own: "
            return {"refused": why + f"env.kwargs={{{role}: {{model: NAME, client: {{base_url: URL}}}}}}"}
        traces = [trace for trace in episode.traces if trace.agent.config.model == model]
        for error in [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]:
            return {"error": f"{error.type}: {error.message}"[:LONGEST]}
        if not traces:
            return {"error": "no agent of it asked the policy"}
        answer = getattr(example["task"].data, "answer", None)
        runs = [as_result(trace.reward, scores_of(trace), answer) | {"raised": [], "run": trace.id} for trace in traces]
        metrics = {name: value for run in runs for name, value in run["metrics"].items()}
        return as_result(sum(run["reward"] for run in runs), metrics, answer) | {"raised": [], "runs": runs}


def scores_of(trace):
    return trace.metrics | {name: reward.value for name, reward in trace.rewards.items() if reward is not None}


def row(task):
    """A task in the form of a dataset's example, to recognise held-out ones."""
    info = task.data.model_dump(mode="json", exclude={"idx"})
    return {"prompt": [info["system_prompt"], info["prompt"]], "info": info, "task": task}


async def do_nothing(*_):
    """Do nothing: an agent that chats in this process needs no installation."""


async def chat(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
    """Hold a conversation with the policy until it calls no tool, instead of the program of the harness `null`."""
    from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient, omit
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.utils.mcp import connect_mcp
    from verifiers.v1.runtimes import ProgramResult

    system, prompt = self.resolve_prompt(data)
    messages = [{"role": "system", "content": system}] if system else []
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or ())
    messages += asked
    where = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(DefaultAsyncHttpxClient(trust_env=False, verify=False))
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None, max_retries=0, http_client=http)
        tools, names, servers = await connect_mcp({"mcpServers": where}, stack)
        calls = True
        while calls:
            try:
                completion = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=tools or omit
                )
            except APIStatusError as err:
                if "context_length_exceeded" in str(err):
                    break  # the conversation so far is scored
                raise
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            calls = message.tool_calls or ()
            for call in calls:
                result = await result_of(call.function, names, servers)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ProgramResult(exit_code=0, stdout="", stderr="")


async def result_of(function, names, servers):
    """A tool's reply to a call."""
    from verifiers.v1.harnesses.utils.mcp import call_mcp

    if function.name not in names:
        return f"error: unknown tool {function.name!r}"
    return await call_mcp(servers, names, function.name, json.loads(function.arguments))


# Playing


class Player:
    def __init__(self, env, say):
        self.env, self.say, self.open = env, say, {}

    def do(self, command):
        if "begin" in command:
            number, examples = command["begin"], self.env.held_out if command["held_out"] else self.env.train
            play = self.play(number, examples[command["number"]], command.get("runs"))
            self.open[number] = asyncio.create_task(play)
        elif command["end"] in self.open:
            self.open[command["end"]].cancel()

    async def play(self, number, example, runs):
        """Play an example and report its score."""
        try:
            self.say(ended=number, **await self.env.roll(example, f"policy-{number}", runs))
        except Exception as err:  # an environment's code may raise anything
            self.say(ended=number, error=f"{type(err).__name__}: {err}"[:LONGEST])
        finally:
            del self.open[number]


async def serve(env, url, key, say, commands):
    """Serve requests until the input ends."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def hear():
        for line in commands:
            loop.call_soon_threadsafe(player.do, json.loads(line))
        loop.call_soon_threadsafe(over.set)
        time.sleep(END_S)
        os._exit(1)

    async with env.connected(url, key):
        player = Player(env, say)
        threading.Thread(target=hear, daemon=True).start()
        await over.wait()


if __name__ == "__main__":
    main()
