import numpy as np
import pytest
import torch

from embodied.core import rng
from embodied.core.errors import ConfigError
from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies import make_policy, policy_class
from embodied.policies.config import MLPConfig
from embodied.policies.networks import ObservationNormalizer, state_moments

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


def test_the_normaliser_equals_the_moments_of_everything_it_saw():
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
    normalizer = ObservationNormalizer(2, floor=0.3)
    normalizer.merge(np.array([[100.0, 5.0, 5.0, 100 * 0.4**2, 0.0]]))  # means 5, deviations 0.4 and 0
    out = normalizer(torch.tensor([[6.0, 5.03]], dtype=torch.float64))
    np.testing.assert_allclose(out, [[1 / 0.5, 0.03 / 0.3]])  # 0.4^2 + 0.3^2 = 0.5^2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mpl", "families: mlp, cnn"),
        ("no_such_pkg.mod:Policy", "no_such_pkg"),
        ("json:JSONDecoder", r"not a class of embodied\.policies\.base\.Policy"),
        ("json:dumps", r"embodied\.policies\.base\.Policy: <function dumps>$"),  # without its address
    ],
)
def test_a_name_that_is_no_policy_is_refused(name, words):
    with pytest.raises(ConfigError, match=words):
        policy_class(name)
    with pytest.raises(ConfigError, match="state observations"):
        make_policy(MLPConfig(), EnvSpec(ActionSpec(2), images={"front": (8, 8, 3)}), 0)


def test_one_outlier_hardly_changes_the_normalisation_of_other_states():
    policy = build("gaussian", normalize_observations=True)
    states = np.random.default_rng(0).normal(size=(50, 4, 5))
    policy.merge_observation_moments(policy.observation_moments({"state": states}))
    before = policy.state({"state": states[0]})
    states[7, 2] = 1e6
    policy.merge_observation_moments(policy.observation_moments({"state": states}))
    assert torch.allclose(policy.state({"state": states[0]}), before, atol=0.5)
