"""Runs in which a language policy talks keep what runs of robots keep: the same batches and steps wherever and however
they are collected, and nothing lost or counted twice where a worker dies."""

import json
import os
import signal
import threading
import time
from collections import Counter
from itertools import count

import numpy as np
import pytest
from stepped import strike
from talking_runs import APART, ONE_OF_EACH, Talk, far, program, told

from embodied import evaluate, train
from embodied.core.types import join
from embodied.learners import learner_worker
from embodied.policies.language.language_worker import LanguageWorker
from embodied.policies.policy_folder import read_weights
from embodied.records.transcripts import SAMPLES, read_samples
from embodied.runtime.device_leases import Coordinator
from embodied.runtime.device_sharing import DeviceSharing
from embodied.workflows import prompt_queue
from embodied.workflows.rl_loop import EmbodiedLoop

THREE_ENGINES = {"sim": "cpu:0", "policy": "cpu:1-3*3", "learner": "cpu:0"}


@pytest.fixture(scope="module")
def sync(tmp_path_factory):
    with Talk(tmp_path_factory.mktemp("sync"), placement=ONE_OF_EACH) as run:
        return run.some(2), run.weights()


def test_the_run_that_others_are_compared_with_learns(sync):
    for episodes, row in sync[0]:
        assert np.var([episode.total_reward for episode in episodes]) > 0
        assert row["train/grad_norm"] > 1e-3 and row["train/staleness"] == 0 and row["groups/used"] > 1
        assert row["train/logprob_gap"] < 1e-6  # log-probs travel in float32
    assert len({episode.index for episodes, _ in sync[0] for episode in episodes}) == 2 * 20


# Engines that share the prompts


def test_a_slow_engine_has_fewer_of_the_answers(sync, monkeypatch, tmp_path):
    """The second one writes nothing until the first has written all that it does not hold."""
    answered, rest, go_on = Counter(), threading.Event(), LanguageWorker.go_on

    def slow(worker, *about):
        if worker.rank == 1:
            assert rest.wait(60)
        found = go_on(worker, *about)
        answered[worker.rank] += sum(map(len, found.values()))
        if answered[0] == 20 - 3:
            rest.set()
        return found

    monkeypatch.setattr(LanguageWorker, "go_on", slow)
    with Talk(tmp_path, "policy.max_running=3") as run:
        assert told(run.some(1)) == told(sync[0][:1])
    assert answered == {0: 17, 1: 3}


def test_only_the_requests_of_a_killed_engine_are_asked_again_each_once(sync, monkeypatch, tmp_path):
    given = []

    class Killing(prompt_queue.RequestQueue):
        def take(self):
            found = super().take()
            for engine, mine in found.items():
                if engine.startswith("policy-1") and not any(name.startswith("policy-1") for name, _ in given):
                    os.kill(run.pid("policy-1"), signal.SIGKILL)
                given.extend((engine, one.key) for one in mine)
            return found

    monkeypatch.setattr(prompt_queue, "RequestQueue", Killing)
    with Talk(tmp_path, "policy.max_running=3", backend="local") as run:
        rows, asked = run.some(1), [*given]
        rows += run.play(1, 2)
        assert far(run.weights(), sync[1]) < 1e-10
    assert told(rows) == told(sync[0]) and "policy-1 is started again" in run.lines[0]
    assert [(row["faults/restarts"], row["faults/lost_episodes"]) for _, row in rows] == [(1, 0), (0, 0)]
    dead = next(name for name, _ in asked if name.startswith("policy-1"))
    lost = {prompt for name, prompt in asked if name == dead}
    times = Counter(prompt for _, prompt in asked)
    assert len(times) == 20 and lost and all(count == 1 + (one in lost) for one, count in times.items())


def test_engines_on_a_learners_device_give_the_same_conversations_and_weights(tmp_path):
    found = []
    for learner in ("fake:3", "fake:2"):
        placement = {"sim": "fake:0", "policy": "fake:1-2", "learner": learner}
        asked = ("pipeline.schedule=async", "policy.max_running=2", "algo.groups=3")
        with Talk(tmp_path / learner[-1], *asked, placement=placement) as run:
            assert run.loop.device_sharing.gives_way("policy-1") == (learner == "fake:2")
            rows = run.some(2)
            assert [row["train/staleness"] for _, row in rows] == [0, 1]
            found.append((told(rows), run.weights()))
    assert found[0][0] == found[1][0] and far(found[0][1], found[1][1]) < 1e-10


