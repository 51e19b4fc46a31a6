"""Playing episodes of their own kind (neither training's nor evaluation's) to record them."""

from __future__ import annotations

from pathlib import Path

from embodied.core.episodes import EpisodeList
from embodied.core.errors import ConfigError
from embodied.core.types import EnvSpec, EpisodeResult, Recording
from embodied.envs import env_class
from embodied.workflows.embodied import EmbodiedLoop


class DemonstrationLoop(EmbodiedLoop):
    """Evaluation's way of playing, dead workers replaced, with other episodes."""

    def demonstrate(self, drafts: Path, expert: str | None) -> tuple[EnvSpec, list[EpisodeResult]]:
        """A draft per episode in this folder; -> what the env offers, and the outcomes in episode order. With an expert
        nobody asks the policy workers."""
        tasks = env_class(self.config.env).tasks(self.config.env)
        episodes = EpisodeList(self.config.seed, "demonstrations", tasks).first(self.config.collect.episodes)
        spec = self.rollouts.ask(self.sims.eval_spec)[0]
        if self.config.collect.noise and spec.action.discrete:
            raise ConfigError(f"collect.noise={self.config.collect.noise:g} needs continuous actions; leave it out")
        recording = Recording(drafts=drafts, noise=self.config.collect.noise, seed=self.config.seed)
        return spec, self._play(episodes, recording, expert)
