"""Decisions of VLA policies that are captured as graphs: the CPU's stand-in decides as without them."""

import numpy as np
import pytest
import torch
from tiny_vla import ROBOT, TEXTS, build, noise, observe, shallow

from embodied.policies.policy_worker import PolicyWorker
from embodied.runtime import Cluster, HostPlan, Timers
from embodied.runtime.device_graphs import CapturedGraphs
from embodied.runtime.published_weights import spec_of
from embodied.runtime.weights import WeightStore

LORA, HALF = {"lora_rank": 2}, {"dtype": "bfloat16"}
OFT = {"name": "openvla_oft", "chunk": 2}
CASES = {
    "openvla": {"name": "openvla"},
    "openvla, adapters in half precision": {"name": "openvla", **LORA, **HALF},
    "openvla, rlds": {"name": "openvla", "rlds_images": True},
    "oft": OFT | LORA | HALF,
    "oft that regresses": OFT | {"head": "l1", "proprio": True, "film": True},
    "pi0": {"name": "pi0", "exploration": "flow_noise", **LORA},
    "pi0 in half precision": {"name": "pi0", **HALF},
    "pi05": {"name": "pi05", **LORA, "state_in_prompt": True},
    "smolvla": {"name": "smolvla", "steps": 3, "exploration": "flow_noise", **HALF},
}
PADDED = {"float32": 1e-5, "bfloat16": 0.15}  # other numbers of rows and widths are rounded otherwise


def with_trained_adapters(policy):
    with torch.no_grad():
        for name, tensor in policy.named_parameters():
            if "lora_B" in name:
                tensor.normal_(0, 0.05, generator=torch.Generator().manual_seed(len(name)))
    return policy


def pair(case):
    """A policy, and one with the same weights whose decisions are captured."""
    plain, captured = (with_trained_adapters(shallow(build(**CASES[case]))) for _ in range(2))
    captured.captured_graphs = CapturedGraphs("cpu")
    return plain, captured


def graphs_of(policy):
    return [graph for graph in policy.captured_graphs.graphs.values() if graph]


def assert_equal(one, other, tolerance=0.0):
    for name in ("actions", "logprobs", "values"):
        wanted, found = (np.asarray(getattr(each, name), np.float64) for each in (one, other))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_captured_decisions_equal_other_decisions(case):
    """From the second request of a kind on; the first two have as many rows as the graph, and one prompt."""
    plain, captured = pair(case)
    for seed in range(4):
        obs, draws = observe(4, texts=TEXTS[:1], seed=seed), noise(plain, 4, seed=seed)
        assert_equal(plain.act(obs, draws), captured.act(obs, draws))
        assert np.array_equal(plain.value(obs), captured.value(obs))
    assert len(graphs_of(captured)) == 2 and not captured.captured_graphs.failed
    best = [each.act(obs, draws, temperature=0.0).actions for each in (plain, captured)]
    assert np.array_equal(*best)


@pytest.mark.parametrize(
    "case", ["openvla, adapters in half precision", "oft that regresses", "pi0", "pi05", "smolvla"]
)
def test_rows_and_prompts_are_padded_to_few_sizes_which_changes_answers_by_rounding_alone(case):
    plain, captured = pair(case)
    captured.act(observe(4), noise(plain, 4))  # it has seen prompts of two lengths
    tolerance = PADDED[plain.config.dtype]
    for rows in (3, 4, 3):
        obs, draws = observe(rows, seed=rows), noise(plain, rows, seed=rows)
        wanted, found = plain.act(obs, draws), captured.act(obs, draws)
        assert found.actions.shape == wanted.actions.shape
        if tolerance > 1e-2 and "tokens" in wanted.replay:  # another token is another action
            alike = (found.replay["tokens"] == wanted.replay["tokens"]).reshape(rows, -1).all(1)
            np.testing.assert_allclose(found.values, wanted.values, atol=tolerance)
            assert alike.any()
        else:
            assert_equal(wanted, found, tolerance)
        np.testing.assert_allclose(captured.value(obs), plain.value(obs), atol=tolerance)
    assert len(graphs_of(captured)) == 2, "three and four rows share their graphs"


def test_rows_do_not_depend_on_their_company():
    _, captured = pair("openvla, adapters in half precision")
    obs, draws = observe(3), noise(captured, 3)
    for _ in range(3):
        together = captured.act(obs, draws)
    others = observe(3, seed=5)
    others["images"] = {name: np.concatenate([obs["images"][name][:1], frames[1:]])
                        for name, frames in others["images"].items()}  # fmt: skip
    others["state"][:1] = obs["state"][:1]
    assert np.array_equal(captured.act(others, draws).logprobs[0], together.logprobs[0])


def test_new_weights_need_no_new_graph():
    plain, captured = pair("openvla, adapters in half precision")
    obs, draws = observe(2, texts=TEXTS[:1]), noise(plain, 2)
    for _ in range(3):  # the first one allocates the KV cache
        before = captured.act(obs, draws)
    kept = graphs_of(captured)
    weights = {name: tensor.float() * 1.5 for name, tensor in plain.state_dict().items()}
    for policy in (plain, captured):
        policy.load_weights(weights)
    after = captured.act(obs, draws)
    assert not np.array_equal(after.values, before.values)
    assert_equal(plain.act(obs, draws), after)
    assert graphs_of(captured) == kept


def test_versions_that_are_copied_on_the_gpu_need_one_graph():
    """Layers with the same input are joined in the reader's memory once; on a CPU handles are the tensors."""
    learner = build("openvla")
    live = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    store = WeightStore({name: spec_of(tensor) for name, tensor in live.items()}, snapshot=False, live=live, gpu="here")
    worker = PolicyWorker(learner.config, 1, graphs="on")
    worker.timers = Timers()
    worker.build(ROBOT)
    obs, draws, addresses = observe(2, texts=TEXTS[:1]), noise(learner, 2), set()
    with Cluster("inline", [HostPlan("only", ("a",))], timeout_s=300) as cluster:
        channel = cluster.channel("weights", capacity=None)
        for version in range(4):
            with torch.no_grad(), store.updating():
                for name, tensor in live.items():
                    tensor.copy_(learner.state_dict()[name] * (1 + version))
            publication = store.publish(version, iter(()))
            store.send((channel,), handles=True)
            assert worker.load_weights(publication, "handles", channel, False) == version
            addresses.add(tuple(tensor.data_ptr() for tensor in worker.policy.parameters()))
            for _ in range(3 if version == 0 else 1):  # the first one allocates the KV cache
                acted = worker.policy.act(obs, draws)
    store.close()
    assert len(graphs_of(worker.policy)) == len(addresses) == 1
    learner.load_weights(live)
    assert_equal(learner.act(obs, draws), acted)


def test_a_decision_that_cannot_be_captured_is_made_as_usual_and_the_log_says_so_once(capsys):
    plain, captured = pair("openvla")
    embed = captured._embed
    captured._embed = lambda chosen: embed(chosen) if chosen.tolist() else None
    for rows in (2, 4):
        obs, draws = observe(rows, texts=TEXTS[:1]), noise(plain, rows)
        for _ in range(3):
            assert_equal(plain.act(obs, draws), captured.act(obs, draws))
    assert not graphs_of(captured)
    assert capsys.readouterr().out.count("acting is not captured: tolist goes to or from the host's memory") == 1
