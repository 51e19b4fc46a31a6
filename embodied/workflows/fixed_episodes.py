"""Playing a fixed list of episodes to the end, whatever happens to the sim workers that play them.

What a dead worker has finished counts; the rest its successor plays. Those that were open when it died may be what
killed it: they come last, each with no other beside it, and one that kills twice is an error episode. What is finished
is told as it comes, and who asks for an end has it when the decisions in progress are played.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from embodied.core.errors import ChannelClosed, EvaluationStopped
from embodied.core.types import EpisodeResult, EpisodeSpec, Note, Route
from embodied.runtime import Channel, Handle
from embodied.workflows.rollout_manager import RolloutManager

MAX_ATTEMPTS = 2  # at an episode that is open whenever its worker dies
LOOK_S = 0.2  # how often it is asked whether to stop

Heard = Callable[[Iterable[EpisodeResult]], object]


def never() -> bool:
    return False


def ignore(episodes: Iterable[EpisodeResult]) -> None:
    """Nobody keeps them on the way."""


def play_fixed(
    rollouts: RolloutManager,
    episodes: list[EpisodeSpec],
    begin: Callable[[int, list[EpisodeSpec], Route, frozenset[int]], Handle],
    notes: Channel,
    temperature: float,
    by_expert: bool = False,
    heard: Heard = ignore,
    stop: Callable[[], bool] = never,
) -> list[EpisodeResult]:
    """The outcome of every episode, in order. `begin(sim, its episodes, route, those to be played alone)`. `heard` gets
    those that are over, soon and whatever happens. EvaluationStopped once `stop` says so and something is missing.
    Experts ask no policy worker, which would wait in vain."""
    num_sims = len(rollouts.sims)
    results: dict[int, EpisodeResult] = {}
    left = {sim: episodes[sim::num_sims] for sim in range(num_sims)}
    attempts: Counter[int] = Counter()
    while left := {sim: specs for sim, specs in left.items() if specs}:
        if stop():
            raise EvaluationStopped(f"{sum(map(len, left.values()))} of {len(episodes)} episodes were not played")
        alone = frozenset(attempts)
        share = partial(begin_share, begin, left, alone)
        with listening(rollouts, notes, heard, stop) as told:
            calls, routes = rollouts.play(left, share, 1, temperature, "eval", asked=not by_expert)
        for sim, call in calls.items():
            mine = [note for note in told if note.source == routes[sim].sources[0]]
            results |= {result.index: result for note in mine for result in note.finished}
            if call.succeeded():
                results |= {result.index: result for result in call.wait()[0]}
            else:
                suspects = {index for note in mine for index in note.begun} - results.keys()
                attempts.update(suspects)
                hopeless = {index for index in suspects if attempts[index] >= MAX_ATTEMPTS}
                cause = next(iter(call.failed.values())).cause
                results |= {spec.index: error(spec, cause) for spec in left[sim] if spec.index in hopeless}
            left[sim] = sorted(
                (spec for spec in left[sim] if spec.index not in results), key=lambda spec: spec.index in attempts
            )
        heard(results.values())
    return [results[spec.index] for spec in episodes]


@contextmanager
def listening(rollouts: RolloutManager, notes: Channel, heard: Heard, stop: Callable[[], bool]) -> Iterator[list[Note]]:
    """While sims play: collect their notes, hand on what is finished, and tell them when to stop."""
    told: list[Note] = []
    over = threading.Event()
    problems: list[Exception] = []

    def take() -> None:
        new = [notes.get() for _ in range(notes.qsize())]
        told.extend(new)
        heard(result for note in new for result in note.finished)

    def listen() -> None:
        stopping = False
        try:
            while not over.wait(LOOK_S):
                take()
                if not stopping and stop():
                    stopping = True
                    rollouts.sims.stop_playing()
        except Exception as err:  # a full disk: what cannot be kept is not played on
            problems.append(err)
            rollouts.sims.stop_playing()

    listener = threading.Thread(target=listen, name="listener", daemon=True)
    listener.start()
    try:
        yield told
    finally:
        over.set()
        listener.join()
        with suppress(ChannelClosed):  # by a worker that failed
            take()
    if problems:
        raise problems[0]


def begin_share(begin, left: dict[int, list[EpisodeSpec]], alone: frozenset[int], sim: int, route: Route) -> Handle:
    return begin(sim, left[sim], route, alone)


def error(spec: EpisodeSpec, cause: str) -> EpisodeResult:
    """An episode that is neither a success nor a failure."""
    return EpisodeResult(spec.index, spec.task, spec.init_state_id, spec.seed, 0, 0.0, None, None, error=cause)
