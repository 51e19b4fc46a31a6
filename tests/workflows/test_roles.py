"""A role of the user's own is launched, phased and supervised as ours are; what is declared wrongly is refused."""

from dataclasses import replace

import numpy as np
import pytest
import stepped

from embodied.core.errors import ConfigError
from embodied.envs.sim_worker import SimWorker
from embodied.policies.policy_worker import PolicyWorker
from embodied.workflows import Role, check_roles
from embodied.workflows.rl_loop import LEARNER, POLICY, SIM, EmbodiedLoop

ARGUMENTS = (
    "recipe=pointmass_ppo env.num_envs=8 env.dtype=float64 policy.dtype=float64 policy.hidden=[8,8] "
    "algo.rollout_decisions=8 algo.minibatch_size=32 run.env_steps=null run.iterations=2 "
    "faults.timeout_s=240 faults.hang_s=20"
).split()


class RelayingLoop(EmbodiedLoop):
    roles = (*EmbodiedLoop.roles, Role("reward", "relays:Unchanged", relays=True))


class StreamingLoop(EmbodiedLoop):
    roles = (
        *EmbodiedLoop.roles,
        Role("reward", "relays:Unchanged", relays=True, streams=True),
        Role("second", "relays:Unchanged", relays=True, streams=True),
    )


ONE_OF_EACH = {"sim": "fake:0", "policy": "fake:1", "learner": "fake:2", "reward": "fake:3"}
SEVERAL = {"sim": "fake:0-1", "policy": "fake:2", "learner": "fake:3-5", "reward": "fake:6-7", "second": "fake:8-11"}


def learned(folder, program, *words, places=ONE_OF_EACH):
    """The weights after two iterations, the loop, the workers that hold devices, and the last iteration's numbers."""
    roles = [role.name for role in program.roles]
    used = {role: devices for role, devices in places.items() if role in roles}
    folder.mkdir()
    with stepped.Run(folder, *ARGUMENTS, *words, kind=program, placement=used) as run:
        numbers = run.train()[-1]
        return run.weights(), run.loop, set(run.loop.device_sharing.coordinator.claims), numbers


@pytest.mark.parametrize(("pieces", "parts"), [("null", 4), (3, 12)])
def test_parts_of_rollouts_stream_through_roles_and_are_learned_from_as_if_they_had_come_straight(
    pieces, parts, tmp_path
):
    """Eight decisions of two sims' rows, which belong to two of three learners each."""
    plain, *_ = learned(tmp_path / "plain", EmbodiedLoop, places=SEVERAL)
    words = [f"pipeline.granularity={pieces}"]
    streamed, *_, numbers = learned(tmp_path / "streamed", StreamingLoop, *words, places=SEVERAL)
    assert all(np.array_equal(plain[name], streamed[name]) for name in plain)
    assert numbers["relay/parts"] == parts


def test_parts_of_a_sim_that_died_stay_out_of_the_rollouts_that_stream(tmp_path):
    words = [*stepped.PPO, "pipeline.granularity=4"]
    with stepped.Run(tmp_path, *words, kind=StreamingLoop, placement=SEVERAL, backend="local") as run:
        run.iterate(0)
        stepped.strike(run, "rollout", "sim-0")
        _, row = run.iterate(1)
        _, after = run.iterate(2)
    assert row["faults/restarts"] == 1 and row["relay/parts"] >= 16
    assert [each["faults/lost_decisions"] for each in (row, after)] == [0, 0], "half of a rollout is collected again"
    assert after["relay/parts"] == 16 and after["faults/restarts"] == 0


def test_rollouts_passed_unchanged_through_a_role_teach_the_same_as_without_the_role(tmp_path):
    plain, *_ = learned(tmp_path / "plain", EmbodiedLoop)
    relayed, loop, claims, _ = learned(tmp_path / "relayed", RelayingLoop)
    assert all(np.array_equal(plain[name], relayed[name]) for name in plain)
    assert len(loop.collector.relays.worker_groups) == 1 and "reward-0" in claims
    assert [group.role for group in loop.groups] == ["sim", "policy", "learner", "reward"]


class CountingSim(SimWorker):
    def play(self, *args, **kwargs):
        self.collected = getattr(self, "collected", 0) + 1
        return super().play(*args, **kwargs)

    def count(self):
        return self.collected


class CountingPolicy(PolicyWorker):
    def count(self):
        return "of one's own"


def test_a_program_may_have_sims_and_policies_of_its_own(tmp_path):
    class CountedLoop(EmbodiedLoop):
        roles = (
            replace(SIM, worker=f"{__name__}:CountingSim"),
            replace(POLICY, worker=f"{__name__}:CountingPolicy"),
            LEARNER,
        )

    places = {"sim": "fake:0", "policy": "fake:1", "learner": "fake:2"}
    with stepped.Run(tmp_path, *ARGUMENTS, kind=CountedLoop, placement=places) as run:
        run.iterate(0)
        assert run.loop.workers.groups["sim"].count().wait() == [1]
        assert run.loop.workers.groups["policy"].count().wait() == ["of one's own"]


@pytest.mark.parametrize(
    ("roles", "told"),
    [
        ((SIM, SIM), "names of their own: sim, sim"),
        ((SIM, LEARNER), "sim sends to policy; roles: sim, learner"),
        (
            (POLICY, LEARNER, Role("reward", "a.b:C", beside="sim")),
            "reward is beside sim; roles: policy, learner, reward",
        ),
    ],
)
def test_roles_that_do_not_fit_together_are_refused(roles, told):
    with pytest.raises(ConfigError, match=told):
        check_roles(roles)


@pytest.mark.parametrize(("name", "worker"), [("my reward", "a.b:C"), ("reward", "a.b.C")])
def test_a_role_that_cannot_be_launched_is_refused(name, worker):
    with pytest.raises(ValueError, match="role"):
        Role(name, worker)


@pytest.mark.parametrize(
    ("program", "beside", "reason"),
    [
        (RelayingLoop, {}, "reward workers take whole batches"),
        (StreamingLoop, {"reward": "fake:0", "second": "fake:4"}, "reward and second workers share devices with sim"),
    ],
)
def test_pieces_of_rollouts_are_not_handed_to_a_role_that_takes_all_together(program, beside, reason, tmp_path):
    places = {**ONE_OF_EACH, **beside}
    with pytest.raises(ConfigError, match=f"granularity=4 sends parts of rollouts, but {reason}"):
        with stepped.Run(tmp_path, *ARGUMENTS, "pipeline.granularity=4", kind=program, placement=places):
            pass
