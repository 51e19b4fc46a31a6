"""The page on serving: what it says of language models is done, command by command."""

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from served_language import SECRET, served
from tiny_language import build, publish

from embodied import evaluate, sft, train
from embodied.config.read import leaves, root
from embodied.config.recipe import RunConfig
from embodied.core.types import SamplingRule
from embodied.policies.language.config import LanguageConfig
from embodied.policies.language.engine import Request, make_engine
from embodied.policies.language.servers.remote_server import RemoteServer
from embodied.policies.language.vllm import FromFolder
from embodied.serving import language_server
from embodied.serving.config import TOKEN

PAGE = (Path(__file__).parents[1] / "docs" / "serving.md").read_text()
SERVE, MAKE_TOKEN, SERVE_SFT, TRAIN, VLLM, POOL, EVALUATE = re.findall(
    r"^(?!#)(.+)$", "\n".join(re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S)), re.M
)
FEW = ["run.iterations=1", "env.num_envs=8", "algo.groups=2", "algo.group_size=4", "eval.episodes=4"]
FEW += ["cluster.backend=inline", 'placement={"sim,policy": "cpu:0", learner: "cpu:0"}']


def test_the_routes_and_keys_that_are_named_are_those_there_are():
    named = set(re.findall(r"(?:GET|POST) (/[\w/]+)", PAGE))
    there = {*language_server.ASKING, *language_server.ANSWERING, *language_server.CONTROL} - {"/health"}
    assert named == there
    keys = {key for key, _, _ in leaves(root(RunConfig))}
    assert set(re.findall(r"`(policy\.\w+)[`=]", PAGE)) <= keys
    told = PAGE.partition("options for servers: ")[2].partition(".")[0]
    assert set(re.findall(r"`(\w+)`", told)) == set(LanguageConfig.of_engine)


@contextmanager
def running(command, until, **environ):
    """A server that a command of the page starts; gives what it printed."""
    settings, words = [], shlex.split(command)
    while "=" in words[0]:
        settings.append(words.pop(0))
    own = dict(word.split("=", 1) for word in settings)
    own = {key: os.path.expandvars(value) for key, value in own.items()}
    words = [sys.executable, "-W", "ignore", *words[1:]]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(words, env=os.environ | own | environ, **output) as process:
        try:
            lines = []
            for line in process.stdout:
                lines.append(line)
                if until in line:
                    break
            assert until in lines[-1], "".join(lines)
            yield lines
        finally:
            process.terminate()
            try:
                process.communicate(timeout=60)
            finally:
                process.kill()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


@pytest.mark.slow
def test_a_run_is_trained_and_evaluated_with_a_server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(TOKEN, SECRET)
    few = ["sft.episodes=64", "sft.epochs=1", "sft.warmup_steps=0", "env.num_envs=8", "eval.episodes=4"]
    assert sft.main(["recipe=sums_sft", *few, "cluster.backend=inline"]) == 0
    (run,) = tmp_path.glob("runs/sft-*")
    port = free_port()
    command = SERVE_SFT.replace("runs/sft-sums_sft-DATE", str(run)).replace("port=8000", f"port={port}")
    assert command.startswith(SERVE.partition("=")[0]) and TOKEN in MAKE_TOKEN
    with running(command, "listening") as lines:
        assert f"http://127.0.0.1:{port}/v1" in lines[-1]
        words = shlex.split(TRAIN.replace("8000", port))[3:]
        assert train.main([*words, *FEW, f"run.start_from={run}"]) == 0
        (trained,) = tmp_path.glob("runs/sums_grpo-*")
        words = shlex.split(POOL.replace("8000", port).replace("8001", free_port()))[3:]
        assert train.main([*words, *FEW, f"run.start_from={run}", f"run.dir={tmp_path / 'pool'}"]) == 0
        words = shlex.split(EVALUATE.replace("8000", port).replace("runs/NAME", str(trained)))[3:]
        assert evaluate.main([*words, "eval.episodes=4", "cluster.backend=inline"]) == 0


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (make vllm)")
@pytest.mark.parametrize("way", ["tied", "untied", "in buckets"])
def test_vllms_server_takes_weights_beside_ours_and_its_logprobs_are_the_models(way, tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)
    tied = way != "untied"
    folder, port = publish(tmp_path / "model", "qwen3", tied=tied, dim=32), free_port()
    assert f"{FromFolder.__module__}.{FromFolder.__name__}" in VLLM
    command = VLLM.replace("FOLDER", str(folder)).replace("8000", port)
    if not tied:  # then it is vLLM as it comes
        command = re.sub(r" --worker-extension-cls \S+", "", command)
    if way == "in buckets":  # the folder that vLLM is asked for is not there, so the weights are sent
        call = RemoteServer.call

        def elsewhere(self, method, path, body=None, **more):
            asked = isinstance(body, dict) and body.get("method") == "sees_folder"
            return call(self, method, path, body | {"args": [str(tmp_path / "gone")]} if asked else body, **more)

        monkeypatch.setattr(RemoteServer, "call", elsewhere)
    command += " --dtype float32 --enforce-eager --max-model-len 256 --max-num-seqs 8"
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    quiet |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "VLLM_NO_USAGE_STATS": "1"}
    few = {"temperature": 0.8, "top_k": 9, "top_p": 0.8} if tied else {}  # the extension divides the logits
    policy = build(pretrained=str(folder), max_running=8, max_length=256, **few)
    options = {"engine": "http", "weights": tmp_path / "weights"}
    with running(command, "startup complete", **quiet), served(build(pretrained=str(folder)), folder) as ours:
        options["url"] = [f"http://127.0.0.1:{port}", ours.url]
        engine = make_engine(LanguageConfig(**policy.config.model_dump() | options), policy)
        for version in range(3):
            engine.load(policy.state_dict(), version)
            while not all(server.takes for server in engine.pool.servers):
                assert not any(server.is_refused for server in engine.pool.servers)
                time.sleep(0.1)
            assert largest_gap(engine, policy, version, **few) <= 1e-5
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version))
        engine.close()


def largest_gap(engine, policy, version, temperature=1.0, **rule):
    """Of the server's log-probs from the model's own among all tokens; prompts are longer than a block that vLLM
    remembers."""
    engine.begin(version, 3, "train", SamplingRule(temperature, **rule, logprob_temperature=temperature))
    for number in range(6):
        engine.add(Request([*[5, 6] * 70, 7 + number], [*[5, 6] * 70, 7 + number], 12, number))
    gaps, count = [0.0], 0
    while engine.running:
        for answer in engine.step():
            ids = torch.tensor([[*answer.key, *answer.tokens.tolist()]])
            with torch.no_grad():
                logits = policy.model(ids).logits[0, len(answer.key) - 1 : -1].double()
            likely = (logits / temperature).log_softmax(-1)
            own = likely.gather(1, ids[0, len(answer.key) :, None])[:, 0]
            gaps.append(float((own - torch.from_numpy(answer.logprobs)).abs().max()))
            count += 1
            assert not answer.dropped
    assert count == 6
    return max(gaps)
