"""Text envs whose rewards even fresh policies earn at times: `env.name=talking_env:Digits`.

With `env.kwargs` a fault strikes one sim worker, as in `faulty_env`.
"""

from dataclasses import replace

from faulty_env import Fault

from embodied.core.pictures import data_url, drawing, load_picture, video
from embodied.envs.text.text_env import TextEnv, Turn


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


class Shown(Digits):
    """Shows a drawing beside its question, by name or (env.kwargs={inline: true}) as it is, of so many `pixels`."""

    @classmethod
    def shows_pictures(cls, config):
        return True

    def reset(self, spec):
        text, options = super().reset(spec), self.config.kwargs
        name = drawing("count", 1000 + sum(map(ord, text)), options.get("pixels", 64))
        name = data_url(load_picture(name)) if options.get("inline") else name
        return ({"role": "user", "content": [{"type": "image", "image": name}, {"type": "text", "text": text}]},)


class Moving(Digits):
    """Shows frames of a video (env.kwargs={video: FILE}) beside its question: 2 to 5."""

    @classmethod
    def shows_pictures(cls, config):
        return True

    def reset(self, spec):
        text = super().reset(spec)
        name = video(self.config.kwargs["video"], 2 + len(text) % 4)
        return ({"role": "user", "content": [{"type": "image", "image": name}, {"type": "text", "text": text}]},)


class NothingToAsk(Digits):
    @classmethod
    def num_questions(cls, config, task):
        return 0


class Persistent(Digits):
    """Asks up to three times, until an answer has a third character, a sixth or so at its end."""

    max_turns = 3

    def step(self, answer):
        if len(answer) % 3 == 0:
            return Turn(reward=1.0, success=True)
        return Turn(said=" again: ", done=False)


class LongReplies(Digits):
    """Replies to the first answer with more text than a conversation has room for."""

    max_turns = 3

    def step(self, answer):
        even = any(digit in answer for digit in "02468")
        return Turn(reward=float(even), said="x" * 3000, success=even)


class ShownAgain(Shown):
    """Replies with another picture, of another size, until an answer has an odd length."""

    max_turns = 3

    def step(self, answer):
        if len(answer) % 2:
            return Turn(reward=1.0, success=True)
        shown = {"type": "image", "image": drawing("colour", len(answer), 32)}
        return Turn(said=({"role": "user", "content": [shown, {"type": "text", "text": "again: "}]},), done=False)


class Chat(Persistent):
    """The same in messages."""

    def reset(self, spec):
        return ({"role": "user", "content": super().reset(spec)},)

    def step(self, answer):
        turn = super().step(answer)
        return turn if turn.done else Turn(said=({"role": "user", "content": "again"},), done=False)


class Forgets(Chat):
    """Replies with another conversation."""

    @classmethod
    def rewrites(cls, config):
        return True

    def step(self, answer):
        return replace(super().step(answer), restarts=True)


class Ranked(Digits):
    """Plays a group of up to two conversations, and rewards the longest of its answers."""

    @classmethod
    def plays_groups(cls, config):
        return True

    def reset(self, spec):
        self.answers, self.asked = [], super().reset(spec)
        return self.asked

    def step(self, answer):
        self.answers.append(answer)
        if len(self.answers) < min(2, self.group_size):
            return Turn(said=self.asked, ends_sample=True)
        best = max(map(len, self.answers))
        return Turn(scores=[Turn(float(len(one) == best)) for one in self.answers])
