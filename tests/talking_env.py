"""Text envs whose rewards even fresh policies earn at times: `env.name=talking_env:Digits`.

With `env.kwargs` a fault strikes one sim worker, as in `faulty_env`.
"""

from faulty_env import Fault

from embodied.envs.text.base import TextEnv, Turn


class Digits(TextEnv):
    """Rewards an answer that contains an even digit."""

    num_held_out = 20

    def __init__(self, config, shared=None):
        super().__init__(config, shared)
        self.fault = Fault(**config.kwargs) if "fault" in config.kwargs else None

    def reset(self, spec):
        self.training = spec.init_state_id < 0
        self.strike("reset" if self.training else "evaluation")
        return "{}+{}=".format(*self.draw(spec, lambda rng: tuple(rng.integers(0, 100, 2).tolist())))

    def step(self, answer):
        if self.training:
            self.strike("rollout")
        even = any(digit in answer for digit in "02468")
        return Turn(reward=float(even), success=even)

    def solution(self):
        return "2"

    def strike(self, place):
        if self.fault:
            self.fault.strike(place)


class Persistent(Digits):
    """Asks up to three times, until an answer has a third character, a sixth or so at its end."""

    max_turns = 3

    def step(self, answer):
        if len(answer) % 3 == 0:
            return Turn(reward=1.0, success=True)
        return Turn(said=" again: ", done=False)
