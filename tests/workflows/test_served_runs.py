"""Runs whose answers come from a server: token by token those of runs that answer themselves, and what a user sees when
the server ends."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from served_language import SECRET, served, until
from talking_runs import ONE_OF_EACH, Talk, far, told
from tiny_language import SEES, build

from embodied import evaluate, train
from embodied.core.pictures import data_url, drawing, load_picture
from embodied.policies import load_policy
from embodied.policies.language.servers.server_pool import ServerPool
from embodied.policies.policy_folder import read_weights
from embodied.records.transcripts import read_transcripts
from embodied.serving.config import TOKEN
from embodied.workflows.rl_loop import EmbodiedLoop

INLINE = ["cluster.backend=inline", 'placement={"sim,policy": "cpu:0", learner: "cpu:0"}']
FEW = ["run.iterations=3", "env.num_envs=16", "algo.groups=4", "algo.group_size=4", "eval.episodes=8", *INLINE]


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)


def at(server, folder):
    return ["policy.engine=http", f"policy.url={server.url}", f"policy.weights={folder / 'weights'}"]


def test_a_run_through_a_server_takes_the_same_steps(tmp_path):
    asked = ["pipeline.schedule=async"]
    with Talk(tmp_path / "own", *asked, placement=ONE_OF_EACH) as run:
        want, weights = run.some(3), run.weights()
    model = build(preset="tiny_gpt2", dtype="float64", max_running=8, seed=7)
    with served(model, tmp_path) as server:
        with Talk(tmp_path / "served", *asked, *at(server, tmp_path), placement=ONE_OF_EACH) as run:
            rows = run.some(3)
            assert told(rows) == told(want)
            assert far(run.weights(), weights) < 1e-10
    for _, row in rows:
        assert row.get("train/logprob_gap", 0.0) < 1e-6 and row["engine/asked_again"] == row["engine/unusable"] == 0


def test_a_run_of_several_processes_shows_what_becomes_of_its_servers(tmp_path):
    model = build(preset="tiny_gpt2", dtype="float64", max_running=8, seed=7)
    with served(model, tmp_path) as server:
        words = [*at(server, tmp_path), "policy.away_s=60"]
        with Talk(tmp_path / "served", *words, placement=ONE_OF_EACH, backend="local") as run:
            server.generation.pause("keep").result(60)
            waiting = threading.Thread(target=lambda: (until(lambda: run.lines), server.generation.resume()))
            waiting.start()
            run.some(1)
            waiting.join(60)
    what = "is paused (POST /pause); its requests wait until POST /resume"
    assert run.lines == [f"warning: policy.url={server.url} {what}"]


async def many_clients(openai, url, stop, answers):
    """12 of OpenAI's clients: some read their answers, some leave in the middle of a stream, some while they wait."""

    async def ask(client, number):
        asked = {"model": "m", "prompt": f"{number}", "max_tokens": 24, "seed": number}
        while not stop.is_set():
            if number % 3 == 0:
                stream = await client.completions.create(**asked, stream=True)
                async for _ in stream:
                    break
                await stream.close()
            elif number % 3 == 1:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(client.completions.create(**asked), 0.05)
            else:
                found = await client.completions.create(**asked)
                answers.setdefault((number, found.system_fingerprint), set()).add(found.choices[0].text)

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=SECRET, max_retries=0, timeout=300) as client:
        await asyncio.gather(*(ask(client, number) for number in range(12)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # streams that a client has dropped
def test_twelve_clients_that_come_and_go_change_nothing_in_a_run_on_their_server(tmp_path):
    openai = pytest.importorskip("openai", reason="comes with vLLM")
    with Talk(tmp_path / "own", placement=ONE_OF_EACH) as run:
        want, weights = run.some(2), run.weights()
    answers, stop = {}, threading.Event()
    model = build(preset="tiny_gpt2", dtype="float64", max_running=8, seed=7)
    with served(model, tmp_path) as server, ThreadPoolExecutor(1) as pool:
        clients = pool.submit(asyncio.run, many_clients(openai, server.url, stop, answers))
        try:
            until(lambda: answers)  # of the weights that the server began with, which are called version 0, too
            with Talk(tmp_path / "served", *at(server, tmp_path), placement=ONE_OF_EACH) as run:
                assert told(run.some(2)) == told(want)
                assert far(run.weights(), weights) < 1e-10
            last = server.generation.fingerprint
            until(lambda: len(answers) > 4 and last in {weights for _, weights in [*answers]})
        finally:
            stop.set()
        clients.result(300)
        until(lambda: not (server.generation.writing or server.generation.queue.waiting or server.active))
    assert last.startswith("v2-") and all(len(texts) == 1 for texts in answers.values())  # by question and weights


DIGITS = ["env.name=talking_env:Digits", "policy.max_tokens=8"]  # a policy that has learned nothing is paid sometimes


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A short run, whose policy others begin with."""
    folder = tmp_path_factory.mktemp("begun")
    few = ["run.iterations=1", *FEW[1:], *DIGITS, "run.start_from=null", f"run.dir={folder}"]
    assert train.main(["recipe=sums_grpo", *few]) == 0
    (run,) = folder.iterdir()
    return run


def trained(folder, begun, *words):
    assert train.main(["recipe=sums_grpo", *FEW, *DIGITS, f"run.start_from={begun}", f"run.dir={folder}", *words]) == 0
    (run,) = (at for at in folder.iterdir() if at.name.startswith("sums"))
    return run


def test_sums_are_learned_through_a_server_as_without_one(begun, tmp_path, capsys):
    own = trained(tmp_path / "own", begun)
    policy = max(begun.glob("checkpoints/v*/policy"))
    with served(load_policy(policy), policy) as server:
        ours = trained(tmp_path / "served", begun, *at(server, tmp_path), "policy.verify=1")  # of all answers
        assert server.generation.version == 3
        weights = [read_weights(max(run.glob("checkpoints/v*/policy"))) for run in (own, ours)]
        assert far(*weights) < 1e-5
        said = [read_transcripts(max((run / "eval").iterdir())) for run in (own, ours)]
        assert [[turn["tokens"] for turn in one["turns"]] for one in said[0].values()] == [
            [turn["tokens"] for turn in one["turns"]] for one in said[1].values()
        ]
        rows = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (own, ours)]
        for mine, theirs in zip(*rows, strict=True):
            assert mine["return"] == theirs["return"] and mine["text/tokens"] == theirs["text/tokens"]
        assert rows[0][-1]["train/grad_norm"] > 1e-3
        assert rows[1][-1]["engine/dropped_servers"] == 0
        assert SECRET not in "".join(file.read_text(errors="replace") for file in ours.rglob("*") if file.is_file())

        # The server has version 3 now: evaluated as it is, and refused as another's.
        asked = ["eval.episodes=8", "cluster.backend=inline", "policy.engine=http", f"policy.url={server.url}"]
        assert evaluate.main([f"checkpoint={own}", "eval.episodes=8", "cluster.backend=inline"]) == 0
        assert evaluate.main([f"checkpoint={ours}", *asked]) == 0
        found = [max((run / "eval").glob("*-evaluate")) for run in (own, ours)]
        assert read_transcripts(found[0]).keys() == read_transcripts(found[1]).keys()
        capsys.readouterr()
        assert evaluate.main([f"checkpoint={begun}", *asked]) != 0
        assert f"policy.url={server.url} has other weights" in capsys.readouterr().err
    # Without its server a run's policy is asked by an engine of its own, and the run goes on with another.
    assert evaluate.main([f"checkpoint={ours}", "eval.episodes=4", "cluster.backend=inline"]) == 0
    with served(load_policy(policy), policy) as server:
        more = ["run.iterations=4", f"policy.url={server.url}", "cluster.backend=inline"]
        assert train.main([f"resume={ours}", *more]) == 0
        assert server.generation.version == 4


def test_engines_are_chosen_for_language_models_alone(begun, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.main(["recipe=pointmass_ppo", "run.iterations=1", "eval.episodes=2", "cluster.backend=inline"]) == 0
    (run,) = tmp_path.glob("runs/pointmass*")
    capsys.readouterr()
    assert evaluate.main([f"checkpoint={run}", "policy.max_running=3"]) == 2
    assert "policy.max_running" in capsys.readouterr().err
    assert evaluate.main([f"checkpoint={begun}", "policy.max_tokens=3"]) == 2
    assert "policy.max_tokens has no effect in evaluate" in capsys.readouterr().err


def test_a_run_is_stopped_and_goes_on_although_its_server_holds_every_request(begun, tmp_path, capsys, monkeypatch):
    policy = max(begun.glob("checkpoints/v*/policy"))
    words = ["recipe=sums_grpo", *DIGITS, *FEW[1:-2], f"run.start_from={begun}", f"run.dir={tmp_path}", "run.name=held"]
    with served(load_policy(policy), policy) as server:
        generation, iterate = server.generation, EmbodiedLoop.iterate

        def strike():
            until(lambda: generation.queue.waiting or generation.writing)
            os.kill(os.getpid(), signal.SIGTERM)

        def held_in_the_second(loop, number, total):
            if number == 1:
                generation.pause("keep").result(60)
                threading.Thread(target=strike, daemon=True).start()
            return iterate(loop, number, total)

        with monkeypatch.context() as patched:
            patched.setattr(EmbodiedLoop, "iterate", held_in_the_second)
            assert train.main([*words, "run.iterations=4", "run.stop_s=0.5", *at(server, tmp_path)]) == 143
        assert "the step in progress was given up" in capsys.readouterr().out
        generation.resume().result(60)
        (run,) = tmp_path.glob("held-*")
        assert train.main([f"resume={run}"]) == 0
        assert generation.version == 4


@pytest.mark.slow
def test_an_honest_server_of_another_processor_is_believed(begun, tmp_path):
    policy = max(begun.glob("checkpoints/v*/policy"))
    other = {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"}
    command = [sys.executable, "-m", "embodied.serve", f"checkpoint={policy}", "port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | other) as server:
        try:
            url = next(line.split()[1] for line in server.stdout if line.startswith("listening"))
            run = trained(tmp_path, begun, *at(SimpleNamespace(url=url), tmp_path), "policy.verify=1")
        finally:
            server.terminate()
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["engine/dropped_servers"] == 0


@pytest.mark.parametrize("suspects", ["use", "stop"])
def test_earlier_answers_of_a_lying_server_are_used_or_dropped_or_end_the_run(suspects, tmp_path, monkeypatch):
    before, released = ServerPool.release, []
    models = [build(preset="tiny_gpt2", dtype="float64", max_running=4, seed=7) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        honest, liar = (stack.enter_context(served(model, tmp_path)) for model in models)

        def release(pool, compared):
            if pool.wanted.startswith("v1-"):
                one = next(server for server in pool.servers if server.name.endswith(liar.url))
                found = before(pool, compared)
                released.extend(found)
                if one.used.answers and one.used.versions[-1] == 1 and not one.is_dropped:
                    with torch.no_grad():
                        for weight in liar.policy.parameters():
                            weight += 1.0
                return found
            return before(pool, compared)

        monkeypatch.setattr(ServerPool, "release", release)
        words = [f"policy.url=[{honest.url}, {liar.url}]", f"policy.weights={tmp_path / 'w'}"]
        words += ["policy.engine=http", f"policy.suspects={suspects}", "algo.groups=8", "algo.filter=none"]
        with Talk(tmp_path / "pool", *words, placement=ONE_OF_EACH) as run:
            rows = run.some(2)
            ends = run.loop.exhausted
    (_, first), (_, second) = rows
    assert first["engine/dropped_servers"] == 0 and second["engine/dropped_servers"] == 1
    assert second["engine/suspect_answers"] > 0
    assert (second["groups/dropped_incomplete"] > 0) == (suspects != "use")
    assert second["groups/used"] == 8 - second["groups/dropped_incomplete"]
    assert ("Checkpoints up to v000000 are from before" in ends) == (suspects == "stop")


def test_servers_answer_to_pictures_as_the_policys_own_engine(tmp_path):
    played = []
    words = ["env.name=talking_env:Shown", "policy.preset=tiny_vl", "policy.max_tokens=4"]
    with served(build(SEES, preset="tiny_vl", dtype="float64", max_running=4, seed=7), tmp_path) as server:
        at_server = ["policy.engine=http", f"policy.url={server.url}", f"policy.weights={tmp_path / 'w'}"]
        for name, more in ("own", []), ("server", at_server):
            with Talk(tmp_path / name, *words, *more, placement=ONE_OF_EACH) as run:
                played.append((told(run.some(1)), run.weights()))
        shown = [data_url(load_picture(drawing("count", 1, 64)))]
        body = {"prompt": [3, -1, -2, 4], "max_tokens": 1, "pictures": shown}
        headers = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}
        asked = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(asked, timeout=60)
        with caught.value as refused:
            assert refused.code == 400 and b"its places are not those of the pictures" in refused.read()
    assert played[0][0] == played[1][0] and far(played[0][1], played[1][1]) < 1e-10


def test_all_policy_workers_drop_a_server_that_one_of_them_finds_out(tmp_path, monkeypatch):
    """The other one compares no log-probs."""
    before, pools = ServerPool.release, []
    models = [build(preset="tiny_gpt2", dtype="float64", max_running=4, seed=7) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        honest, liar = (stack.enter_context(served(model, tmp_path)) for model in models)

        def release(pool, compared):
            if not pools:
                with torch.no_grad():
                    for weight in liar.policy.parameters():
                        weight += 1.0
            if pool not in pools:
                pools.append(pool)
                pool.config = pool.config.model_copy(update={"gap_limit": 0.1 if len(pools) == 1 else None})
            return before(pool, compared)

        monkeypatch.setattr(ServerPool, "release", release)
        words = [f"policy.url=[{honest.url}, {liar.url}]", "policy.engine=http", f"policy.weights={tmp_path / 'w'}"]
        two = {"sim": "cpu:0", "policy": "cpu:1-2*2", "learner": "cpu:3"}
        with Talk(tmp_path / "pool", *words, "policy.suspects=drop", "algo.groups=8", placement=two) as run:
            _, row = run.iterate(0)
    assert len(pools) == 2 and row["engine/dropped_servers"] == 2
    assert row["engine/suspect_answers"] > 0 and row["groups/dropped_incomplete"] > 0
