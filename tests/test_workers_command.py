"""Policy workers come and go by the commands of docs/faults.md while a run goes on."""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pages import Page, newest, runner

from embodied import workers
from embodied.config.recipe import load
from embodied.core.errors import ConfigError
from embodied.placement import PlacementError, make_plan
from embodied.placement.topology import Gpu, Node, Topology
from embodied.run.run_folder import REQUEST
from embodied.workers import WorkerRequest, check_work, place, refuse_changes

COMMANDS = [line for line in Page("faults.md").commands if "embodied.workers" in line]
EXACT = [
    *("recipe=pointmass_ppo", "env.num_envs=8", "env.dtype=float64", "env.max_episode_steps=12", "run.env_steps=null"),
    *("policy.dtype=float64", "policy.hidden=[16,16]", "algo.rollout_decisions=16", "algo.minibatch_size=32"),
    *("eval.episodes=2", "eval.videos=0", "run.name=pointmass_ppo"),
]
APART = {"sim": "cpu:0-1*2", "policy": "cpu:0", "learner": "cpu:1"}
TWO = Topology((Node("", 2, core_ids=(4, 5)),))


def run_folder(path, **facts):
    path.mkdir()
    (path / "logs").mkdir()
    (path / "logs" / "driver.log").touch()
    placement = {"hosts": [{"name": "policy-0", "roles": ["policy"], "cores": [1], "devices": []}]}
    info = {"state": "running", "command": "train", "provenance": {"host": platform.node()}, "placement": placement}
    (path / "run.json").write_text(json.dumps(info | facts))
    return path


@pytest.mark.parametrize(
    ("words", "facts", "told"),
    [
        ([], {}, "name the folder of one run"),
        (["RUN", "learner=+1"], {}, "learner=+1: only policy workers come and go"),
        (["RUN", "policy=2"], {}, "policy=2: should be +1 or -1"),
        (["RUN", "policy=+0"], {}, "policy=+0: should be"),
        (["RUN", "policy=-1", "devices=cpu:0"], {}, "devices=cpu:0 is for added workers"),
        (["RUN/logs", "policy=+1"], {}, "is not the folder of a run: run.json is missing"),
        (["RUN", "policy=+1"], {"state": "finished"}, "is not running: it has finished"),
        (["RUN", "policy=+1"], {"provenance": {"host": "elsewhere"}}, "runs on elsewhere: give the command there"),
        (["RUN", "policy=+1"], {}, "is not running: its process was killed; it goes on with"),
    ],
)
def test_a_request_that_no_run_can_follow_is_refused_at_once(words, facts, told, tmp_path, capsys):
    folder = run_folder(tmp_path / "run", **facts)
    assert workers.main([word.replace("RUN", str(folder)) for word in words]) == 2
    assert told in capsys.readouterr().err and not (folder / REQUEST).exists()


def test_only_one_command_asks_at_a_time(tmp_path):
    folder = run_folder(tmp_path / "run")
    (folder / REQUEST).write_text("{}")
    with pytest.raises(ConfigError, match="another command asks this run"):
        workers.ask(folder, 1, "")
    assert (folder / REQUEST).read_text() == "{}"


@pytest.mark.parametrize(
    "content", [{}, {"change": 0}, {"change": "1"}, {"change": 10**9}, {"change": 1, "devices": 3}]
)
def test_a_file_with_other_content_is_not_taken_for_a_request(content):
    with pytest.raises(ValueError, match="number of workers"):
        WorkerRequest.read(content)


def gpus(count, *nodes):
    return Topology(tuple(Node(name, 4, tuple(map(Gpu, range(count)))) for name in nodes or ("",)))


@pytest.mark.parametrize(
    ("placement", "machines", "count", "named", "found"),
    [
        ({"sim": "cpu:0", "policy": "cpu:0", "learner": "cpu:0"}, TWO, 1, "", ["cpu:5"]),
        ({"sim": "cpu:0", "policy": "cpu:0", "learner": "cpu:1"}, TWO, 1, "", ["cpu:5"]),  # in turns with the learner
        ({"sim,policy": "cpu:0-1*2", "learner": "cpu:1"}, TWO, 1, "cpu:1", ["cpu:5"]),
        ({"sim": "cpu:0", "policy": "gpu:0", "learner": "gpu:1"}, gpus(4), 2, "", ["gpu:2", "gpu:3"]),
        ({"sim": "cpu:0", "policy": "gpu:0", "learner": "gpu:1"}, gpus(4), 1, "gpu:3", ["gpu:3"]),
        ({"sim": "a/cpu:0", "policy,learner": "a/gpu:0"}, gpus(1, "a", "b"), 1, "", ["b/gpu:0"]),
    ],
)
def test_an_added_worker_gets_a_free_device_or_a_core_of_learners_in_turns(placement, machines, count, named, found):
    config = load(["recipe=sums_grpo"]).config.with_values("pipeline", schedule="sync")
    plan = make_plan(placement, machines, config.env.num_envs, shared=True)
    hosts = place(config, plan, machines, {"learner"}, count, named)
    assert [device for host in hosts for device in host.device_names] == found


