"""A reward of your own for any env: effort costs, so the policy learns to move less. About twenty seconds.

python own_reward.py
"""

import numpy as np

import embodied


class LessEffort:
    """The env's reward without a share of the actions' squares; every env makes one object with env.reward_kwargs."""

    def __init__(self, cost=0.1):
        self.cost = cost

    def __call__(self, env, actions, step):  # actions [N, A], step.rewards [N]
        return step.rewards - self.cost * np.square(actions).sum(axis=1)


def main():
    for cost in (0.0, 0.02):
        run = embodied.train(
            "pointmass_ppo",
            "env.reward=own_reward:LessEffort",
            f"env.reward_kwargs.cost={cost}",
            f"run.name=effort_{cost}",
            "run.iterations=20",
            "algo.lr=3e-3",
            "eval.videos=0",
        )
        last = run.metrics[-1]
        print(f"effort costs {cost}: return {last['return']:.2f}, success {last['success_once']:.0%}")


if __name__ == "__main__":
    main()
