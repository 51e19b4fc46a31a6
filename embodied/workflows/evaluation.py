"""Playing a fixed list of episodes to the end, whatever happens to the sim workers that play them.

What a dead worker has finished counts; the rest its successor plays. Those that were open when it died may be what
killed it: they come last, each with no other beside it, and one that kills twice is an error episode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from embodied.data import EpisodeResult, EpisodeSpec, Note, Route
from embodied.runtime import Channel, Handle
from embodied.workflows.crew import Crew

MAX_ATTEMPTS = 2  # at an episode that is open whenever its worker dies


def play_fixed(
    crew: Crew,
    episodes: list[EpisodeSpec],
    begin: Callable[[int, list[EpisodeSpec], Route, frozenset[int]], Handle],
    notes: Channel,
    temperature: float,
    results: dict[int, EpisodeResult],
    by_expert: bool = False,
) -> list[EpisodeResult]:
    """The outcome of every episode, in order. `begin(sim, its episodes, route, those to be played alone)`. `results`
    is filled on the way; what `notes` hold beyond it when this is interrupted is finished, too. Experts ask no policy
    worker, which would wait in vain."""
    num_sims = len(crew.sims)
    left = {sim: episodes[sim::num_sims] for sim in range(num_sims)}
    attempts: Counter[int] = Counter()
    while left := {sim: specs for sim, specs in left.items() if specs}:
        alone = frozenset(attempts)
        share = partial(begin_share, begin, left, alone)
        calls, routes = crew.play(left, share, 1, temperature, "eval", asked=not by_expert)
        heard: list[Note] = [notes.get() for _ in range(notes.qsize())]
        for sim, call in calls.items():
            if call.succeeded():
                results |= {result.index: result for result in call.wait()[0]}
                left[sim] = []
                continue
            mine = [note for note in heard if note.source == routes[sim].sources[0]]
            results |= {result.index: result for note in mine for result in note.finished}
            suspects = {index for note in mine for index in note.begun} - results.keys()
            attempts.update(suspects)
            hopeless = {index for index in suspects if attempts[index] >= MAX_ATTEMPTS}
            cause = next(iter(call.failed.values())).cause
            results |= {spec.index: error(spec, cause) for spec in left[sim] if spec.index in hopeless}
            left[sim] = sorted(
                (spec for spec in left[sim] if spec.index not in results), key=lambda spec: spec.index in attempts
            )
    return [results[spec.index] for spec in episodes]


def begin_share(begin, left: dict[int, list[EpisodeSpec]], alone: frozenset[int], sim: int, route: Route) -> Handle:
    return begin(sim, left[sim], route, alone)


def error(spec: EpisodeSpec, cause: str) -> EpisodeResult:
    """An episode that is neither a success nor a failure."""
    return EpisodeResult(spec.index, spec.task, spec.init_state_id, spec.seed, 0, 0.0, None, None, error=cause)
