"""Options that change how the learner computes, not what it learns."""

import sys
from types import ModuleType

import pytest
import torch
import toy
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file

from embodied.algorithms.config import GRPOConfig, PPOConfig
from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.types import BatchEnd
from embodied.learners.config import LearnerConfig
from embodied.learners.learner_worker import LearnerWorker
from embodied.learners.model import Model, PolicyOptimizer, is_sharded, join_rows
from embodied.learners.update import update_policy
from embodied.policies.networks import RandomPolicy
from embodied.policies.policy_folder import read_blobs, read_weights
from embodied.runtime import Cluster, HostPlan, Timers
from embodied.runtime.collective import Alone
from embodied.runtime.device_memory import Offloader, num_bytes
from embodied.runtime.published_weights import blob_of, tensor_of
from embodied.runtime.weights import WeightReader

PPO = PPOConfig(rollout_decisions=toy.T, epochs=2, minibatch_size=9, lr=1e-2)


def trained(dtype="float64", iterations=2, algo=PPO, before=lambda policy: None, **options):
    """A policy after some updates, its optimizer, and the numbers of the last one. The data is always the same."""
    actor, policy = toy.make(), toy.make(dtype=dtype)
    policy.load_weights({name: tensor.numpy() for name, tensor in actor.state_dict().items()})
    before(policy)
    model = Model(policy, LearnerConfig(**options))
    optimizer = PolicyOptimizer(policy, algo, Alone())
    for iteration in range(iterations):
        data = toy.rollout(actor, iteration)
        share = toy.batch_of(data, algo, model)
        numbers = update_policy(model, optimizer, algo, share, 0, BatchEnd(iteration, iterations))
    return policy, optimizer, numbers


@torch.no_grad()
def largest_difference(ours, theirs):
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(ours.parameters(), theirs.parameters()))


@pytest.fixture(scope="module")
def plain():
    return trained()


@pytest.mark.parametrize("size", [1, 4, 9, 1000])
def test_gradients_of_micro_batches_add_up_to_that_of_the_minibatch(plain, size):
    policy, _, numbers = trained(micro_batch_size=size)
    assert largest_difference(policy, plain[0]) < 1e-9
    assert numbers == pytest.approx(plain[2], abs=1e-9)


@pytest.mark.parametrize("which", [True, "half", "language", "auto"])
def test_computing_activations_again_changes_nothing(plain, which):
    policy, _, numbers = trained(checkpoint_activations=which)
    assert largest_difference(policy, plain[0]) == 0 and numbers == plain[2]


def test_activations_are_really_computed_again():
    calls = []
    policy = toy.make()
    policy.actor[0].register_forward_hook(lambda *_: calls.append(1))
    Model(policy, LearnerConfig(checkpoint_activations=True))
    inputs = {"obs": {"state": torch.zeros(2, 5, dtype=torch.float64)}, "actions": torch.zeros(2, toy.C, 3)}
    policy(inputs).logprobs.sum().backward()
    assert len(calls) == 2