def test_an_answer_that_an_engine_had_begun_goes_on_elsewhere_from_the_tokens_that_are_written(monkeypatch, tmp_path):
    """The second engine has to leave four times, each time after a drawn number of tokens."""
    wanted, left, tokens, draw = threading.Event(), [], count(1), np.random.default_rng(45)
    due = [0]
    take, leaving, release = LanguageWorker._take, Coordinator.leaving, Coordinator.release

    def until_asked_to_leave(worker, requests, *about):
        if worker.rank == 1 and worker.engine.running and (now := next(tokens)) >= due[0] and len(left) < 4:
            due[0] = now + draw.integers(1, 6)
            wanted.set()
            sharing.changes += 1
            sharing.wake()
            while not requests.qsize():
                time.sleep(0.001)
        return take(worker, requests, *about)

    def has_to_leave(coordinator):
        held = coordinator.preemptible & coordinator.holding
        return leaving(coordinator) | (held if wanted.is_set() else set())

    def gives_back(coordinator, gang):
        if gang in coordinator.preemptible and wanted.is_set():
            wanted.clear()
            left.append(gang)
        return release(coordinator, gang)

    placement = {"sim": "fake:0", "policy": "fake:1-2", "learner": "fake:2"}
    asked = ("pipeline.schedule=async", "policy.max_running=2", "policy.max_tokens=8", "run.iterations=2")
    with Talk(tmp_path / "alone", *asked, placement=placement) as run:
        alone = told(run.some(2))
    with Talk(tmp_path / "left", *asked, placement=placement) as run:
        sharing = run.loop.device_sharing
        monkeypatch.setattr(LanguageWorker, "_take", until_asked_to_leave)
        monkeypatch.setattr(Coordinator, "leaving", has_to_leave)
        monkeypatch.setattr(Coordinator, "release", gives_back)
        rows = run.some(2)
    assert told(rows) == alone and len(left) == 4
    assert sum(row["engine/resumed"] for _, row in rows) > 0
    assert sum(row["engine/tokens"] for _, row in rows) == sum(
        tokens for episodes in alone for _, tokens, _ in episodes
    )


# Faults


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("schedule", ["sync", "periodic", "async"])
def test_a_replacement_engine_gives_the_same_answers(sync, how, schedule, tmp_path):
    """Under async the second batch is of the first weights, too, so only its first is sync's."""
    with Talk(tmp_path, f"pipeline.schedule={schedule}", "faults.hang_s=8", backend="local") as run:
        strike(run, "rollout", "policy-1", how)
        rows = run.some(2)
        assert [row["faults/restarts"] for _, row in rows] == [1, 0] and "policy-1 is started again" in run.lines[0]
        same = 1 if schedule == "async" else 2
        assert told(rows[:same]) == told(sync[0][:same]) and rows[0][1]["faults/lost_episodes"] == 0
        if schedule != "async":
            assert far(run.weights(), sync[1]) < 1e-10


