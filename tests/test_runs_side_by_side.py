"""Runs that share devices while each needs them: each learns what it learns alone, whatever moves or dies when.

Envs and policies stand still while a test says so (`held.py`), so that one run has no work for a device exactly while
another one writes answers. Every claim is read from the record that the runs leave.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import groupby, product
from pathlib import Path

import numpy as np
import pytest
from pages import Page
from safetensors.numpy import load_file
from share_record import check_record
from talking_runs import TALK, far

from embodied.policies.policy_folder import read_json
from embodied.sharing.page import BUILDING, UPDATE, record_of
from embodied.sharing.runs import read_shared_runs

pytestmark = pytest.mark.slow
WAIT_S = 900
PATIENT = ["faults.timeout_s=600", "faults.hang_s=400", "faults.max_restarts=100", "run.save_every=1", "eval.videos=0"]
ROBOT = [
    *("recipe=pointmass_ppo", "env.name=held:HeldPoint", "env.num_envs=8", "policy.name=held:HeldPolicy"),
    *("algo.rollout_decisions=16", "algo.minibatch_size=32", "run.env_steps=null", "eval.episodes=4", *PATIENT),
]
OTHERWISE = ("faults", "env.name", "eval.videos", "run.iterations", "policy.max_tokens", "policy.max_running")
TALKER = [
    *(word for word in TALK if not word.startswith(OTHERWISE)),
    *("env.name=held:HeldDigits", "policy.max_tokens=32", "policy.max_running=2", "run.samples=20", *PATIENT),
]
DEVICES = "devices=fake:0-2"  # the first two are the robots'
ON = {
    "robot": {"sim": "fake:10-11", "policy": "fake:0-1", "learner": "fake:0"},
    "borrower": {"sim": "fake:10-11", "policy": "fake:0-3", "learner": "fake:0"},
    "lender": {"sim": "fake:13-14", "policy": "fake:2-3", "learner": "fake:2"},
    "talker": {"sim": "fake:12", "policy": "fake:0-2", "learner": "fake:2"},
}
ITERATIONS = {"robot": 24, "talker": 16}


def words(folder, kind, *more, on=None):
    """The arguments of a run, and the files that hold its env and its gradients."""
    usual = ROBOT if kind == "robot" else TALKER
    own = [f"placement={json.dumps(ON[on or kind])}", f"env.kwargs={{hold: {folder / f'{on or kind}-env'}}}"]
    own += [f"policy.kwargs={{hold: {folder / f'{on or kind}-policy'}}}"] if kind == "robot" else []
    return [*usual, f"run.iterations={ITERATIONS[kind]}", *own, *more]


def start(folder, module, *arguments):
    support = Path(__file__).parent / "support"
    with (folder / "said.txt").open("ab") as said:
        return subprocess.Popen(
            [sys.executable, "-m", f"embodied.{module}", *arguments],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{support}:{os.environ.get('PYTHONPATH', '')}"},
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run(folder, module, *arguments):
    assert start(folder, module, *arguments).wait(WAIT_S) == 0, (folder / "said.txt").read_text()


def folder_of(folder, name):
    (path,) = folder.glob(f"runs/{name}-20*")
    return path


def outcome(folder, name):
    """The weights that a run ended with, and the tokens of all its conversations."""
    path = folder_of(folder, name)
    newest = path / "checkpoints" / (path / "checkpoints" / "latest").read_text().strip()
    lines = (path / "samples.jsonl").read_text().splitlines() if (path / "samples.jsonl").exists() else []
    samples = [json.loads(line) for line in lines]
    told = [(one["iteration"], one["index"], [turn["tokens"] for turn in one["turns"]]) for one in samples]
    return load_file(newest / "policy" / "model.safetensors"), told


def same(folder, name, expected):
    """Every conversation once and of the same tokens, and the same weights."""
    (weights, told), (weights_alone, told_alone) = outcome(folder, name), expected
    assert told == told_alone
    assert far(weights, weights_alone) < 1e-9


def rows(folder, name):
    return [json.loads(line) for line in (folder_of(folder, name) / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What each run comes to by itself."""
    folder = tmp_path_factory.mktemp("alone")
    for name, kind, more in (("robot", "robot", []), ("second", "robot", ["seed=1"]), ("talker", "talker", [])):
        run(folder, "train", *words(folder, kind, *more), f"run.name={name}")
    found = {name: outcome(folder, name) for name in ("robot", "second", "talker")}
    told = found["talker"][1]
    assert len(told) == 20 * ITERATIONS["talker"] == len({one[1] for one in told})
    return found