def test_a_policy_that_names_no_blocks_cannot_compute_them_again():
    policy = RandomPolicy(None, toy.ENV)
    policy.weight = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigError, match="RandomPolicy names no blocks"):
        Model(policy, LearnerConfig(checkpoint_activations=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.*:DeprecationWarning")  # of torch's own
@pytest.mark.parametrize("again", [False, True])
def test_a_compiled_policy_learns_the_same(plain, again):
    policy, _, numbers = trained(compile=True, checkpoint_activations=again, micro_batch_size=4)
    assert largest_difference(policy, plain[0]) < 1e-9
    assert numbers == pytest.approx(plain[2], abs=1e-9)


def test_bf16_products_learn_nearly_the_same_with_full_weights():
    full, _, exact = trained("float32", iterations=1)
    policy, _, numbers = trained("float32", iterations=1, precision="bf16")
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert exact["train/logprob_gap"] < 1e-4 < numbers["train/logprob_gap"] < 0.1  # the data was made in float64
    assert 0 < largest_difference(policy, full) < 0.1
    assert numbers["train/value_loss"] == pytest.approx(exact["train/value_loss"], rel=0.05)


def test_bfloat16_weights_collect_steps_that_are_too_small_for_them():
    """A weight of 1 in bfloat16 does not see a step of 1e-4; its float32 copy adds them up."""
    algo = PPO.model_copy(update={"lr": 1e-4, "epochs": 1, "minibatch_size": toy.T * toy.N})

    def ones(policy):
        with torch.no_grad():
            for p in policy.critic.parameters():
                p.fill_(1.0)

    policy, optimizer, _ = trained("bfloat16", 60, algo, ones, micro_batch_size=5)
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}
    assert {master.dtype for master in optimizer.masters} == {torch.float32}
    moved = sum(int((p != 1).sum()) for p in policy.critic.parameters())
    assert moved > 100
    for p, master in zip(optimizer.params, optimizer.masters, strict=True):
        assert torch.equal(p, master.bfloat16())


def test_an_optimizer_of_bfloat16_weights_comes_back_with_its_float32_copies(tmp_path):
    policy, optimizer, _ = trained("bfloat16")
    optimizer.save(tmp_path)
    policy.save_pretrained(tmp_path)
    twin = toy.make(seed=9, dtype="bfloat16")
    twin.load_weights(read_weights(tmp_path))
    assert largest_difference(policy, twin) == 0
    restored = PolicyOptimizer(twin, PPO, Alone())
    restored.load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(optimizer.masters, restored.masters, strict=True))
    assert not all(torch.equal(m, m.bfloat16().float()) for m in restored.masters)


@pytest.mark.parametrize("kept", [0, 5])
def test_an_optimizers_file_without_some_of_its_tensors_is_refused_by_name(tmp_path, kept):
    policy, optimizer, _ = trained()
    optimizer.save(tmp_path)
    stored = load_file(tmp_path / "optimizer.safetensors")
    save_file(dict(sorted(stored.items())[:kept]), tmp_path / "optimizer.safetensors")
    told = rf"optimizer\.safetensors lacks {len(stored) - kept} of the optimizer's {len(stored)} tensors"
    with pytest.raises(CheckpointError, match=told):
        PolicyOptimizer(policy, PPO, Alone()).load(tmp_path)


def test_an_optimizer_that_has_not_stepped_yet_comes_back(tmp_path):
    PolicyOptimizer(toy.make(), PPO, Alone()).save(tmp_path)
    PolicyOptimizer(toy.make(), PPO, Alone()).load(tmp_path)


def test_an_optimizer_saved_from_shards_can_be_offloaded(tmp_path):
    _, optimizer, _ = trained()
    optimizer.sharded = True  # so that what is stored is gathered, here from this rank alone
    optimizer.save(tmp_path)
    held, freed = num_bytes(optimizer.tensors()), Offloader().offload(optimizer.tensors())
    assert freed == held


