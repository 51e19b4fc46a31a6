"""Tests marked `gpu` run where there is an NVIDIA card, those of the bridge tasks where these tasks' files are: in the
folder that MS_ASSET_DIR names, or beside the checkout."""

import ctypes
import gc
import io
import os
import resource
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS / "support"), str(TESTS)]  # for what tests of several folders share

BESIDE = Path(__file__).parents[2] / "shared" / "assets"  # other people's files: read where they are, never copied
if (BESIDE / "data").is_dir():
    os.environ.setdefault("MS_ASSET_DIR", str(BESIDE))


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background has it: commands would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

if kernels := os.environ.get("ATEN_CPU_CAPABILITY"):  # torch's compiler keeps code for one processor only
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"compiled-for-{kernels}"))

LIBC = ctypes.CDLL(None)
if hasattr(LIBC, "mallopt"):  # glibc
    LIBC.mallopt(-8, 1)  # M_ARENA_MAX: memory that one thread of a test has freed is of use to the threads of the next


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected stays to the end: nobody need look through it for garbage, time and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


kept_bytes = 1e12  # the least since memory was freed
peak_before, raised = 0, []  # raised: (bytes, test) of tests that raised the worker's peak by a quarter of a GB


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """Frees memory after tests that leave 200 MB more: cycles around scenes and models, and freed blocks that the C
    library keeps. A worker that ran the documents' commands held 1.4 GB without this, and 0.8 GB with it."""
    global kept_bytes, peak_before
    yield
    from embodied.runtime.heartbeat import resident_bytes

    if (bytes_now := resident_bytes()) > kept_bytes + 200e6:
        gc.collect()
        LIBC.malloc_trim(0)
        kept_bytes = resident_bytes()
    kept_bytes = min(kept_bytes, bytes_now)
    if (peak := peak_bytes()) > (peak_before or peak) + 250e6:
        raised.append((peak - peak_before, item.nodeid))
    peak_before = peak


worker_peaks = []  # (bytes, the tests that raised it)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak"] = (peak_bytes(), raised)


@pytest.hookimpl(optionalhook=True)  # also without xdist
def pytest_testnodedown(node):
    worker_peaks.append(getattr(node, "workeroutput", {}).get("peak", (0, [])))  # 0 if it crashed


def pytest_terminal_summary(terminalreporter):
    own, ended = (resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    seconds = sum(used.ru_utime + used.ru_stime for used in (own, ended))
    terminalreporter.write_line(f"processor time: {seconds:.0f} s, without processes that nobody waited for")
    if worker_peaks:
        peak, tests = max(worker_peaks)
        terminalreporter.write_line(f"memory of a worker: at most {peak / 1e9:.2f} GB")
        for more, test in tests:
            terminalreporter.write_line(f"  {more / 1e9:.2f} GB more in {test}")


@pytest.fixture(scope="session", autouse=True)
def unsynced_files():
    """No file has to outlast a power cut here, and a run would wait for the disk 25 times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.hookimpl(optionalhook=True)  # also without xdist
def pytest_xdist_auto_num_workers(config):
    """One more than there are cores: a quarter of the time a test waits for something else."""
    return len(os.sched_getaffinity(0)) + 1


PAGES = "tests/test_pages.py"
DRAWING = (  # what draws ManiSkill's scenes
    "tests/envs/maniskill/",
    "tests/test_published_page.py",
    f"{PAGES}::test_a_page_is_followed[own_task.md",
)
TOGETHER = {  # files that one worker runs, since what they share takes seconds to start or hundreds of megabytes
    "drawing": DRAWING,
    "Ray": ("tests/runtime/",),
    "MuJoCo": ("tests/envs/libero/", "tests/envs/robosuite/", "tests/workflows/test_libero_runs.py"),
    "ranks": (  # which fork from one server
        "tests/learners/test_collective.py",
        "tests/learners/test_divided_learners.py",
        "tests/learners/test_learner_options.py",
        "tests/policies/language/test_divided_rows.py",
    ),
}
LONG = (  # few tests that take long: what is begun last keeps one worker at work while the other has ended
    "workflows/test_stopped_drivers workflows/test_recovery workflows/test_partial_overlap workflows/test_async "
    "workflows/test_language_runs workflows/test_served_runs policies/language/test_vllm policies/test_robot_runs "
    "test_pages test_interrupted_evaluations test_train_command test_workflows_page test_invariance "
    "config/test_packaging"
)
FIRST = (*TOGETHER, *(f"tests/{name}.py" for name in LONG.split()))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """As --dist loadscope: a file at a time, those with most tests first. But files may be together, each page of the
    documents is its own, and these and what takes long with few tests come first."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            together = (name for name, files in TOGETHER.items() if nodeid.startswith(files))
            of_its_own = nodeid if nodeid.startswith(PAGES) else super()._split_scope(nodeid)  # each page has a folder
            return next(together, of_its_own)

        def _assign_work_unit(self, node):
            if scope := next((scope for first in FIRST for scope in self.workqueue if scope.startswith(first)), None):
                self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    return Files(config, log) if config.getoption("dist") == "loadscope" else None


@pytest.fixture(scope="module")
def plain_scenes():
    """Tests whose modules use this look at no picture of LIBERO or robosuite."""
    from plain_scenes import bare, scenes

    with scenes(bare):
        yield


@pytest.fixture
def rehearsed_here(monkeypatch):
    """Objects of the user's own are made once in this process, not in one that imports for seconds."""
    from embodied.run import rehearsal

    def run(command, *, input, **_):
        monkeypatch.setattr(sys, "stdin", io.StringIO(input))
        rehearsal.main(Path(command[-1]))
        return SimpleNamespace(returncode=0)

    named = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "TimeoutExpired")}
    monkeypatch.setattr(rehearsal, "subprocess", SimpleNamespace(run=run, **named))


