"""Success rates with their intervals, and paired comparisons of two policies.

An episode that ended in an error is neither a success nor a failure. Several answers of a language policy to the same
prompt are correlated, so its intervals are over prompts. Seeds are summarised by the interquartile mean, with intervals
over seeds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean, variance
from typing import Any

import numpy as np

from embodied.core.arrays import gather
from embodied.core.types import EpisodeResult

Prompt = tuple[str, int, int]  # task, number, seed
Z95 = 1.959963984540054  # the 97.5% point of the normal distribution
DRAWS = 10_000  # of a bootstrap


def wilson(count: float, total: float) -> tuple[float, float]:
    """The 95% Wilson score interval of a rate: wilson(9, 10) is 59.6% to 98.2%."""
    if not 0 <= count <= total or total == 0:
        raise ValueError(f"there is no rate of {count} in {total}")
    rate, z2 = count / total, Z95**2
    centre = (rate + z2 / (2 * total)) / (1 + z2 / total)
    half = Z95 * math.sqrt(rate * (1 - rate) / total + z2 / (4 * total**2)) / (1 + z2 / total)
    low = 0.0 if count == 0 else centre - half
    high = 1.0 if count == total else centre + half
    return low, high


def summarize(episodes: Iterable[EpisodeResult]) -> dict[str, Any]:
    """The figures of a list of episodes for results.json: `overall`, `per_task`, and `per_suite` if there are several
    suites."""
    episodes = list(episodes)
    by_task = gather((episode.task, episode) for episode in episodes)
    by_suite = gather((suite, episode) for episode in episodes if (suite := suite_of(episode.task)))
    return {
        "overall": figures(episodes),
        "per_task": {task: figures(by_task[task]) for task in sorted(by_task)},
        **({"per_suite": {suite: figures(by_suite[suite]) for suite in sorted(by_suite)}} if len(by_suite) > 1 else {}),
    }


def suite_of(task: str) -> str:
    """`libero_goal` for libero_goal/3; empty for a task without a number."""
    suite, _, number = task.rpartition("/")
    return suite if number.isdecimal() else ""


def figures(episodes: list[EpisodeResult]) -> dict[str, Any]:
    """Counts, rates and means of some episodes. `episodes` counts those without an error."""
    played = [episode for episode in episodes if not episode.error]
    prompts = [prompt_of(episode) for episode in played] if of_text(played) else ()
    return {
        "episodes": len(played),
        "errors": len(episodes) - len(played),
        "success_once": measure([episode.success_once for episode in played], prompts),
        "success_at_end": measure([episode.success_at_end for episode in played], prompts),
        "success_at_reset": measure([episode.success_at_reset for episode in played]),
        "return": mean([episode.total_reward for episode in played]),
        "length": mean([episode.length for episode in played]),
        **({"text": text_figures(played)} if prompts else {}),
    }


def count_causes(episodes: Iterable[EpisodeResult]) -> dict[str, int]:
    """The number of episodes by error, the most frequent error first."""
    return dict(Counter(episode.error for episode in episodes if episode.error).most_common())


def measure(outcomes: list[bool | None], prompts: Sequence[Prompt] = ()) -> dict[str, Any] | None:
    """Count, rate and interval of the known outcomes; None if none is known. Outcomes of one prompt are correlated."""
    known = [outcome for outcome in outcomes if outcome is not None]
    if not known:
        return None
    count, alone = sum(map(bool, known)), float(len(known))
    if prompts:
        by_prompt = gather((prompt, outcome) for prompt, outcome in zip(prompts, outcomes) if outcome is not None)
        alone = effective_sample_size(
            [fmean(map(bool, outcomes_of_prompt)) for outcomes_of_prompt in by_prompt.values()], len(known)
        )
    interval = wilson(count * alone / len(known), alone)
    return {"count": count, "of": len(known), "rate": count / len(known), "interval": list(interval)}


# Conversations: several answers to a prompt


def of_text(episodes: Iterable[EpisodeResult]) -> bool:
    """True for episodes of a language policy."""
    return any(episode.truncated is not None for episode in episodes)


def prompt_of(episode: EpisodeResult) -> Prompt:
    """Identifies the prompt of an episode: its number in the held-out list, or its seed."""
    return episode.task, episode.init_state_id, episode.seed if episode.init_state_id < 0 else 0


def text_figures(played: list[EpisodeResult]) -> dict[str, Any]:
    """avg@k and pass@k for k answers to each prompt, the share of truncated answers, and their length."""
    prompts = [prompt_of(episode) for episode in played]
    outcomes = gather((prompt_of(one), bool(one.success_once)) for one in played if one.success_once is not None)
    most = max(map(len, outcomes.values()), default=0)
    sizes = [2**power for power in range(most.bit_length())]
    turns = sum(episode.length for episode in played)
    return {
        "prompts": len(set(prompts)),
        "samples": most,
        "avg": rate_over_prompts([fmean(right) for right in outcomes.values()], sum(map(len, outcomes.values()))),
        "pass": {str(k): pass_rate(outcomes.values(), k) for k in sizes},
        "truncated": measure([episode.truncated for episode in played], prompts),
        "tokens": sum(episode.tokens for episode in played) / turns if turns else None,
    }


def pass_rate(by_prompt: Iterable[list[bool]], k: int) -> dict[str, Any] | None:
    """pass@k over the prompts that have at least k answers."""
    enough = [right for right in by_prompt if len(right) >= k]
    # pass@k only counts a prompt's best answer.
    answers = sum(map(len, enough)) if k == 1 else len(enough)
    return rate_over_prompts([pass_at(k, sum(right), len(right)) for right in enough], answers)


def pass_at(k: int, right: int, answers: int) -> float:
    """The probability that at least one of k answers, drawn without replacement, is right: pass_at(2, 1, 4) is 1/2."""
    return 1 - math.comb(answers - right, k) / math.comb(answers, k)


def rate_over_prompts(shares: list[float], answers: int) -> dict[str, Any] | None:
    """The mean over prompts of their share of right answers, with its 95% Wilson interval; None without prompts."""
    if not shares:
        return None
    rate, alone = min(1.0, fmean(shares)), effective_sample_size(shares, answers)
    return {"rate": rate, "interval": list(wilson(rate * alone, alone)), "of": len(shares)}


def effective_sample_size(shares: list[float], answers: int) -> float:
    """The effective sample size of these prompts' shares: the number of independent answers whose mean would have the
    same variance, at least one for each prompt and at most all answers."""
    rate, prompts = fmean(shares), len(shares)
    if prompts < 2 or not 0 < rate < 1:
        return float(prompts)
    squared_error = variance(shares) / prompts
    return min(max(prompts, rate * (1 - rate) / squared_error if squared_error else answers), answers)


def mean(values: list[float]) -> float | None:
    return fmean(values) if values else None


# Two policies on the same episodes


def compare(first: Iterable[EpisodeResult], second: Iterable[EpisodeResult]) -> dict[str, Any]:
    """The second policy's figures minus the first's, on the episodes that both played without an error.

    `episodes` counts these. Differences of rates and means come with 95% intervals, and are None where unknown.
    Language policies are compared on the `prompts` that both answered.
    """
    first, second = list(first), list(second)
    if of_text([*first, *second]):
        return compare_answers(first, second)
    known = {episode_id(episode): episode for episode in first if not episode.error}
    pairs = [(known[episode_id(one)], one) for one in second if not one.error and episode_id(one) in known]
    return {
        "episodes": len(pairs),
        "success_once": compare_outcomes([(a.success_once, b.success_once) for a, b in pairs]),
        "success_at_end": compare_outcomes([(a.success_at_end, b.success_at_end) for a, b in pairs]),
        "return": compare_means([b.total_reward - a.total_reward for a, b in pairs]),
    }


def compare_answers(first: list[EpisodeResult], second: list[EpisodeResult]) -> dict[str, Any]:
    """`compare` for answers to the same prompts: single answers by their outcomes, several answers by each prompt's
    mean."""
    ours, theirs = (gather((prompt_of(one), one) for one in played if not one.error) for played in (first, second))
    pairs = [(ours[prompt], theirs[prompt]) for prompt in ours if prompt in theirs]
    single = all(len(a) == len(b) == 1 for a, b in pairs)

    def differ(number: str) -> dict[str, Any] | None:
        known = [[[getattr(one, number) for one in side] for side in pair] for pair in pairs]
        known = [(a, b) for a, b in known if None not in a and None not in b]
        return compare_means([fmean(map(float, b)) - fmean(map(float, a)) for a, b in known])

    def outcomes(name: str) -> dict[str, Any] | None:
        return compare_outcomes([(getattr(a[0], name), getattr(b[0], name)) for a, b in pairs])

    return {
        "episodes": sum(len(b) for _, b in pairs),
        "prompts": len(pairs),
        **{name: outcomes(name) if single else differ(name) for name in ("success_once", "success_at_end")},
        "return": differ("total_reward"),
        "truncated": differ("truncated"),
        "tokens": differ("tokens"),
    }


def episode_id(episode: EpisodeResult) -> tuple[str, int, int]:
    """The key by which episodes of two evaluations are paired."""
    return episode.task, episode.init_state_id, episode.seed


def compare_outcomes(pairs: list[tuple[bool | None, bool | None]]) -> dict[str, Any] | None:
    """Difference of two rates over the episodes with both outcomes known."""
    known = [(bool(a), bool(b)) for a, b in pairs if a is not None and b is not None]
    if not known:
        return None
    kinds = {"both": (True, True), "only_first": (True, False), "only_second": (False, True), "neither": (False, False)}
    counts = {name: known.count(kind) for name, kind in kinds.items()}
    both, only_first, only_second, neither = counts.values()
    difference, *interval = paired_difference(both, only_second, only_first, neither)
    p_value = exact_mcnemar(only_first, only_second)
    return {**counts, "difference": difference, "interval": interval, "p_value": p_value}


def exact_mcnemar(one: int, other: int) -> float:
    """Two-sided p-value of the split of the episodes on which two policies differ, under equal success rates."""
    total, fewer = one + other, min(one, other)
    return min(1.0, 2 * sum(math.comb(total, count) for count in range(fewer + 1)) / 2**total)


def paired_difference(both: int, one: int, other: int, neither: int) -> tuple[float, float, float]:
    """Rate of (both + one) minus rate of (both + other) in paired trials, and Newcombe's 95% interval (1998, method
    10): Wilson intervals of the two rates, combined with their correlation.
    """
    total = both + one + other + neither
    p, q = (both + one) / total, (both + other) / total
    (p_low, p_high), (q_low, q_high) = wilson(both + one, total), wilson(both + other, total)
    product = (both + one) * (other + neither) * (both + other) * (one + neither)
    excess = both * neither - one * other
    excess = max(excess - total / 2, 0.0) if excess > 0 else excess
    phi = excess / math.sqrt(product) if product else 0.0
    below = (p - p_low) ** 2 - 2 * phi * (p - p_low) * (q_high - q) + (q_high - q) ** 2
    above = (q - q_low) ** 2 - 2 * phi * (q - q_low) * (p_high - p) + (p_high - p) ** 2
    return p - q, p - q - math.sqrt(max(below, 0.0)), p - q + math.sqrt(max(above, 0.0))


def independent_difference(count: int, total: int, other: int, others: int) -> tuple[float, float, float]:
    """The rate `count` / `total` minus the rate `other` / `others`, and Newcombe's 95% interval for independent trials
    (1998, method 10 of the first part): Wilson intervals of the two rates, combined."""
    p, q = count / total, other / others
    (p_low, p_high), (q_low, q_high) = wilson(count, total), wilson(other, others)
    return p - q, p - q - math.hypot(p - p_low, q_high - q), p - q + math.hypot(q - q_low, p_high - p)


def compare_means(differences: list[float]) -> dict[str, Any] | None:
    """Mean of paired differences, with the normal 95% interval."""
    if len(differences) < 2:
        return None
    centre, half = fmean(differences), Z95 * math.sqrt(variance(differences) / len(differences))
    return {"difference": centre, "interval": [centre - half, centre + half]}


# Several seeds


def iqm(scores: Any) -> Any:
    """The interquartile mean: the mean without the lowest and the highest quarter, each rounded down, as
    scipy.stats.trim_mean(scores, 0.25) and rliable compute it. iqm([0, 4, 5, 6, 100]) is 5."""
    ranked = np.sort(np.asarray(scores, float))
    cut = ranked.shape[-1] // 4
    return ranked[..., cut : ranked.shape[-1] - cut].mean(axis=-1)


def over_seeds(scores: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The IQM of scores [seeds, tasks], with its 95% bootstrap interval over seeds. Seeds are drawn separately for
    every task (stratified, as in rliable). None for one seed."""
    table = np.asarray(scores, float)
    seeds, tasks = table.shape
    interval = None
    if seeds > 1:
        picks = np.random.default_rng(0).integers(0, seeds, (DRAWS, seeds, tasks))
        drawn = table[picks, np.arange(tasks)].reshape(DRAWS, -1)
        interval = np.percentile(iqm(drawn), [2.5, 97.5]).tolist()
    return {"iqm": float(iqm(table.ravel())), "interval": interval, "seeds": seeds}


