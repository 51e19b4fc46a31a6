import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from embodied.core import rng
from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies import load_policy, make_policy, policy_class
from embodied.policies.config import MLPConfig

SPECS = {
    "gaussian": EnvSpec(ActionSpec(3), state_dim=5),
    "categorical": EnvSpec(ActionSpec(1, num_choices=4), state_dim=5),
}


def build(kind, seed=0, **options):
    return make_policy(MLPConfig(hidden=(16, 16), dtype="float64", **options), SPECS[kind], seed)


def noise_for(policy, rows, seed=1):
    spec = policy.noise_spec()
    draw = rng.normal if spec.kind == "normal" else rng.uniform
    return draw(seed, "act", np.arange(rows), np.zeros(rows, int), spec.width)


def test_gaussian_log_probs_and_entropy_equal_torch_distributions():
    policy = build("gaussian")
    obs = {"state": np.ones((2, 5))}
    output = policy.act(obs, noise_for(policy, 2))
    normal = torch.distributions.Normal(
        policy.actor(torch.ones(2, 5, dtype=torch.float64)).view(2, 1, 3), policy.log_std.exp()
    )
    np.testing.assert_allclose(normal.log_prob(torch.from_numpy(output.actions)).detach(), output.logprobs, atol=1e-12)
    scores = policy({"obs": obs, "actions": torch.from_numpy(output.actions)})
    torch.testing.assert_close(scores.entropy, normal.entropy())


def test_gumbel_sampling_follows_the_categorical_probabilities():
    policy = build("categorical")
    obs = {"state": np.repeat(np.random.default_rng(3).normal(size=(1, 5)), 20_000, axis=0)}
    with torch.no_grad():
        policy.actor[-1].bias.copy_(torch.tensor([0.0, 1.0, -1.0, 0.5]))
    actions = policy.act(obs, noise_for(policy, 20_000)).actions
    wanted = policy.actor(torch.from_numpy(obs["state"][:1])).softmax(-1)[0].detach().numpy()
    np.testing.assert_allclose(np.bincount(actions.ravel(), minlength=4) / 20_000, wanted, atol=0.015)


def test_a_lower_temperature_shrinks_the_noise():
    policy, obs = build("gaussian"), {"state": np.ones((3, 5))}
    noise = noise_for(policy, 3)
    best, half, full = (policy.act(obs, noise, temperature).actions for temperature in (0.0, 0.5, 1.0))
    np.testing.assert_allclose(half - best, (full - best) / 2, atol=1e-12)


def test_initial_weights_come_from_the_seed_alone():
    torch.manual_seed(0)
    one = build("gaussian", seed=7).state_dict()
    torch.manual_seed(1)
    same, other = build("gaussian", seed=7).state_dict(), build("gaussian", seed=8).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["actor.0.weight"], other["actor.0.weight"])


def test_a_saved_policy_comes_back_whole_with_its_normaliser(tmp_path):
    policy = build("gaussian", normalize_observations=True)
    policy.normalizer.merge(
        np.concatenate([np.full((1, 1), 10.0), np.full((1, 5), 2.0), np.full((1, 5), 40.0)], axis=1)
    )
    policy.save_pretrained(tmp_path)
    again = load_policy(tmp_path)
    obs = {"state": np.random.default_rng(0).normal(size=(4, 5))}
    assert np.array_equal(policy.act(obs, noise_for(policy, 4)).actions, again.act(obs, noise_for(again, 4)).actions)
    assert again.normalizer.count == 10


def test_the_normaliser_equals_the_moments_of_everything_it_saw():
    from embodied.policies.networks import ObservationNormalizer, state_moments

    data = np.random.default_rng(0).normal(3, 2, size=(2, 7, 4, 5))  # two iterations of [T, N, D]
    normalizer = ObservationNormalizer(5, floor=1e-9)
    for states in data:
        normalizer.merge(state_moments(states))
    flat = data.reshape(-1, 5)
    np.testing.assert_allclose(normalizer.mean.numpy(), flat.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose((normalizer.m2 / normalizer.count).numpy(), flat.var(axis=0), atol=1e-12)
    out = normalizer(torch.from_numpy(flat[:3])).numpy()
    np.testing.assert_allclose(out, (flat[:3] - flat.mean(axis=0)) / flat.std(axis=0), atol=1e-9)


def test_a_number_that_hardly_moves_is_not_blown_up():
    from embodied.policies.networks import ObservationNormalizer

    normalizer = ObservationNormalizer(2, floor=0.3)
    normalizer.merge(np.array([[100.0, 5.0, 5.0, 100 * 0.4**2, 0.0]]))  # means 5, deviations 0.4 and 0
    out = normalizer(torch.tensor([[6.0, 5.03]], dtype=torch.float64))
    np.testing.assert_allclose(out, [[1 / 0.5, 0.03 / 0.3]])  # 0.4^2 + 0.3^2 = 0.5^2


def test_a_damaged_or_foreign_policy_folder_is_refused_with_the_reason(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_policy(tmp_path)
    policy = build("gaussian")
    policy.save_pretrained(tmp_path)
    (tmp_path / "checksums.json").unlink()
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="do not belong"):
        load_policy(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="damaged"):
        load_policy(tmp_path)


def test_an_unknown_family_or_a_missing_module_is_named():
    with pytest.raises(ConfigError, match="families: mlp, cnn"):
        policy_class("mpl")
    with pytest.raises(ConfigError, match="no_such_pkg"):
        policy_class("no_such_pkg.mod:Policy")
    with pytest.raises(ConfigError, match=r"not a class of embodied\.policies\.base\.Policy"):
        policy_class("json:JSONDecoder")
    with pytest.raises(
        ConfigError, match=r"embodied\.policies\.base\.Policy: <function dumps>$"
    ):  # without its address
        policy_class("json:dumps")
    with pytest.raises(ConfigError, match="state observations"):
        make_policy(MLPConfig(), EnvSpec(ActionSpec(2), images={"front": (8, 8, 3)}), 0)


def test_one_thing_flung_away_does_not_change_what_everything_else_looks_like():
    policy = build("gaussian", normalize_observations=True)
    states = np.random.default_rng(0).normal(size=(50, 4, 5))
    policy.merge_observation_moments(policy.observation_moments({"state": states}))
    before = policy.state({"state": states[0]})
    states[7, 2] = 1e6
    policy.merge_observation_moments(policy.observation_moments({"state": states}))
    assert torch.allclose(policy.state({"state": states[0]}), before, atol=0.5)
