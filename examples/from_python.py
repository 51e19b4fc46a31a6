"""The commands as functions: train two settings, evaluate, compare, and act with a policy. About fifteen seconds.

python from_python.py
"""

import numpy as np

import embodied
from embodied.envs import make_env

if __name__ == "__main__":
    short = ["run.iterations=12", "eval.videos=0"]
    runs = [embodied.train("pointmass_ppo", f"algo.lr={lr}", f"run.name=lr_{lr}", *short) for lr in (3e-4, 3e-3)]
    for run in runs:
        results = embodied.evaluate(run, "eval.episodes=50", "eval.videos=0")
        print(run.name, "succeeds in", f"{results['overall']['success_once']['rate']:.0%} of episodes")
    print("compared in", embodied.report(*runs))

    policy = embodied.load_policy(runs[-1])
    env = make_env(embodied.load_recipe("pointmass_ppo").env, num_envs=4)
    obs, _ = env.reset(seed=0)
    done = np.zeros(4, bool)
    while not done.all():
        played = env.step_chunk(policy.act_on(obs))
        obs, done = played.obs, done | played.done
    print("four episodes of my own:", played.success[:, -1])
    env.close()
