"""Several runs with one command: what is asked for, how many go on at once, and what becomes of each."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from embodied.core.errors import ConfigError, EmbodiedError
from embodied.placement import PlannedHost, Topology
from embodied.placement.placement_plan import PlacementPlan
from embodied.placement.topology import Gpu, Node
from embodied.run import run_group
from embodied.run.ending import Interruption
from embodied.run.run_group import Member, RunGroup, find_group, lock_runs, read_group
from embodied.sharing.children import BEGIN, GroupChildren, Place, slug
from embodied.sweep import divide_machine, load_all, members_of, read_order, read_seeds, runs_at_once, split_values

# A run without training: seed 1 fails, seed 2 fails before it has a folder, seed 3 waits until it is told to stop.
TRAIN = """import json, os, signal, sys, time
from pathlib import Path
said = dict(word.split("=", 1) for word in sys.argv[1:])
if "resume" in said:
    folder = Path(said["resume"])
    seed = int(folder.name.rpartition("seed")[2].partition("-")[0])
else:
    seed = int(said["seed"])
    folder = Path(f"{said['run.name']}-20260101-000000")
if seed == 2:
    print("error: the second one")
    print("cannot be")
    sys.exit(2)
(folder / "logs").mkdir(parents=True, exist_ok=True)
(folder / "logs" / "driver.log").write_text("2026-01-01T00:00:00 iteration 1/2\\n")
def write(state, cause=""):
    content = {"state": state, "cause": cause, "words": sys.argv[1:], "cores": sorted(os.sched_getaffinity(0))}
    (folder / "run.json").write_text(json.dumps({**content, "processes": {"driver": os.getpid()}}))
def stop(*_):
    write("stopped")
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
write("running")
if seed == 3 and "resume" not in said:
    while True:
        time.sleep(0.01)
if seed == 1 and "resume" not in said:
    write("failed", "WorkerFailed: sim-0: gone")
    sys.exit(1)
write("finished")
"""

WHOLE = (Place(),)


def order(*words, sweep=False):
    return read_order([f"recipe={'pointmass_ppo'}", *words], sweep)


def wanted(*words, sweep=False):
    """The group that a command line asks for."""
    asked = order(*words, sweep=sweep)
    members = members_of(asked, load_all(asked))
    return RunGroup(
        Path(), "pointmass_ppo", asked.asked, tuple(sorted(asked.grid)), members, ("embodied.train", *words)
    )


@pytest.fixture
def children(tmp_path, monkeypatch):
    """Runs of a group in a folder of its own, by the script above."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)

    def make(*seeds, places=WHOLE, folder="group"):
        found = RunGroup(
            Path(folder), "toy", {}, (), tuple(Member({}, seed) for seed in seeds), ("embodied.train", "x")
        )
        (found.folder / "logs").mkdir(parents=True, exist_ok=True)
        found.write()
        crew = GroupChildren(found, ["recipe=toy"], Path(), places)
        crew.train = ["train.py"]
        return crew

    return make


# What is asked for


def test_seeds_are_numbers_and_ranges():
    lists = {"0-4": (0, 1, 2, 3, 4), "0,2,5": (0, 2, 5), "7": (7,), "0-1,9": (0, 1, 9), "[1,2]": (1, 2)}
    problems = []
    assert {text: read_seeds(text, problems) for text in lists} == lists and not problems
    for count, text in enumerate(["", "4-0", "a", "-1", "1,,2", "1,1", "0-99999"], 1):
        read_seeds(text, problems)
        assert len(problems) == count and f"seeds={text}" in problems[-1]


def test_commas_inside_brackets_and_quotes_belong_to_a_value():
    assert split_values("1e-4,3e-4") == ["1e-4", "3e-4"]
    assert split_values("[64,64],[256,256]") == ["[64,64]", "[256,256]"]
    assert split_values("'a,b',{c: [1,2]}") == ["'a,b'", "{c: [1,2]}"]
    assert order("policy.hidden=[8,8]", "seeds=0-1").words == ("recipe=pointmass_ppo", "policy.hidden=[8,8]")


def test_settings_multiply_and_every_setting_has_a_seed_before_one_has_the_next():
    found = wanted("algo.lr=1e-4,1e-3", "policy.hidden=[8],[8,8]", "seeds=0-1", sweep=True)
    assert found.swept == ("algo.lr", "policy.hidden") and len(found.members) == 8
    assert [member.seed for member in found.members] == [0] * 4 + [1] * 4
    assert found.members[1].settings == {"algo.lr": 1e-4, "policy.hidden": [8, 8]}
    assert len({member.recipe for member in found.members}) == 4  # a seed is no other recipe