def goes_on(info):
    said = json.loads(info.read_text())
    return said["state"] == "running" and Path(f"/proc/{said['processes']['driver']}").exists()


class Share:
    """A command that serves runs, seen through its record."""

    def __init__(self, folder, *arguments):
        self.folder, self.process = folder, start(folder, "share", *arguments)

    @property
    def lines(self):
        path = self.folder / "s" / "share.jsonl"
        *whole, _ = path.read_text().split("\n") if path.exists() else [""]
        return [json.loads(line) for line in whole]

    @property
    def record(self):
        return record_of(self.lines)

    def until(self, true, *about, pause_s=0.002):
        """Wait until it is so while the command goes on; returns what is true."""
        end = time.monotonic() + WAIT_S
        while not (found := true(*about)):
            alive = self.process.poll() is None
            assert time.monotonic() < end and alive, (self.folder / "said.txt").read_text()
            time.sleep(pause_s)
        return found

    def lent(self, owner, least=0.02):
        """The run that has borrowed a device of this one, in the middle of a batch."""
        record = self.record
        own = record.runs[owner].own if owner in record.runs else ()
        borrowers = (hold.run for hold in record.held.values() if hold.run != owner and hold.device in own)
        return next((name for name in borrowers if least <= (record.runs[name].progress or 0) < least + 0.5), None)

    def holds(self, name, phase):
        return any((hold.run, hold.phase) == (name, phase) for hold in self.record.held.values())

    def waits(self, name):
        """True if it has asked for devices and has not got them."""
        return bool(self.record.runs[name].asks)

    def iterations(self, name):
        return sum(line.get("run") == name and line.get("progress", 0) is None for line in self.lines)

    def kills(self, name):
        """How often this command has said that this run was killed."""
        return (self.folder / "said.txt").read_text().count(f"{name} failed: it was ended by SIGKILL")

    def resume(self):
        """Stop whatever goes on and go on with all of it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
        self.process.wait(WAIT_S)
        self.until_stopped()
        sessions = self.sessions
        self.process = start(self.folder, "share", "resume=s")
        self.until(lambda: self.sessions > sessions)

    @property
    def sessions(self):
        return sum("format" in line for line in self.lines)

    def until_stopped(self):
        """Wait until no run of a command that is gone is left, nor its socket."""
        end = time.monotonic() + WAIT_S
        while any(map(goes_on, self.folder.glob("runs/s-*/run.json"))):
            assert time.monotonic() < end, (self.folder / "said.txt").read_text()
            time.sleep(0.05)
        socket = Path(read_shared_runs(self.folder / "s").socket)
        while socket.parent.exists():
            assert time.monotonic() < end
            time.sleep(0.05)

    def pid(self, name, worker):
        """The process of a run's worker, or `driver`; or this command, if no run is named."""
        if not name:
            return self.process.pid

        def find_pid():
            info = read_json(folder_of(self.folder, f"s-{name}") / "run.json")
            assert info["state"] != "finished", (self.folder / "said.txt").read_text()
            pid = info["processes"].get(worker)  # that of a killed driver stays until the run goes on
            return pid if Path(f"/proc/{pid}").exists() else None

        return self.until(find_pid)

    def lend(self, owner, hold, least=0.02):
        """Keep the owner in its next update until one of its devices is lent; then it wants that one back."""
        hold.touch()
        self.until(self.holds, owner, UPDATE)
        borrower = self.until(self.lent, owner, least)
        hold.unlink()
        return borrower

    def loans(self):
        """Who had devices that belonged to another run then: borrower, owner."""
        record, end = self.record, float("inf")
        return {
            (hold.run, owner.name)
            for hold in (*record.holds, *record.held.values())
            for owner in record.runs.values()
            if hold.device in owner.own and hold.device not in record.runs[hold.run].own
            if owner.joined_s <= hold.start_s < (owner.ended_s or end)
        }

    def end(self, names):
        assert self.process.wait(WAIT_S) == 0, (self.folder / "said.txt").read_text()
        first, *lines = self.lines
        assert first["format"] == "embodied-share/1"
        if not any("format" in line for line in lines):  # it was not resumed
            check_record(lines, names)
        assert [run.ended for run in read_shared_runs(self.folder / "s").members] == ["finished"] * len(names)


