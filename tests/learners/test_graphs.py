"""Captured gradient steps (learner.graphs) learn what other steps do; and what an update reads of its device."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import toy
from fake_cuda import WHERE, Card, fetched
from ranks import on_ranks
from torch._subclasses.fake_tensor import FakeTensor

from embodied.algorithms.config import GRPOConfig, PPOConfig
from embodied.core.arrays import host
from embodied.core.errors import ConfigError, Diverged
from embodied.core.types import ActionSpec, BatchEnd, EnvSpec, env_blocks
from embodied.learners.config import LearnerConfig
from embodied.learners.model import Model, PolicyOptimizer
from embodied.learners.update import update_policy, why_not_graphs
from embodied.policies import make_policy
from embodied.policies.config import CNNConfig, MLPConfig
from embodied.runtime.collective import Alone
from embodied.runtime.device_memory import to_device

PPO = {"rollout_decisions": toy.T, "epochs": 2, "minibatch_size": 17, "lr": 1e-2, "max_grad_norm": 0.3}
DEVICE = "cpu"
TOLERANCE = {"cpu": 1e-9, "cuda": 1e-6}  # CUDA's Adam takes learning rates in float32
CAMERA = EnvSpec(ActionSpec(3), state_dim=5, images={"top": (36, 36, 3)}, privileged_dim=2)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def on_devices(request, monkeypatch):
    """On a CPU its stand-in for graphs is tested, on a GPU CUDA's."""
    monkeypatch.setattr(sys.modules[__name__], "DEVICE", request.param)


def data_for(policy, iteration, spec):
    """A rollout; where the env has a camera, with random images and privileged numbers."""
    data = toy.rollout(toy.make(), iteration)
    if not spec.images:
        return data
    r = np.random.default_rng(iteration)
    count = toy.T * toy.N
    obs = data.obs | {"images": {"top": r.integers(0, 256, (count, 36, 36, 3), np.uint8)}}
    obs["privileged"] = r.normal(size=(count, 2))
    found = host(policy.encode({name: obs[name] for name in ("images",)}))
    return replace(data, obs=obs, replay={"estimates": found})


def learner(graphs, collective, policy_config=None, spec=toy.ENV, algo=None, **options):
    """A model and its optimizer."""
    policy = make_policy(policy_config or MLPConfig(hidden=(12, 12), chunk=toy.C, dtype="float64"), spec, 0).to(DEVICE)
    model = Model(policy, LearnerConfig(graphs=graphs, **options))
    return model, PolicyOptimizer(policy, algo or PPOConfig(**PPO), collective)


def learned(graphs, updates=3, rows=None, collective=None, spec=toy.ENV, algo=None, between=lambda *_: None, **options):
    """The weights after some updates, and the numbers of each."""
    algo, collective = algo or PPOConfig(**PPO), collective or Alone()
    model, optimizer = learner(graphs, collective, spec=spec, algo=algo, **options)
    numbers = []
    for iteration in range(updates):
        data = toy.columns(data_for(model.policy, iteration, spec), slice(None) if rows is None else rows)
        share = toy.batch_of(data, algo, model, collective)
        numbers.append(update_policy(model, optimizer, algo, share, 0, BatchEnd(iteration, 2 * updates)))
        between(model, optimizer)
    assert bool(model.graphed) == (graphs == "on")
    return {name: tensor.clone() for name, tensor in model.policy.state_dict().items()}, numbers


def assert_alike(one, other, tolerance=1e-9):
    assert one[0].keys() == other[0].keys()
    for name, tensor in one[0].items():
        torch.testing.assert_close(tensor.double(), other[0][name].double(), atol=tolerance, rtol=0, msg=name)
    for mine, theirs in zip(one[1], other[1], strict=True):
        assert mine == pytest.approx(theirs, abs=tolerance)


