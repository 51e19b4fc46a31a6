"""A vision-language-action model from a folder: RL goes on with its weights. About forty seconds.

    python vla_folder.py            a small Pi0 model that this script makes
    python vla_folder.py FOLDER     a published one, such as lerobot/smolvla_base, with recipe=libero_ppo_smolvla

docs/published.md says which folders are recognised, and what large models need.
"""

import sys

import embodied

SHORT = ["run.iterations=2", "env.num_envs=4", "algo.rollout_decisions=6", "algo.minibatch_size=12"]


def main(folder=None):
    recipe = "libero_ppo_smolvla" if folder else "pointmass_ppo_pi0_tiny"
    evaluated = ["eval.episodes=8", "eval.videos=1"]
    if folder is None:
        first = embodied.train(recipe, *SHORT, *evaluated, "run.name=small_vla")
        folder = next(first.folder.glob("checkpoints/v*/policy"))  # safetensors and JSON, as published models have them
        print("folder", sorted(path.name for path in folder.iterdir()))
    run = embodied.train(recipe, f"run.start_from={folder}", *SHORT, *evaluated, "run.name=vla_goes_on")
    results = embodied.evaluate(run, *evaluated)
    print("success", results["overall"]["success_once"]["rate"], "videos in", run.folder / "eval")


if __name__ == "__main__":
    main(*sys.argv[1:])
