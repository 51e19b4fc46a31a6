"""Questions from a file: what is asked, what is compared, and which lines are refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from embodied.core.conversations import pictures_in
from embodied.core.errors import ConfigError
from embodied.core.types import EpisodeSpec
from embodied.envs.config import EnvConfig
from embodied.envs.text.math import INSTRUCTION, Math, MathQuestions, boxed_answer, questions
from embodied.envs.text.scoring_process import TIMED_OUT
from embodied.learners.examples import read_examples


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": ["gone.png"]}, "there is no picture"),
        ({"images": ["a.png"], "question": "<image><image>"}, "stands 2 times, and images are 1"),
        ({"images": "a.png"}, "must be a list of files"),
        ({"images": ["a.png"], "question": None, "prompt": "1+1="}, "must be a list of files"),
    ],
)
def test_lines_whose_pictures_do_not_fit_are_refused(changes, words, tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(ConfigError, match=words):
        questions(config(written(tmp_path / "a.jsonl", SUM | changes)))


def test_questions_are_asked_as_messages_prompts_as_text(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    entries = [SUM, {"prompt": "1+1=", "solutions": ["2", "two"]}, {"messages": messages, "answer": "$2$"}]
    chosen = config(written(tmp_path / "a.jsonl", *entries), held_out=str(tmp_path / "a.jsonl"))
    env = env_of(chosen)
    said = [env.reset(EpisodeSpec("math", number, 0, 0)) for number in range(3)]
    assert said == [({"role": "user", "content": f"What is 1 + 1?\n{INSTRUCTION}"},), "1+1=", tuple(messages)]
    assert env.question.solutions == ("2",), "dollars do not count"


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
        ("{", "line 2: not JSON"),
        (r'{"prompt": "\ud800", "answer": "1"}', "line 2: not JSON: .*surrogates not allowed"),
        ("[1]", "line 2: list, it must be an object"),
        ({"question": "1+1?"}, "line 2: one of answer, solutions is needed, and it has none"),
        ({"question": "1+1?", "answer": ""}, "it has none"),
        ({"answer": "2"}, "one of question, problem, prompt, messages is needed, and it has none"),
        ({**SUM, "prompt": "1+1="}, "and it has question, prompt"),
        ({"question": "1+1?", "answer": {"a": 1}}, "answer must be text or a number"),
        ({"question": 5, "answer": "2"}, "question must be text, it is int"),
        ({"messages": ["hi"], "answer": "2"}, "messages must be a list of"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(tmp_path, line, message):
    file = written(tmp_path / "bad.jsonl", SUM, line)
    with pytest.raises(ConfigError, match=rf"bad\.jsonl, {message if 'line' in message else f'line 2: .*{message}'}"):
        questions(config(file))


def test_a_file_that_is_missing_or_empty_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.jsonl: No such file"):
        questions(config(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match=r"empty\.jsonl: no questions"):
        questions(config(written(tmp_path / "empty.jsonl", "")))


def test_questions_lie_in_parquet_or_in_a_folder_of_datasets_too_and_are_chosen_by_their_rates(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "solve_rate": n / 10} for n in range(10)]
    table, saved = pyarrow.Table.from_pylist(rows), tmp_path / "saved"
    parquet.write_table(table, tmp_path / "a.parquet")
    saved.mkdir()
    for part in (0, 1):  # as `save_to_disk` of the package datasets leaves it
        with ipc.new_stream(str(saved / f"data-{part:05d}-of-00002.arrow"), table.schema) as file:
            file.write_table(table.slice(5 * part, 5))
    (saved / "state.json").write_text("{}")
    lines = questions(config(written(tmp_path / "a.jsonl", *rows)))
    assert questions(config(tmp_path / "a.parquet")) == questions(config(saved)) == lines
    train, _ = questions(config(saved, solve_rate=[0.2, 0.4]))
    assert [one.said for one in train] == ["2+1=", "3+1=", "4+1="]
    assert "5% of the 10 questions" in Math.remarks(config(saved, solve_rate=[0.2, 0.4]), tmp_path)[0]
    with pytest.raises(ConfigError, match=r"leaves none of the 9 questions of .*, of which 9 have a solve_rate"):
        questions(config(saved, solve_rate=[0.95, 1]))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and more")
    with pytest.raises(ConfigError, match=r"bad\.parquet is damaged"):
        questions(config(tmp_path / "bad.parquet"))
    damaged = bytearray((tmp_path / "a.parquet").read_bytes())
    damaged[4] ^= 255  # in the head of the first page
    (tmp_path / "bad.parquet").write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"bad\.parquet: [^\n]+$") as told:
        questions(config(tmp_path / "bad.parquet"))
    assert "\n" not in str(told.value)


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


def test_what_is_in_a_held_out_file_is_not_trained_on(tmp_path):
    held_out = written(tmp_path / "b.jsonl", *many(20)[10:])
    chosen = config(written(tmp_path / "a.jsonl", *many(20)), held_out=str(held_out))
    train, others = questions(chosen)
    assert len(train) == len(others) == 10 and not {one.said for one in train} & {one.said for one in others}


def test_a_changed_file_is_read_again(tmp_path):
    file = written(tmp_path / "a.jsonl", *many(10))
    assert len(questions(config(file))[0]) == 9
    written(file, *many(40))
    assert len(questions(config(file))[0]) == 38


def test_a_file_whose_questions_are_all_held_out_is_refused(tmp_path):
    pytest.importorskip("math_verify")
    chosen = config(written(tmp_path / "a.jsonl", SUM))
    with pytest.raises(ConfigError, match="all are held out"):
        Math.check(chosen)


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
