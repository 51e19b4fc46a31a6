"""The sim worker of text envs: holds conversations for training and evaluation, and keeps them until learners want
them. It never sees the policy and knows no tokens but those that come with answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np

from embodied.core.conversations import EvaluationShare, Manner
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
from embodied.envs.text.conversations import Conversation, Part, Talk, play_conversations
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
        beside: EvaluationShare | None = None,
    ) -> RolloutStats:
        """Hold these conversations to their ends and keep them; where their ends are `noted`, `hand_on` may be asked
        for each from then on. One whose answer was unusable counts for nothing. Those of an evaluation `beside` are
        held at the same time, and written down."""
        if horizon:
            raise ConfigError(f"a text env holds whole conversations, not {horizon} decisions; set algo.groups")
        before, results, kept, steps = self.timers.totals(), [], [], 0
        problems: list[str] = []
        rows = max(1, self.config.num_envs // self.world_size)
        mine = self._part(self.config, episodes, rows)
        parts, noting = [mine], nullcontext()
        if beside:
            parts.append(self._evaluated(beside.episodes, manner=Manner("eval", beside.temperature)))
            noting = self._noting(route, beside.recording, beside.notes)
        with noting as note:
            for over in play_conversations(parts, Talk(route, self.timers), self.timers):
                self.tick()
                ended = [one for one in over if one.part is mine]
                if note and len(ended) < len(over):
                    note([one for one in over if one.part is not mine])
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
                if noted and (finished := tuple(one.result() for one in ended if not one.problem)):
                    self.journal.put(Note(route.sources[0], finished=finished))
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
        source, results = route.sources[0], []

        def begun(specs: list[EpisodeSpec]) -> None:
            notes.put(Note(source, begun=tuple(spec.index for spec in specs)))

        part = self._evaluated(episodes, begun=begun, alone=alone)
        talk = Talk(route, self.timers)
        with self._noting(route, recording, notes) as note:
            for ended in play_conversations([part], talk, self.timers, lambda: self.stopped):
                self.tick()
                results += note(ended)
        return results

    def _part(self, config: Any, episodes: Sequence[EpisodeSpec], rows: int, **more: Any) -> Part:
        return Part(self.kind, config, self.shared[config.model_dump_json()], episodes, rows, **more)

    def _evaluated(self, episodes: Sequence[EpisodeSpec], **more: Any) -> Part:
        self.eval_spec()
        return self._part(self.eval_config, episodes, self.eval_rows, **more)

    @contextmanager
    def _noting(
        self, route: Route, recording: Recording, notes: Channel
    ) -> Iterator[Callable[[list[Conversation]], list[EpisodeResult]]]:
        """What writes conversations of an evaluation down when they are over, notes their ends and returns these."""
        with ExitStack() as stack:
            writer = None
            if recording.videos is not None:
                folder = recording.videos.parent / TRANSCRIPTS
                writer = stack.enter_context(TranscriptWriter(folder, f"sim-{self.rank}"))

            def note(ended: list[Conversation]) -> list[EpisodeResult]:
                over = [one.result() for one in ended]
                if writer is not None:
                    for one, result in zip(ended, over, strict=True):
                        writer.add(result, one.turns)
                notes.put(Note(route.sources[0], finished=tuple(over)))
                return over

            yield note

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
