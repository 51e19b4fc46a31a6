"""An engine with weights of its own gives the device back for every update, and answers as if it had stayed.

The engine is a stand-in for vLLM that raises where it is used asleep or before its weights are there; in `test_vllm.py`
vLLM itself does the same steps.
"""

import importlib.util

import psutil
import pytest
from sleeping_vllm import CACHE_BYTES, SleepyLoop, SleepyLoopOnGPU, SleepyVLLM
from talking_runs import Talk, far, told

from embodied.learners.learner_worker import LearnerWorker
from embodied.workflows.launched_workers import Workers
from embodied.workflows.rl_loop import EmbodiedLoop

ITERATIONS = 3
HYBRID = {"sim": "fake:0", "policy,learner": "fake:1"}
COLLOCATED = {"sim": "fake:0", "policy": "fake:1", "learner": "fake:1"}
sleep = SleepyVLLM.sleep


class Sleepy(Talk):
    def __init__(self, folder, *arguments, kind=SleepyLoop, **more):
        super().__init__(folder, "faults.max_restarts=100", *arguments, kind=kind, **more)

    def told(self):
        """What its episodes come to. Saving takes the device from the engine, and brings it no new weights."""
        rows = self.some(1)
        self.weights()
        return told(rows + self.play(1, ITERATIONS))

    @property
    def moves(self):
        return [(move.verb, move.worker) for move in self.loop.device_sharing.moves]

    @property
    def claims(self):
        return {name: claim.num_bytes for name, claim in self.loop.device_sharing.coordinator.claims.items()}


@pytest.fixture(scope="module")
def stays(tmp_path_factory):
    """What a run comes to whose engine never leaves, and the bytes that its workers need."""
    with Sleepy(tmp_path_factory.mktemp("stays"), placement=COLLOCATED) as run:
        rows = run.told()
        assert not run.moves
        return rows, run.weights(), run.claims


def limit(claims):
    """For the learner, or for the engine, never for both."""
    assert claims["policy-0"] > CACHE_BYTES
    return f"cluster.memory_gb={(max(claims['learner-0'], claims['policy-0']) + 1000) / 1e9}"


@pytest.mark.parametrize(
    ("placement", "kind"), [(COLLOCATED, SleepyLoopOnGPU), (HYBRID, SleepyLoop)], ids=["gpu", "cpu"]
)
def test_an_engine_leaves_for_every_update_and_answers_as_if_it_had_stayed(stays, placement, kind, tmp_path):
    rows, weights, claims = stays
    with Sleepy(tmp_path, limit(claims), placement=placement, kind=kind) as run:
        assert run.told() == rows
        assert far(run.weights(), weights) < 1e-6
        # For every update, for the first publishing, and for saving twice
        assert run.moves.count(("offload", "policy-0")) == ITERATIONS + 3
        assert run.moves.count(("onload", "policy-0")) == ITERATIONS + 2


def test_on_a_gpu_learners_are_built_where_an_engine_was_that_sleeps(monkeypatch, tmp_path):
    made, build, asleep = [], LearnerWorker.build, []
    monkeypatch.setattr(SleepyVLLM, "sleep", lambda engine, level: made.append(engine) or sleep(engine, level))
    monkeypatch.setattr(LearnerWorker, "build", lambda *args: asleep.append(made[0].asleep.copy()) or build(*args))
    monkeypatch.setattr(Workers, "_share_gpus", True)
    with Sleepy(tmp_path, placement=COLLOCATED, kind=SleepyLoopOnGPU) as run:
        assert asleep == [{"weights", "kv_cache"}]
        run.iterate(0)


needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (make vllm)")
VLLM = ("policy.engine=vllm", "policy.preset=tiny", "policy.dtype=float32", "policy.max_length=64")
VLLM = (*VLLM, "faults.timeout_s=500", "faults.hang_s=400")
DIVIDED = {"sim": "fake:0", "policy": "fake:1-2", "learner": "fake:1"}


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("parts", [1, 2])
def test_vllm_itself_leaves_for_updates_and_answers_as_if_it_had_stayed(parts, tmp_path):
    found, memory, placement = [], [], DIVIDED if parts > 1 else COLLOCATED
    for name in ("stays", "leaves"):
        asked = (*VLLM, f"policy.tensor_parallel={parts}", *memory)
        with Sleepy(tmp_path / name, *asked, kind=EmbodiedLoop, placement=placement, backend="local") as run:
            rows = run.some(3)
            assert all(row["train/logprob_gap"] < 1e-4 for _, row in rows)
            assert run.moves.count(("offload", "policy-0")) == (4 if memory else 0)
            found.append((told(rows), run.weights()))
            assert run.claims["policy-0"] > 2**30  # vLLM's least cache on a CPU
            memory = [f"cluster.memory_gb={(run.claims['policy-0'] + 1000) / 1e9}"]
    assert found[0][0] == found[1][0] and far(found[1][1], found[0][1]) < 1e-6


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("victim", ["part", "worker"])
def test_a_run_survives_the_death_of_a_part_of_a_divided_vllm_and_leaves_no_part_behind(victim, tmp_path):
    asked = (*VLLM, "policy.tensor_parallel=2")
    with Sleepy(tmp_path, *asked, kind=EmbodiedLoop, placement=DIVIDED, backend="local") as run:
        run.some(1)
        worker = psutil.Process(run.pid("policy-0"))
        parts = [part for part in worker.children() if "VLLM::Worker" in "".join(part.cmdline())]
        assert len(parts) == 2
        (parts[1] if victim == "part" else worker).kill()
        run.play(1, 2)
        assert not [one for one in parts if one.is_running()]
    (line,) = (line for line in run.lines if "policy-0 is started again" in line)
    assert ("one of the 2 processes in which vLLM runs the model has died" in line) == (victim == "part")