@pytest.mark.parametrize(
    ("words", "sweep", "answer"),
    [
        ("at_once=2", False, "at_once= needs seeds="),
        ("seeds=0-1 seed=3", False, "seeds=0-4"),
        ("seeds=", False, "^seeds= has no value; if this key may have none, write seeds=null$"),
        ("seeds=0-1 seeds=a", False, "^seeds is given twice on the command line: 0-1 and a$"),
        ("seeds=0-1 resume=auto", False, "leave resume= out"),
        ("seeds=0-1 at_once=0", False, "at_once=0"),
        ("seeds=0-1 at_once=half", False, "at_once='half'"),
        ("", True, "nothing is swept"),
        ("run.dir=a,b", True, "run.dir cannot be swept"),
        ("algo.lr=1e-3,0.001", True, "1e-3 and 0.001 are the same value"),
        ("algo.lr=1e-3,", True, "a value between commas is empty"),
        ("algo.lr=1e-3,2e-3 algo.lr=1", True, "algo.lr is given twice"),
        ("algo.lr=1e-3,[,2", True, "the value is not YAML"),
    ],
)
def test_a_mistake_in_a_command_line_is_refused(words, sweep, answer):
    with pytest.raises(ConfigError, match=answer):
        order(*words.split(), sweep=sweep)


def test_a_value_that_does_not_fit_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match=r"algo\.lr=-1"):
        load_all(order("algo.lr=1e-3,-1", sweep=True))


# How many at once


def plan(*cores, gpus=0):
    hosts = [PlannedHost(f"sim-{i}", ("sim",), (core,), 1) for i, core in enumerate(cores)]
    hosts += [PlannedHost(f"learner-{i}", ("learner",), cores[:1], 1, devices=(f"gpu:{i}",)) for i in range(gpus)]
    return PlacementPlan("auto", tuple(hosts), 8)


def machine(cores, gpus=0, memory=1e12):
    cards = tuple(Gpu(i, "H100", 80e9, card=i) for i in range(gpus))
    return Topology((Node("", cores, cards, memory, core_ids=tuple(range(cores))),))


def test_runs_go_side_by_side_where_one_leaves_room_for_others():
    assert runs_at_once(plan(0, 1), machine(2), 1e9) == (1, "a run takes 2 cores of 2")
    assert runs_at_once(plan(0, 1, 2, 3), machine(16), 1e9)[0] == 4
    assert runs_at_once(plan(0, 1, 2, 3), machine(16, memory=24e9), 10e9) == (2, "a run takes 10.0 GB of 24")
    assert runs_at_once(plan(0, gpus=2), machine(16, gpus=4), 1e9) == (2, "a run takes 2 GPUs of 4")
    several = Topology(machine(16).nodes * 2)
    assert runs_at_once(plan(0), several, 1e9)[0] == 1


def test_runs_at_once_have_cores_and_gpus_of_their_own():
    assert divide_machine(machine(5, gpus=2), 2) == [Place((0, 1), "0"), Place((2, 3), "1")]
    assert divide_machine(machine(4), 2) == [Place((0, 1)), Place((2, 3))]
    assert divide_machine(machine(4, gpus=1), 1) == [Place()]


# A group is found again


def test_the_same_command_finds_its_runs_again_and_more_seeds_join_them(tmp_path):
    first, new = find_group(tmp_path, wanted("seeds=0-1"), None)
    assert new
    first.folder.mkdir()
    first.change(first.members[0], folder="../a")
    again, new = find_group(tmp_path, wanted("seeds=1-3"), None)
    assert not new and again.folder == first.folder
    assert [(member.seed, member.folder) for member in again.members] == [(0, "../a"), (1, ""), (2, ""), (3, "")]
    assert again.path(again.members[0]) == tmp_path / "a"


def test_another_or_a_changed_recipe_has_a_group_of_its_own(tmp_path):
    asked = wanted("seeds=0-1")
    old = replace(asked, folder=tmp_path / "old", members=tuple(replace(one, recipe="before") for one in asked.members))
    old.folder.mkdir()
    old.write()
    assert find_group(tmp_path, asked, None)[1] and find_group(tmp_path, asked, tmp_path / "mine")[1]
    for group, reason in ((asked, "the recipe has changed since"), (wanted("seeds=0-1", "algo.lr=1e-4"), "of other")):
        with pytest.raises(ConfigError, match=f"holds other runs: {reason}"):
            find_group(tmp_path, group, old.folder)


def test_two_commands_do_not_go_on_with_one_group(tmp_path):
    found = replace(wanted("seeds=0"), folder=tmp_path)
    with lock_runs(found.folder), pytest.raises(EmbodiedError, match="another process continues"):
        lock_runs(found.folder).__enter__()