CNN = CNNConfig(name="cnn", hidden=(8,), chunk=toy.C, estimate=True, dtype="float64", normalize_observations=True)
UNPADDED = PPOConfig(**PPO | {"minibatch_size": 8})  # so that nothing is rounded differently
MLP = {"hidden": (12,), "chunk": toy.C}
WAYS = {
    "a padded last minibatch": {},
    "small passes": {"micro_batch_size": 4},
    "a falling rate": {"algo": PPOConfig(**PPO, lr_schedule="linear", value_lr=3e-3, weight_decay=0.1)},
    "an early end": {"algo": PPOConfig(**PPO | {"epochs": 4}, target_kl=0.002)},
    "all terms": {"algo": PPOConfig(**PPO, logprob_level="action", dual_clip=3.0, value_clip=0.1, entropy_coef=0.01)},
    "estimates": {"policy_config": CNN, "spec": CAMERA},
    "half precision": {"policy_config": MLPConfig(**MLP, dtype="bfloat16"), "algo": UNPADDED, "tolerance": 1e-6},
    "bf16 products": {"policy_config": MLPConfig(**MLP), "precision": "bf16", "algo": UNPADDED, "tolerance": 1e-6},
}


@pytest.mark.usefixtures("on_devices")
@pytest.mark.parametrize("way", WAYS)
def test_captured_steps_learn_the_same_as_other_steps(way):
    options = dict(WAYS[way])
    tolerance = options.pop("tolerance", TOLERANCE[DEVICE])
    assert_alike(learned("on", **options), learned("off", **options), tolerance)


def test_ranks_with_captured_steps_learn_the_same_as_one_learner():
    """Their shares of a minibatch differ, and one may have none."""
    algo = PPOConfig(**PPO | {"minibatch_size": 11})

    def work(rank, collective):
        block = env_blocks(toy.N, 2)[rank]
        return learned("on", rows=slice(block.start, block.stop), collective=collective, algo=algo)

    found = on_ranks(2, work)
    alone = learned("off", algo=algo)
    assert_alike((found[0][0], []), (alone[0], []))
    assert all(torch.equal(tensor, found[1][0][name]) for name, tensor in found[0][0].items())


@pytest.mark.usefixtures("on_devices")
@pytest.mark.parametrize("change", ["gradients", "optimizer", "off"])
def test_gradient_steps_are_captured_again_after_their_memory_has_moved(change, tmp_path):
    """As after a learner gave up its device, or read a checkpoint; or no more, where that is switched off."""

    def between(model, optimizer):
        if change == "gradients":
            optimizer.forget_gradients()
        elif change == "off":
            model.config = LearnerConfig(graphs="off")
        else:
            optimizer.save(tmp_path)
            optimizer.load(tmp_path)

    assert_alike(learned("on", between=between), learned("off"), TOLERANCE[DEVICE])


@pytest.mark.usefixtures("on_devices")
@pytest.mark.parametrize("graphs", ["on", "off"])
def test_from_the_first_step_on_whose_numbers_are_not_finite_weights_stay(graphs):
    algo = PPOConfig(**PPO | {"minibatch_size": 9})
    model, optimizer = learner(graphs, Alone())
    share = toy.batch_of(toy.rollout(toy.make(), 0), algo, model)
    share.logprobs[share.order(0, 0, 0)[12]] = float("nan")  # of the second minibatch
    with pytest.raises(Diverged, match="in iteration 1, epoch 1"):
        update_policy(model, optimizer, algo, share, 0, BatchEnd(0, 2))
    assert {float(state["step"]) for state in optimizer.adam.state.values()} == {1}
    assert all(torch.isfinite(weight).all() for weight in model.policy.parameters())


def reads_its_numbers(policy):
    score = policy.forward

    def forward(inputs):
        scores = score(inputs)
        return scores if float(scores.values.detach().sum()) < 1e9 else None

    policy.forward = forward


@pytest.mark.usefixtures("on_devices")
def test_steps_that_no_graph_can_hold_are_refused_and_with_graphs_auto_learned_from_as_ever(monkeypatch):
    """What reads a number meanwhile cannot be captured."""
    algo, found = PPOConfig(**PPO), {}
    for graphs in ("on", "auto", "off"):
        model, optimizer = learner(graphs, Alone())
        reads_its_numbers(model.policy)
        share = toy.batch_of(toy.rollout(toy.make(), 0), algo, model)
        with monkeypatch.context() as patched:
            if graphs == "auto":  # as if on a GPU
                patched.setattr("embodied.learners.update.why_not_graphs", lambda *_: "")
            if graphs == "on":
                with pytest.raises(ConfigError, match=r"MLPPolicy cannot be captured.*try learner\.graphs=off"):
                    update_policy(model, optimizer, algo, share, 0, BatchEnd(0, 2))
            else:
                found[graphs] = update_policy(model, optimizer, algo, share, 0, BatchEnd(0, 2))
    assert found["auto"] == found["off"]


