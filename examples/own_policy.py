"""A policy of your own: a torch module whose `act` and `forward` agree on log-probabilities. About ten seconds.

    python own_policy.py

docs/own_policy.md explains the methods, and shows one that sees images and reads instructions.
"""

import torch
from torch.distributions import Normal

import embodied
from embodied.core.types import NoiseSpec, PolicyOutput
from embodied.policies.base import Policy, Scores


class Residual(Policy):
    """Moves straight to the target, plus what a small network adds."""

    def __init__(self, config, spec):
        super().__init__(config, spec)
        self.actor = torch.nn.Sequential(torch.nn.Linear(spec.state_dim, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
        self.critic = torch.nn.Linear(spec.state_dim, 1)

    def initialise(self, rng):
        for parameter in self.parameters():
            parameter.data = torch.tensor(0.1 * rng.standard_normal(parameter.shape), dtype=parameter.dtype)

    def noise_spec(self):
        return NoiseSpec("normal", self.spec.action.dim)

    def distribution(self, state):
        mean = (self.config.kwargs["gain"] * state[:, -2:] + self.actor(state)).clamp(-1, 1)
        return Normal(mean[:, None], 0.3)  # [N, 1, A]: one action for each request

    @torch.no_grad()
    def act(self, obs, noise, temperature=1.0):
        normal = self.distribution(torch.as_tensor(obs["state"]))
        actions = normal.mean + temperature * normal.stddev * torch.as_tensor(noise, dtype=torch.float32)[:, None]
        scores = self({"obs": obs, "actions": actions})
        return PolicyOutput(actions.numpy(), scores.logprobs.numpy(), scores.values.numpy())

    @torch.no_grad()
    def value(self, obs):
        return self.critic(torch.as_tensor(obs["state"]))[:, 0].numpy()

    def forward(self, inputs):
        state = torch.as_tensor(inputs["obs"]["state"])
        normal = self.distribution(state)
        return Scores(normal.log_prob(torch.as_tensor(inputs["actions"])), normal.entropy(), self.critic(state)[:, 0])


if __name__ == "__main__":
    mine = ["policy.name=own_policy:Residual", "policy.kwargs={gain: 0.1}", "run.iterations=15", "eval.videos=0"]
    run = embodied.train("pointmass_ppo", *mine)
    print("returns", [round(row["return"], 2) for row in run.metrics if row.get("return") is not None][::4])
