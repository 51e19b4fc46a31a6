"""The page on text envs, followed from a user's folder: its envs are checked, its file is read, its commands run."""

import importlib
import re

import pytest
from pages import Page, runner
from verifiers_stand_in import stand_in

from embodied.envs.config import ENV_CONFIGS
from embodied.envs.text.config import TOY_TASKS

PAGE = Page("text_envs.md")
CHECK, TRAIN, CHECK_PICTURES, CHECK_TURNS, CHECK_FILE, MIXED, CHECK_VERIFIERS, TRAIN_VERIFIERS, CALC, CHECK_BOX = (
    PAGE.commands
)


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    (questions,) = (text for kind, text in PAGE.blocks if kind == "json")
    (tmp_path / "questions.jsonl").write_text(questions)
    return runner(PAGE.write(tmp_path), monkeypatch, capsys)


def test_the_env_of_the_page_keeps_the_contract(here):
    printed = here(CHECK)
    assert "contract kept" in printed and "held out 200 prompts" in printed


def test_the_env_of_the_page_can_be_trained_on(here):
    assert "task my_envs:Doubling" in here(TRAIN, "run.start_from=null")


def test_the_env_that_replies_keeps_the_contract_and_helps_to_guess(here, tmp_path):
    printed = here(CHECK_TURNS)
    assert "contract kept" in printed and "at most 10 answers" in printed
    guesses = importlib.import_module("my_guesses").Guesses(None)
    guesses.number = 371
    said = [guesses.step(answer) for answer in ("900", "??", "200", " 371\n")]
    assert [turn.done for turn in said] == [False, False, False, True]
    assert ["lower" in said[0].said, "a number" in said[1].said.lower(), "higher" in said[2].said] == [True] * 3
    assert said[3].success and said[3].reward == 1


def test_the_env_with_pictures_keeps_the_contract_and_says_that_it_has_some(here, monkeypatch):
    assert "contract kept" in here(CHECK_PICTURES)
    monkeypatch.setattr(importlib.import_module("my_pictures").Dots, "shows_pictures", lambda config: False)
    assert "shows_pictures does not return True" in here(CHECK_PICTURES, code=1)


def test_a_mixture_and_an_env_with_a_box_run_as_printed(here):
    assert "task mixture mixture" in here(MIXED)
    assert "sums calc2" in here(CALC, "--dry-run")
    assert "contract kept" in here(CHECK_BOX)


def test_the_file_of_the_page_is_read_and_answered(here):
    pytest.importorskip("math_verify")
    printed = here(CHECK_FILE)
    assert "1/2 + 1/3" in printed and "contract kept" in printed


def test_an_environment_of_verifiers_is_looked_at_and_trained_on(here, tmp_path):
    interpreter = tmp_path / "verifiers-env" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    stand_in(interpreter)
    printed = here(CHECK_VERIFIERS)
    assert "held out 0?" in printed and "contract kept" in printed
    printed = here(TRAIN_VERIFIERS.rpartition(" run.start_from=")[0], "run.start_from=null", "--dry-run")
    assert "verifiers:my_vf_sums" in printed


def test_every_env_and_task_of_the_page_is_there_and_the_other_way_round():
    table = re.findall(r"^\| `([\w:]+)` \| (.*) \|", PAGE.text, re.M)
    assert {name.partition(":")[0] for name, _ in table} == {
        "sums",
        "sort",
        "pictures",
        "math",
        "mixture",
        "reasoning_gym",
        "verifiers",
    }
    assert {"sums", "sort", "math"} <= {*ENV_CONFIGS}
    for name, tasks in TOY_TASKS.items():
        assert name == "sort" or all(task in dict(table)[name] for task in tasks)
