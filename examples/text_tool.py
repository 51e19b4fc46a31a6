"""A text env of your own with a tool: a language model asks for a word's length, and answers. About thirty seconds.

    python text_tool.py

A tool call is a turn: the env answers it with done=False, and the model goes on. docs/text_envs.md has tools for chat
models, a Python tool and a search.
"""

import re

import embodied
from embodied.envs import TextEnv, Turn

LETTERS = list("abcdefgh")
CALL = re.compile(r"<len>(.*)</len>")


class Lengths(TextEnv):
    """ "length of abac: " wants "4"; "<len>abac</len>" is answered with the number of letters."""

    max_turns = 2

    def reset(self, spec):
        self.word = self.draw(spec, lambda rng: "".join(rng.choice(LETTERS, rng.integers(3, 9))))
        self.has_called = False
        return f"length of {self.word}: "

    def step(self, answer):
        if (call := CALL.search(answer)) and not self.has_called:
            self.has_called = True
            return Turn(said=f" {len(call[1])} so ", done=False, facts={"tool": call[0]})
        right = answer.strip() == str(len(self.word))
        return Turn(reward=float(right), success=right, facts={"used the tool": self.has_called})

    def solution(self):
        """What imitation shows before RL: the call, then the number."""
        return str(len(self.word)) if self.has_called else f"<len>{self.word}</len>"


if __name__ == "__main__":
    mine = [
        "env.name=text_tool:Lengths",
        "env.num_envs=64",
        "cluster.backend=inline",  # one process, which starts sooner than several
        "policy.max_tokens=20",
        "eval.videos=0",
        "run.start_from=null",
    ]
    embodied.check(mine[0])
    start = embodied.sft("sums_sft", *mine, "sft.episodes=1600", "eval.episodes=40")
    mine[-1] = f"run.start_from={start.folder}"
    run = embodied.train("sums_grpo", *mine, "algo.groups=8", "run.iterations=16", "eval.episodes=40")
    right = [row["success_once"] for row in run.metrics]
    print(f"right answers in the first and last four iterations: {sum(right[:4]) / 4:.0%}, {sum(right[-4:]) / 4:.0%}")
