"""Several sets of questions in one evaluation: each with its own answers, sampling and figures."""

import json

import pytest
from needed import requires

import embodied
from embodied.core.errors import ConfigError
from embodied.core.files import data_files
from embodied.records.results import read_results
from embodied.train import main as train
from tests.support.loopback_hub import commit_of, serve
from tests.support.tiny_language import PLAIN, publish

requires("math_verify")


def rows(path, key, *numbers):
    path.write_text("\n".join(json.dumps({key: f"{n}+1?", "answer": n + 1}) for n in numbers))
    return str(path)


@pytest.fixture
def model(tmp_path):
    return publish(tmp_path / "model", "llama", True, PLAIN)


def recipe(tmp_path, model, **sets):
    rows(tmp_path / "train.jsonl", "question", *range(40))
    content = {
        "run": {"iterations": 1, "eval_every": 1, "dir": str(tmp_path / "runs")},
        "env": {"name": "math", "file": "train.jsonl", "num_envs": 4},
        "policy": {"name": "language", "pretrained": str(model), "max_tokens": 8, "max_running": 16, "system": "Add."},
        "algo": {"name": "grpo", "groups": 2, "group_size": 2, "epochs": 1, "minibatch_size": None, "filter": "none"},
        "eval": {"temperature": 1, "sets": sets},
        "cluster": {"backend": "inline"},
    }
    file = tmp_path / "sets.yaml"
    file.write_text(json.dumps(content))
    return str(file)


def test_a_run_and_the_command_evaluate_every_set_by_its_own_rule(tmp_path, model, capsys):
    rows(tmp_path / "first.jsonl", "question", *range(3), *range(100, 104))
    rows(tmp_path / "second.jsonl", "query", *range(200, 205))
    own = {"columns": {"question": "query"}, "samples": 4, "temperature": 0, "max_tokens": 3, "questions": 2}
    run = embodied.train(recipe(tmp_path, model, first="first.jsonl", second={"file": "second.jsonl"} | own))
    shown = capsys.readouterr().out
    assert "sets-v1: all questions of first (7), second (2), in order" in shown
    assert "1 of the 7 questions of eval.sets.first are trained on, too" in shown, "0 and 1 are held out"
    assert "15 answers to 2 sets\n  first   T=1: success" in shown and "\n  second  greedy: avg@4" in shown
    results, episodes = read_results(run.folder / "eval" / "v000001")
    figures = {name: each["text"] for name, each in results["per_task"].items()}
    assert [(figures[name]["prompts"], figures[name]["samples"]) for name in ("first", "second")] == [(7, 1), (2, 4)]
    assert {one.tokens for one in episodes if one.task == "second"} == {3}, "its own max_tokens"
    by_prompt = {(one.init_state_id, one.tokens) for one in episodes if one.task == "second"}
    assert len(by_prompt) == 2 and max(one.tokens for one in episodes) > 3
    row = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["eval/first/episodes"] == 7 and "eval/second/pass@4" in row and row["eval/episodes"] == 15
    assert "second" in (run.folder / "report.html").read_text()
    again = embodied.evaluate(run, f"run.dir={tmp_path}")
    assert again["per_task"] == results["per_task"], "the run's evaluation equals the command's"
    assert again["protocol"]["messages"] == {"system": "Add.", "template_arguments": {}, "chat": None}
    other = embodied.evaluate(run, f"run.dir={tmp_path}", "policy.system=null")
    assert other["protocol"]["messages"]["system"] is None
    capsys.readouterr()


def test_a_run_on_data_sets_of_the_hub_records_the_commit_that_it_reads(tmp_path, model, monkeypatch, capsys):
    pytest.importorskip("huggingface_hub")
    data_files.cache_clear()
    train, test = (
        "\n".join(json.dumps({"question": f"{n}+1?", "answer": f"Add.\n#### {n + 1}"}) for n in numbers).encode()
        for numbers in (range(40), range(100, 103))
    )
    files = {"main/train-00000-of-00001.jsonl": train, "main/test-00000-of-00001.jsonl": test}
    path = recipe(tmp_path, model, sums="hf:openai/sums:main:test")
    with serve({"openai/sums": files}, monkeypatch, tmp_path / "hub"):
        run = embodied.train(path, "env.file=hf:openai/sums:main:train")
    capsys.readouterr()
    data_files.cache_clear()
    recorded = (run.folder / "config.yaml").read_text()
    assert all(f"hf:openai/sums:main:{split}@{commit_of(files)}" in recorded for split in ("train", "test"))
    assert read_results(run.folder / "eval" / "v000001")[0]["per_task"]["sums"]["text"]["prompts"] == 3


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ({"a": "none.jsonl"}, r"eval\.sets\.a: .*none\.jsonl: No such file"),
        ({"a": {"file": "odd.jsonl"}}, r"eval\.sets\.a: .* name them, such as columns: \{question: query"),
        ({"a": {"file": "odd.jsonl", "sample": 3}}, r"eval\.sets\.a\.sample"),
        ({"a/b": "odd.jsonl"}, "names no set"),
    ],
)
def test_sets_that_cannot_be_asked_are_refused_by_their_name(tmp_path, model, sets, words):
    rows(tmp_path / "odd.jsonl", "query", *range(100, 103))
    with pytest.raises(ConfigError, match=words):
        embodied.train(recipe(tmp_path, model, **sets))


def test_more_questions_than_there_are_is_said_in_a_line(tmp_path, model, capsys):
    rows(tmp_path / "first.jsonl", "question", *range(3))
    file = recipe(tmp_path, model, first={"file": "first.jsonl", "questions": 9})
    prompts = ["recipe=sums_grpo", "run.start_from=null", "eval.episodes=1000", "eval.samples=4"]
    for words in ([f"recipe={file}"], prompts):
        assert train([*words, "--dry-run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "note eval.sets.first.questions=9 is more than there are: all 3 are asked" in shown
    assert "eval.episodes=1000 is more than there are: all 200 prompts are asked, 4 times each, 800" in shown
