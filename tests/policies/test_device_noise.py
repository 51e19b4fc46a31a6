"""The CPU stands in for the device: what is computed there is computed from the same integers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from embodied.core import rng
from embodied.core.errors import Unusable
from embodied.core.types import ActionSpec, ActRequest, EnvSpec, SamplingRule
from embodied.policies import make_policy, policy_worker
from embodied.policies.config import MLPConfig
from embodied.policies.policy_worker import PolicyWorker
from embodied.runtime import Timers

EPISODES, DECISIONS = np.array([0, 4, 2**40 + 9, 2**33, 7]), np.array([0, 3, 2**31, 7, 12345])


devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@devices
def test_a_device_draws_the_uniform_numbers_of_the_host_bit_for_bit_and_normal_ones_nearly(device):
    for seed, width in ((0, 1), (5, 7), (2**40 + 3, 8)):
        for kind in ("uniform", "normal"):
            arguments = (seed, "act/train", EPISODES, DECISIONS, width)
            theirs = getattr(rng, kind)(*arguments)
            ours = policy_worker.draw_noise(kind, *arguments, device).cpu().numpy()
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=0 if kind == "uniform" else 1e-13)
            assert ours.shape == (len(EPISODES), width)


def test_philox_of_tensors_gives_the_published_vectors():
    counters = tuple(torch.tensor([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]).split(1))
    found = [int(word) for word in policy_worker.philox(counters, (0xA4093822, 0x299F31D0))]
    assert found == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


class CountedReads(TorchDispatchMode):
    """Counts the numbers that Python reads from tensors: on a GPU each waits for all work before it."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def acting(device="cpu", **options):
    worker = PolicyWorker(MLPConfig(dtype="float64"), seed=3, device=device, **options)
    worker.timers = Timers()
    spec = EnvSpec(ActionSpec(2), state_dim=4, max_episode_steps=9)
    worker.build(spec)
    worker.policy = make_policy(worker.config, spec, 3).eval().to(device)
    worker.weights.version = 0
    return worker


def test_a_policy_on_a_device_reads_one_number_a_decision_and_decides_as_with_the_noise_of_the_host():
    worker = acting()
    obs = {"state": torch.arange(20.0, dtype=torch.float64).view(5, 4) / 20}
    request = ActRequest("sim-0/0#1", 0, obs, EPISODES, DECISIONS)
    by_host = worker._act({0: request}, SamplingRule())[0]
    worker.noise_device = "cpu"
    with CountedReads() as reads:
        by_device = worker._act({0: request}, SamplingRule())[0]
    torch.testing.assert_close(by_device.actions, by_host.actions, rtol=0, atol=1e-13)
    assert reads.count == 1


def reads_its_actions(policy):
    act = policy.act

    def reading(*arguments):
        output = act(*arguments)
        return output if float(output.values.sum()) < 1e9 else None

    policy.act = reading


@devices
@pytest.mark.parametrize("reads", [False, True])
def test_captured_acting_decides_the_same_also_where_the_capture_fails(device, reads):
    """From the second request of a shape on; weights that change are seen, and those that have moved."""
    plain, captured = acting(device), acting(device, graphs="auto")
    rng, arrays = np.random.default_rng(0), (torch.tensor(EPISODES), torch.tensor(DECISIONS))
    for decision in range(8):
        states, weights = torch.tensor(rng.normal(size=(5, 4))), torch.tensor(rng.normal(size=256))
        found = []
        for chosen in (plain, captured):
            chosen.noise_device = device
            if reads and not decision:
                reads_its_actions(chosen.policy)
            bias = chosen.policy.actor[0].bias
            bias.data = (bias.data.clone() if decision == 5 else bias.data).copy_(weights[: len(bias)])
            numbers = (arrays[0].to(device), arrays[1].to(device) + decision)
            request = ActRequest("sim-0/0#1", 0, {"state": states.to(device)}, *numbers)
            found.append(chosen._act({0: request}, SamplingRule())[0])
        for name, wanted in vars(found[0]).items():
            if name != "replay":
                torch.testing.assert_close(getattr(found[1], name), wanted, rtol=0, atol=0)
    kept = [type(graph) for graph in captured.captured_graphs.graphs.values()]
    assert kept == [bool if reads else tuple] * 2


def test_answers_on_a_device_are_checked_when_their_rollout_ends_and_those_to_nan_are_not_the_policys_fault():
    worker = acting()
    obs = {"state": torch.zeros(5, 4, dtype=torch.float64)}
    obs["state"][1] = torch.nan
    request = ActRequest("sim-0/0#1", 0, obs, EPISODES, DECISIONS, checked_later=True)
    last = replace(request, value_only=True)
    with CountedReads() as reads:
        assert list(worker._answers([request], 0, SamplingRule()))
    assert reads.count == 0
    assert list(worker._answers([last], 0, SamplingRule()))
    with torch.no_grad():
        worker.policy.actor[-1].bias[:] = torch.inf
    assert list(worker._answers([request], 0, SamplingRule()))
    with pytest.raises(
        Unusable, match=r"the policy's actions are NaN or infinite for rows \[0, 2, 3, 4\] of a rollout"
    ):
        list(worker._answers([last], 0, SamplingRule()))
