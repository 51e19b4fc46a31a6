"""The commands of docs/cluster.md run, with two or three Ray nodes on one machine. They see neither the same files in
/dev/shm nor the same processes, and believe to be different machines."""

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from embodied.policies.policy_folder import read_weights

pytest.importorskip("ray")
from embodied.runtime.ray_nodes import ENVIRONMENT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
PAGE = (Path(__file__).parents[1] / "docs" / "cluster.md").read_text()
HEAD, SECOND = re.findall(r"^(ray start .*)", PAGE, re.M)
(TRAIN,) = re.findall(r"^(python -m embodied.train .*address=.*)", PAGE, re.M)
(JOB,) = re.findall(r"^(ray job submit .*)", PAGE, re.M)
(EXPORTS,) = re.findall(r"^export (.*)", PAGE, re.M)
SMALL = ["--object-store-memory=200000000"]
SAME = [
    *("env.num_envs=8", "env.dtype=float64", "env.max_episode_steps=30", "policy.dtype=float64"),
    *("policy.hidden=[16,16]", "algo.rollout_decisions=16", "algo.minibatch_size=32", "algo.epochs=2"),
    *("run.iterations=2", "eval.episodes=2", "eval.videos=0"),
]
ELSEWHERE = """
    mount -t tmpfs tmpfs /dev/shm
    mount --bind {boot_id} /proc/sys/kernel/random/boot_id
    exec {command}
"""


