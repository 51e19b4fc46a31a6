"""The workers of a run with gates (`chaos.gates`), and what goes wrong at them."""

from __future__ import annotations

import dataclasses

import numpy as np
from chaos.gates import arrive
from faulty_env import commit

from embodied.core.types import EnvSpec
from embodied.envs.sim_worker import SimWorker
from embodied.envs.vector_env import VectorEnv
from embodied.learners.learner_worker import LearnerWorker
from embodied.policies.policy_worker import PolicyWorker


class GatedSim(SimWorker):
    """Gates: `start`, and `rollout` (an env step), `reset` and `evaluation` (an env step there)."""

    def build(self) -> EnvSpec:
        new = not self.stages
        if new:
            commit(arrive(self.name, "start"))
        found = super().build()
        for stage in self.stages if new else ():
            gated(stage.env, self.name, "rollout")
        return found

    def eval_spec(self) -> EnvSpec:
        new = self.eval_env is None
        found = super().eval_spec()
        if new:
            gated(self.eval_env, self.name, "evaluation")
        return found


def gated(env: VectorEnv, worker: str, playing: str) -> None:
    """Put gates into this env."""
    reset, step, observe, broken = env._reset_rows, env._step, env._observe, [""]

    def gated_reset(rows, episodes):
        if playing == "rollout":
            broken[0] = commit(arrive(worker, "reset"))
        return reset(rows, episodes)

    def gated_step(actions, active):
        broken[0] = commit(arrive(worker, playing)) or broken[0]
        result = step(actions, active)
        if broken[0] == "inf_reward":
            result.rewards[:] = np.inf
        return result

    def gated_observe():
        obs = observe()
        if broken[0] == "nan_observation":
            obs["state"][:, 0] = np.nan
        elif broken[0] == "wrong_shape":
            obs["state"] = obs["state"][:, :-1]
        return obs

    env._reset_rows, env._step, env._observe = gated_reset, gated_step, gated_observe


class GatedPolicy(PolicyWorker):
    """Gates: `start`, `rollout` and `evaluation` (an answer), and `weights` (taking new ones)."""

    def build(self, spec: EnvSpec) -> None:
        commit(arrive(self.name, "start"))
        super().build(spec)
        act, self.place = self.policy.act, "rollout"

        def gated_act(*args, **kwargs):
            broken, output = commit(arrive(self.name, self.place)), act(*args, **kwargs)
            if broken == "nan_action":
                return dataclasses.replace(output, actions=output.actions * np.nan)
            if broken == "wrong_shape":
                return dataclasses.replace(output, actions=output.actions[..., :-1])
            return output

        self.policy.act = gated_act

    def load_weights(self, *args):
        commit(arrive(self.name, "weights"))
        return super().load_weights(*args)

    def _answer(self, request, rule):
        self.place = "evaluation" if rule.stream == "eval" else "rollout"
        return super()._answer(request, rule)


class GatedLearner(LearnerWorker):
    """Gate: `update`."""

    def learn(self, *args):
        arrive(self.name, "update")
        return super().learn(*args)
