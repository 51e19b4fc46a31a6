"""The socket over which several runs share devices: who may speak there, and what runs do when their parent is gone."""

import builtins
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import pytest
from pages import Page
from share_record import check_hands

from embodied.core.errors import EmbodiedError, StepGivenUp
from embodied.runtime import shared_leases
from embodied.runtime.device_leases import GENERATE, TRAIN, Claim, Coordinator, LeaseError
from embodied.runtime.device_sharing import DeviceSharing
from embodied.runtime.shared_leases import SharedLeases
from embodied.runtime.worker import Timers
from embodied.sharing.lease_server import PROTOCOL, LeaseServer, RecordedLeases, is_stopped
from embodied.sharing.run_turns import RECORD

DEADLINE_S = 60


class Parent:
    """A server in a thread of its own, with a clock that moves when it is told to."""

    def __init__(self):
        self.lines, self.ahead_s, self.over = [], 0.0, threading.Event()
        self.server = LeaseServer(["fake:0", "fake:1"], "lend", self.lines.append, str, self.clock)
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def clock(self):
        return self.ahead_s

    def serve(self):
        while not self.over.is_set():
            with self.lock:
                self.server.serve(0.005)
            time.sleep(0.001)  # for whoever waits for the lock
        self.server.close()

    def connect(self, run, own, capacity=None):
        """A run that speaks from this process, and may build its workers."""
        leases = self.connect_later(run, own)
        leases.begin(capacity)
        return leases

    def connect_later(self, run, own):
        """A run that has built its workers while others held its devices."""
        with self.lock:
            self.server.expect(run, os.getpid(), 1.0, own)
        return SharedLeases(str(self.server.path))

    def close(self):
        """Runs that this process plays hear of it before they would stop the process."""
        self.over.set()
        self.thread.join()
        for thread in threading.enumerate():
            if thread.name == "share_listen":
                thread.join(DEADLINE_S)


@pytest.fixture
def stopped(monkeypatch):
    """A run stops once for each time that something is in here."""
    told = []
    monkeypatch.setattr(shared_leases, "stop_this_run", lambda: told.append("stop"))
    return told


@pytest.fixture
def parent(stopped):
    parent = Parent()
    yield parent
    parent.close()


def until(found):
    end = time.monotonic() + DEADLINE_S
    while not found():
        assert time.monotonic() < end
        time.sleep(0.002)


def gangs(own, borrowed):
    on = {"rollout": own, "update": own, "borrower": borrowed}
    claims = {name: [Claim(f"{name}-0", (device,))] for name, device in on.items()}
    return Coordinator({own: 0, borrowed: 0}, claims, [f"{name}-0" for name in on], preemptible=["borrower"])


TIERS = {"rollout": GENERATE, "update": TRAIN, "borrower": GENERATE}


def joined(parent, run, own, borrowed, follow=lambda actions: None):
    return parent.connect(run, [own]).join(gangs(own, borrowed), TIERS, follow)


def test_a_run_may_give_up_waiting_before_it_hears_that_it_has_the_device(parent, stopped):
    owner, borrower = joined(parent, "owner", "fake:0", "fake:1"), joined(parent, "borrower", "fake:1", "fake:0")
    owner.acquire("rollout")
    borrower.acquire("borrower")
    owner.release("rollout")
    with parent.lock:
        parent.ahead_s = 30.0
        parent.server.coordinator.pass_time(30.0)
    borrower.cancel("borrower")
    owner.acquire("update")
    assert owner.granted("update") and not stopped and not borrower.alone


def test_a_run_that_reports_does_not_wait_until_its_parent_hears_of_it(parent):
    owner = joined(parent, "owner", "fake:0", "fake:1")
    with parent.lock:
        owner.report_progress(0.5)
        owner.report_idle(["borrower"])
        owner.report_load_time(0.5)
        owner.clear_progress()
    owner.acquire("update")
    assert owner.granted("update")
    assert [line["progress"] for line in parent.lines if "progress" in line] == [0.5, None]