def test_frozen_weights_stay_and_cost_no_optimizer_state():
    def freeze(policy):
        policy.actor.requires_grad_(False)

    policy, optimizer, _ = trained(before=freeze)
    start = toy.make()
    assert all(torch.equal(a, b) for a, b in zip(policy.actor.parameters(), start.actor.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(policy.critic.parameters(), start.critic.parameters()))
    assert not any(name.startswith("actor") for name in optimizer.names)


def test_the_optimizer_and_the_reference_leave_the_device_with_the_learner_and_come_back():
    algo = GRPOConfig(name="grpo", groups=2, group_size=2, kl_coef=0.1, minibatch_size=4, lr=1e-2)
    worker = LearnerWorker(toy.make().config, algo, LearnerConfig(), 0, None)
    worker.rank, worker.world_size, worker.timers = 0, 1, Timers()
    worker.build(toy.ENV, "0" * 16, snapshot=False)
    weights, frozen = dict(worker.policy.named_parameters()), dict(worker.reference.policy.named_parameters())
    before = {name: tensor.detach().clone() for name, tensor in frozen.items()}
    size = sum(tensor.nbytes for tensor in before.values())
    assert worker.needs().num_bytes >= 5 * size  # weights, gradients and two moments, reference
    with torch.no_grad():
        for tensor in weights.values():
            tensor.add_(1.0)
    moments = {name: tensor.add_(2.0) for name, tensor in worker.optimizer.state_tensors()}
    worker.offload()
    moved = (*weights.values(), *frozen.values(), *moments.values())
    assert not any(tensor.untyped_storage().nbytes() for tensor in moved)
    worker.onload()
    assert moments and all((tensor == 2.0).all() for tensor in moments.values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in frozen.items())
    assert all(torch.equal(tensor, before[name] + 1.0) for name, tensor in weights.items())
    worker.close()


def test_weights_that_are_loaded_are_published_with_the_frozen_ones(tmp_path):
    worker = LearnerWorker(toy.make().config, PPO, LearnerConfig(), 0, None)
    worker.rank, worker.world_size, worker.timers = 0, 1, Timers()
    worker.build(toy.ENV, "0" * 16, snapshot=True)
    worker.moving -= {"actor.0.weight"}  # as if it were frozen
    worker.publish(0)
    assert "actor.0.weight" not in worker.publish(1).changed
    worker.save(tmp_path)
    worker.load(tmp_path)
    assert {*worker.publish(2).changed} == {*worker.policy.state_dict()} > {*worker.publish(3).changed}
    worker.close()


def test_a_save_leaves_weights_that_others_may_be_reading_as_they_are(tmp_path):
    algo = PPOConfig(rollout_decisions=toy.T, average=3)
    worker = LearnerWorker(toy.make().config, algo, LearnerConfig(), 0, None)
    worker.rank, worker.world_size, worker.timers = 0, 1, Timers()
    worker.build(toy.ENV, "0" * 16, snapshot=False)
    first = {name: tensor.clone() for name, tensor in worker.policy.named_parameters()}
    worker.optimizer.add_to_mean(1.0)
    with torch.no_grad():
        for master in worker.optimizer.masters:
            master.add_(1.0)
    save, seen = worker.policy.save_pretrained, []

    def look(folder, tensors, specs):
        seen.extend((worker.store.live[name] - tensor).min() for name, tensor in first.items())
        save(folder, tensors, specs)

    worker.policy.save_pretrained = look
    worker.save(tmp_path)
    assert len(seen) == 2 * len(first) and min(seen) > 0.9  # while either folder is written
    mean = read_weights(tmp_path / "average")
    assert all(torch.equal(torch.from_numpy(mean[name]), tensor) for name, tensor in first.items())
    worker.close()


def test_an_offloaded_learner_sends_its_weights():
    worker = LearnerWorker(toy.make().config, PPO, LearnerConfig(), 0, None)
    worker.rank, worker.world_size, worker.timers = 0, 1, Timers()
    worker.build(toy.ENV, "0" * 16, snapshot=False)
    published, before = worker.publish(0), {n: t.clone() for n, t in worker.policy.state_dict().items()}
    worker.offload()
    with Cluster("inline", [HostPlan("only", ("a",))], timeout_s=300) as cluster:
        channel = cluster.channel("weights", capacity=None)
        worker.store.send((channel,), whole=True)
        blobs = WeightReader().load(published, "buckets", channel)
    assert blobs.keys() == before.keys()
    assert all(torch.equal(tensor_of(blobs[name]), tensor) for name, tensor in before.items())
    worker.close()


HALVED = """
import os, sys
from pathlib import Path
out, rank = Path(sys.argv[1]), int(sys.argv[2])
from unittest.mock import patch
import numpy as np
import torch.distributed
import toy
from rank_processes import run_ranks
from embodied.algorithms.config import PPOConfig
from embodied.core.types import BatchEnd, env_blocks
from embodied.learners.config import LearnerConfig
from embodied.runtime.rendezvous import RendezvousFile
from embodied.learners.update import update_policy
from embodied.learners.learner_worker import LearnerWorker
from embodied.runtime import Timers
from embodied.policies.policy_folder import read_weights

actor = toy.make()
actor.save_pretrained(out / f"start-{rank}")
algo = PPOConfig(rollout_decisions=toy.T, epochs=1, minibatch_size=toy.T * toy.N, lr=1e-2)
config = LearnerConfig(shard=True, micro_batch_size=1, reduce_each_pass=len(sys.argv) > 4)
worker = LearnerWorker(toy.make(dtype="bfloat16").config, algo, config, 0, RendezvousFile(str(out / "meet"), 60.0))
worker.name, worker.rank, worker.world_size, worker.timers = f"learner-{rank}", rank, 2, Timers()
worker.build(toy.ENV, "0" * 16, True, out / f"start-{rank}")
block = env_blocks(toy.N, 2)[rank]
data = toy.columns(toy.rollout(actor, 0), slice(block.start, block.stop))
share = toy.batch_of(data, algo, worker.model, worker.collective)
with patch("torch.distributed.reduce_scatter_single", wraps=torch.distributed.reduce_scatter_single) as sums:
    numbers = update_policy(worker.model, worker.optimizer, algo, share, 0, BatchEnd(0, 1))
worker.save(out / "after")
torch.distributed.barrier()  # else the other rank's file may not be there yet
own = {name: p.to_local() for name, p in worker.policy.named_parameters()}
held, kept = {str(p.dtype) for p in own.values()}, {name: p.detach().clone() for name, p in own.items()}
worker.offload()
worker.onload()
with torch.no_grad():
    for p in own.values():
        p.zero_()
worker.load(out / "after")
assert all(torch.equal(p.to_local(), kept[name]) for name, p in worker.policy.named_parameters())
parts = len([*worker.policy.blocks(), worker.policy])
print(numbers["train/grad_norm"], *held, sums.call_count, parts, sep=",", flush=True)
worker.close()
os._exit(0)
"""


@pytest.mark.parametrize("each_pass", [[], ["each pass"]], ids=["a step", "each pass"])
def test_shards_of_half_precision_add_up_gradients_exactly(tmp_path, tmp_path_factory, each_pass):
    """Twelve micro-batches a rank, each computed in bfloat16: their sum is that of a learner that holds everything.
    Such a learner goes on from their checkpoint."""
    algo = PPO.model_copy(update={"epochs": 1, "minibatch_size": toy.T * toy.N})
    _, optimizer, numbers = trained("bfloat16", 1, algo, micro_batch_size=1)
    program = tmp_path_factory.mktemp("program") / "halved.py"
    program.write_text(HALVED)
    told = run_ranks(program, tmp_path, 2, *each_pass)
    passes = 12 if each_pass else 1
    for norm, held, sums, parts in told:
        assert held == "torch.float32"
        assert passes <= int(sums) <= passes * int(parts), "once a step, or with every micro-batch"
        assert float(norm) == pytest.approx(numbers["train/grad_norm"], rel=1e-6)
    assert len(told) == 2
    resumed = PolicyOptimizer(toy.make(dtype="bfloat16"), algo, Alone())
    resumed.load(tmp_path / "after" / "learner")
    kept = dict(resumed.state_tensors())
    for key, tensor in optimizer.state_tensors():
        assert torch.allclose(kept[key], tensor, rtol=1e-5, atol=1e-6), key
    stored = read_blobs(tmp_path / "after" / "policy")
    assert {stored[name].spec.dtype for name in optimizer.names} == {"bfloat16"}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_find_their_rows_in_the_files_of_any_number_of_ranks(ranks):
    whole = torch.arange(14.0).view(7, 2)
    for writers in (1, 2, 3, 5):
        parts = whole.chunk(writers)
        shards = [blob_of(part) for part in (*parts, *[whole[:0]] * (writers - len(parts)))]
        each = -(-7 // ranks)
        for rank in range(ranks):
            rows = slice(min(rank * each, 7), min((rank + 1) * each, 7))
            assert torch.equal(join_rows(shards, rows), whole[rows])


def test_an_optimizer_with_a_missing_shard_is_refused(tmp_path):
    _, optimizer, _ = trained()
    optimizer.save(tmp_path)
    (tmp_path / "optimizer.safetensors").rename(tmp_path / "optimizer-1-of-2.safetensors")
    with pytest.raises(CheckpointError, match="has 1 of the optimizer's 2 files; it is damaged"):
        optimizer.load(tmp_path)


def test_tensors_count_as_whole_while_another_worker_imports_sharded_tensors(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", ModuleType("half imported"))
    assert not is_sharded(torch.ones(1))
