"""The console when it is not read, and what it warns of."""

import os
from io import StringIO
from pathlib import Path

import pytest

from embodied.core.types import EpisodeResult
from embodied.records.progress import Console
from embodied.records.success_stats import summarize

STATE = {"iteration": 1, "version": 1, "env_steps": 8, "train_s": 1.0}


def episodes(count, success, truncated=None):
    return [EpisodeResult(i, "t", -1, 0, 1, success, bool(success), None, truncated=truncated) for i in range(count)]


def test_a_closed_pipe_or_stdout_ends_no_run(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    noted = []
    with os.fdopen(write, "w") as stream:
        console = Console(Path("run"), noted.append, stream)
        console.say("one")
        console.say("two")
    monkeypatch.setattr("sys.stdout", None)
    Console(Path("run"), noted.append).say("three")
    assert noted == ["one", "two", "three"]


def test_a_policy_whose_act_and_forward_disagree_is_warned_of_once():
    stream = StringIO()
    console = Console(Path("run"), stream=stream)
    for gap in (0.01, 5.0, 6.0):
        console.iteration(STATE, [], {"env_steps": 8.0, "train/logprob_gap": gap}, 1.0, 3)
    (warning,) = (line for line in stream.getvalue().splitlines() if line.startswith("warning"))
    assert "differ by 5 nats" in warning


def test_success_is_of_the_last_100_episodes_of_robots_and_of_all_conversations_of_an_iteration():
    for truncated, wanted in ((None, (100, 0.0)), (False, (150, 0.3333))):
        console = Console(Path("run"), stream=StringIO())
        finished = [*episodes(50, 1.0, truncated), *episodes(100, 0.0, truncated)]
        row = console.iteration(STATE, finished, {"env_steps": 8.0}, 1.0, 3)
        assert (row["recent_episodes"], row["success_once"]) == wanted


def told_without_success(*successes, resumed=False, each=34):
    """What a run of nine iterations says beside its lines, where episodes end like this, so many in each iteration."""
    stream = StringIO()
    console = Console(Path("run"), stream=stream, advice="try this")
    if resumed:
        console.resumed(Path("run"), STATE, 0, 0)
    for at, success in enumerate(successes, 1):
        finished = [one._replace(success_once=success) for one in episodes(each, 0.0)]
        console.iteration({**STATE, "iteration": at}, finished, {"env_steps": 8.0}, 1.0, 9)
    return [line for line in stream.getvalue().splitlines() if line == "try this"]


def test_a_third_of_a_run_without_success_is_advised_once_after_100_episodes():
    assert told_without_success(False, False) == []
    assert told_without_success(False, False, False, False, False) == ["try this"]
    assert told_without_success(False, True, False, False, False) == []
    assert told_without_success(None, None, None, None) == []
    assert told_without_success(False, False, False, False, resumed=True) == []
    assert told_without_success(*[False] * 4, each=20) == [] != told_without_success(*[False] * 5, each=20)


@pytest.mark.parametrize(
    ("sampled", "greedy", "temperature", "is_said"),
    [(77, 17, 0, True), (77, 70, 0, False), (17, 77, 0, False), (77, 17, 1, False), (None, 17, 0, False)],
)
def test_a_policy_that_relies_on_noise_is_remarked_on(sampled, greedy, temperature, is_said):
    """Of 100 episodes each; greedy ones that succeed more often are usual."""
    stream = StringIO()
    console = Console(Path("run"), stream=stream)
    known = sampled is not None
    trained = [one._replace(success_once=i < sampled if known else None) for i, one in enumerate(episodes(100, 0.0))]
    console.iteration(STATE, trained, {"env_steps": 8.0}, 1.0, 3)
    played = [one._replace(success_once=i < greedy) for i, one in enumerate(episodes(100, 0.0))]
    console.evaluated(1, {**summarize(played), "protocol": {"eval": {"temperature": temperature}}})
    told = "succeeds in 17% of 100 episodes, with sampled actions in 77% of the last 100 of training"
    assert (told in stream.getvalue()) == is_said
