"""What a user types first, on every backend, in a process of its own: hosts start and end as they do for users."""

import json
import re
import subprocess
import sys

import pytest

from embodied.runtime import Cluster, HostPlan
from embodied.runtime.processes import Forked

FEW = ["env.num_envs=8", "algo.rollout_decisions=16", "algo.minibatch_size=32", "run.iterations=2", "eval.episodes=4"]
FEW_GROUPS = ["env.num_envs=8", "algo.groups=4", "algo.group_size=2", "algo.filter=none", "run.iterations=2"]


FRIGHTENING = re.compile(
    r"warn|error|traceback|exception|fail(?!ure_reach_seed)|fatal|critical|"
    r"kill|crash|\bdie[sd]\b|abort|leak|deprecat|refus|cannot",
    re.I,
)


@pytest.mark.parametrize("backend", [pytest.param("inline", marks=pytest.mark.slow), "local", "ray"])
@pytest.mark.parametrize(
    ("recipe", "options"),
    [("pointmass_ppo", FEW), pytest.param("pointmass_grpo", [*FEW_GROUPS, "eval.episodes=4"], marks=pytest.mark.slow)],
    ids=["ppo", "grpo"],
)
def test_a_run_in_the_default_placement_starts_trains_evaluates_and_ends(tmp_path, backend, recipe, options):
    place = [f"cluster.backend={backend}", f"run.dir={tmp_path}", "eval.videos=0"]
    command = [sys.executable, "-m", "embodied.train", f"recipe={recipe}", *options, *place]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0 and "started again" not in done.stdout, done.stdout + done.stderr
    if backend != "ray":  # which has a voice of its own
        assert done.stderr == "" and not [line for line in done.stdout.splitlines() if FRIGHTENING.search(line)]
    (run,) = tmp_path.glob(f"{recipe}-*")
    info = json.loads((run / "run.json").read_text())
    assert info["state"] == "finished" and f"{backend}: " in done.stdout
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert json.loads((run / "eval" / "v000002" / "results.json").read_text())["overall"]["episodes"] == 4
    assert bool(list(run.glob("logs/sim*.log"))) == (backend != "inline"), "hosts are processes"


def test_hosts_of_other_tests_are_forked_from_one_server_that_outlives_their_clusters():
    """Else each host of every test imports for seconds."""
    for _ in range(2):
        with Cluster("local", [HostPlan("only", ("a",))], timeout_s=300) as cluster:
            process = cluster._backend.processes["only"].popen
    assert isinstance(process, Forked)
