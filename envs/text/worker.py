"""The sim worker of text envs: holds conversations for training and evaluation, and keeps them until learners want
them. It never sees the policy and knows no tokens but those that come with answers.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np

from embodied.core.errors import ConfigError
from embodied.core.types import (
    EnvSpec,
    EpisodeList,
    EpisodeResult,
    EpisodeSpec,
    Note,
    Recording,
    RolloutStats,
    Route,
    join,
)
from embodied.envs import env_class
from embodied.envs.episode_keeper import EpisodeKeeper
from embodied.envs.text.conversations import Talk, play_conversations
from embodied.reporting.transcripts import TranscriptWriter
from embodied.runtime import Channel, Needs, served_while_busy

TRANSCRIPTS = "transcripts"  # beside the folder of videos


class TextWorker(EpisodeKeeper):
    def __init__(
        self, config, stages: int = 1, journal: Channel | None = None, eval_config=None, eval_rows: int = 1
    ) -> None:
        """Evaluations go on in `eval_rows` conversations at a time, of `eval_config`; `journal` hears of ends where
        these are noted."""
        super().__init__()
        self.config = config
        self.eval_config, self.eval_rows = eval_config or config, eval_rows
        self.journal = journal
        self.stages = stages
        self.kind = env_class(config)
        self.shared: dict[str, Any] = {}  # what conversations of a config share, by the config as JSON
        self.stopped = False

    def spec(self) -> EnvSpec:
        """Load what conversations share (a dataset may take seconds) and say what the env offers."""
        return self._spec(self.config) if self.stages else self.eval_spec()

    def eval_spec(self) -> EnvSpec:
        """The same for evaluations."""
        return self._spec(self.eval_config)

    def _spec(self, config: Any) -> EnvSpec:
        if (key := config.model_dump_json()) not in self.shared:  # evaluations are mostly of the same
            self.shared[key] = self.kind.load(config)
        return self.kind.env_spec(config)

    def needs(self, shared: bool = False) -> Needs:
        """Text takes no memory of a device."""
        return Needs()

    def collect(
        self,
        episodes: list[EpisodeSpec],
        route: Route,
        horizon: int = 0,
        out: tuple[Channel, ...] = (),
        granularity: int = 0,
        noted: bool = False,
    ) -> RolloutStats:
        """Hold these conversations to their ends and keep them; where their ends are `noted`, `hand_on` may be asked
        for each from then on. One whose answer was unusable counts for nothing."""
        if horizon:
            raise ConfigError(f"a text env holds whole conversations, not {horizon} decisions; set algo.groups")
        before, results, kept, steps = self.timers.totals(), [], [], 0
        problems: list[str] = []
        talk = Talk(route, self.timers)
        rows = max(1, self.config.num_envs // self.world_size)
        playing = play_conversations(
            self.kind, self.config, self.shared[self.config.model_dump_json()], episodes, rows, talk, self.timers
        )
        for ended in playing:
            self.tick()
            for one in ended:
                steps += len(one.turns)
                if one.problem:
                    problems.append(one.problem)
                    continue
                results.append(one.result())
                if noted:
                    self.ended[one.spec.index] = one.trajectory()
                else:
                    kept.append(one.trajectory())
            if noted and (over := tuple(one.result() for one in ended if not one.problem)):
                self.journal.put(Note(route.sources[0], finished=over))
        if kept:
            self.whole = join([self.whole, *kept] if self.whole else kept)
        return self.stats(before, steps, results, problems)

    def evaluate(
        self,
        episodes: list[EpisodeSpec],
        route: Route,
        recording: Recording,
        notes: Channel,
        alone: frozenset[int],
        expert: str | None = None,
    ) -> list[EpisodeResult]:
        """Hold these conversations to their ends and write them down. `notes` hears of every beginning and end."""
        if expert:
            raise ConfigError(f"there is no expert for env.name={self.config.name}; imitation asks the env itself")
        self.eval_spec()
        source, results = route.sources[0], []

        def begun(specs: list[EpisodeSpec]) -> None:
            notes.put(Note(source, begun=tuple(spec.index for spec in specs)))

        playing = play_conversations(
            self.kind,
            self.eval_config,
            self.shared[self.eval_config.model_dump_json()],
            episodes,
            self.eval_rows,
            Talk(route, self.timers),
            self.timers,
            begun,
            alone,
            lambda: self.stopped,
        )
        with ExitStack() as stack:
            writer = None
            if recording.videos is not None:
                folder = recording.videos.parent / TRANSCRIPTS
                writer = stack.enter_context(TranscriptWriter(folder, f"sim-{self.rank}"))
            for ended in playing:
                self.tick()
                over = [one.result() for one in ended]
                if writer is not None:
                    for one, result in zip(ended, over, strict=True):
                        writer.add(result, one.turns)
                results += over
                notes.put(Note(source, finished=tuple(over)))
        return results

    @served_while_busy
    def stop_playing(self) -> None:
        """Give up the evaluation that goes on, and any that follows."""
        self.stopped = True

    def begin(self, episodes: EpisodeList, started: np.ndarray) -> None:
        """Take over from a worker that died: what it held is lost, and nothing is open."""

    def get_state(self) -> dict[str, np.ndarray]:
        """Nothing is open between iterations."""
        return {}

    def set_state(self, state: dict[str, np.ndarray], episodes: EpisodeList) -> int:
        """Nothing was open."""
        return 0

    def close(self) -> None:
        for shared in self.shared.values():
            self.kind.unload(shared)