HOSTS_IMPORT = (
    "torch",
    "embodied.envs.sim_worker",
    "embodied.policies.policy_worker",
    "embodied.policies.networks",
    "embodied.policies.language.policy",
    "embodied.learners.learner_worker",
)


@pytest.fixture(scope="session", autouse=True)
def kept_fork_servers():
    """Lets the hosts of all clusters in this process fork from one server, which has imported the modules that most
    hosts need; hosts of simulators and of pretended GPUs fork, too. A server and a fresh host take seconds of processor
    time to start. Commands in separate processes, tests of how hosts start and tests marked `as_users_do` start fresh
    hosts."""
    from embodied.runtime import local, processes

    kept: dict[tuple, processes.ForkServer] = {}
    starter = ThreadPoolExecutor(1)  # a server ends with the thread that starts it, as a cluster's threads do with it

    def servers_with(imports):
        class KeptServers:
            def fork(self, boot, env, modules, fds):
                if not modules and Path("/dev/nvidiactl").exists():
                    return None  # it may use CUDA
                threads = env.get("OMP_NUM_THREADS", "") if "torch" in imports else ""  # which is read at the import
                if (key := (imports, threads)) not in kept:
                    unmarked = {name: value for name, value in env.items() if name != processes.MARK}
                    kept[key] = starter.submit(processes.ForkServer, unmarked, imports, boot["path"]).result()
                return kept[key].fork(boot, env, fds)

            def close(self):
                """They are for the next cluster, and for hosts that replace dead ones of this one; in a run, and in
                tests of how hosts start, these start fresh."""

        return KeptServers

    local.ForkServers = servers_with(HOSTS_IMPORT)
    yield servers_with
    local.ForkServers = processes.ForkServers
    for server in kept.values():
        server.close()
    starter.shutdown()


@pytest.fixture(autouse=True)
def started_as_users_do(request, monkeypatch):
    """A cluster starts and ends fork servers of its own, and who replaces a dead host starts fresh."""
    if request.node.get_closest_marker("as_users_do"):
        from embodied.runtime import local, processes

        monkeypatch.setattr(local, "ForkServers", processes.ForkServers)


NUMBERS = (  # tests marked `numbers`: they compare what other widths, precisions or processes compute
    "test_invariance.py test_train_command.py::test_which_ test_train_command.py::test_acting_ "
    "learners/test_features.py learners/test_update.py::test_five_ learners/test_update.py::test_the_n "
    "learners/test_update.py::test_parts_ learners/test_update.py::test_our_adam_ policies/test_openvla "
    "policies/test_every_family.py::test_the_ policies/test_lora.py policies/test_lora_targets.py::test_whatever_ "
    "policies/test_pi0.py::test_imitation_ policies/test_pi0_blocks.py policies/test_smolvla.py "
    "policies/test_request_batching.py policies/test_robot_runs.py::test_a_run_of_ "
    "policies/language/test_trust.py policies/language/test_engines.py policies/language/test_kinds.py "
    "policies/language/test_language_policy.py::test_a_tied_ "
    "policies/language/test_language_policy.py::test_gradients_ "
    "policies/language/test_language_policy.py::test_adapters_ policies/language/test_shared_prompts.py"
)
NUMBERS = tuple(f"tests/{name}" for name in NUMBERS.split())


def pytest_ignore_collect(collection_path, config):
    """`make test-numbers` imports no file without such tests: all of them take 15 seconds in each process."""
    if collection_path.is_file() and config.option.markexpr.startswith("numbers "):
        name = collection_path.relative_to(config.rootpath).as_posix()
        return True if not any(name.startswith(one.split("::")[0]) for one in NUMBERS) else None
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.startswith(NUMBERS):
            item.add_marker(pytest.mark.numbers)
    if not Path("/dev/nvidiactl").exists():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
