"""Twenty bad placements, twenty clear messages; what each message says to try does work."""

import re

import pytest

from embodied.config.recipe import load
from embodied.core.errors import ConfigError
from embodied.run import launch

SIM, LEARNER = '"sim,policy": "cpu:0"', 'learner: "cpu:0"'
BAD = {
    "a mode's name misspelt": ("hybird", "did you mean placement=hybrid?"),
    "a mode's name in other words": ("side_by_side", "neither a mode nor a map; try placement=auto."),
    "more cores than a mode has": ("disaggregated", "needs 3 cores, this run may use 2"),
    "a role that is none": ("{sims: cpu:0, policy: cpu:0, learner: cpu:0}", "'sims' is not a role"),
    "a role without a place": ("{sim: cpu:0, policy: cpu:0}", "'learner' has no place"),
    "a role in two places": ('{sim: cpu:0, "sim,policy": cpu:0, learner: cpu:0}', "'sim' has 2 places"),
    "no quotes around two roles": ("{sim,policy: cpu:0, learner: cpu:0}", "roles joined by a comma need quotes"),
    "a simulator beside the optimizer": ('{"sim,learner": cpu:0, policy: cpu:0}', "its crash would take the weights"),
    "a number instead of devices": ("{sim: 3, policy: cpu:0, learner: cpu:0}", "are 3, not text"),
    "devices that cannot be read": ("{sim: core 1, policy: cpu:0, learner: cpu:0}", "'core 1' does not name devices"),
    "devices that count down": ("{sim: cpu:1-0, policy: cpu:0, learner: cpu:0}", "'cpu:1-0' counts down"),
    "no worker": ("{sim: cpu:0*0, policy: cpu:0, learner: cpu:0}", "'cpu:0*0' asks for no worker"),
    "cores that do not divide": ("{sim: cpu:0-2*2, policy: cpu:0, learner: cpu:0}", "splits 3 cores among 2 workers"),
    "a core that is not there": ('{"sim,policy": cpu:0, learner: cpu:7}', "this run may use 2 cores, cpu:0-1"),
    "a GPU that is not there": ('{"sim,policy": cpu:0, learner: gpu:0}', "no NVIDIA GPU is seen here"),
    "a kind that nobody declared": ('{"sim,policy": arm:0, learner: cpu:0}', "hardware that the recipe declares"),
    "a machine that is not there": ('{"sim,policy": n1/cpu:0, learner: cpu:0}', "this run uses one machine"),
    "envs that do not divide": (
        '{"sim,policy": "cpu:0,cpu:1,cpu:0", learner: cpu:0}',
        "env.num_envs=8 does not divide",
    ),
    "policies without work": ("{sim: cpu:0, policy: cpu:0-1*2, learner: cpu:0}", "so 1 would have no work"),
    "drawing on cores": ("{sim: {devices: cpu:0, render: cpu:1}, policy: cpu:0, learner: cpu:0}", "render is a GPU"),
    "drawing without a simulator": (
        "{sim: cpu:0, policy: {devices: cpu:0, render: gpu:0}, learner: cpu:0}",
        "only simulators draw",
    ),
    "a key that is none": ("{sim: {device: cpu:0}, policy: cpu:0, learner: cpu:0}", "'sim' has device; keys: devices"),
    "a GPU to draw on that is not there": (
        "{sim: {devices: cpu:0, render: gpu:3}, policy: cpu:0, learner: cpu:0}",
        "so nothing can be drawn on it",
    ),
}


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr("embodied.run.devices.os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("embodied.run.devices.gpus", lambda *sys: [])


def planned(*arguments):
    return launch.planned(load(["recipe=pointmass_ppo", "env.num_envs=8", *arguments]).config)[1]


@pytest.mark.parametrize("what", BAD)
def test_a_bad_placement_is_refused_with_one_that_works(what, two_cores, tmp_path):
    placement, answer = BAD[what]
    with pytest.raises(ConfigError) as caught:
        planned(f"run.dir={tmp_path}", f"placement={placement}")
    told = str(caught.value)
    assert answer in told
    works = re.search(r"(try|did you mean) placement=('(?P<map>.*?)'|(?P<mode>\w+))", told)
    assert works, told
    planned(f"run.dir={tmp_path}", f"placement={works['map'] or works['mode']}")


def test_pieces_of_a_rollout_need_learners_on_devices_of_their_own(two_cores, tmp_path):
    pieces = f"run.dir={tmp_path}", "pipeline.granularity=4"
    with pytest.raises(ConfigError, match=r"pipeline.granularity=4: .* but with placement=collocated they take turns"):
        planned(*pieces, "placement=collocated")
    planned(*pieces, 'placement={"sim,policy": "cpu:0", learner: "cpu:1"}')


@pytest.mark.parametrize("name", ["arm", "cpu:0", "fake:1", "gpu:0", "arm:0-3"])
def test_hardware_is_declared_by_kind_and_number(name):
    with pytest.raises(ConfigError, match="arm:0 for example"):
        load(["recipe=pointmass_ppo", f"cluster.devices=[{name}]"])