def overlap(record, one, other):
    """Seconds in which both runs held devices."""
    holds = [[hold for hold in record.holds if hold.run == name and hold.phase != BUILDING] for name in (one, other)]
    return seconds_in_both(*holds)


def seconds_in_both(some, others):
    return sum(max(0.0, min(a.end_s, b.end_s) - max(a.start_s, b.start_s)) for a, b in product(some, others))


A, B, C = "pointmass_ppo", "sums_grpo", "pointmass_ppo-2"


def test_a_run_by_itself_whose_engine_is_on_the_learners_device_is_what_it_is_without_the_command(tmp_path):
    own = {"sim": "fake:12", "policy": "fake:0-1", "learner": "fake:1"}
    told = [*words(tmp_path, "talker"), "pipeline.schedule=async", "run.iterations=5"]
    told = [word for word in told if not word.startswith(("placement", f"run.iterations={ITERATIONS['talker']}"))]
    told += [f"placement={json.dumps(own)}"]
    run(tmp_path, "train", *told, "run.name=alone")
    share = Share(tmp_path, "folder=s", "devices=fake:0-1", *told)
    share.end({B})
    holds = share.record.holds
    updates, writes = ([h for h in holds if h.phase.startswith(phase)] for phase in (UPDATE, "rollout"))
    assert seconds_in_both(updates, [h for h in writes if h.device == "fake:0"]) > 0
    assert {h.device for h in writes} == {"fake:0", "fake:1"} and {h.device for h in updates} == {"fake:1"}
    same(tmp_path, f"s-{B}", outcome(tmp_path, "alone"))


@pytest.mark.parametrize("rule", ["lend", "remaining"])
def test_three_runs_of_which_one_ends_early_and_one_joins_late_learn_what_they_learn_alone(rule, alone, tmp_path):
    """A robots' run lends a device to a language run, whose conversations go on elsewhere when it is taken back."""
    talks, hold = tmp_path / "talker-env", tmp_path / "robot-policy"
    share = Share(
        tmp_path,
        "folder=s",
        DEVICES,
        "weights=2,1",
        f"rule={rule}",
        *words(tmp_path, "robot"),
        *words(tmp_path, "talker"),
    )
    assert share.lend(A, hold) == B
    talks.touch()  # the language run waits for the run that joins
    share.until(lambda: share.record.runs[A].how == "finished")
    assert os.stat(read_shared_runs(tmp_path / "s").socket).st_mode & 0o777 == 0o600
    hold.touch()
    run(tmp_path, "share", "join=s", *words(tmp_path, "robot", "seed=1"))
    share.until(share.holds, C, UPDATE)
    talks.unlink()
    assert share.lend(C, hold) == B
    share.end({A, B, C})
    record = share.record
    assert record.runs[A].ended_s < record.runs[C].joined_s < record.runs[B].ended_s
    assert overlap(record, A, B) > 0 and overlap(record, C, B) > 0 and share.loans() >= {(B, A), (B, C)}
    if rule == "lend":  # else the borrower may keep the device until its batch is whole
        assert sum("leaves" in line and line["run"] == B for line in share.lines) >= 2
        assert sum(row["engine/resumed"] for row in rows(tmp_path, f"s-{B}")) > 0
    same(tmp_path, f"s-{A}", alone["robot"])
    same(tmp_path, f"s-{C}", alone["second"])
    same(tmp_path, f"s-{B}", alone["talker"])


def test_conversations_go_on_elsewhere_whenever_their_engine_has_to_leave(alone, tmp_path):
    """Six times, at drawn moments of a batch."""
    share = Share(tmp_path, "folder=s", DEVICES, "weights=2,1", *words(tmp_path, "robot"), *words(tmp_path, "talker"))
    for least in np.random.default_rng(45).uniform(0.02, 0.5, 6):
        assert share.lend(A, tmp_path / "robot-policy", least) == B
        share.until(lambda: not share.holds(A, UPDATE))
    share.end({A, B})
    assert sum("leaves" in line and line["run"] == B for line in share.lines) >= 6
    assert sum(row["engine/resumed"] for row in rows(tmp_path, f"s-{B}")) > 0
    same(tmp_path, f"s-{A}", alone["robot"])
    same(tmp_path, f"s-{B}", alone["talker"])


