"""An engine with weights of its own gives the device back for every update, and answers as if it had stayed.

The engine is a stand-in for vLLM that raises where it is used asleep or before its weights are there; in `test_vllm.py`
vLLM itself does the same steps.
"""

import importlib.util

import pytest
from sleeping_vllm import CACHE_BYTES, SleepyLoop, SleepyLoopOnGPU, SleepyVLLM
from talking_runs import Talk, far, told

from embodied.learners.worker import LearnerWorker
from embodied.workflows.rl_loop import EmbodiedLoop
from embodied.workflows.workers import Workers

ITERATIONS = 20
HYBRID = {"sim": "fake:0", "policy,learner": "fake:1"}
COLLOCATED = {"sim": "fake:0", "policy": "fake:1", "learner": "fake:1"}
sleep = SleepyVLLM.sleep


class Sleepy(Talk):
    def __init__(self, folder, *arguments, kind=SleepyLoop, **more):
        usual = (f"run.iterations={ITERATIONS}", "faults.max_restarts=100")
        super().__init__(folder, *usual, *arguments, kind=kind, **more)

    def iterate(self, number):
        if number == ITERATIONS // 2:
            self.weights()  # saving takes the device from the engine, and brings it no new weights
        return super().iterate(number)

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
        rows = told(run.some(ITERATIONS))
        assert not run.moves
        return rows, run.weights(), run.claims


def limit(claims):
    """For the learner, or for the engine, never for both."""
    assert claims["policy-0"] > CACHE_BYTES
    return f"cluster.memory_gb={(max(claims['learner-0'], claims['policy-0']) + 1000) / 1e9}"


@pytest.mark.parametrize("kind", [SleepyLoop, SleepyLoopOnGPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("placement", [COLLOCATED, HYBRID], ids=["collocated", "hybrid"])
def test_an_engine_leaves_for_every_update_and_answers_as_if_it_had_stayed(stays, placement, kind, tmp_path):
    rows, weights, claims = stays
    with Sleepy(tmp_path, limit(claims), placement=placement, kind=kind) as run:
        assert told(run.some(ITERATIONS)) == rows
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


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (make vllm)")
def test_vllm_itself_leaves_for_updates_and_answers_as_if_it_had_stayed(tmp_path):
    options = ["policy.engine=vllm", "policy.preset=tiny", "policy.dtype=float32", "policy.max_length=64"]
    patient, found, memory = ["faults.timeout_s=500", "faults.hang_s=400"], [], []
    for name in ("stays", "leaves"):
        asked = (*options, *patient, *memory)
        with Sleepy(tmp_path / name, *asked, kind=EmbodiedLoop, placement=COLLOCATED, backend="local") as run:
            rows = run.some(3)
            assert all(row["train/logprob_gap"] < 1e-4 for _, row in rows)
            assert run.moves.count(("offload", "policy-0")) == (4 if memory else 0)
            found.append((told(rows), run.weights()))
            assert run.claims["policy-0"] > 2**30  # vLLM's least cache on a CPU
            memory = [f"cluster.memory_gb={(run.claims['policy-0'] + 1000) / 1e9}"]
    assert found[0][0] == found[1][0] and far(found[1][1], found[0][1]) < 1e-6
