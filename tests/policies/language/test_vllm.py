"""vLLM in a policy worker's process: its log-probs are the learner's after every load of new weights."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from language_models import engine_of, gpt2, qwen3
from tiny_language import publish

from embodied import train
from embodied.core.errors import ConfigError
from embodied.policies.language.config import SEEING, LanguageConfig
from embodied.policies.language.folder import CPU_HEADS
from embodied.policies.language.policy import LanguagePolicy
from embodied.policies.language.vllm import on_gpu

installed = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not installed, reason="vLLM is not installed (make vllm)")
SCRIPT = Path(__file__).parents[2] / "support" / "vllm_answers.py"


EVERYDAY = ("untied",)  # it starts an engine for 15 seconds; make test-all starts one for every kind
KINDS = ("tied", "untied", "divided", "experts", *SEEING)


@cache
def script(*kinds):
    """What the script prints: one line, then one of each kind."""
    one_thread = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *kinds]
    done = subprocess.run(command, env=os.environ | one_thread, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith(('{"heads"', '{"gaps"', '{"seen"'))
    ]
    return dict(zip(("heads", *kinds), lines, strict=True))


def answers_of(kind):
    return script(*(EVERYDAY if kind in ("heads", *EVERYDAY) else [other for other in KINDS if other not in EVERYDAY]))[
        kind
    ]


def each(kinds):
    return [pytest.param(kind, marks=[] if kind in EVERYDAY else pytest.mark.slow) for kind in kinds]


@pytest.fixture(params=each(["tied", "untied", "divided", "experts"]))
def results(request):
    return answers_of(request.param)


@pytest.fixture
def drawn():
    return answers_of("untied")


@needs_vllm
def test_logprobs_are_of_all_tokens_at_the_policys_temperature_after_every_load(results):
    assert max(results["gaps"]) <= 1e-5


@needs_vllm
@pytest.mark.parametrize("kind", each(SEEING))
def test_pictures_are_seen_as_the_learner_sees_them_after_every_load(kind):
    for same, other in answers_of(kind)["seen"]:
        assert same <= 1e-5 < 1e-3 < other


@needs_vllm
def test_greedy_answers_are_those_of_our_own_engine(results):
    same = [results["greedy"][key] == results["greedy_of_ours"][key] for key in results["greedy"]]
    assert all(same)


@needs_vllm
def test_the_likeliest_token_alone_is_drawn_where_the_rule_keeps_no_other(drawn):
    assert drawn["narrow"] == [drawn["greedy"]] * 3
    usual, with_min_p = drawn["shares"]
    assert usual < 0.3 - 1e-5 <= with_min_p


@needs_vllm
def test_greedy_answers_beside_drawn_ones_are_those_of_a_greedy_round(drawn):
    for place, (key, answer) in enumerate(drawn["beside"].items()):
        assert (answer == drawn["greedy"][key]) == bool(place % 2)


@needs_vllm
def test_a_round_that_is_repeated_writes_the_same(drawn):
    assert drawn["first"] == drawn["again"]
    assert len({tuple(tokens) for tokens, *_ in drawn["first"].values()}) > 5  # every conversation has noise of its own


@needs_vllm
def test_answers_end_with_their_stop_token_or_are_cut_off(drawn):
    for tokens, truncated, dropped, count in drawn["first"].values():
        assert not dropped and len(tokens) == count <= 12
        assert truncated == (drawn["stop"] not in tokens)
        assert drawn["stop"] not in tokens[:-1]
    cut, full = drawn["full"]["0"], drawn["full"]["1"]
    assert len(cut[0]) == 6 or not cut[1]  # 256 tokens at most
    assert full[:2] == [[], True]


@needs_vllm
def test_requests_that_vllm_aborts_return_the_tokens_written_so_far(drawn):
    assert drawn["room"] == drawn["left"] == 0
    assert all(truncated and 1 <= len(tokens) <= 3 for tokens, truncated, *_ in drawn["aborted"].values())


@needs_vllm
def test_a_sleeping_engine_has_neither_weights_nor_cache_and_answers_alike_after_loading(results):
    slept = results["slept"]
    weights, cache, packed = slept["awake"]
    assert weights > 1e4 and cache >= 2**30 and packed >= 8
    assert slept["freed"] == slept["num_bytes"] >= cache + weights
    assert slept["asleep"] == [0, 0, 0]
    assert slept["for_weights"] == [weights, 0, 0] and slept["taken"] == slept["num_bytes"] - cache
    assert slept["loaded"] == slept["awake"]
    asleep, no_room, unloaded = slept["refused"]
    assert "has weights None" in asleep and "no memory for them" in no_room and "has weights None" in unloaded
    assert slept["again"] == results["first"]


@needs_vllm
def test_an_answer_with_numbers_that_are_not_finite_is_dropped_and_others_go_on(drawn):
    assert drawn["broken"]["0"][2] == "a log-prob is not finite"
    others = [drawn["broken"][key] for key in "123"]
    assert all(not dropped and tokens for tokens, _, dropped, _ in others if 40 not in tokens)


@pytest.mark.skipif(installed, reason="vLLM is installed")
def test_a_recipe_for_vllm_without_it_names_the_command_that_installs_it():
    with pytest.raises(ConfigError, match="Run: make vllm"):
        engine_of(qwen3(), engine="vllm")


def test_on_a_gpu_it_asks_for_no_more_than_its_weights_and_cache_and_can_sleep(monkeypatch):
    """It would ask for 92% of the GPU, and not start where a learner has more than the rest."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(total_memory=80e9))
    options = on_gpu(cache=48 * 10**9, weights=4 * 10**9)
    assert options == {"kv_cache_memory_bytes": 48 * 10**9, "enable_sleep_mode": True, "gpu_memory_utilization": 0.65}


@needs_vllm
def test_float64_is_refused():
    with pytest.raises(ConfigError, match=r"try policy\.dtype=float32"):
        engine_of(gpt2(), engine="vllm", dtype="float64")


def test_a_mixture_of_experts_that_vllm_gives_no_new_weights_on_a_cpu_is_refused(tmp_path):
    transformers.DeepseekV3Config().save_pretrained(tmp_path)
    config = LanguageConfig(name="language", engine="vllm", pretrained=str(tmp_path))
    with pytest.raises(ConfigError, match="a deepseek_v3 takes no new weights"):
        LanguagePolicy.check_engine(config)


@needs_vllm
def test_heads_that_vllm_cannot_run_on_a_cpu_are_refused_before_anything_starts(tmp_path, capsys):
    assert answers_of("heads") == {"heads": [*CPU_HEADS]}
    folder, recipe = publish(tmp_path, "qwen3", False), ["recipe=sums_grpo", "policy.engine=vllm", "--dry-run"]
    assert train.main([*recipe, f"policy.pretrained={folder}"]) == 2
    said = capsys.readouterr().err
    assert f"those of {folder} have 8; try policy.engine=transformers" in said and "Traceback" not in said