def test_two_robots_runs_learn_what_they_learn_alone_when_one_acts_on_a_device_of_the_other(alone, tmp_path):
    acts, updates = tmp_path / "borrower-env", tmp_path / "lender-policy"
    acts.touch()
    updates.touch()
    first = words(tmp_path, "robot", "pipeline.merge_rows=8", on="borrower")
    share = Share(tmp_path, "folder=s", "devices=fake:0-3", *first, *words(tmp_path, "robot", "seed=1", on="lender"))
    share.until(lambda: (A, C) in share.loans())
    updates.unlink()
    share.until(lambda: any("leaves" in line and line["run"] == A for line in share.lines))
    acts.unlink()
    share.end({A, C})
    assert overlap(share.record, A, C) > 0 and (A, C) in share.loans()
    same(tmp_path, f"s-{A}", alone["robot"])
    same(tmp_path, f"s-{C}", alone["second"])


def test_a_second_ctrl_c_stops_all_runs_at_once_and_they_can_be_resumed(alone, tmp_path):
    holds = [tmp_path / "robot-policy", tmp_path / "talker-env"]
    share = Share(tmp_path, "folder=s", DEVICES, "weights=2,1", *words(tmp_path, "robot"), *words(tmp_path, "talker"))
    for name, hold in zip((A, B), holds):  # then no step comes to an end any more
        share.until(share.iterations, name)
        hold.touch()
    share.until(lambda: all(hold.with_suffix(".waits").exists() for hold in holds))
    pids = [share.pid(name, "driver") for name in (A, B)]
    os.killpg(share.process.pid, signal.SIGINT)
    logs = [tmp_path / "s" / "logs" / f"{name}.log" for name in (A, B)]
    share.until(lambda: all("stopping after this step" in log.read_text() for log in logs))
    os.killpg(share.process.pid, signal.SIGINT)
    assert share.process.wait(WAIT_S) == 130 and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert [run.ended for run in read_shared_runs(tmp_path / "s").members] == ["stopped"] * 2
    said = (tmp_path / "said.txt").read_text()
    assert "continue    python -m embodied.share resume=s" in said
    assert "Traceback" not in said and "stopped: ;" not in said
    for hold in holds:
        hold.unlink()
    run(tmp_path, "share", "resume=s")
    same(tmp_path, f"s-{A}", alone["robot"])
    same(tmp_path, f"s-{B}", alone["talker"])


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed (pip install trl)")
def test_trls_trainer_takes_turns_with_a_run_that_learns_what_it_learns_alone(alone, tmp_path):
    """The program of the page: each of its steps is a turn. The run stands still until the program waits."""
    program, hold = "program:trl", tmp_path / "robot-env"
    hold.touch()
    share = Share(tmp_path, "folder=s", DEVICES, *words(tmp_path, "robot"))
    share.until((Page("share_protocol.md").write(tmp_path) / "s" / "share.json").exists)
    with (tmp_path / "trl.txt").open("w") as said:
        command = [sys.executable, "trl_turns.py", "s", "fake:0,fake:1", "6"]
        trl = subprocess.Popen(command, cwd=tmp_path, stdout=said, stderr=subprocess.STDOUT)
    share.until(lambda: trl.poll() is not None or (program in share.record.runs and share.waits(program)))
    hold.unlink()
    assert trl.wait(WAIT_S) == 0, (tmp_path / "trl.txt").read_text()
    assert "steps 6 of 6 rewards" in (tmp_path / "trl.txt").read_text()
    assert share.process.wait(WAIT_S) == 0, (tmp_path / "said.txt").read_text()
    check_record(share.lines[1:], {A, program})
    holders = [hold.run for hold in share.record.holds if hold.device == "fake:0"]
    turns = [name for name, _ in groupby(holders)]
    assert holders.count(program) == 7 and turns.count(A) > 3, "six steps, a start, and the run between them"
    same(tmp_path, f"s-{A}", alone["robot"])


# Whoever is killed in whatever phase