def check_counts(rows):
    """No conversation is counted twice, and what is lost is counted as such."""
    played = [episode.index for episodes, _ in rows for episode in episodes]
    lost = sum(row["faults/lost_episodes"] for _, row in rows)
    assert len({*played}) == len(played) and max(played) + 1 - len(played) <= lost
    for episodes, row in rows:
        assert row["env_steps"] >= sum(episode.length for episode in episodes)
        assert row["groups/used"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sync", "periodic"])
def test_conversations_of_a_sim_that_dies_are_lost_or_held_again_and_never_count_twice(schedule, tmp_path):
    fault = f"{{fault: sigkill, place: rollout, worker: sim-1, once: {tmp_path}/struck}}"
    with Talk(tmp_path, f"env.kwargs={fault}", f"pipeline.schedule={schedule}", backend="local") as run:
        rows = run.some(2)
        assert [row["faults/restarts"] for _, row in rows] == [1, 0]
        check_counts(rows)
        first = rows[0][1]
        assert first["env_steps"] == len(rows[0][0]) and first["groups/used"] >= 2
        assert first["faults/lost_episodes"] > 0 and first["groups/dropped_incomplete"] > 0


# Placements


MANY_LEARNERS = {"sim,policy": "cpu:0", "learner": "cpu:0-3*4"}
ANYWHERE = {
    "collocated": ("collocated", ()),
    "one_at_a_time": (ONE_OF_EACH, ("env.num_envs=1", "eval.num_envs=1")),
    "two_learners_as_groups_come": (APART, ("policy.max_running=3", "pipeline.schedule=periodic")),
    "three_engines_for_one_sim": (THREE_ENGINES, ("policy.max_running=2",)),
}


@pytest.mark.parametrize(("placement", "options"), ANYWHERE.values(), ids=ANYWHERE)
def test_every_plan_gives_the_same_conversations_and_weights(sync, placement, options, tmp_path):
    with Talk(tmp_path, *options, placement=placement) as run:
        rows = run.some(2)
        assert told(rows) == told(sync[0])
        assert far(run.weights(), sync[1]) < 1e-10


def test_more_learners_than_groups_give_the_same_weights(tmp_path):
    few = ["env.num_envs=6", "algo.groups=2", "algo.group_size=3", "seed=1"]
    found = []
    for schedule, placement in (("sync", ONE_OF_EACH), ("sync", MANY_LEARNERS), ("periodic", MANY_LEARNERS)):
        with Talk(tmp_path / str(len(found)), *few, f"pipeline.schedule={schedule}", placement=placement) as run:
            assert any(row.get("train/grad_norm", 0) > 1e-3 for _, row in run.some(3))
            found.append(run.weights())
    assert max(far(others, found[0]) for others in found[1:]) < 1e-10


# Ways to train and to talk


@pytest.mark.parametrize(
    "options",
    [
        ("policy.lora_rank=4",),
        ("policy.train_layers=1", "policy.temperature=0.7"),
        ("policy.dtype=bfloat16",),
        ("policy.dtype=float32", "learner.precision=bf16"),
        pytest.param(("learner.shard=true",), marks=pytest.mark.slow),
        ("learner.checkpoint_activations=true", "learner.share_prompts=false", "learner.pack_tokens=8"),
        pytest.param(("learner.sequence_degree=2", "pipeline.schedule=periodic"), marks=pytest.mark.slow),
        pytest.param(("policy.lora_rank=4", "learner.shard=true", "algo.kl_coef=0.05"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_way_to_train_learns_and_says_what_it_scored(sync, options, tmp_path):
    backend = "local" if {"learner.shard=true", "learner.sequence_degree=2"} & {*options} else "inline"
    shape = "tiny" if "policy.lora_rank=4" in options else "tiny_gpt2"  # GPT-2's layers take no adapters
    with Talk(tmp_path, *options, f"policy.preset={shape}", backend=backend) as run:
        rows = run.some(2 if options[0].startswith("learner.") else 1)
        assert all(np.isfinite(row["train/grad_norm"]) and row["train/grad_norm"] > 1e-4 for _, row in rows)
        gap = max(row["train/logprob_gap"] for _, row in rows)
        weights = run.weights()
    if options[0].startswith("learner."):
        assert told(rows) == told(sync[0]) and far(weights, sync[1]) < 1e-10
    coarse = {"policy.dtype=bfloat16", "learner.precision=bf16"} & {*options}
    assert gap < (0.1 if coarse else 1e-6)


def test_conversations_of_several_turns_are_learned_from(tmp_path):
    found = []
    three = ("pipeline.schedule=periodic", "policy.max_running=2")
    for placement, options in ((ONE_OF_EACH, ()), (THREE_ENGINES, three)):
        own = ["env.name=talking_env:Persistent", "policy.max_tokens=60", "algo.groups=2", "seed=1", *options]
        with Talk(tmp_path / str(len(found)), *own, placement=placement) as run:
            rows = run.some(1)
            for episodes, row in rows:
                assert {1, 3} <= {episode.length for episode in episodes} <= {1, 2, 3}
                assert len({episode.tokens for episode in episodes}) > 3
                assert row["env_steps"] == sum(episode.length for episode in episodes)
                assert row["train/grad_norm"] > 1e-3
            found.append((told(rows), run.weights()))
    assert found[0][0] == found[1][0] and far(found[0][1], found[1][1]) < 1e-10


def test_groups_that_an_env_plays_and_scores_whole_are_equal_for_one_sim_and_for_two(tmp_path):
    played, weights = [], []
    for name, placement in ("one", ONE_OF_EACH), ("two", APART):
        with Talk(tmp_path / name, "env.name=talking_env:Ranked", "algo.groups=6", placement=placement) as run:
            played.append(told(run.some(1)))
            weights.append(run.weights())
    assert played[0] == played[1] and far(*weights) < 1e-10
    rewards = {index: reward for index, _, reward in played[0][0]}
    pairs = [(rewards[first], rewards[first + 1]) for first in rewards if first % 2 == 0]
    assert len(rewards) == 24 and len({*pairs}) > 1 and (0.0, 0.0) not in pairs


def test_progress_counts_the_groups_that_the_update_will_use(monkeypatch, tmp_path):
    told, report = [], DeviceSharing.report_progress

    def record(sharing, fraction):
        told.append((run.loop.rollouts.rounds, fraction))
        report(sharing, fraction)

    monkeypatch.setattr(DeviceSharing, "report_progress", record)
    with Talk(tmp_path, "algo.filter=resample", "algo.max_rounds=3", placement=THREE_ENGINES) as run:
        _, row = run.iterate(0)
    assert row["groups/rounds"] > 1 and row["groups/dropped_equal"] > 0
    began = [next(fraction for number, fraction in told if number == one) for one in (1, 2)]
    assert began[0] == 0 and 0 < began[1] < 1


def test_answers_of_one_token_are_learned_from_though_all_are_cut_off(tmp_path):
    with Talk(tmp_path, "policy.max_tokens=1", "algo.groups=10", "algo.group_size=8", placement=ONE_OF_EACH) as run:
        ((episodes, row),) = run.some(1)
        assert {episode.tokens for episode in episodes} == {1}
        assert np.mean([episode.truncated for episode in episodes]) > 0.9
        assert row["train/grad_norm"] > 1e-3


# Whole programs


def final_weights(run):
    return read_weights(run / "checkpoints" / "v000003" / "policy")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing has stopped."""
    folder = tmp_path_factory.mktemp("whole")
    assert train.main(program(folder)) == 0
    (run,) = folder.iterdir()
    return run


def test_a_language_run_that_was_stopped_and_resumed_equals_one_that_was_not(whole, tmp_path, monkeypatch):
    iterate = EmbodiedLoop.iterate

    def stopped(loop, iteration, total):
        if iteration == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return iterate(loop, iteration, total)

    monkeypatch.setattr(EmbodiedLoop, "iterate", stopped)
    train.main(program(tmp_path))
    monkeypatch.undo()
    (run,) = tmp_path.iterdir()
    assert not (run / "checkpoints" / "v000003").exists()
    assert train.main([f"resume={run}"]) == 0
    ours, theirs = final_weights(run), final_weights(whole)
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    assert transcripts(run / "eval" / "v000003") == transcripts(whole / "eval" / "v000003")
    assert (run / SAMPLES).read_text() == (whole / SAMPLES).read_text()


def test_every_iteration_writes_some_of_its_conversations_down_spread_over_its_groups(whole):
    samples = read_samples(whole)
    assert [(sample["iteration"], sample["version"]) for sample in samples] == [
        (n + 1, n) for n in range(3) for _ in range(3)
    ]
    assert [sample["index"] % 20 // 4 for sample in samples[:3]] == [0, 1, 3], "of 5 groups"
    answers = [turn["answer"] for sample in samples for turn in sample["turns"]]
    rewards = [float(any(digit in answer for digit in "02468")) for answer in answers]
    assert [sample["reward"] for sample in samples] == rewards and {0.0, 1.0} == {*rewards}


def test_no_more_conversations_are_written_down_than_were_asked_for(tmp_path):
    with Talk(tmp_path, "run.samples=0", placement=ONE_OF_EACH) as run:
        run.some(1)
        assert run.loop.collector.samples == []


def test_an_evaluation_in_mid_run_equals_one_of_its_checkpoint(whole):
    before = {*(whole / "eval").iterdir()}
    asked = [f"checkpoint={whole / 'checkpoints' / 'v000002'}", "eval.videos=0", "cluster.backend=inline"]
    assert evaluate.main([*asked, "eval.temperature=1", "eval.num_envs=1"]) == 0
    (folder,) = {*(whole / "eval").iterdir()} - before
    first = (whole / "eval" / "v000002" / "episodes.csv").read_text()
    assert (folder / "episodes.csv").read_text() == first
    assert transcripts(folder) == transcripts(whole / "eval" / "v000002")


def transcripts(evaluation):
    """All conversations of an evaluation, in order."""
    found = [json.loads(line) for line in (evaluation / "transcripts.jsonl").read_text().splitlines()]
    assert len(found) == 6
    return found


def test_a_run_whose_prompts_are_all_too_long_ends_and_says_so(tmp_path, capsys):
    assert train.main(program(tmp_path, "policy.max_length=4")) == 1
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error"))
    assert "conversations count for nothing, the first because a prompt of 6 tokens leaves no room" in line
    (run,) = tmp_path.iterdir()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1


def test_prompts_that_are_too_long_are_counted_and_reported_once(tmp_path):
    with Talk(tmp_path, "policy.max_length=6", placement=ONE_OF_EACH) as run:
        rows = run.some(6)
    assert any(row["faults/unusable_answers"] and len(episodes) for episodes, row in rows)
    (line,) = run.lines
    assert line.startswith("warning: ") and "leaves no room for an answer within 6" in line


def test_a_reply_without_room_ends_its_conversation_and_its_answers_are_learned_from(tmp_path, monkeypatch):
    learned, build = [], learner_worker.build_batch

    def noting(trajectory, *about):
        learned.append(trajectory)
        return build(trajectory, *about)

    monkeypatch.setattr(learner_worker, "build_batch", noting)
    own = ("env.name=talking_env:LongReplies", "policy.max_tokens=60", "policy.max_length=200")
    with Talk(tmp_path, *own, placement=ONE_OF_EACH) as run:
        ((episodes, row),) = run.some(1)
    assert all(episode.truncated for episode in episodes) and row["train/grad_norm"] > 1e-3
    replied_to = [episode for episode in episodes if episode.length == 2]
    assert len(replied_to) == row["engine/no_room"] > 0 < np.mean([episode.success_once for episode in replied_to]) < 1
    played = join(learned)
    assert max(played.lengths) <= 6 + 60  # a question and an answer
    assert played.rewards.sum() == played.rewards[played.mask].sum() > 0
    assert played.truncated.sum() == len(played.lengths)


@pytest.mark.parametrize("backend", ["inline", pytest.param("local", marks=pytest.mark.slow)])
def test_an_env_that_raises_is_named_with_its_line(backend, tmp_path, capsys):
    fault = "{fault: exception, place: rollout, worker: sim-0}"
    assert train.main(program(tmp_path, f"env.kwargs={fault}", f"cluster.backend={backend}")) == 1
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error"))
    assert "sim-0: play failed: RuntimeError: the gripper fell off (faulty_env.py:" in line


# Devices that policies and learners take in turns


@pytest.mark.parametrize("backend", ["inline", pytest.param("local", marks=pytest.mark.slow)])
def test_an_engine_leaves_its_device_to_the_learner_and_answers_alike(backend, sync, tmp_path):
    apart = {"sim": "fake:0", "policy": "fake:1", "learner": "fake:1"}
    with Talk(tmp_path / "roomy", placement=apart) as run:
        run.some(1)
        learner = run.loop.device_sharing.coordinator.claims["learner-0"].num_bytes
        assert not run.loop.device_sharing.moves
    limit = f"cluster.memory_gb={(learner + 1e6) / 1e9}"
    with Talk(tmp_path / "tight", limit, placement=apart, backend=backend) as run:
        rows = run.some(2)
        assert run.loop.device_sharing.coordinator.claims["policy-0"].num_bytes > 1e6
        assert {("offload", "policy-0"), ("onload", "policy-0")} <= {
            (m.verb, m.worker) for m in run.loop.device_sharing.moves
        }
        assert told(rows) == told(sync[0])
        assert far(run.weights(), sync[1]) < 1e-10


# Ray
