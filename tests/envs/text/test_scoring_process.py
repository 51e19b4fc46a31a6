"""The process that scores: it hangs or dies at the cost of one answer, and ends with its worker."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from embodied.envs.text import scoring_process as scoring
from embodied.envs.text.scoring_process import DIED, LONGEST, TIMED_OUT, Scorer

LOOPS = "9" * 400 + "^{" + "9" * 400 + "}"  # a number with more digits than there is memory for


FAULTY = """
import os, time
def scores():
    def score(answer):
        if answer == "hang": time.sleep(1000)
        if answer == "die": os.kill(os.getpid(), 9)
        if answer == "print": print("chatter")
        if answer == "raise": raise ValueError("odd")
        return float(len(answer))
    return score
"""


@pytest.fixture(autouse=True)
def faulty(tmp_path, monkeypatch):
    """A module whose scores are lengths, and which sleeps or dies as the answer says."""
    (tmp_path / "faulty_scores.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def scorer(faulty):
    scorer = Scorer("faulty_scores:scores")
    yield scorer
    scorer.close()


def test_an_answer_need_not_wait_for_another_that_takes_long(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    scorers = scoring.Scorers("faulty_scores:scores")
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(scorers.score, 600.0, answer="hang")
        while scorers.idle:
            assert not slow.done()
        assert scorers.score(60.0, answer="abc") == (3.0, "") and not slow.done()
        while not scorers.all[0]._ready:  # killed earlier, it would not have started
            time.sleep(0.01)
        os.kill(scorers.all[0].pid, signal.SIGKILL)
        assert slow.result() == (0.0, DIED)
    scorers.close()


def gone(pid, within_s=60.0):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(("answer", "limit_s", "problem"), [("hang", 0.5, TIMED_OUT), ("die", 60.0, DIED)])
def test_a_scorer_that_hangs_or_dies_costs_one_answer(scorer, answer, limit_s, problem):
    assert scorer.score(30.0, answer="abc") == (3.0, "")
    before = scorer.pid
    assert scorer.score(limit_s, answer=answer) == (0.0, problem)
    assert scorer.score(30.0, answer="ab") == (2.0, "")
    assert scorer.pid != before and gone(before)


def test_a_scorer_that_was_killed_between_answers_is_replaced(scorer):
    assert scorer.score(30.0, answer="abc") == (3.0, "")
    os.kill(scorer.pid, signal.SIGKILL)
    assert scorer.score(30.0, answer="abc")[1] == DIED
    assert scorer.score(30.0, answer="abc") == (3.0, "")


def test_an_exception_in_a_scorer_counts_as_a_wrong_answer_with_the_reason(scorer):
    assert scorer.score(30.0, answer="raise") == (0.0, "scoring failed: ValueError: odd")


def test_printed_lines_of_libraries_are_not_taken_for_the_score(scorer):
    assert scorer.score(30.0, answer="print") == (5.0, "")


def test_a_very_long_answer_is_not_compared(scorer):
    assert scorer.score(30.0, answer="a" * (LONGEST + 1)) == (0.0, f"longer than {LONGEST} characters")
    assert scorer.score(30.0, answer="é" * LONGEST) == (float(LONGEST), "")


def test_a_process_whose_worker_is_gone_ends():
    code = "from embodied.envs.text.scoring_process import MATHEMATICS, Scorer; s = Scorer(MATHEMATICS); "
    code += "print(s.pid, flush=True); "
    done = subprocess.run(
        [sys.executable, "-c", code + "import os; os.kill(os.getpid(), 9)"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == -9 and gone(int(done.stdout))


def test_mathematics_that_never_ends_costs_one_answer():
    pytest.importorskip("math_verify")
    scorer = Scorer(scoring.MATHEMATICS)
    try:
        assert scorer.score(60.0, answer="0.5", solutions=["\\frac{1}{2}"]) == (1.0, "")
        score, problem = scorer.score(0.5, answer="\\int_0^\\infty x^{x^{x^x}} dx", solutions=[LOOPS])
        assert score == 0.0
        score, problem = scorer.score(0.5, answer=LOOPS, solutions=["3"])
        assert score == 0.0 and problem
        assert scorer.score(60.0, answer="1/2", solutions=["0.5"]) == (1.0, "")
    finally:
        scorer.close()