class Machines:
    """Nodes that the commands of the page start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("", 0))
            self.port = probe.getsockname()[1]
        told = dict(word.split("=", 1) for word in EXPORTS.split())
        ours = {"RAY_AUTH_MODE", "RAY_worker_niceness", "RAY_memory_monitor_refresh_ms"}
        assert told.keys() == ours | {"RAY_AUTH_TOKEN"} and all(told[name] == ENVIRONMENT[name] for name in ours)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        scripts = str(Path(sys.executable).parent)
        self.environment = {**environment, **told, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment["PATH"] = f"{scripts}:{os.environ['PATH']}"
        self.nodes: list[subprocess.Popen] = []
        self.address = ""

    def start_nodes(self, count: int) -> None:
        self.address = self.start("node1", self.words(HEAD), "Local node IP: ([0-9.]+)")
        self.join(*range(2, count + 1))

    def join(self, *numbers: int) -> None:
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-ec"]
        for number in numbers:
            boot_id = self.folder / f"boot_id{number}"
            boot_id.write_text(f"11111111-2222-3333-4444-{number:012}\n")
            words = [*self.words(SECOND.replace("node2", f"node{number}")), f"--node-ip-address=127.0.0.{number}"]
            script = ELSEWHERE.format(boot_id=boot_id, command=shlex.join(words))
            self.start(f"node{number}", [*apart, textwrap.dedent(script)], "Local node IP: ([0-9.]+)")

    def words(self, command: str) -> list[str]:
        if self.address:
            command = command.replace("10.0.0.1", self.address)
        alone = [] if self.address else ["--include-dashboard=false"]  # other tests may have its port
        return [*shlex.split(command.replace("6379", str(self.port))), *SMALL, *alone]

    def start(self, name: str, command: list[str], asked: str) -> str:
        output = self.folder / f"{name}.txt"
        (self.folder / name).mkdir()
        with output.open("w") as file:
            node = subprocess.Popen(
                command,
                cwd=self.folder / name,
                env={**self.environment, "RAY_TMPDIR": str(self.folder / name)},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.nodes.append(node)
        until = time.monotonic() + 300
        while "Ray runtime started" not in output.read_text():
            assert node.poll() is None and time.monotonic() < until, output.read_text()
            time.sleep(0.1)
        return re.search(asked, re.sub(r"\x1b\[[0-9;]*m", "", output.read_text()))[1]  # Ray paints in files, too

    def begin(self, folder: Path, *arguments: str, **options) -> subprocess.Popen:
        words = shlex.split(TRAIN.replace("10.0.0.1:6379", f"{self.address}:{self.port}"))
        keys = {argument.split("=")[0] for argument in arguments}
        return subprocess.Popen(
            [sys.executable, *[word for word in words[1:] if word.split("=")[0] not in keys], *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )

    def train(self, folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        here = {**self.environment, "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **environment}
        with self.begin(folder, *arguments, env=here, stderr=subprocess.PIPE) as process:
            output, errors = process.communicate(timeout=600)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def lose_the_second(self) -> None:
        """With everything on it."""
        node = self.nodes.pop(1)
        os.killpg(node.pid, signal.SIGKILL)
        node.wait(60)

    def status(self, run: subprocess.Popen) -> str:
        """What `ray status` shows while the run waits."""
        run.send_signal(signal.SIGSTOP)
        words = ["ray", "status", f"--address={self.address}:{self.port}"]
        try:
            return subprocess.run(words, env=self.environment, stdout=subprocess.PIPE, text=True, timeout=120).stdout
        finally:
            run.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        for node in reversed(self.nodes):
            os.killpg(node.pid, signal.SIGTERM)
        for node in reversed(self.nodes):
            try:
                node.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(node.pid, signal.SIGKILL)


@contextmanager
def started(count: int):
    can_part = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "true"]
    if shutil.which("unshare") is None or subprocess.run(can_part, capture_output=True).returncode:
        pytest.skip("needs the right to part namespaces, as root has it")
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a short path, for Ray's sockets
    machines = Machines(folder)
    try:
        machines.start_nodes(count)
        yield machines
    finally:
        machines.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def machines():
    with started(2) as two:
        yield two


def weights(folder: Path) -> dict[str, np.ndarray]:
    (run,) = (folder / "runs").iterdir()
    assert json.loads((run / "run.json").read_text())["state"] == "finished"
    return read_weights(run / "checkpoints" / "v000002" / "policy")


APART = pytest.mark.parametrize("apart", [(), (f"env.python={sys.executable}",)], ids=["here", "own_interpreter"])


@APART
def test_the_documented_run_over_two_machines_gives_the_weights_of_one_process(
    machines, of_one_process, apart, tmp_path
):
    done = machines.train(tmp_path, *SAME, *apart)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of node2" in done.stdout and "of node1" in done.stdout
    logs = next((tmp_path / "runs").glob("*/logs"))
    assert {"learner-0.log", "sim+policy-0.log", "sim+policy-1.log"} <= {path.name for path in logs.iterdir()}
    ours, reference = weights(tmp_path), of_one_process
    assert max(float(np.abs(ours[name] - reference[name]).max()) for name in reference) < 1e-9


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    one = [sys.executable, "-m", "embodied.train", "recipe=pointmass_ppo", *SAME, "cluster.backend=inline"]
    subprocess.run(one, cwd=folder, check=True, capture_output=True, timeout=300)
    return weights(folder)


def test_profile_plan_auto_and_benchmark_use_all_machines_of_the_cluster(machines, tmp_path):
    at = f"cluster.address={machines.address}:{machines.port}"
    small = ["env.num_envs=8", "algo.rollout_decisions=16", "algo.minibatch_size=32", "eval.episodes=2"]

    def run(command: str, *arguments: str) -> str:
        here = {**machines.environment, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        words = [sys.executable, "-m", f"embodied.{command}", "recipe=pointmass_ppo", at, *small, *arguments]
        done = subprocess.run(words, cwd=tmp_path, env=here, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    told = run("profiling", "seconds=20")
    assert "measuring on 4 cores of 2 nodes" in told and "a short real run: [sim, policy: 4 cpu]" in told
    (profile,) = (tmp_path / "runs/profiles").glob("pointmass_ppo-4cpu-2nodes-*.json")
    assert json.loads(profile.read_text())["made"]["nodes"] == 2
    assert "2 nodes: 2 cores" in run("plan")
    told = run("train", "--dry-run")
    assert "the fastest by the profile measured here" in told
    told = run("benchmark", "rounds=1", "modes=[collocated]", "profile=stored", "out=bench")
    assert "8 envs, 4 cores of 2 nodes" in told
    (found,) = json.loads((tmp_path / "bench/bench.json").read_text())["results"]
    assert (found["devices"], found["nodes"]) == ({"cpu": 4}, 2)
    assert "node1/cpu" in json.dumps(found["expected"]["collocated"]["placement"])
    alone = [argument for argument in small if "address" not in argument]
    words = [sys.executable, "-m", "embodied.train", "recipe=pointmass_ppo", *alone, "--dry-run"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    assert "does not count: measured on 4 cores of 2 nodes, this run has 2 cores" in done.stdout


def test_runs_share_the_devices_of_all_machines(machines, tmp_path):
    at = f"cluster.address={machines.address}:{machines.port}"
    here = {**machines.environment, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    small = ["eval.episodes=2", "eval.videos=0"]
    robot = ["pointmass_ppo", "run.env_steps=512", "env.num_envs=8", "algo.rollout_decisions=16"]
    talker = ["sums_grpo", "run.start_from=null", "run.iterations=2", "env.num_envs=32", "algo.max_empty=1000"]
    share = [sys.executable, "-m", "embodied.share", at, "folder=both", *small]
    words = [*share, *robot, "algo.minibatch_size=32", *talker]
    done = subprocess.run(words, cwd=tmp_path, env=here, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pointmass_ppo owns node1/cpu:0, node1/cpu:1" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "both/share.jsonl").read_text().splitlines()]
    worked = {
        (line["run"], line["device"].partition("/")[0]) for line in lines if line.get("run") and line.get("device")
    }
    assert worked >= {("pointmass_ppo", "node1"), ("sums_grpo", "node2")}
    for run in json.loads((tmp_path / "both/share.json").read_text())["runs"]:
        assert run["ended"] == "finished"
        hosts = json.loads((tmp_path / "both" / run["folder"] / "run.json").read_text())["placement"]["hosts"]
        assert {host["node"] for host in hosts if "learner" in host["roles"]} == {run["own"][0].partition("/")[0]}


def test_a_policy_worker_is_added_on_a_machine_that_has_joined_since(tmp_path):
    apart = [*(word for word in SAME if "iterations" not in word), "run.iterations=100000", "pipeline.stages=2"]
    placement = "placement={sim: 'node1/cpu:0', policy: 'node1/cpu:0', learner: 'node1/cpu:0'}"
    with started(1) as machines:
        here = {**machines.environment, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}

        def reach(more: int) -> Path:
            """So many iterations from now on."""
            wanted, until = None, time.monotonic() + 300
            while training.poll() is None and time.monotonic() < until:
                found = [*tmp_path.glob("runs/*/metrics.jsonl")]
                count = len(found[0].read_text().splitlines()) if found else 0
                wanted = count + more if wanted is None else wanted
                if count >= wanted:
                    return found[0].parent
                time.sleep(0.1)
            raise AssertionError("the run has ended or does not go on")

        def workers(*words: str) -> str:
            command = [sys.executable, "-m", "embodied.workers", str(run), *words]
            done = subprocess.run(command, env=here, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        with machines.begin(tmp_path, *apart, placement, env=here, stderr=subprocess.STDOUT) as training:
            try:
                run = reach(1)
                machines.join(2)
                assert "on core 0 of node2: 2 policy workers" in workers("policy=+1", "devices=node2/cpu:0")
                assert "policy-1" in (run / "run.json").read_text()
                reach(3)
                assert "policy-1 has left, which was on core 0 of node2" in workers("policy=-1")
                reach(1)
            finally:
                training.terminate()
                output, _ = training.communicate(timeout=120)
    assert training.returncode == 143 and "is started again" not in output, output


MY_ENV = """
import os
from embodied.envs.pointmass.env import PointMassEnv
from embodied.envs.pointmass.config import PointMassConfig

