"""The probe of drawing finds what drivers of data-centre GPUs do wrong, with drawers that do it on purpose."""

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from pydantic import TypeAdapter

from embodied.config.recipe import load
from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.vulkan_driver import ensure_vulkan
from embodied.envs.config import ENV_CONFIGS, EnvConfig
from embodied.placement.topology import GB, Gpu
from embodied.run import devices, launch
from embodied.run.devices import discover, seats_on
from embodied.system import drawing
from embodied.system.drawing import Limits, Result, judge, probe, record, recorded

SOON = Limits(together=0.5)
SEAT = {"EMBODIED_RENDER": "gpu:0", "CUDA_VISIBLE_DEVICES": ""}


def drawn(**kwargs):
    return TypeAdapter(EnvConfig).validate_python({"name": "drawn_env:DrawnEnv", "kwargs": kwargs})


FAULTS = [  # (what the drawer does, what the probe says)
    ({"fault": "abort", "at": 4}, "drawer-0: its process died with SIGABRT, at picture 3"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ({"fault": "again", "at": 5}, "drawer-0 draws the picture before once more (number 4)"),
            ({"fault": "driver"}, "drawer-0: ImportError: Cannot initialize a EGL device display, before it began"),
        )
    ),
]


@pytest.mark.parametrize(("kwargs", "words"), FAULTS)
def test_a_drawer_that_fails_on_the_gpu_is_named_with_the_picture(kwargs, words):
    result = probe(drawn(**kwargs), [SEAT], SOON)
    assert words in result.problem and not result.on_gpus and result.software_s > 0
    assert "env.renderer=cores" in result.ways_out(ENV_CONFIGS["robosuite"]) and result.one_each is None
    assert "env.renderer=warp" in result.ways_out(ENV_CONFIGS["libero"])


def test_a_drawer_that_hangs_costs_its_deadline_and_is_killed(tmp_path):
    pids = tmp_path / "pid"
    result = probe(drawn(fault="hang", at=3, pids=str(pids)), [SEAT], replace(SOON, next=5))
    assert re.fullmatch(
        r"(drawer-0 hangs at picture 2|computing-0 hangs at product \d+): nothing for 5 s", result.problem
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int(pids.read_text()), 0)


def test_a_drawer_whose_parent_died_while_it_started_ends(tmp_path):
    command = [sys.executable, "-m", "embodied.system.probes", "multiply", str(tmp_path), "computing-0"]
    ended = subprocess.run(command, env={**os.environ, "EMBODIED_PARENT": "1"}, capture_output=True, timeout=60)
    assert b"has ended" in ended.stderr and not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_a_gpu_that_draws_for_one_process_alone_offers_this_as_a_way_out(tmp_path):
    result = probe(drawn(fault="abort", at=2, lone=str(tmp_path / "lock")), [SEAT] * 2, SOON)
    assert "SIGABRT" in result.problem and result.one_each == ""
    assert "one drawing process per GPU works" in result.ways_out(ENV_CONFIGS["libero"])


@pytest.mark.slow
def test_a_slow_gpu_and_a_driver_that_draws_by_software_are_said():
    slow = probe(drawn(fault="slow", at=1), [SEAT], SOON)
    assert slow.on_gpus and slow.picture_s >= 0.05 and "software is faster" in slow.describe()
    software = probe(drawn(drawn_by="llvmpipe (LLVM 15)"), [SEAT], SOON)
    assert not software.problem and not software.on_gpus and "although there is a GPU" in software.describe()


SCENE = np.random.default_rng(0).integers(0, 256, (8, 8), np.uint8)
EXPECTED = np.stack([np.roll(np.pad(SCENE, 8), 2 * step).ravel() for step in range(6)])  # a thing that moves


@pytest.mark.parametrize(
    ("picture", "words"),
    [
        (EXPECTED[3], ""),
        (np.clip(EXPECTED[3].astype(int) + 3, 0, 255).astype(np.uint8), ""),  # other rounding
        (EXPECTED[2], "draws the picture before once more"),
        (EXPECTED[1], "grey levels from software's"),
        (np.zeros_like(EXPECTED[3]), "blank"),
        (np.full_like(EXPECTED[3], 99), "blank"),
        (255 - EXPECTED[3], "wrong picture"),
        (EXPECTED[3][:-3], "numbers"),
    ],
)
def test_a_picture_is_compared_with_softwares(picture, words):
    fault = judge(picture, EXPECTED[:3], EXPECTED)[1]
    assert words in fault and bool(words) == bool(fault)


def test_a_small_thing_that_is_late_is_noticed():
    faint = EXPECTED // 32  # below the limit for wrong pictures
    assert "another time, -2 decisions away" in judge(faint[1], faint[:3], faint)[1]
    assert judge(faint[3], faint[:3], faint)[1] == ""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    with suppress(EmbodiedError):
        ensure_vulkan()  # our own driver is in the user's cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(drawing, "DRIVER", tmp_path / "version")
    return tmp_path


def test_results_are_remembered_for_the_driver_and_for_as_many_drawers(cache):
    env, seats = drawn(), lambda count: [SEAT] * count
    assert recorded(env, seats(1)) is None
    record(env, seats(4), Result(4, 1, "a card"))
    assert recorded(env, seats(2)).on_gpus and recorded(env, seats(8)) is None
    record(env, seats(4), Result(4, 1, problem="drawer-1 hangs"))
    assert recorded(env, seats(8)).problem and recorded(env, seats(2)) is None
    (cache / "version").write_text("another driver")
    assert recorded(env, seats(8)) is None