def test_a_run_that_had_nothing_to_learn_is_over_and_one_that_was_stopped_is_not(tmp_path):
    def state(**info):
        (tmp_path / "run.json").write_text(json.dumps(info))
        return run_group.state_of(tmp_path)

    assert state(state="finished") == "finished"
    assert state(state="stopped", cause="10 steps in a row had nothing to learn from") == "ended early"
    assert state(state="stopped", cause="") == state(state="stopped", cause="second Ctrl-C") == "unfinished"
    assert state(state="failed", cause="x") == state(state="running") == "unfinished"
    assert run_group.state_of(tmp_path / "none") == "not begun"


# What becomes of the runs


def test_a_failed_seed_does_not_end_the_others_and_is_named(children, capsys):
    crew = children(0, 1, 2, 4)
    crew.run(crew.group.members, Interruption())
    assert crew.say_results(crew.group.members, Interruption()) == 1
    found = read_group(Path("group"))
    assert [found.state(member) for member in found.members] == ["finished", "unfinished", "not begun", "finished"]
    assert [member.problem for member in found.members] == ["", "WorkerFailed: sim-0: gone", "the second one", ""]
    told = capsys.readouterr().out
    assert "2 of 4 runs finished" in told and "continue    python -m embodied.train x" in told
    assert "seed 1: unfinished, WorkerFailed: sim-0: gone" in told and "seed 2: not begun, the second one" in told


def test_an_unfinished_run_of_a_group_is_resumed(children):
    crew = children(1)
    crew.run(crew.group.members, Interruption())
    crew.run(crew.group.members, Interruption())
    (member,) = read_group(Path("group")).members
    assert json.loads((crew.group.path(member) / "run.json").read_text())["words"] == [
        f"resume={crew.group.path(member)}"
    ]
    assert crew.say_results(crew.group.members, Interruption()) == 0


def test_runs_are_stopped_with_the_command_and_the_rest_does_not_begin(children, capsys):
    crew, interruption = children(3, 4), Interruption()
    look = crew.look

    def stop_once_it_runs():
        look()
        if crew.going and crew.going[0].folder:
            interruption.signal = signal.SIGTERM

    crew.look = stop_once_it_runs
    crew.run(crew.group.members, interruption)
    assert crew.say_results(crew.group.members, interruption) == 128 + signal.SIGTERM
    told = capsys.readouterr().out
    assert "seed 3 stopped" in told and "seed 4: not begun" in told and "continue " in told
    assert not crew.going


def test_no_process_is_left_where_an_end_cannot_be_recorded(children, monkeypatch):
    crew, processes = children(3, 4, places=2 * WHOLE), []

    def begin(member, begin=crew.begin):
        begin(member)
        processes.append(crew.going[-1].process)

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(crew, "begin", begin)
    monkeypatch.setattr(crew, "record_end", full)
    with pytest.raises(OSError, match="no space left"):
        crew.run(crew.group.members, Interruption())
    assert [process.poll() is None for process in processes] == [False, False]


def test_no_process_is_left_where_a_signal_comes_while_it_starts(children, monkeypatch):
    crew, processes = children(3), []

    class Interrupting(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            processes.append(self)
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupting)
    with Interruption() as interruption, pytest.raises(KeyboardInterrupt):
        crew.run(crew.group.members, interruption)
    assert [process.poll() is None for process in processes] == [False]


def test_runs_at_once_keep_to_their_cores(children):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    crew = children(0, 4, places=[Place(cores[:1]), Place(cores[1:2])])
    crew.run(crew.group.members, Interruption())
    found = [json.loads((crew.group.path(member) / "run.json").read_text())["cores"] for member in crew.group.members]
    assert found == [cores[:1], cores[1:2]]


def test_a_run_ends_when_the_command_that_started_it_is_killed(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    parent = (
        "import json, os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {BEGIN!r}, json.dumps([os.getpid(), []]), 'train.py', 'seed=3',"
        " 'run.name=toy-seed3'])\n"
        "time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=tmp_path)
    run_json = tmp_path / "toy-seed3-20260101-000000" / "run.json"
    try:
        until(lambda: run_json.is_file() and run_json.read_text().endswith("}"))
    finally:
        process.kill()
        process.wait()
    until(lambda: json.loads(run_json.read_text() or "{}").get("state") == "stopped")


def until(true, seconds=60):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_names_of_files_hold_no_odd_signs_and_a_given_name_is_that_of_the_group(children):
    crew = children(4)
    crew.shared = ["recipe=toy", "run.name=mine"]
    assert crew.arguments_of(Member({}, 4)) == ["recipe=toy", "seed=4", "run.name=toy-seed4"]
    assert slug("policy.hidden=[64, 64], seed 1") == "policy.hidden=_64_64_seed_1"
    assert slug("pointmass_ppo-lr3.0e-05") == "pointmass_ppo-lr3.0e-05"
