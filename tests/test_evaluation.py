"""What an evaluation counts, with policies whose outcome is known beforehand."""

import fcntl
import json
import os
import shutil
import signal
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from tiny_language import publish

from embodied import evaluate, report, train
from embodied.records.results import read_results
from embodied.records.success_stats import wilson
from embodied.workflows.evaluator import Evaluator

INLINE = ["recipe=pointmass_ppo", "cluster.backend=inline", 'placement={"sim,policy": "cpu:0", learner: "cpu:0"}']
SWITCH = [*INLINE, "env.name=scripted:Switch", "env.on_success=continue", "env.num_envs=4", "eval.videos=0"]


@pytest.fixture(autouse=True)
def scripted(monkeypatch, tmp_path):
    """`scripted:Switch` and its policies can be named; results go to a folder of the test's own."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "support"))
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("scripted", None)


def run(*arguments, code=0):
    assert evaluate.main(list(arguments)) == code


def results(folder):
    return read_results(folder)


@pytest.mark.parametrize(
    ("policy", "once", "at_end"), [("Succeeds", 1, 1), ("Fails", 0, 0), ("SucceedsThenDrops", 1, 0)]
)
def test_success_once_and_at_the_end_of_scripted_policies(policy, once, at_end, tmp_path):
    run(f"checkpoint=scripted:{policy}", *SWITCH, "eval.episodes=10")
    found, episodes = results(tmp_path / f"runs/evaluate-{policy}")
    overall = found["overall"]
    assert (overall["success_once"]["rate"], overall["success_at_end"]["rate"]) == (once, at_end)
    assert overall["success_once"]["interval"] == list(wilson(10 * once, 10))
    assert overall["success_at_reset"]["count"] == 0
    assert [episode.index for episode in episodes] == list(range(10))
    assert {episode.length for episode in episodes} == {6}
    assert found["protocol"]["name"] == "as-trained-v1" and found["protocol"]["max_episode_steps"] == 6


def test_success_at_reset_is_flagged(tmp_path):
    run("checkpoint=scripted:Fails", *SWITCH, "eval.episodes=3", "env.kwargs={at_reset: true}")
    overall = results(tmp_path / "runs/evaluate-Fails")[0]["overall"]
    assert overall["success_at_reset"]["count"] == 3
    assert overall["success_once"]["rate"] == 1.0 and overall["success_at_end"]["rate"] == 0.0


def test_finished_rows_are_neither_stepped_nor_shown_to_the_policy(tmp_path):
    """Five episodes of six steps on four rows: three rows take one more turn to spread them evenly."""
    run("checkpoint=scripted:Fails", *SWITCH, "eval.episodes=5")
    from scripted import Fails

    assert Fails.asked == [3] * 6 + [2] * 6
    Fails.asked.clear()


@pytest.mark.parametrize("policy", ["random", "scripted:Reaches"])
def test_the_number_of_envs_and_where_they_run_change_no_episode(tmp_path, policy):
    """One row, three, eight in one worker, and five in two workers."""
    two = 'placement={"sim,policy": "cpu:0-1*2", learner: "cpu:0-1"}'
    for number, last in enumerate(["eval.num_envs=1", "eval.num_envs=3", "eval.num_envs=8", "eval.num_envs=5"]):
        where = [two if number == 3 and key.startswith("placement") else key for key in INLINE]
        run(f"checkpoint={policy}", *where, "eval.episodes=11", "eval.videos=0", "run.dir=runs", last)
    found = [path.read_bytes() for path in (tmp_path / "runs").glob("*/episodes.csv")]
    assert len(found) == 4 and len(set(found)) == 1
    assert policy == "random" or b",true,true," in found[0]


def test_several_tasks_are_played_in_one_call_each_the_same_as_alone(tmp_path):
    tasks = [*SWITCH, "checkpoint=scripted:SucceedsOnEvenSeeds"]
    run(*tasks, "env.task=[left,right]", "eval.episodes=8")
    run(*tasks, "env.task=right", "eval.episodes=4")
    both, episodes = results(tmp_path / "runs/evaluate-SucceedsOnEvenSeeds")
    _, alone = results(tmp_path / "runs/evaluate-SucceedsOnEvenSeeds-2")
    assert [episode.task for episode in episodes] == ["left", "right"] * 4
    assert [one.seed for one in episodes if one.task == "right"] == [one.seed for one in alone]
    assert [one.success_once for one in episodes if one.task == "right"] == [one.success_once for one in alone]
    assert set(both["per_task"]) == {"left", "right"}
    assert sum(found["episodes"] for found in both["per_task"].values()) == both["overall"]["episodes"] == 8
    assert both["protocol"]["env"]["task"] == ["left", "right"]


def test_policies_play_the_same_episodes_and_are_compared_on_them(tmp_path, capsys):
    policies = "checkpoint=[scripted:SucceedsOnEvenSeeds,scripted:Succeeds,scripted:Succeeds]"
    run(policies, *SWITCH, "eval.episodes=10")
    found = {name: results(tmp_path / "runs/compare" / name)[1] for name in ("SucceedsOnEvenSeeds", "Succeeds-2")}
    assert len({tuple(one.seed for one in episodes) for episodes in found.values()}) == 1
    told = json.loads((tmp_path / "runs/compare/comparison.json").read_text())
    assert told["policies"] == ["SucceedsOnEvenSeeds", "Succeeds", "Succeeds-2"]
    odd = sum(not one.success_once for one in found["SucceedsOnEvenSeeds"])
    first = told["pairs"][0]
    assert (first["first"], first["second"], first["episodes"]) == ("SucceedsOnEvenSeeds", "Succeeds", 10)
    assert first["success_once"]["difference"] == pytest.approx(odd / 10)
    assert first["success_once"]["p_value"] == pytest.approx(min(1.0, 2 / 2**odd))
    assert told["pairs"][2]["return"]["interval"] == [0.0, 0.0]
    assert "Succeeds - SucceedsOnEvenSeeds on the same 10 episodes" in capsys.readouterr().out
    assert "On the same episodes" in (tmp_path / "runs/compare/comparison.html").read_text()


def test_options_that_the_protocol_fixes_are_refused(tmp_path, capsys):
    run("checkpoint=random", *INLINE, "env.on_success=continue", code=2)
    assert "pointmass-v1 plays with truncate" in capsys.readouterr().err
    run("checkpoint=random", *INLINE, "env.on_success=continue", "eval.protocol=as-trained-v1", "eval.episodes=2")
    found, episodes = results(tmp_path / "runs/evaluate-random")
    assert found["protocol"]["name"] == "as-trained-v1"
    assert {episode.length for episode in episodes} == {50}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The cache of the Hugging Face hub; nothing beyond it can be reached."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_policy_on_the_hub_is_evaluated_like_its_folder(tmp_path, hub):
    from embodied.core.types import ActionSpec, EnvSpec
    from embodied.policies import make_policy
    from embodied.policies.config import MLPConfig

    snapshot = hub / "models--org--reacher" / "snapshots" / "0123abc"
    policy = make_policy(MLPConfig(), EnvSpec(ActionSpec(2), state_dim=6), seed=0)
    policy.save_pretrained(snapshot)
    (hub / "models--org--reacher" / "refs").mkdir()
    (hub / "models--org--reacher" / "refs" / "main").write_text("0123abc")
    for checkpoint in ("org/reacher", snapshot):
        run(f"checkpoint={checkpoint}", *INLINE, "eval.episodes=4", "eval.videos=0")
    found, episodes = results(tmp_path / "runs/evaluate-org-reacher")
    assert found["policy"]["name"] == "org-reacher" and len(found["policy"]["sha256"]) == 64
    assert episodes == results(snapshot.parent / "eval/0123abc")[1]


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("checkpoint", "code", "says"),
    [
        ("org/policy", 2, "hf download org/policy"),
        ("nowhere", 2, "nowhere: there is no such folder"),
        (str(Path(__file__).parent), 2, "no policy in it"),
        ("[]", 2, "name at least one"),
        ("[random,true]", 2, "should be text"),
        ("nowhere:Policy", 2, "No module named 'nowhere'"),
    ],
)
def test_a_policy_that_is_not_there_is_explained(checkpoint, code, says, capsys):
    run(f"checkpoint={checkpoint}", *INLINE, code=code)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("checkpoint", "says"),
    [
        ("runs/nothing-2026", "checkpoint=runs/nothing-2026: there is no such folder\n"),
        ("3", "error: checkpoint=3: there is no such folder\n"),
        ("true", "error: checkpoint=True: should be text\n"),
        ("org/policy", "no such folder; if it is a policy on the Hugging Face hub, name its env: env.name=libero"),
        (".", "checkpoint=.: no policy in it; name a run folder"),
        ("random", "checkpoint=random is not in a run's folder, so name the env: env.name="),
    ],
)
def test_without_a_recipe_a_missing_folder_and_a_missing_env_have_different_errors(checkpoint, says, capsys, tmp_path):
    (tmp_path / "runs").mkdir()
    run(f"checkpoint={checkpoint}", code=2)
    assert says in capsys.readouterr().err


def test_a_language_models_folder_answers_any_text_env(tmp_path, capsys):
    publish(tmp_path / "model", "gpt2", tied=True)
    run("checkpoint=model", code=2)
    assert (
        "checkpoint=model holds a language model, so name its env: for example env.name=sums" in capsys.readouterr().err
    )
    run("checkpoint=model", "env.name=pointmass", code=2)
    assert "env.name=pointmass takes actions, and policy.name=language answers in words" in capsys.readouterr().err
    run("checkpoint=model", "env.name=sums", "policy.max_tokens=2", "eval.episodes=2", "cluster.backend=inline")
    assert results(tmp_path / "runs/evaluate-model")[0]["overall"]["episodes"] == 2
    (tmp_path / "model" / "model.safetensors").unlink()
    run("checkpoint=model", "env.name=sums", code=2)
    assert "checkpoint=model: the model has no weights there, no file *.safetensors" in capsys.readouterr().err


def test_a_policy_for_another_env_is_refused_and_leaves_nothing(tmp_path, capsys):
    words = ["recipe=pointmass_ppo", "run.iterations=1", "eval.episodes=1", "eval.videos=0", "cluster.backend=inline"]
    made = train(*words, 'placement={"sim,policy": "cpu:0", learner: "cpu:0"}').folder
    capsys.readouterr()
    before = {*made.rglob("*")}
    run(f"checkpoint={made}", "env.name=scripted:Switch", code=2)
    told = capsys.readouterr()
    assert told.out == "" and "was made for another env than scripted:Switch" in told.err  # no plan
    run(f"checkpoint={made}", "env.state=proprio", code=2)
    assert "state 6 there, 4 here" in capsys.readouterr().err and {*made.rglob("*")} == before
    policy = shutil.copytree(next(made.glob("checkpoints/*/policy")), tmp_path / "alone" / "policy")
    run(f"checkpoint={policy}", "env.name=scripted:Switch", code=2)
    assert not (tmp_path / "alone" / "eval").exists()


@pytest.fixture
def interrupted(monkeypatch):
    """`with interrupted(n):` every evaluation gets a Ctrl-C when n episodes are over, as if it came from a terminal."""

    @contextmanager
    def interrupted(after):
        with monkeypatch.context() as patched:
            played = Evaluator.play

            def play(evaluator, episodes, *args, **options):
                played(evaluator, episodes[:after], *args, **options)
                signal.raise_signal(signal.SIGINT)

            patched.setattr(Evaluator, "play", play)
            yield

    return interrupted


def test_the_page_of_a_run_counts_an_evaluation_that_was_completed_later(interrupted):
    words = ["recipe=pointmass_ppo", "run.iterations=1", "eval.episodes=6", "eval.videos=0", "cluster.backend=inline"]
    made = train(*words, 'placement={"sim,policy": "cpu:0", learner: "cpu:0"}').folder
    with interrupted(0):
        run(f"checkpoint={made}", code=130)
    assert report.main([str(made)]) == 0 and "is partial: 0 of 6" in (made / "report.html").read_text()
    run(f"checkpoint={made}")
    assert "is partial" not in (made / "report.html").read_text()


def but_provenance(folder):
    return {key: value for key, value in results(folder)[0].items() if key != "provenance"}


def test_episodes_before_ctrl_c_are_kept_and_the_same_command_plays_the_rest(tmp_path, interrupted, capsys):
    command = ["checkpoint=scripted:SucceedsOnEvenSeeds", *SWITCH, "eval.episodes=10"]
    with interrupted(3):
        run(*command, code=130)
    folder = tmp_path / "runs/evaluate-SucceedsOnEvenSeeds"
    assert (folder / "episodes.csv").read_text().count("\n") == 4
    assert not (folder / "results.json").exists()
    told = json.loads((folder / "partial.json").read_text())
    assert (told["state"], told["over"], told["episodes"]) == ("partial", 3, 10)
    said = capsys.readouterr()
    assert "3 of 10 episodes are over, without rates; the same command plays the rest" in said.out
    assert said.err == "stopped at once\n"
    with interrupted(4):  # of those that are missing
        run(*command, code=130)
    run(*command)
    assert "7 of 10 episodes were over already" in capsys.readouterr().out
    assert not (folder / "partial.json").exists() and len(results(folder)[0]["provenance"]["earlier"]) == 2
    run(*command)  # now it is whole, so a new one begins
    whole = tmp_path / "runs/evaluate-SucceedsOnEvenSeeds-2"
    assert (folder / "episodes.csv").read_bytes() == (whole / "episodes.csv").read_bytes()
    assert but_provenance(folder) == but_provenance(whole)
    assert "earlier" not in results(whole)[0]["provenance"]


@pytest.mark.parametrize("change", ["eval.episodes=9", "eval.seed=2", "seed=3", "env.task=left", "eval.temperature=1"])
def test_another_command_begins_an_evaluation_of_its_own(tmp_path, interrupted, change):
    command = ["checkpoint=scripted:Succeeds", *SWITCH, "eval.episodes=10"]
    with interrupted(3):
        run(*command, code=130)
    key = change.partition("=")[0]
    run(*(argument for argument in command if argument.partition("=")[0] != key), change)
    assert (tmp_path / "runs/evaluate-Succeeds/partial.json").is_file()
    assert (tmp_path / "runs/evaluate-Succeeds-2/results.json").is_file()
    run(*command)
    assert not (tmp_path / "runs/evaluate-Succeeds/partial.json").exists()


def test_an_evaluation_that_goes_on_elsewhere_is_left_alone(tmp_path, interrupted):
    command = ["checkpoint=scripted:Succeeds", *SWITCH, "eval.episodes=10"]
    with interrupted(3):
        run(*command, code=130)
    folder = tmp_path / "runs/evaluate-Succeeds"
    there = os.open(folder, os.O_RDONLY)
    fcntl.flock(there, fcntl.LOCK_EX)
    run(*command)
    os.close(there)
    assert (folder / "partial.json").is_file() and (tmp_path / "runs/evaluate-Succeeds-2/results.json").is_file()


def test_a_comparison_that_was_interrupted_goes_on_with_the_policy_that_played(tmp_path, interrupted, monkeypatch):
    command = ["checkpoint=[scripted:Fails,scripted:SucceedsOnEvenSeeds]", *SWITCH, "eval.episodes=10"]
    played = evaluate.evaluate

    def second_interrupted(parts, source, *args):
        with interrupted(4) if source.name != "Fails" else nullcontext():
            return played(parts, source, *args)

    with monkeypatch.context() as patched:
        patched.setattr(evaluate, "evaluate", second_interrupted)
        run(*command, code=130)
    first = tmp_path / "runs/compare/Fails/results.json"
    before = first.stat().st_mtime_ns
    run(*command)
    assert first.stat().st_mtime_ns == before
    run(*command)
    ours, whole = (
        json.loads((tmp_path / f"runs/{name}/comparison.json").read_text()) for name in ("compare", "compare-2")
    )
    assert ours == whole and len(results(tmp_path / "runs/compare/SucceedsOnEvenSeeds")[1]) == 10
    assert not (tmp_path / "runs/compare/partial.json").exists()


def test_films_and_the_dataset_of_an_evaluation_in_two_sittings_are_whole(tmp_path, interrupted):
    pytest.importorskip("pyarrow")
    wanted = ["eval.videos=6", "eval.dataset=true", "env.max_episode_steps=8"]
    command = ["checkpoint=random", *INLINE, "env.num_envs=2", "eval.episodes=8", *wanted]
    with interrupted(4):
        run(*command, code=130)
    run(*command)
    run(*command)
    ours, whole = tmp_path / "runs/evaluate-random", tmp_path / "runs/evaluate-random-2"
    names = [
        sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.suffix in (".mp4", ".parquet"))
        for out in (ours, whole)
    ]
    assert names[0] == names[1] and len(list((ours / "videos").glob("*.mp4"))) >= 6
    assert recorded(ours / "dataset") == recorded(whole / "dataset")


def test_the_dataset_of_a_task_that_was_played_before_the_interruption_is_whole(tmp_path, interrupted):
    pytest.importorskip("pyarrow")
    command = ["checkpoint=random", *SWITCH, "env.task=[left,right]", "eval.episodes=8", "eval.dataset=true"]
    for over in (4, 2):  # the first task is over, then its dataset is written and half of the second task played
        with interrupted(over):
            run(*command, code=130)
    run(*command)
    run(*command)
    ours, whole = tmp_path / "runs/evaluate-random", tmp_path / "runs/evaluate-random-2"
    assert [recorded(ours / "dataset" / task) for task in ("left", "right")] == [
        recorded(whole / "dataset" / task) for task in ("left", "right")
    ]
    assert not (ours / "episode_buffers").exists()
    assert results(ours)[1] == results(whole)[1] and but_provenance(ours) == but_provenance(whole)


def test_an_evaluation_that_is_stopped_between_its_dataset_and_its_results_goes_on(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    command = ["checkpoint=random", *SWITCH, "eval.episodes=4", "eval.dataset=true"]

    def stopped(kept, *_):
        kept.write()  # as it is once a second
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(evaluate, "write_evaluation", stopped)
        run(*command, code=130)
    folder = tmp_path / "runs/evaluate-random"
    before = recorded(folder / "dataset")
    run(*command)
    assert len(before) == 4 and recorded(folder / "dataset") == before
    assert len(results(folder)[1]) == 4 and not (folder / "episode_buffers").exists()


def recorded(dataset):
    from embodied.datasets import read_dataset

    return [one.actions.tolist() for one in read_dataset(dataset)]
