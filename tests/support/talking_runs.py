"""Short runs in which a language policy talks, in float64, played iteration by iteration."""

import numpy as np
from stepped import ITERATIONS, Run

TALK = [
    "recipe=sums_grpo",
    "run.start_from=null",
    "env.name=talking_env:Digits",
    "env.num_envs=8",
    "policy.preset=tiny_gpt2",
    "policy.dtype=float64",
    "policy.max_tokens=4",
    "policy.max_running=8",
    "algo.groups=5",
    "algo.group_size=4",
    "algo.adam_eps=0.1",  # with a small one, Adam steps as far whatever the gradient is divided by
    "algo.lr=0.01",
    "eval.episodes=6",
    "eval.videos=0",
    "faults.timeout_s=240",
    "faults.hang_s=20",
    f"run.iterations={ITERATIONS}",
]
ONE_OF_EACH = {"sim": "cpu:0", "policy": "cpu:1", "learner": "cpu:2"}
APART = {"sim": "cpu:0-1*2", "policy": "cpu:1-2*2", "learner": "cpu:2-3*2"}


class Talk(Run):
    """A run of conversations."""

    usual = TALK

    def __init__(self, folder, *arguments, placement=APART, **more):
        folder.mkdir(exist_ok=True)
        super().__init__(folder, *arguments, placement=placement, **more)

    def some(self, count):
        return self.play(0, count)


def far(ours, theirs):
    """The largest difference of a weight, relative to the largest weight of its tensor."""
    sizes = {name: np.abs(array).max() or 1.0 for name, array in theirs.items()}
    return max(float(np.abs(ours[name] - theirs[name]).max() / sizes[name]) for name in theirs)


def told(rows):
    """What episodes came to: their number, tokens and reward."""
    return [[(e.index, e.tokens, e.total_reward) for e in episodes] for episodes, _ in rows]


ONE_PROCESS = ["cluster.backend=inline", "placement={'sim,policy': 'cpu:0', learner: 'cpu:1'}", "run.keep=null"]


def program(folder, *arguments):
    """The arguments of a run of three iterations with a checkpoint and an evaluation after each."""
    often = ["run.iterations=3", "run.save_every=1", "run.eval_every=1", "eval.temperature=1", f"run.dir={folder}"]
    changed = {argument.partition("=")[0] for argument in arguments}
    short = [one for one in TALK if not one.startswith("run.iterations")]
    usual = [one for one in (*short, *ONE_PROCESS, *often) if one.partition("=")[0] not in changed]
    return [*usual, *arguments]