class Phases:
    """What a run does with its devices, by a record that grows: saving, acting, updating, publishing."""

    def __init__(self, share, name):
        self.path, self.name, self.read = share.folder / "s" / "share.jsonl", name, 0
        self.begun, self.acted, self.updates, self.held = False, False, 0, {}

    def now(self):
        *lines, _ = self.path.read_bytes()[self.read :].split(b"\n")
        for line in lines:
            self.read += len(line) + 1
            self.add(json.loads(line))
        if not self.begun or UPDATE not in self.held.values():
            return "acting"
        return "saving" if not self.acted else ("updating", "publishing")[self.updates > 1]

    def add(self, line):
        mine = line.get("run") == self.name
        if "format" in line or (mine and line.get("phase") == BUILDING):
            self.begun, self.held = False, {}
        elif mine and line.get("progress", 0) is None:
            self.begun, self.acted, self.updates = True, False, 0
        elif mine and "device" in line:
            if line["phase"] != UPDATE:
                self.acted, self.updates = True, 0
            elif UPDATE not in self.held.values():
                self.updates += 1
            self.held[line["device"]] = line["phase"]
        elif "device" in line:
            self.held.pop(line["device"], None)


class TwoRuns:
    """A robots' run that lends a device to a language run, with whom a test does as it likes."""

    def __init__(self, folder):
        self.share = Share(
            folder, "folder=s", DEVICES, "weights=2,1", *words(folder, "robot"), *words(folder, "talker")
        )
        self.update, self.talks = folder / "robot-policy", folder / "talker-env"
        self.update.touch()

    def hold(self):
        self.update.touch()
        self.talks.touch()

    def replace(self, name, victim, pid):
        """This run alone goes on, until its victim has a successor and an iteration has ended since then."""
        self.hold()
        (self.update if name == A else self.talks).unlink()
        self.share.until(lambda: self.share.pid(name, victim) != pid)
        before = self.share.iterations(name)
        self.share.until(lambda: self.share.iterations(name) > before)

    def go_on(self):
        self.update.unlink(missing_ok=True)
        self.talks.unlink(missing_ok=True)

    @contextmanager
    def stopped(self, name):
        """The driver of this run does nothing inside."""
        pid = self.share.pid(name, "driver")
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def strike(self, name, phase, kill):
        """Kill in this phase of a run, and let all go on."""
        self.talks.unlink(missing_ok=True)
        if phase == "building":
            self.share.until(self.share.holds, name, BUILDING)
            return kill()
        if phase in ("lent", "draining", "waiting"):
            self.share.until(self.share.holds, A, UPDATE)
            self.share.until(self.share.lent, A)
        if phase == "lent":
            kill()
        elif phase == "waiting" and name == B:
            self.share.until(self.share.waits, B)
            kill()
        elif phase in ("draining", "waiting"):
            with self.stopped(B):  # it cannot give the device back before
                self.update.unlink()
                self.share.until(self.share.waits, A)
                kill()
        else:
            self.during(name, phase, kill)

    def during(self, name, phase, kill):
        """The driver goes on for fractions of a millisecond, between which the record is looked at."""
        phases = Phases(self.share, name)
        if name == A:
            self.update.unlink(missing_ok=True)

        def struck():
            with self.stopped(name):
                time.sleep(0.001)
                if is_phase := phases.now() == phase:
                    kill()
            return is_phase

        self.share.until(struck, pause_s=0)


ROBOTS = [(A, victim) for victim in ("sim-0", "policy-1", "learner-0", "driver")]
TALKERS = [(B, victim) for victim in ("sim-0", "policy-1", "policy-2", "learner-0", "driver")]
PHASES = ("lent", "draining", "waiting", "publishing", "saving")  # a robots' run that has lent a device updates


@pytest.mark.chaos
@pytest.mark.parametrize(("name", "victim"), [*ROBOTS, *TALKERS, ("", "command")])
def test_runs_learn_what_they_learn_alone_after_a_kill_in_any_phase(name, victim, alone, tmp_path):
    """Sims, engines and learners are started again. After a driver or the command, resume= goes on with all runs."""
    runs, struck = TwoRuns(tmp_path), []
    share = runs.share
    first = ["building"] if victim in ("driver", "command") else []
    for phase in (*first, *PHASES, *(["updating"] if name == B else [])):

        def kill():
            struck.append(share.pid(name, victim))
            os.kill(struck[-1], signal.SIGKILL)

        runs.strike(name or A, phase, kill)
        if victim in ("driver", "command"):
            runs.go_on()
            if victim == "driver":
                share.until(lambda: share.kills(name) == len(struck))
            share.resume()
        else:
            runs.replace(name, victim, struck[-1])
        runs.hold()
    runs.go_on()
    share.end({A, B})
    for run, kind in ((A, "robot"), (B, "talker")):
        if (run, "sim-0") != (name, victim):  # the open episodes of a sim that dies are lost, and others are played
            same(tmp_path, f"s-{run}", alone[kind])