@pytest.mark.parametrize(
    ("placement", "machines", "options", "named", "told"),
    [
        ("collocated", TWO, [], "", "the run uses 2 of 2 cores; devices=cpu:0 shares a core"),
        ({"sim": "cpu:0", "policy,learner": "gpu:0"}, gpus(1), [], "", "the run uses 1 of 1 GPU"),
        ({"sim": "cpu:0", "policy,learner": "gpu:0"}, gpus(1), [], "gpu:0", "gpu:0 is used by policy+learner-0"),
        ({"sim": "cpu:0", "policy": "gpu:0", "learner": "gpu:1"}, gpus(2), [], "cpu:1", "must answer alike"),
        ({"sim": "cpu:0", "policy": "cpu:0", "learner": "cpu:1"}, TWO, ["async"], "", "too few free devices"),
        (
            {"sim": "cpu:0", "policy": "cpu:0", "learner": "cpu:1"},
            TWO,
            ["async"],
            "cpu:1",
            "learner-0 works there during rollouts",
        ),
        ({"sim": "cpu:0", "policy": "cpu:0", "learner": "cpu:1"}, TWO, [], "cpu:0,cpu:1", "is for 2 workers"),
        ({"sim": "cpu:0", "policy": "cpu:0", "learner": "cpu:1"}, TWO, [], "cpu:7", "cpu:7 is not there"),
    ],
)
def test_a_worker_without_a_device_is_refused_with_the_reason(placement, machines, options, named, told):
    config = load(["recipe=sums_grpo"]).config.with_values("pipeline", schedule=(options or ["sync"])[0])
    plan = make_plan(placement, machines, config.env.num_envs, shared=True)
    with pytest.raises((ConfigError, PlacementError), match=re.escape(told)):
        place(config, plan, machines, {"learner"}, 1, named)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["policy.engine=http", "policy.url=http://127.0.0.1:1"], "servers of policy.url"),
        (["cluster.backend=inline"], "cluster.backend=inline has one process"),
        ([], "embodied.share gives this run its devices"),
    ],
)
def test_runs_whose_policy_workers_come_and_go_in_another_way_refuse_changes(options, told, monkeypatch):
    if not options:
        monkeypatch.setenv("EMBODIED_SHARE", "somewhere")
    with pytest.raises(ConfigError, match=re.escape(told)):
        refuse_changes(load(["recipe=sums_grpo", *options]).config)


def test_a_robot_policy_worker_that_no_simulator_would_ask_is_refused():
    plan = make_plan({"sim": "cpu:0", "policy": "cpu:0", "learner": "cpu:1"}, TWO, 8)
    with pytest.raises(ConfigError, match=r"so 1 would have no work; in a run with pipeline\.merge_rows=64"):
        check_work(load(["recipe=pointmass_ppo"]).config, plan, 1)
    check_work(load(["recipe=pointmass_ppo", "pipeline.merge_rows=64"]).config, plan, 1)


class Training:
    """A run as a user starts it, which goes on until it is stopped."""

    def __init__(self, folder, *arguments):
        words = [*EXACT, f"placement={json.dumps(APART)}", "run.iterations=100000", *arguments]
        command = [sys.executable, "-m", "embodied.train", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=folder)
        self.folder = folder

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.process.kill()
        self.process.wait()

    def reach(self, more):
        """So many iterations from now on."""
        rows = None
        while self.process.poll() is None:
            done = sum(1 for _ in self.rows())
            rows = done if rows is None else rows
            if done >= rows + more:
                return
            time.sleep(0.05)
        raise AssertionError("the run has ended")

    def rows(self):
        for path in self.folder.glob("runs/*/metrics.jsonl"):
            yield from path.read_text().splitlines()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(120) == 143


def test_workers_come_and_go_while_a_run_goes_on_and_can_be_resumed(tmp_path, monkeypatch, capsys):
    add, show, take_away = COMMANDS
    here = runner(tmp_path, monkeypatch, capsys)
    with Training(tmp_path) as training:
        training.reach(1)
        run = newest(tmp_path, "pointmass_ppo")
        assert re.search(r"policy-0 cpu:\d", here(show))
        assert "part from the next rollout on, on core" in (said := here(add, "devices=cpu:1")), said
        assert "policy-1" in said and "2 policy workers" in said
        training.reach(2)
        info = json.loads((run / "run.json").read_text())
        os.kill(info["processes"]["policy-1"], signal.SIGKILL)
        training.reach(2)
        assert json.loads((run / "run.json").read_text())["restarts"] == 1
        assert "would have no work" in here(add, "devices=cpu:0", code=2)
        assert "policy-1 has left" in here(take_away)
        assert "one has to stay" in here(take_away, code=2)
        training.reach(1)
        here(add, "devices=cpu:0")
        training.stop()
    info = json.loads((run / "run.json").read_text())
    acting = [host["name"] for host in info["placement"]["hosts"] if "policy" in host["roles"]]
    assert acting == ["policy-0", "policy-2"]
    changes = [{*change} - {"at", "devices"} for change in info["worker_changes"]]
    assert changes == [{"added"}, {"taken_away"}, {"added"}]
    report = (run / "report.html").read_text()
    assert "policy-2" in report and "policy-1 was taken away" in report
    (newest_saved,) = re.findall(r"\d+", (run / "checkpoints" / "latest").read_text())
    done = int(newest_saved)
    here(f"python -m embodied.train resume={run} run.iterations={done + 1}")
    hosts = json.loads((run / "run.json").read_text())["placement"]["hosts"]
    assert Path(run / "checkpoints" / f"v{done + 1:06d}").is_dir() and sum("policy" in h["roles"] for h in hosts) == 1