def test_graphs_are_refused_where_sizes_or_operations_are_unknown(monkeypatch):
    monkeypatch.setattr("embodied.learners.model.compile_blocks", lambda policy: None)
    with pytest.raises(ConfigError, match=r"learner\.graphs=on: learner\.compile=true hides its operations on a CPU"):
        learned("on", compile=True)
    share = toy.batch_of(toy.rollout(toy.make(), 0), PPOConfig(**PPO), toy.make())
    model, answers = learner("on", Alone())[0], GRPOConfig(name="grpo", logprob_level="episode")
    assert why_not_graphs(model, answers, share).startswith("algo.logprob_level=episode counts answers")
    texts = replace(share, obs=share.obs | {"instruction": np.array(["go"] * len(share))})
    assert why_not_graphs(model, PPOConfig(**PPO), texts) == "MLPPolicy takes texts, which no graph reads"
    assert not why_not_graphs(model, PPOConfig(**PPO), share)
    model.config = LearnerConfig()
    assert why_not_graphs(model, PPOConfig(**PPO), share).startswith("they are for small policies on GPUs")
    model.device = "cuda"
    assert not why_not_graphs(model, PPOConfig(**PPO), share)


class CountedWaits(Card):
    """Counts how often Python waits for the GPU: for a number, or for a copy from or to the host's memory."""

    waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == WHERE:
            self.waits += 1
        if func is torch.ops.aten._to_copy.default and not kwargs.get("non_blocking"):
            there = kwargs.get("device") or args[0].device
            self.waits += (there.type == WHERE) != (args[0].device.type == WHERE)
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_a_batch_and_an_update_wait_as_often_for_their_device_however_many_steps_there_are(monkeypatch):
    """A batch of which a simulator on the GPU made the larger part: rewards and values are read together, and what the
    host adds goes there in two copies."""
    monkeypatch.setattr("torch._fused_adamw_", lambda *_, **__: None)  # torch's has no kernel for `meta`
    monkeypatch.setattr(FakeTensor, "tolist", lambda tensor: fetched(tensor.cpu()).tolist())  # one copy, as on a GPU
    config = MLPConfig(hidden=(8,), chunk=toy.C, normalize_observations=True)
    data, built, waits = toy.rollout(toy.make(), 0), [], []
    made = "actions logprobs rewards values next_values".split()
    for epochs, size in ((1, 24), (2, 8)):
        card = CountedWaits()
        policy = card.take(make_policy(config, toy.ENV, 0))
        with card:
            there = {name: torch.as_tensor(getattr(data, name)).to(WHERE) for name in made}
            there["obs"] = {"state": torch.as_tensor(data.obs["state"]).to(WHERE)}
            model, algo = Model(policy, LearnerConfig()), PPOConfig(**PPO | {"epochs": epochs, "minibatch_size": size})
            card.waits = 0
            share = toy.batch_of(replace(data, **there), algo, model)
            built.append(card.waits)
            card.waits = 0
            update_policy(model, PolicyOptimizer(policy, algo, Alone()), algo, share, 0, BatchEnd(0, 2))
        waits.append(card.waits)
    assert built == [3, 3] and waits == [1, 1]


def test_arrays_that_go_to_a_device_in_one_copy_keep_their_numbers_and_dtypes():
    arrays = {
        "sequences": np.array([0, 2**53, 7]),
        "mask": np.array([[True], [False]]),
        "advantages": np.array([0.1, -1e-300]),
        "logprobs": np.array([[1.1]], np.float32),
        "none": np.zeros((0, 2)),
    }
    found = to_device(arrays, "cpu:0")  # any device but the learner's "cpu"
    for name, array in arrays.items():
        assert torch.equal(found[name], torch.from_numpy(array)) and found[name].dtype == torch.from_numpy(array).dtype