def test_an_idle_device_is_lent_taken_back_and_its_holder_ended_if_it_keeps_it(parent):
    owner, borrower = joined(parent, "owner", "fake:0", "fake:1"), joined(parent, "borrower", "fake:1", "fake:0")
    owner.acquire("rollout")
    borrower.acquire("rollout")
    borrower.acquire("borrower")
    assert owner.granted("rollout") and borrower.granted("rollout") and not borrower.granted("borrower")
    owner.release("rollout")
    assert not borrower.granted("borrower")  # nobody knows how long it will be idle
    parent.ahead_s = 30.0
    until(lambda: borrower.granted("borrower"))
    owner.acquire("update")
    until(lambda: borrower.leaving() == {"borrower"})
    assert not owner.granted("update") and parent.server.overdue(5.0) == set()
    assert owner.in_the_way("update") == {"borrower/borrower"}
    parent.ahead_s = 36.0
    until(lambda: parent.server.overdue(5.0) == {"borrower"})
    borrower.release("borrower")
    until(lambda: owner.granted("update"))
    assert parent.server.overdue(5.0) == set()


def test_a_connection_that_ends_frees_what_its_run_held(parent):
    owner, other = joined(parent, "a", "fake:0", "fake:1"), joined(parent, "b", "fake:0", "fake:1")
    owner.acquire("update")
    other.acquire("update")
    assert owner.granted("update") and not other.granted("update")
    owner._socket.shutdown(socket.SHUT_RDWR)
    until(lambda: other.granted("update"))


def test_runs_whose_parent_is_gone_stop_and_have_no_device_both(parent, stopped, monkeypatch):
    """Owners of one device take turns still, and the borrower of another one gives it back for good."""
    one, other = joined(parent, "one", "fake:0", "fake:1"), joined(parent, "other", "fake:0", "fake:1")
    lender = joined(parent, "lender", "fake:1", "fake:0")
    lender.acquire("update")
    other.acquire("update")
    one.acquire("update")
    one.acquire("borrower")
    lender.release("update")
    parent.ahead_s = 30.0
    until(lambda: one.granted("borrower"))
    parent.close()
    until(lambda: all(run.alone for run in (one, other, lender)) and len(stopped) == 3)
    assert other.granted("update") and not one.granted("update") and not one.in_the_way("update")
    lender.acquire("update")
    assert one.leaving() == {"borrower"} and not lender.granted("update")
    monkeypatch.setattr(lender, "_until", 0.0)
    with pytest.raises(EmbodiedError, match="another run still has fake:1; end that run, then continue with resume="):
        lender.granted("update")
    one.release("borrower")
    one.acquire("borrower")
    assert lender.granted("update") and not one.granted("borrower") and not one.leaving()
    other.release("update")
    assert one.granted("update")
    other.acquire("rollout")
    assert not other.granted("rollout")
    one._locks.keep(())  # as the kernel does when a process has ended
    assert other.granted("rollout")


def test_a_run_whose_parent_is_gone_before_it_could_build_waits_until_its_devices_are_free(parent, stopped):
    builds = parent.connect("builds", ["fake:0"])
    with parent.lock:
        parent.server.expect("waits", os.getpid(), 1.0, ["fake:0"])
    waits, built = SharedLeases(str(parent.server.path)), threading.Event()
    thread = threading.Thread(target=lambda: (waits.begin(), built.set()))
    thread.start()
    until(lambda: waits.told["waiting"])
    parent.close()
    until(lambda: waits.alone and builds.alone)
    assert not built.wait(2 * shared_leases.LOOK_S)
    builds._locks.keep(())
    assert built.wait(DEADLINE_S)
    thread.join()


def test_a_run_builds_where_memory_is_limited_once_others_have_given_theirs_back(parent):
    moved, limit = [], {"fake:0": 10.0}

    def follow(actions):
        for action in actions:
            moved.append((action.verb, action.worker))
            first.done(action)

    first = parent.connect("a", ["fake:0"], limit)
    claims = {"update": [Claim("learner", ("fake:0",), 9.0, 1.0)]}
    first.join(Coordinator(limit, claims, ["learner"]), {"update": TRAIN}, follow)
    second = parent.connect("b", ["fake:1"], limit)
    assert moved == [("offload", "learner")]
    second.join(Coordinator(limit, {"update": [Claim("learner", ("fake:0",), 8.0)]}, ["learner"]), {}, follow)
    with pytest.raises(LeaseError, match=r"learner 9\.5e-09 GB \+ a/learner 1e-09 GB"):
        second.revise([Claim("learner", ("fake:0",), 9.5)])


