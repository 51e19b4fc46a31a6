"""Pages on language policies: conversations, rates over prompts, training's text metrics, and two policies compared."""

import json

import numpy as np
import pytest

from embodied.core.pictures import drawing, load_picture
from embodied.core.types import EpisodeResult
from embodied.records.progress import RunLog, text_numbers
from embodied.records.results import write_results
from embodied.records.success_stats import summarize
from embodied.records.transcripts import PARTS, SAMPLES, TranscriptWriter, as_line, join_transcripts, read_ends
from embodied.reporting.comparison_page import comparison
from embodied.reporting.run_page import report
from embodied.reporting.runs import read_run
from embodied.reporting.sections import unfinished

EVIL = '<script>alert("x")</script><b onclick=y>'


def spoken(index, success, prompt=None, truncated=False, tokens=3):
    number = index if prompt is None else prompt
    return EpisodeResult(
        index, "add2", number, 7 + number, 1, float(success), success, success, None, "", truncated, tokens
    )


def turn(answer, said="37+58=", **more):
    given = {"tokens": [*answer], "logprobs": [-0.01] * len(answer), "truncated": False, "reward": 0.0}
    return {"said": said, "answer": answer, "facts": {"expected": "95"}, **given, **more}


def write_evaluation(folder, told, temperature=1.0, videos=1, version=3, **drawn):
    """An evaluation on disk: `told` holds an episode and its turns each."""
    with TranscriptWriter(folder / PARTS, "sim-0") as writer:
        for episode, turns in told:
            writer.add(episode, turns)
    join_transcripts(folder, {episode.index for episode, _ in told})
    protocol = {
        "name": "held-out-v1",
        "eval": {"temperature": temperature, "videos": videos, **drawn},
        "max_episode_steps": 1,
    }
    episodes = [episode for episode, _ in told]
    write_results(folder, {"policy_version": version, "protocol": protocol, **summarize(episodes)}, episodes)
    return folder


@pytest.fixture
def page_of(tmp_path, page_checker):
    def page(told, **more):
        return page_checker(report(read_run(write_evaluation(tmp_path / "e", told, **more)), tmp_path / "e"))

    return page


def test_a_reader_sees_the_pictures_of_a_conversation_and_what_became_of_lost_ones(page_of, tmp_path):
    shown = [{"type": "image", "image": name} for name in (drawing("add", 1, 1000), str(tmp_path / "gone.png"))]
    said = [{"role": "user", "content": [*shown, {"type": "text", "text": "sum: "}]}]
    page = page_of([(spoken(0, False), [turn("85", said)])])
    shown, lost, words = page.conversations[0]["turns"][0]["said"][0]["parts"]
    assert np.array_equal(load_picture(shown["src"]), load_picture(drawing("add", 1, 1000))[::4, ::4])
    assert "there is no picture" in lost["text"] and words["text"] == "sum: "


def test_failures_come_first_and_as_many_as_asked_for_are_unfolded(page_of):
    page = page_of([(spoken(0, True), [turn("a")]), (spoken(1, False), [turn("b")]), (spoken(2, False), [turn("c")])])
    told = [(talk["outcome"], talk["open"]) for talk in page.conversations]
    assert told == [("failure", True), ("failure", False), ("success", False)]


def test_a_transcript_of_another_shape_is_left_out(page_of):
    told = [(spoken(0, True), [turn("95")]), (spoken(1, True), [{"said": 7}]), (spoken(2, True), [])]
    assert "1 of 3 are shown" in page_of(told).text


def test_training_metrics_of_text_are_those_of_the_iteration():
    finished = [spoken(0, True, tokens=4)._replace(length=2), spoken(1, False, truncated=True, tokens=8)]
    assert text_numbers(finished, 2.0) == {"text/truncated": 0.5, "text/tokens": 4.0, "text/tokens_per_s": 6.0}
    assert text_numbers([EpisodeResult(0, "reach", -1, 5, 9, 1.0, True, True)], 2.0) == {}


def test_a_runs_page_shows_the_long_tail_of_its_answers(tmp_path, page_checker):
    """What answers.jsonl keeps: all conversations of a few, the longest one of many, nothing of iterations undone."""
    run = run_folder(tmp_path / "run")
    log = RunLog(run)
    for iteration in (0, 1, 2):
        log.answers(iteration, [(9, 0.75), (2, 0.25), *[(4, 0.5)] * iteration])
    log.answers(1, [(number, number / 10) for number in range(1, 1001)])
    with (run / "answers.jsonl").open("a") as file:
        file.write('{"iteration": 2, "tok')
    few, many, _ = read_ends(run)
    assert (few["tokens"], few["ended_s"], few["conversations"]) == ([2, 9], [0.25, 0.75], 2)
    assert (len(many["tokens"]), many["tokens"][-1], many["ended_s"][-1], many["conversations"]) == (
        256,
        1000,
        100,
        1000,
    )
    assert unfinished(few, 0).y == [1, 0.5, 0]
    page = page_checker(report(read_run(run), run))
    for words in ("tokens of a conversation's answers, iteration 2", "unfinished conversations", "all have at most"):
        assert words in page.text
    log.keep_rows(1)
    assert [row["iteration"] for row in read_ends(run)] == [0, 1]


