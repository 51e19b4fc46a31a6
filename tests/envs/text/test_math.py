"""Questions from a file: what is asked, what is compared, and which lines are refused."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import TypeAdapter

from embodied.core.conversations import pictures_in
from embodied.core.errors import ConfigError
from embodied.core.types import EpisodeSpec
from embodied.envs.config import EnvConfig
from embodied.envs.text.math import INSTRUCTION, Math, MathQuestions, boxed_answer, final_answer_in, questions
from embodied.envs.text.scoring_process import TIMED_OUT
from embodied.learners.examples import read_examples
from embodied.run.memory_check import check_pictures


def written(path, *entries):
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in entries) + "\n")
    return path


def config(file, **options):
    return TypeAdapter(EnvConfig).validate_python({"name": "math", "file": str(file), **options})


class Says:
    """A scorer that finds these equal to everything."""

    def __init__(self, *equal, problem=""):
        self.equal, self.problem, self.asked = equal, problem, []

    def score(self, seconds, answer, solutions):
        self.asked.append(answer)
        return float(answer in self.equal), self.problem


def env_of(chosen, scorer=None):
    return Math(chosen, MathQuestions(*questions(chosen), scorer or Says()))


SUM = {"question": "What is 1 + 1?", "answer": 2}


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("so \\boxed{5}", "5"),
        ("\\boxed{1} or \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{5", None),
        ("5", None),
        ("\\boxed{}", ""),
    ],
)
def test_the_last_box_counts(text, inside):
    assert boxed_answer(text) == inside


def test_pictures_stand_where_the_text_says_or_before_it(tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"")
    one = {"question": "<image>and<image>?", "images": ["a.png", "b.png"], "answer": 2}
    other = {"messages": [{"role": "user", "content": "Which?"}], "images": ["b.png"], "answer": 2}
    chosen = config(written(tmp_path / "a.jsonl", one, other, SUM), held_out=str(tmp_path / "a.jsonl"))
    first, second, third = (each.said[0]["content"] for each in questions(chosen)[1])
    a, b = ({"type": "image", "image": str(tmp_path / name)} for name in ("a.png", "b.png"))
    assert first[:3] == [a, {"type": "text", "text": "and"}, b] and INSTRUCTION in first[3]["text"]
    assert second == [b, {"type": "text", "text": "Which?"}] and isinstance(third, str)
    assert Math.shows_pictures(chosen) and Math.env_spec(chosen).pictures
    assert not Math.shows_pictures(config(written(tmp_path / "b.jsonl", SUM, SUM), held_out=str(tmp_path / "b.jsonl")))


def test_videos_stand_where_the_text_says_with_the_rule_that_chooses_their_frames(tmp_path):
    for name in ("a.mp4", "b.png"):
        (tmp_path / name).write_bytes(b"")
    told = {"question": "<video>then<image>?", "videos": [{"video": "a.mp4"}], "images": ["b.png"], "answer": 2}
    lines = written(tmp_path / "a.jsonl", told, SUM)
    chosen = config(lines, held_out=str(lines), frames=4, frame_s=0.5)
    shown = env_of(chosen).reset(EpisodeSpec("math", 0, 0, 0))[0]["content"]
    names = [part.get("image", part.get("text")) for part in shown]
    assert names[:3] == [f"video:{tmp_path / 'a.mp4'}?frames=4&every=0.5", "then", str(tmp_path / "b.png")]
    assert Math.shows_videos(chosen) and Math.shows_pictures(chosen)
    assert not Math.shows_videos(config(written(tmp_path / "b.jsonl", SUM, SUM)))
    asks_vllm = SimpleNamespace(env=chosen, policy=SimpleNamespace(reads_pictures=True, engine="vllm"))
    with pytest.raises(ConfigError, match=r"shows videos, .*engine=vllm does not .*try policy.engine=transformers"):
        check_pictures(asks_vllm, Math)
    for row, words in (
        (told | {"videos": ["c.mp4"]}, "there is no video .*c.mp4"),
        (told | {"videos": [3]}, "of files$"),
    ):
        with pytest.raises(ConfigError, match=words):
            questions(config(written(tmp_path / "c.jsonl", row, SUM)))


def test_pictures_lie_in_parquet_as_bytes_as_geometry3k_has_them(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    shown = [{"bytes": b"one", "path": None}, {"bytes": b"other", "path": "a.jpg"}]
    rows = [{"images": shown[:1], "problem": "<image>Find x.", "answer": "12"}] * 2
    rows.append({"images": shown, "problem": "<image>or<image>?", "answer": "3"})
    file = tmp_path / "train-00000-of-00001.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    train, held_out = questions(config(file))
    assert [len(pictures_in(one.said)) for one in (*held_out, *train)] == [1, 2], "the second is asked already"
    names = [*map(Path, pictures_in(train[0].said))]
    assert [name.read_bytes() for name in names] == [b"one", b"other"]
    assert [name.suffix for name in names] == [".png", ".jpg"]
    assert (names[0],) == (Path(pictures_in(held_out[0].said)[0]),) and len([*names[0].parent.iterdir()]) == 2
    assert read_examples(file)[2] == ((train[0].said, "3"),)


def test_questions_are_asked_as_messages_prompts_as_text(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    entries = [SUM, {"prompt": "1+1=", "solutions": ["2", "two"]}, {"messages": messages, "answer": "$2$"}]
    chosen = config(written(tmp_path / "a.jsonl", *entries), held_out=str(tmp_path / "a.jsonl"))
    env = env_of(chosen)
    said = [env.reset(EpisodeSpec("math", number, 0, 0)) for number in range(3)]
    assert said == [({"role": "user", "content": f"What is 1 + 1?\n{INSTRUCTION}"},), "1+1=", tuple(messages)]
    assert env.question.solutions == ("2",), "dollars do not count"


@pytest.mark.parametrize(
    ("prompt", "solution", "right", "wrong"),
    [
        ("1+1=\\boxed{", "2}", ["2}.", "2} 5+5=\\boxed{10}", "\\boxed{2}"], ["2", "3}", ""]),
        ("1+1? Answer:", " 2", ["2.\n3", "one more: \\boxed{2}", "3? Answer: 2"], ["3\n2", ""]),
    ],
)
def test_a_prompt_that_ends_with_the_mark_or_an_open_box_is_continued(tmp_path, prompt, solution, right, wrong):
    file = written(tmp_path / "a.jsonl", {"prompt": prompt, "answer": 2})
    env = env_of(config(file, held_out=str(file)))
    env.reset(EpisodeSpec("math", 0, 0, 0))
    assert env.solution() == solution
    assert all(env.step(answer).success for answer in (solution, *right))
    assert not any(env.step(answer).success for answer in wrong)


def test_a_box_that_reads_like_a_solution_is_right_without_being_compared(tmp_path):
    scorer = Says("4/2")
    env = env_of(config(written(tmp_path / "a.jsonl", SUM, {**SUM, "question": "Again?"})), scorer)
    env.reset(EpisodeSpec("math", 0, 0, 0))
    assert env.step("\\boxed{2}").success and not scorer.asked
    assert env.step("it is \\boxed{4/2}").success and scorer.asked == ["4/2"]
    turn = env.step("\\boxed{3}")
    assert (turn.reward, turn.success, turn.facts) == (0.0, False, {"expected": "2", "given": "3"})
    assert env.step("2").facts["problem"] == "nothing is boxed"
    assert env.step(env.solution()).success


def test_a_comparison_that_takes_too_long_is_a_wrong_answer(tmp_path):
    env = env_of(config(written(tmp_path / "a.jsonl", SUM, {**SUM, "question": "b"})), Says(problem=TIMED_OUT))
    env.reset(EpisodeSpec("math", 0, 0, 0))
    turn = env.step("\\boxed{9^9}")
    assert (turn.reward, turn.facts["problem"]) == (0.0, "scoring timed out")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"question": "1+1?"}, r"no answer \(answer, solutions, .*; its columns are question; name them"),
        ({"query": "1+1?", "result": "2"}, r"no question .* are query, result; .*{question: query, answer: result}"),
        (
            {"talk": [{"role": "user", "content": "1+1?"}], "meta": {"gold": "2"}},
            r"no question .* are talk, meta \(gold\); .*{question: talk, answer: meta.gold}",
        ),
        ({**SUM, "prompt": "1+1="}, r"several questions \(question, prompt\)"),
        ({"problem": "1+1?", "reward_model": {"style": "rule"}}, r"are problem, reward_model \(style\)"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(tmp_path, line, message):
    file = written(tmp_path / "bad.jsonl", SUM, line)
    with pytest.raises(ConfigError, match=rf"bad\.jsonl, line 2: .*{message}"):
        questions(config(file))


GSM8K = {"question": "How many?", "answer": "48/2 = <<48/2=24>>24 clips, 1,000 more.\n#### 1,024"}
MATH = {"problem": "Find x.", "level": "Level 5", "type": "Algebra", "solution": "So $x = \\boxed{\\frac{1}{2}}$."}
MATH_500 = {**MATH, "answer": "\\frac{1}{2}", "subject": "Algebra", "unique_id": "test/1.json"}
ASKS_FOR_MARK = 'Let\'s think step by step and output the final answer after "####".'
ASKED = f"How many? {ASKS_FOR_MARK}"
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": ASKED}],
    "ability": "math",
    "reward_model": {"ground_truth": "1024", "style": "rule"},
    "extra_info": {"answer": GSM8K["answer"], "index": 0, "question": "How many?", "split": "train"},
}
DAPO = VERL | {"prompt": [{"role": "user", "content": "The last line should be of the form Answer: $Answer. 2+32?"}]}
DAPO_PROCESSED = {"prompt": "2+32?", "solution": "34", "data_source": "math_dapo", "source_prompt": DAPO["prompt"]}
WRITTEN = [{"role": "user", "content": "Find x."}, {"role": "assistant", "content": "<think>hm</think> \\boxed{1/2}"}]
OPEN_R1 = {**MATH, "answer": "1/2", "generations": ["<think>", "<think>"], "messages": WRITTEN}
ODD = {"query": "Find x.", "extra_info": {"result": "3"}, "solution": "long"}


@pytest.mark.parametrize(
    ("row", "columns", "asked", "solution", "right"),
    [
        (GSM8K, {}, f"How many?\n{INSTRUCTION}", "1024", "\\boxed{1024}"),
        (MATH, {}, f"Find x.\n{INSTRUCTION}", "\\frac{1}{2}", "\\boxed{\\frac{1}{2}}"),
        (MATH_500, {}, f"Find x.\n{INSTRUCTION}", "\\frac{1}{2}", "\\boxed{\\frac{1}{2}}"),
        (VERL, {}, ASKED, "1024", "so 1,024\n#### 1,024"),
        (VERL, {}, ASKED, "1024", "#### \\boxed{1024}."),
        (DAPO, {}, DAPO["prompt"][0]["content"], "1024", "Hence\n**Answer:** $1024$."),
        (DAPO_PROCESSED, {}, f"2+32?\n{INSTRUCTION}", "34", "\\boxed{34}"),
        (OPEN_R1, {}, f"Find x.\n{INSTRUCTION}", "1/2", "\\boxed{1/2}"),
        (ODD, {"question": "query", "answer": "extra_info.result"}, f"Find x.\n{INSTRUCTION}", "3", "\\boxed{3}"),
        (ODD | {"query": VERL["prompt"]}, {"question": "query", "answer": "extra_info.result"}, ASKED, "3", "#### 3"),
        (VERL, {"prompt": "extra_info.question"}, f"How many?\n{INSTRUCTION}", "1024", "\\boxed{1024}"),
    ],
)
def test_rows_are_read_as_they_are_published(tmp_path, row, columns, asked, solution, right):
    file = written(tmp_path / "a.jsonl", row)
    env = env_of(config(file, held_out=str(file), columns=columns))
    said = env.reset(EpisodeSpec("math", 0, 0, 0))
    assert said[-1]["content"] == asked and env.question.solutions == (solution,)
    assert final_answer_in(right, env.question.mark) == solution and env.step(right).success
    assert env.step(env.solution()).success and not env.step("7").success


def test_worked_solutions_are_imitated_and_messages_up_to_the_assistants_last(tmp_path):
    file = written(
        tmp_path / "a.jsonl", GSM8K, MATH_500, OPEN_R1, {"messages": WRITTEN}, {"prompt": "1+1=", "answer": "2"}
    )
    assert [answer for ((_, answer),) in read_examples(file)] == [
        GSM8K["answer"],
        MATH["solution"],
        WRITTEN[1]["content"],
        WRITTEN[1]["content"],
        "2",
    ]
    assert read_examples(file)[2][0][0] == tuple(WRITTEN[:1]) and read_examples(file)[4][0][0] == "1+1="
    other = written(tmp_path / "b.jsonl", ODD | {"worked": "x = 3"})
    assert read_examples(other, names={"question": "query", "answer": "worked"})[0][0][1] == "x = 3"
    with pytest.raises(ConfigError, match=r"no answer as text; .* such as sft\.names="):
        read_examples(written(tmp_path / "c.jsonl", {"question": "Why?"}))


def test_rows_whose_solution_states_no_final_answer_are_left_out_and_counted(tmp_path):
    proof = {"problem": "Prove it.", "solution": "We see that it holds.\nThis completes the proof."}
    file = written(tmp_path / "a.jsonl", MATH, proof, GSM8K)
    assert len(questions(config(file, held_out=str(file)))[1]) == 2
    assert "1 of the 3 rows of" in Math.remarks(config(file), tmp_path)[0]
    with pytest.raises(ConfigError, match="no solution states a final answer"):
        questions(config(written(tmp_path / "b.jsonl", proof)))
    with pytest.raises(ConfigError, match=r"line 1: no column reply; its columns are problem, level"):
        questions(config(file, columns={"answer": "reply"}))


def test_questions_are_chosen_by_their_rates(tmp_path):
    saved = written(tmp_path / "a.jsonl", *({**row, "solve_rate": n / 10} for n, row in enumerate(many(10))))
    train, _ = questions(config(saved, solve_rate=[0.2, 0.4]))
    assert [one.said for one in train] == ["2+1=", "3+1=", "4+1="]
    unmarked, few = Math.remarks(config(saved, solve_rate=[0.2, 0.4]), tmp_path)
    assert "10 of the 10 questions" in unmarked and "5% of the 10 questions" in few
    with pytest.raises(ConfigError, match=r"leaves none of the 9 questions of .*, of which 9 have a solve_rate"):
        questions(config(saved, solve_rate=[0.95, 1]))


def many(count):
    return [{"prompt": f"{number}+1=", "answer": number + 1} for number in range(count)]


def test_the_first_twentieth_is_held_out(tmp_path):
    chosen = config(written(tmp_path / "a.jsonl", *many(100), many(1)[0]))
    assert Math.held_out(chosen) == 5 and Math.protocols(chosen)[0].stored_states == 5
    env = env_of(chosen)
    held_out = [env.reset(EpisodeSpec("math", number, 0, 0)) for number in range(5)]
    assert held_out == [f"{number}+1=" for number in range(5)]
    drawn = {env.reset(EpisodeSpec("math", -1, seed, 0)) for seed in range(3000)}
    assert len(drawn) == 95 and not drawn & {*held_out}, "0+1= comes twice in the file"


def test_questions_of_the_held_out_file_are_not_trained_on(tmp_path):
    held_out = written(tmp_path / "b.jsonl", *many(20)[10:])
    chosen = config(written(tmp_path / "a.jsonl", *many(20)), held_out=str(held_out))
    train, others = questions(chosen)
    assert len(train) == len(others) == 10 and not {one.said for one in train} & {one.said for one in others}


def test_a_changed_file_is_read_again(tmp_path):
    file = written(tmp_path / "a.jsonl", *many(10))
    assert len(questions(config(file))[0]) == 9
    written(file, *many(40))
    assert len(questions(config(file))[0]) == 38


def test_answers_are_compared_as_mathematics(tmp_path):
    pytest.importorskip("math_verify")
    entries = [
        {"question": "half", "answer": "\\frac{1}{2}"},
        {"question": "root", "solutions": ["x = 3", "\\boxed{\\sqrt{9}}"]},
        {"question": "more", "answer": "1"},
    ]
    chosen = config(written(tmp_path / "a.jsonl", *entries), held_out=str(tmp_path / "a.jsonl"), score_s=60)
    shared = Math.load(chosen)
    try:
        env = Math(chosen, shared)
        for number, answer, right in [(0, "0.5", True), (0, "\\frac{2}{4}", True), (0, "0.6", False), (1, "3", True)]:
            env.reset(EpisodeSpec("math", number, 0, 0))
            assert env.step(f"\\boxed{{{answer}}}").success == right, (number, answer)
        env = Math(chosen, replace(shared, train=[]))
        env.reset(EpisodeSpec("math", 2, 0, 0))
        assert env.step("\\boxed{2-1}").success
    finally:
        Math.unload(shared)