def test_a_run_whose_process_is_stopped_is_overdue_where_others_wait_for_it(parent):
    run, other = joined(parent, "a", "fake:0", "fake:1"), joined(parent, "b", "fake:0", "fake:1")
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            with parent.lock:
                parent.server.expected = {process.pid: "a"}
            process.send_signal(signal.SIGSTOP)
            until(lambda: is_stopped(process.pid))
            assert parent.server.overdue(5.0) == set()
            run.acquire("update")
            parent.ahead_s = 6.0
            assert parent.server.overdue(5.0) == set()
            other.acquire("update")
            assert parent.server.overdue(5.0) == {"a"}
        finally:
            process.kill()


def test_a_phase_waits_for_another_run_as_long_as_it_takes(parent):
    other = joined(parent, "b", "fake:0", "fake:1")
    other.acquire("update")
    sharing = DeviceSharing(gangs("fake:0", "fake:1"), [], Timers(), timeout_s=0.01)
    sharing.share_with_other_runs(parent.connect_later("a", ["fake:0"]), TIERS)
    inside = threading.Event()

    def update():
        with sharing.phase("update"):
            inside.set()

    thread = threading.Thread(target=update)
    thread.start()
    assert not inside.wait(1.5)  # more than the look at a clock that would end it
    other.release("update")
    assert inside.wait(DEADLINE_S)
    thread.join()


def test_a_phase_that_is_given_up_while_memory_moves_for_it_releases_its_devices(parent):
    def stop():
        raise StepGivenUp("the step was given up")

    limit = {"fake:0": 10.0}
    sharing = DeviceSharing(Coordinator(limit, {"update": [Claim("a", ("fake:0",))]}), [], Timers(), interrupt=stop)
    sharing.unbuilt.add("a")  # so it has no memory yet
    sharing.share_with_other_runs(parent.connect("a", ["fake:0"]), {"update": TRAIN})
    with pytest.raises(StepGivenUp), sharing.phase("update"):
        pass
    claims = {"update": [Claim("b", ("fake:0",))]}
    other = parent.connect_later("b", ["fake:0"]).join(Coordinator(limit, claims, ["b"]), {}, lambda actions: None)
    other.acquire("update")
    until(lambda: other.granted("update"))


def test_a_mistake_of_a_run_is_its_own(parent):
    one, other = joined(parent, "a", "fake:0", "fake:1"), joined(parent, "b", "fake:1", "fake:0")
    with pytest.raises(LeaseError, match="update gives back devices that it does not hold"):
        one.release("update")
    other.acquire("update")
    assert other.granted("update") and not one.alone


ENTER = {"do": "enter", "n": 1, "protocol": PROTOCOL, "name": "trl", "devices": ["fake:0"], "lease_s": 5.0}
JOIN = {"do": "join", "n": 2, "tiers": {}, "preemptible": [], "resident": [], "capacity": {}}
JOIN["gangs"] = {"update": [{"worker": "all", "devices": ["fake:0"]}]}
RELEASE = {"do": "release", "n": 3, "gang": "update"}