def compared(tmp_path, page_checker, first, second):
    folders = [write_evaluation(tmp_path / name, told) for name, told in {"a": first, "b": second}.items()]
    return page_checker(comparison([read_run(folder) for folder in folders], tmp_path))


def test_two_policies_are_compared_on_the_same_prompts_with_answers_side_by_side(tmp_path, page_checker):
    first = [(spoken(i, False, prompt=i // 2), [turn("85", said=f"{i // 2}+1=")]) for i in range(8)]
    second = [(spoken(i, i % 2 == 0, prompt=i // 2), [turn("95", said=f"{i // 2}+1=")]) for i in range(8)]
    page = compared(tmp_path, page_checker, first, second)
    assert "+50.0 pp" in page.text and "avg@k" in page.text
    assert "a, prompt 3" in page.text and "b, prompt 3" in page.text
    assert len(page.conversations) == 8 and page.blocks("conversations")[0]["columns"] == 2


def test_prompts_of_the_same_number_that_read_otherwise_are_left_out(tmp_path, page_checker):
    first = [(spoken(i, False), [turn("85", said="1+1=")]) for i in range(4)]
    second = [(spoken(i, True), [turn("95", said="1+1=" if i else "2+2=")]) for i in range(4)]
    page = compared(tmp_path, page_checker, first, second)
    assert "1 prompts read otherwise in b than in a: left out" in page.text
    assert "only this one 3" in page.text and "a, prompt 0" not in page.text


# A run: its samples, and where it started


def sampled(iteration, reward, answer="95", **more):
    told = {"index": 16 * iteration, "task": "add2", "success": reward == 1, "reward": reward, "truncated": False}
    turns = [turn(answer, tokens=[], logprobs=[], reward=reward)]
    return {"iteration": iteration, "version": iteration - 1, **told, "tokens": 3, "error": "", "turns": turns, **more}


def run_folder(folder, lines=(), started_from=None, rate=0.5):
    """A run of two iterations on disk with an evaluation at its end."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"state": "finished", "started_from": started_from}))
    rows = [{"iteration": n, "policy_version": n, "env_steps": 256 * n, "train_s": n, "episodes": 256} for n in (1, 2)]
    row = {"recent_episodes": 256, "success_once": rate, "return": rate, "text/tokens": 3.0, "text/truncated": 0.0}
    row |= {"text/tokens_per_s": 500.0, "text/trainer_tokens_per_s": 900.0, "text/mfu": 0.1}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one | row) + "\n" for one in rows))
    (folder / SAMPLES).write_bytes(b"".join(lines))
    write_evaluation(folder / "eval" / "v000002", [(spoken(n, n < 3), [turn("95")]) for n in range(4)], version=2)
    return folder


def test_samples_are_shown_by_iteration_and_reward_and_damaged_lines_are_not(tmp_path, page_checker):
    lines = [as_line(sampled(1, 0.0, EVIL)), as_line(sampled(2, 1.0)), b'{"iteration": 3, "ind', b'{"iteration": 4}\n']
    run = run_folder(tmp_path / "run", lines)
    page = page_checker(report(read_run(run), run))
    (block,) = [block for block in page.blocks("conversations") if block["filter"] == "samples"]
    assert [(talk["iteration"], talk["reward"]) for talk in block["items"]] == [(2, 1), (1, 0)] and EVIL in page.text
    assert [SAMPLES, SAMPLES] in [each["link"] for each in page.blocks("text")]
    (run / SAMPLES).write_bytes(b"".join(as_line(sampled(number, 1.0)) for number in range(1, 1001)))
    page = page_checker(report(read_run(run), run))
    shown = [talk["iteration"] for talk in page.conversations if "iteration" in talk]
    assert shown[0] == 1000 and shown[-1] == 1 and 100 < len(shown) < 200 and f"{len(shown)} of 1000" in page.text


def test_a_run_shows_the_rate_of_the_policy_that_it_started_from(tmp_path, page_checker):
    """Of its evaluation where that asked the same; else of the first iteration, before any update."""
    start = run_folder(tmp_path / "sft-1")
    policy = {"folder": str(start / "checkpoints" / "v000002" / "policy")}
    run = run_folder(tmp_path / "run", started_from=policy)
    page = page_checker(report(read_run(run), run))
    assert "success of the start\n75%" in page.text and "start: sft-1 v000002" in page.text
    write_evaluation(run / "eval" / "v000002", [(spoken(n, True), [turn("95")]) for n in range(4)], 0.0, version=2)
    page = page_checker(report(read_run(run), run))
    assert "success of the start" not in page.text, "sampled answers are not compared with greedy ones"
    assert "success at the start\n50%\n256 answers of iteration 1" in page.text
