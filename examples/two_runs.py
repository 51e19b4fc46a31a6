"""Two runs that share this machine: a device that one run does not use is lent to the other. About thirty seconds.

    python two_runs.py

docs/sharing.md has the rules. Each run is an ordinary one, with a folder, a report and checkpoints of its own.
"""

import embodied

if __name__ == "__main__":
    every = ["run.iterations=8", "run.env_steps=null", "eval.videos=0", "eval.episodes=20"]  # keys for both runs
    runs = embodied.share(*every, "pointmass_ppo", "gym_ppo", "algo.lr=3e-3")  # a key after a recipe is its own
    for name, run in runs.items():
        print(f"{name:<16} return {run.metrics[-1]['return']:.2f}  {run.folder}")