def say(parent, *messages):
    """What a process that is no run is answered to these messages."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(DEADLINE_S)
        stranger.connect(str(parent.server.path))
        lines = [message if isinstance(message, bytes) else json.dumps(message).encode() for message in messages]
        stranger.sendall(b"\n".join(lines) + b"\n")
        stranger.shutdown(socket.SHUT_WR)
        return stranger.makefile().read()


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([b"{"], "Expecting property name"),
        ([b"[]"], "cannot be interpreted"),
        ([{"do": "acquire"}], "'n'"),
        ([{"do": "acquire", "n": 1, "gang": "a/update"}], "missing"),
        ([ENTER | {"do": "close"}], "a program begins with enter, protocol embodied-leases/1"),
        ([ENTER | {"protocol": "embodied-leases/0"}], "a program begins with enter, protocol embodied-leases/1"),
        ([ENTER | {"devices": ["fake:0", "fake:7"]}], "fake:7 is not shared: fake:0, fake:1"),
        ([ENTER | {"name": "a/b"}], "should match pattern"),
        ([ENTER | {"lease_s": float("inf")}], "finite number"),
        ([ENTER, ENTER | {"n": 2}], "_do_enter"),
        ([ENTER, JOIN | {"tiers": {"update": 4}}], "less than or equal to 3"),
        ([ENTER, JOIN | {"resident": ["other"]}], "no worker is called other"),
        ([ENTER, JOIN | {"gangs": {"update": [{"worker": "all", "devices": [0]}]}}], "valid string"),
        ([ENTER, JOIN, {"do": "revise", "n": 3, "claims": [{"worker": "x", "devices": []}]}], "no worker is called"),
        ([ENTER, JOIN, RELEASE], "update gives back devices that it does not hold"),
        ([ENTER, JOIN, RELEASE | {"do": "acquire", "gang": "x"}], "x asks for devices, but no such gang has joined"),
    ],
)
def test_invalid_messages_are_refused_and_harm_no_run(parent, messages, problem):
    run = joined(parent, "a", "fake:0", "fake:1")
    with parent.lock:
        parent.server.expected.clear()  # this process is a run no longer
    *_, last = say(parent, *messages).splitlines()
    assert problem in json.loads(last)["error"]
    run.acquire("update")
    assert run.granted("update")


def test_a_process_that_is_no_run_may_ask_to_add_one(parent):
    assert json.loads(say(parent, {"do": "add", "n": 1, "words": ["x"]})) == {"said": "['x']"}


@pytest.fixture
def program(parent, tmp_path):
    """Starts a program with the page's client, which prints a line for each turn and each question that it reads."""
    (tmp_path / "share.json").write_text(json.dumps({"socket": str(parent.server.path)}))
    (Page("share_protocol.md").write(tmp_path) / "turns.py").write_text(
        "from share_client import Share\n"
        "share = Share('.', 'other', ['fake:0'], lease_s=5.0)\n"
        "while True:\n    share.acquire()\n    print('turn', flush=True)\n"
        "    while input() != 'release':\n        share.renew()\n        print('renewed', flush=True)\n"
        "    share.release()\n    print('released', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", "import sys; sys.path.append('.'); import turns"],
        **{
            "cwd": tmp_path,
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        },
    )
    with process:
        yield process
        process.kill()


def ask(program, word):
    program.stdin.write(f"{word}\n")
    program.stdin.flush()
    return program.stdout.readline()


def test_a_program_takes_turns_with_a_run_until_it_is_silent_while_the_run_waits(parent, program):
    run = joined(parent, "a", "fake:0", "fake:1")
    assert program.stdout.readline() == "turn\n"
    run.acquire("update")
    assert run.in_the_way("update") == {"program:other/update"} and not run.granted("update")
    assert ask(program, "release") == "released\n"
    until(lambda: run.granted("update"))
    run.release("update")
    assert program.stdout.readline() == "turn\n"
    parent.ahead_s = 6.0
    assert parent.server.end_late_programs() == []  # nobody waits
    assert ask(program, "renew") == "renewed\n"
    run.acquire("update")
    parent.ahead_s = 9.0
    assert parent.server.end_late_programs() == []
    parent.ahead_s = 12.0
    assert parent.server.end_late_programs() == ["program:other"]
    until(lambda: run.granted("update"))
    assert program.wait(DEADLINE_S) == -signal.SIGKILL and not parent.server.programs
    check_hands(parent.lines)
    assert [line["ends"] for line in parent.lines if "ends" in line] == ["failed"]


def test_a_program_gets_a_connection_error_after_its_share_has_ended(parent, program):
    assert program.stdout.readline() == "turn\n"
    parent.close()
    assert ask(program, "release") == ""
    assert issubclass(getattr(builtins, program.stderr.read().splitlines()[-1].partition(":")[0]), ConnectionError)


def test_only_this_user_can_open_the_socket(parent):
    assert os.stat(parent.server.path).st_mode & 0o777 == 0o600
    assert os.stat(parent.server.path.parent).st_mode & 0o777 == 0o700


def test_folders_of_killed_parents_are_removed_by_the_next_one(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("s")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    (folder / "embodied-share-0" / "socket").mkdir(parents=True)
    first = LeaseServer(["fake:0"], "lend", print, str)
    second = LeaseServer(["fake:0"], "lend", print, str)
    assert {path.name for path in folder.iterdir()} == {first.path.parent.name, second.path.parent.name}
    first.close()
    second.close()
    assert not [*folder.iterdir()]


def test_a_record_that_cannot_be_written_stops_no_run(tmp_path, capsys):
    (tmp_path / RECORD).symlink_to("/dev/full")
    leases = RecordedLeases(tmp_path, ["fake:0"], "lend", str)
    assert leases.record.devices == ["fake:0"]
    leases.close()
    assert capsys.readouterr().out.count(f"warning: {tmp_path / RECORD} cannot be written") == 1