def mean_with_interval(curves: Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, low and high at each point of curves [seeds, points]: the bootstrap's 95% interval of the mean over
    seeds."""
    table = np.asarray(curves, float)
    picks = np.random.default_rng(0).integers(0, len(table), (DRAWS // 10, len(table)))
    low, high = np.percentile(table[picks].mean(axis=1), [2.5, 97.5], axis=0)
    return table.mean(axis=0), low, high


def standings(figures: dict[str, tuple[float, Sequence[float] | None]]) -> dict[str, str]:
    """The standing of figures with intervals, by name: `behind` where an interval lies below the highest figure's, else
    `not apart`. The highest is `best` if all other intervals lie below it, else `highest`; equal highest figures have
    neither."""
    if len(figures) < 2:
        return dict.fromkeys(figures, "-")
    top = max(figures, key=lambda name: figures[name][0])
    low = (figures[top][1] or (-math.inf,))[0]
    intervals = {name: interval for name, (_, interval) in figures.items()}
    places = {name: "behind" if span and span[1] < low else "not apart" for name, span in intervals.items()}
    tied = sum(figure == figures[top][0] for figure, _ in figures.values()) > 1
    alone = all(place == "behind" for name, place in places.items() if name != top)
    return places | {top: "not apart" if tied else "best" if alone else "highest"}
