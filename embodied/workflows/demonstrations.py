"""Playing episodes of their own kind (neither training's nor evaluation's) to record them."""

from __future__ import annotations

from pathlib import Path

from embodied.data import EnvSpec, EpisodeResult, Recording
from embodied.envs import env_class
from embodied.episodes import EpisodeList
from embodied.workflows.embodied import EmbodiedLoop


class DemonstrationLoop(EmbodiedLoop):
    """Evaluation's way of playing, dead workers replaced, with other episodes."""

    def demonstrate(self, drafts: Path, by_expert: bool) -> tuple[EnvSpec, list[EpisodeResult]]:
        """A draft per episode in this folder; -> what the env offers, and the outcomes in episode order. With an expert
        nobody asks the policy workers."""
        tasks = env_class(self.config.env).tasks(self.config.env)
        episodes = EpisodeList(self.config.seed, "demonstrations", tasks).first(self.config.collect.episodes)
        spec = self.crew.ask(self.sims.eval_spec)[0]
        return spec, self._play(episodes, Recording(drafts=drafts), by_expert)
