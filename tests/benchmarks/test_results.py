"""What measurements leave in the repository names the code that was measured, and nothing of the machine's folders."""

import json
import re
import subprocess

import pytest

from benchmarks.common import RESULTS, ROOT

FOLDER = re.compile(r"(?<![\w.>/])/(tmp|work|home|root|var|mnt|opt|usr|Users)/[\w.-]+")


def test_no_result_names_a_folder_of_the_machine_that_measured_it():
    found = {path.name: FOLDER.search(path.read_text()) for path in RESULTS.rglob("*") if path.is_file()}
    assert found and not [f"{name}: {hit[0]}" for name, hit in found.items() if hit]


def test_every_result_names_a_commit_of_this_history():
    if not (history := commits_of_this_history()):
        pytest.skip("there is no history here: this is not a git checkout, or a shallow one")
    found = {path.relative_to(RESULTS).as_posix(): commits_in(json.loads(path.read_text())) for path in all_results()}
    unknown = {
        name: [told for told in commits if not is_in(history, told)] or "no commit at all"
        for name, commits in found.items()
        if not commits or not all(is_in(history, told) for told in commits)
    }
    assert found and not unknown, unknown


def test_commits_are_found_wherever_a_result_says_them():
    assert commits_in({"rows": [{"commit": "a"}, {"commit": "b"}], "about": {"commit": "a"}, "x": 1}) == {"a", "b"}
    assert is_in({"05673e1c2d18ffff"}, "05673e1c2d18") and is_in({"05673e1c2d18ffff"}, "05673e1c2d18-dirty-ee311eaf")
    assert not is_in({"05673e1c2d18ffff"}, "05673e1c2d19") and not is_in({"05673e1c2d18ffff"}, "")


def all_results():
    return sorted(RESULTS.rglob("*.json"))


def commits_in(content):
    """What is said under `commit`, anywhere."""
    if isinstance(content, list):
        return set().union(*map(commits_in, content))
    if not isinstance(content, dict):
        return set()
    return ({content["commit"]} if "commit" in content else set()).union(*map(commits_in, content.values()))


def is_in(history, told):
    """A commit with changes that were not committed counts as the one they were made to."""
    short = str(told).partition("-")[0]
    return len(short) >= 7 and any(commit.startswith(short) for commit in history)


def commits_of_this_history():
    """All ancestors of what is checked out; none outside a checkout, or where older ones were not fetched."""

    def git(*arguments):
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=60)

    top = git("rev-parse", "--show-toplevel", "--is-shallow-repository")
    if top.returncode or top.stdout.split("\n")[:2] != [str(ROOT), "false"]:
        return set()
    return set(git("rev-list", "HEAD").stdout.split())