def test_drawing_results_expire_after_a_week_and_a_damaged_file_is_ignored(cache):
    env = drawn()
    record(env, [SEAT], Result(1, 1))
    path = drawing.place_of(env, [SEAT])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"at": 1.0}))
    assert recorded(env, [SEAT]) is None
    path.write_text("{")
    assert recorded(env, [SEAT]) is None


CARDS = [Gpu(i, "H100", 80 * GB, card=i, uuid=f"GPU-{i}a") for i in range(2)]
PROBLEM = Result(2, 2, "NVIDIA H100", 0.002, 0.02, problem="drawer-1: its process died with SIGABRT, at picture 2")


@pytest.fixture
def two_gpus(cache, monkeypatch):
    monkeypatch.setattr(devices, "gpus", lambda sys=None: CARDS)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def planned(result=None, *words, dry=False, device="cpu"):
    """The plan of a run with pictures on two GPUs, after a probe that found this."""
    arguments = ["recipe=maniskill_ppo_rgb", f"learner.device={device}", *words]
    if result:
        config, plan = launch.planned(load([*arguments, "env.renderer=gpu"]).config, dry=True)
        record(config.env, devices.seats_of(plan), result)
    return launch.planned(load(arguments).config, dry=dry)


def test_a_run_draws_where_the_probe_says_and_its_first_lines_say_why(two_gpus):
    config, plan = planned(replace(PROBLEM, problem=""))
    assert len(devices.seats_of(plan)) == plan.count("sim") and config.env.renderer == "auto"
    lines = " ".join(" ".join(launch.drawing_lines(config, plan)).split())
    assert "2 ms for a decision's images, 20 by software" in lines
    config, plan = planned(PROBLEM)
    assert config.env.renderer == "cores" and not devices.seats_of(plan) and plan.count("sim")
    assert "SIGABRT" in plan.describe()[0] and "env.renderer=gpu" in plan.describe()[0]
    config, plan = planned(replace(PROBLEM, problem="", by="llvmpipe"))
    assert config.env.renderer == "cores" and "although there is a GPU" in plan.describe()[0]


def test_without_software_to_compare_with_a_run_draws_on_gpus_and_says_so(two_gpus):
    config, plan = planned(replace(PROBLEM, software_s=0.0, problem="there is nothing to compare with"))
    assert devices.seats_of(plan) and "nothing to compare with" in " ".join(launch.drawing_lines(config, plan))


def test_a_map_that_draws_where_the_probe_failed_is_refused_with_the_ways_out(two_gpus):
    where = """placement={"sim,policy": {devices: "cpu:0,cpu:1", render: "gpu:0-1"}, learner: "cpu:0"}"""
    with pytest.raises(ConfigError, match=r"SIGABRT.*env.renderer=cores.*env.renderer=gpu"):
        planned(PROBLEM, where)
    with pytest.raises(ConfigError, match=r"sim draws on gpu:0, but env.renderer=cores"):
        planned(None, where, "env.renderer=cores")


def test_many_rows_with_images_are_simulated_on_gpus_that_draw_while_they_compute(two_gpus, monkeypatch):
    """Fewer rows, and GPUs that fail the probe or were not tried, mean physics on cores."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)

    def on_gpus(result, *words, rows=128):
        return planned(result, f"env.num_envs={rows}", *words, dry=True, device="cuda")

    config, plan = on_gpus(None)
    assert config.env.backend != "cuda" and "a run tries first" in plan.describe()[0]
    config, plan = on_gpus(PROBLEM)
    assert config.env.backend != "cuda" and "physics on cores, since" in plan.describe()[0]
    works = replace(PROBLEM, problem="")
    config, plan = on_gpus(works)
    assert config.env.backend == "cuda" and {host.device for host in plan.hosts} == {"gpu:0", "gpu:1"}
    assert "physics on GPUs, since 2 processes on 2 GPUs draw" in plan.describe()[0]
    assert on_gpus(works, rows=64)[0].env.backend != "cuda"
    for words in ("env.backend=cpu", "env.renderer=cores"):
        assert on_gpus(None, words)[0].env.backend != "cuda"


def test_only_a_plan_that_draws_on_gpus_asks(cache, monkeypatch):
    monkeypatch.setattr(drawing, "probe", lambda *_: pytest.fail("probed"))
    monkeypatch.setattr(devices, "gpus", lambda sys=None: [])
    launch.planned(load(["recipe=maniskill_ppo_rgb"]).config)
    monkeypatch.setattr(devices, "gpus", lambda sys=None: CARDS)
    launch.planned(load(["recipe=maniskill_ppo", "learner.device=cpu"]).config)
    planned(dry=True)


def real(**words):
    return TypeAdapter(EnvConfig).validate_python(words)


SIMULATORS = [
    {"name": "libero", "cameras": ["agentview", "wrist"]},
    {"name": "maniskill", "task": "PushCube-v1", "cameras": ["base_camera"]},
]


@pytest.mark.slow
@pytest.mark.parametrize("words", SIMULATORS)
def test_simulators_draw_by_software_as_software_does(words):
    result = probe(real(**words), [SEAT], Limits(together=2))
    assert not result.problem and result.by_software and result.off < 1, result


@pytest.mark.gpu
@pytest.mark.parametrize("words", SIMULATORS)
def test_simulators_that_draw_on_the_gpu_are_probed_within_the_deadlines(words):
    result = probe(real(**words), seats_on(discover().nodes[0].gpus, 2))
    assert result.software_s > 0 and (result.problem or result.by), result
    assert result.problem or result.off < drawing.MOST_OFF