class MyEnv(PointMassEnv):
    def __init__(self, config, num_envs):
        print("built from", __file__, "in", os.getpid(), flush=True)
        common = {name: getattr(config, name) for name in ("num_envs", "max_episode_steps", "on_success")}
        super().__init__(PointMassConfig(name="pointmass", dtype="float64", **common), num_envs)
"""


@APART
def test_learners_on_both_machines_and_an_env_of_ones_own(machines, apart, tmp_path):
    (tmp_path / "my_env.py").write_text(MY_ENV)
    same = [argument for argument in SAME if not argument.startswith("env.dtype")]
    placement = "placement={'sim,policy': 'node2/cpu:0', learner: 'node1/cpu:0,node2/cpu:1'}"
    own = ["env.name=my_env:MyEnv", "env.task=reach", placement, *apart]
    done = machines.train(tmp_path, *same, *own, PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 x learner on core 0 of node1" in done.stdout
    (log,) = (tmp_path / "runs").glob("*/logs/sim+policy-0.log")
    assert "built from " in log.read_text() and str(tmp_path) not in log.read_text()


def test_a_killed_driver_leaves_no_program_on_another_machine(machines, tmp_path):
    program = f"sleep {1000 + secrets.randbelow(10**9)}"
    text = MY_ENV.replace("import os\n", "import os, subprocess\n").replace(
        '        print("built',
        f'        subprocess.Popen("{program}".split(), start_new_session=True)\n        print("built',
    )
    (tmp_path / "my_env.py").write_text(text)
    same = [argument for argument in SAME if not argument.startswith(("env.dtype", "run.iterations"))]
    own = ["env.name=my_env:MyEnv", "env.task=reach", "run.iterations=100000"]
    here = {**machines.environment, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    with machines.begin(tmp_path, *same, *own, env=here, stderr=subprocess.STDOUT) as process:
        next(line for line in process.stdout if line.startswith("iteration 2/"))
        assert running(program)
        process.kill()
    until = time.monotonic() + 120
    while running(program) and time.monotonic() < until:
        time.sleep(0.1)
    assert not running(program)


def running(program: str) -> bool:
    """The processes of both machines are seen here."""
    words = program.encode().replace(b" ", b"\0") + b"\0"
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes() == words:
                return True
    return False


def test_a_wrong_token_or_node_is_refused_in_one_line(machines, tmp_path):
    wrong = machines.train(tmp_path, RAY_AUTH_TOKEN=secrets.token_hex(32))
    assert wrong.returncode in (1, 2) and "the cluster does not take this token" in wrong.stderr
    nowhere = machines.train(tmp_path, "placement={'sim,policy': 'node3/cpu:0', learner: 'cpu:0'}")
    assert nowhere.returncode == 2 and "placement names the node 'node3', but the cluster has node1" in nowhere.stderr
    for done in (wrong, nowhere):
        assert "Traceback" not in done.stderr and done.stderr.splitlines()[-1].startswith("error: ")


LOSS_ITERATIONS = 12
LOSSES = {
    "sims": ("{sim: 'node2/cpu:0-1*2', 'policy,learner': 'node1/cpu:0'}", 0),
    "policies": ("{sim: 'node1/cpu:0', policy: 'node2/cpu:0', learner: 'node1/cpu:1'}", 0),
    "learner": ("{'sim,policy': 'node1/cpu:0', learner: 'node2/cpu:0'}", 1),
}


def struck(tmp_path, *more: str, count: int = 2, looks: tuple[int, ...] = ()) -> tuple[int, list[str], list[dict]]:
    """Train, and lose the second machine in the third iteration. Returns the exit code, the lines of the run and of
    `ray status` (after the iterations `looks`), and the rows of metrics."""
    said = []
    with started(count) as machines:
        here = {**machines.environment, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        keys = {argument.partition("=")[0] for argument in more}
        same = [argument for argument in SAME if argument.partition("=")[0] not in keys]
        with machines.begin(tmp_path, *same, *more, env=here, stderr=subprocess.STDOUT) as process:
            late = threading.Timer(600, process.kill)
            late.start()
            for line in process.stdout:
                said.append(line)
                if line.startswith("iteration 3/") and len(machines.nodes) == count:  # it may be played twice
                    machines.lose_the_second()
                if line.startswith(tuple(f"iteration {look}/" for look in looks)):
                    said.append(machines.status(process))
            late.cancel()
    (run,) = (tmp_path / "runs").iterdir()
    return process.returncode, said, [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


GONE = "its process was lost with node node2 of the cluster"


@pytest.mark.chaos
@pytest.mark.parametrize("lost", LOSSES)
def test_a_run_survives_the_loss_of_a_machine_that_only_plays(tmp_path, lost):
    placement, expected = LOSSES[lost]
    more = [f"run.iterations={LOSS_ITERATIONS}", "run.save_every=1", f"placement={placement}"]
    code, said, rows = struck(tmp_path, *more)
    assert code == expected, said
    if code:
        assert any(line.startswith(f"error: learner-0: {GONE}") for line in said), said
        assert any("python -m embodied.train resume=" in line for line in said[-3:])
        return
    told = [line for line in said if "is started again (restart 1," in line]
    assert all(GONE in line for line in told) and len(told) == (2 if lost == "sims" else 1), said
    missed = sum(row["faults/lost_decisions"] for row in rows)
    assert rows[-1]["env_steps"] + missed == LOSS_ITERATIONS * 8 * 16


@pytest.mark.chaos
def test_a_lost_machine_with_a_learner_is_named_and_the_run_goes_on_from_the_newest_checkpoint(tmp_path):
    """In the default placement, where steps are large enough to be divided between the learners of three machines. The
    run reserves all cores, and those of the other two machines afterwards."""
    more = ["run.iterations=8", "run.save_every=2", "placement=auto", "policy.hidden=[1024,1024]"]
    code, said, rows = struck(tmp_path, *more, count=3, looks=(1, 7))
    assert code == 0, "".join(said[-20:])
    reserved = re.findall(r"[0-9.]+/([0-9.]+) CPU \(.* of ([0-9.]+) reserved in placement groups\)", "".join(said))
    assert reserved == [("6.0", "6.0"), ("4.0", "4.0")], "".join(said)
    (line,) = [line for line in said if "started again" in line]
    assert re.search(rf"^learner-\d is lost: all workers .* on other nodes .* from v00000\d: {GONE}", line), line
    after = "".join(said).partition(line)[2]
    assert "of node3" in after and "of node2" not in after  # the new placement
    assert [row["iteration"] for row in rows] == list(range(1, 9))


def metrics_of(folder: Path) -> str:
    """What a node of this Ray exports for Prometheus, if numbers of ours are among it."""
    with suppress(OSError, ValueError):
        for target in json.loads((folder / "ray/prom_metrics_service_discovery.json").read_text())[0]["targets"]:
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=5) as page:
                if "embodied_env_steps" in (text := page.read().decode()):
                    return text
    return ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_submitted_job_joins_its_cluster_and_its_numbers_are_metrics_of_ray():
    folder, port, dashboard = Path(tempfile.mkdtemp(prefix="job-", dir="/tmp")), free_port(), free_port()
    exported = dict(word.split("=", 1) for word in EXPORTS.split()) | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "RAY_TMPDIR": str(folder)}
    environment = {**os.environ, **exported, **paths}
    start = [*shlex.split(HEAD.replace("6379", str(port))), *SMALL, f"--dashboard-port={dashboard}"]
    submit = shlex.split(JOB.replace("submit", f"submit --address=http://127.0.0.1:{dashboard}", 1))
    short = [*(word for word in SAME if "iterations" not in word), "run.iterations=30", f"run.dir={folder}/runs"]
    with (folder / "head.txt").open("w") as said:
        head = subprocess.Popen(start, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
    seen, told, until = "", "", time.monotonic() + 400
    try:
        while not told or ("submitted successfully" not in told and time.monotonic() < until):  # Ray is not ready yet
            with (folder / "job.txt").open("w") as output:
                job = subprocess.Popen([*submit, *short], env=environment, stdout=output, stderr=subprocess.STDOUT)
                while job.poll() is None:
                    seen = metrics_of(folder) or seen
                    time.sleep(1)
            told = (folder / "job.txt").read_text()
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        head.wait(60)
    assert job.returncode == 0 and "ray: one process per host" in told and "iteration 30/30" in told, told
    assert re.search(r'ray_embodied_train_grad_norm\{.*run="pointmass_ppo-', seen), seen[-2000:]
    shutil.rmtree(folder)
