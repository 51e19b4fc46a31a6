"""Success rates with their intervals, and paired comparisons of two policies; figures of an evaluation as curves and in
words.

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
    assert 0 <= count <= total and total, (count, total)
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
    """libero_goal for libero_goal/3; empty for a task without a number."""
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
    numbers = [outcome for outcome in outcomes if outcome is not None]
    if not numbers:
        return None
    count, alone = sum(map(bool, numbers)), float(len(numbers))
    if prompts:
        by_prompt = gather((prompt, outcome) for prompt, outcome in zip(prompts, outcomes) if outcome is not None)
        alone = effective_sample_size(
            [fmean(map(bool, outcomes_of_prompt)) for outcomes_of_prompt in by_prompt.values()], len(numbers)
        )
    interval = wilson(count * alone / len(numbers), alone)
    return {"count": count, "of": len(numbers), "rate": count / len(numbers), "interval": list(interval)}


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
        **({"rewards": means} if (means := mean_rewards(played)) else {}),
    }


def mean_rewards(played: list[EpisodeResult]) -> dict[str, float]:
    """The mean of each of `env.rewards`, without its weight."""
    scores = gather((name, score) for episode in played for name, score in (episode.rewards or {}).items())
    return {name: fmean(some) for name, some in scores.items()}


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
    by_id = {episode_id(episode): episode for episode in first if not episode.error}
    pairs = [(by_id[episode_id(one)], one) for one in second if not one.error and episode_id(one) in by_id]
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
        numbers = [[[getattr(result, number) for result in side] for side in pair] for pair in pairs]
        numbers = [(a, b) for a, b in numbers if None not in a and None not in b]
        return compare_means([fmean(map(float, b)) - fmean(map(float, a)) for a, b in numbers])

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
    complete = [(bool(a), bool(b)) for a, b in pairs if a is not None and b is not None]
    if not complete:
        return None
    kinds = {"both": (True, True), "only_first": (True, False), "only_second": (False, True), "neither": (False, False)}
    counts = {name: complete.count(kind) for name, kind in kinds.items()}
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


# The figures in results.json, as curves and in words


def evaluation_numbers(results: dict[str, Any]) -> dict[str, float]:
    """The figures of an evaluation by the names of curves: eval/success_once and so on, if the env reports them; of
    every set of `eval.sets` eval/NAME/success_once."""
    parts = {"eval": results["overall"], **{f"eval/{name}": results["per_task"][name] for name in sets_in(results)}}
    return {
        f"{prefix}/{name}": value for prefix, measured in parts.items() for name, value in numbers_of(measured).items()
    }


def numbers_of(figures: dict[str, Any]) -> dict[str, float]:
    text = figures.get("text", {})
    rates = {"success_once": figures["success_once"], "success_at_end": figures["success_at_end"]}
    rates |= {"truncated": text.get("truncated"), **{f"pass@{k}": rate for k, rate in text.get("pass", {}).items()}}
    means = {"return": figures["return"], "length": figures["length"], "tokens": text.get("tokens")}
    numbers = {name: rate["rate"] for name, rate in rates.items() if rate} | means
    numbers["episodes"] = figures["episodes"]
    return {name: value for name, value in numbers.items() if value is not None}


def sets_in(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of the evaluated `eval.sets` by name; empty for other evaluations."""
    sets = results.get("protocol", {}).get("eval", {}).get("sets", {})
    return {name: options for name, options in sets.items() if name in results.get("per_task", {})}


def describe_results(results: dict) -> str:
    """Both success measures with their intervals, or the return for an env without success."""
    overall = results["overall"]
    if sets := sets_in(results):
        return f"{overall['episodes']} answers to {len(sets)} set{'s' * (len(sets) > 1)}{rows_of_tasks(results)}"
    if "text" in overall:
        return describe_answers(results)
    measured = {name: overall[name] for name in ("success_once", "success_at_end") if overall[name]}
    rates = [f"{rate_in_words(name, rate)} ({rate['count']}/{overall['episodes']})" for name, rate in measured.items()]
    return ", ".join([*rates, *errors_and_return(overall)]) or "no episode was played to its end"


def errors_and_return(overall: dict[str, Any]) -> list[str]:
    """Errors and return, if there are any."""
    errors = [f"{overall['errors']} error episodes"] if overall["errors"] else []
    return errors + ([f"return {overall['return']:.2f}"] if overall["return"] is not None else [])


def describe_answers(results: dict) -> str:
    """`T=1: avg@4 52.0% [44.1%, 59.8%], pass@2 ..., return 0.52, 3.0% cut off, 12.3 tokens an answer (50 prompts)`"""
    overall = results["overall"]
    figures_of_answers, samples = overall["text"], overall["text"]["samples"]
    rates = {f"avg@{samples}": figures_of_answers["avg"]} if samples > 1 else {"success": figures_of_answers["avg"]}
    rates |= {f"pass@{k}": rate for k, rate in figures_of_answers["pass"].items() if k != "1"}
    parts = [rate_in_words(name, rate) for name, rate in rates.items() if rate] + errors_and_return(overall)
    if figures_of_answers["truncated"]:
        parts.append(f"{figures_of_answers['truncated']['rate']:.1%} cut off")
    if figures_of_answers["tokens"] is not None:
        parts.append(f"{figures_of_answers['tokens']:.1f} tokens an answer")
    how = sampling(results)
    begin = f"{how}: " if how else ""
    return f"{begin}{', '.join(parts)} ({figures_of_answers['prompts']} prompts)"


def rate_in_words(name: str, rate: dict[str, Any]) -> str:
    low, high = rate["interval"]
    return f"{name} {rate['rate']:.1%} [{low:.1%}, {high:.1%}]"


def greedy_gap(sampled: float | None, episodes: int, results: dict) -> str:
    """A remark if greedy episodes succeed less often than the last `episodes` of training, which did at rate `sampled`,
    beyond both 95% intervals. The opposite is usual: training episodes are of older policies, and noise has a cost."""
    greedy = results["overall"]["success_once"]
    if sampling(results) != "greedy" or sampled is None or not greedy:
        return ""
    if greedy["interval"][1] >= wilson(sampled * episodes, episodes)[0]:
        return ""
    return (
        f"with its best actions (eval.temperature=0) the policy succeeds in {greedy['rate']:.0%} of {greedy['of']} "
        f"episodes, with sampled actions in {sampled:.0%} of the last {episodes} of training: it relies on noise; "
        "eval.temperature=1 evaluates sampled actions"
    )


def sampling(results: dict) -> str:
    """The sampling of an evaluation's answers: `T=1`, `T=0.6, top_p 0.9, top_k 20` or `greedy`; empty if unknown, or if
    there are several sets."""
    if sets_in(results):
        return ""
    return sampling_in_words(results.get("protocol", {}).get("eval", {}))


def sampling_of_set(results: dict[str, Any], name: str) -> str:
    """The sampling of the answers to one of `eval.sets`; empty for another task."""
    set_values = {key: value for key, value in sets_in(results).get(name, {}).items() if value is not None}
    return sampling_in_words(results["protocol"]["eval"] | set_values) if set_values else ""


def sampling_in_words(how: dict[str, Any]) -> str:
    if how.get("temperature") is None:
        return ""
    usual = {"top_p": 1, "top_k": 0, "min_p": 0}
    narrow = [f", {name} {how[name]:g}" for name in usual if how.get(name, usual[name]) != usual[name]]
    return f"T={how['temperature']:g}{''.join(narrow)}" if how["temperature"] else "greedy"


def warn_of_errors(results: dict) -> str:
    """A line with a warning if some episodes ended in an error; else empty."""
    errors, played = results["overall"]["errors"], results["overall"]["episodes"]
    if not errors:
        return ""
    warning = f"warning: {errors} of {errors + played} episodes ended in an error, which is neither success nor failure"
    return f"\n  {warning}: {describe_causes(results.get('causes', {}))}"


def describe_causes(causes: dict[str, int]) -> str:
    """The most frequent cause, and the number of further causes."""
    first, *others = causes or {"unknown": 0}
    return first + (f" (and {len(others)} other causes)" if others else "")


def describe_tasks(results: dict) -> str:
    """If there are several tasks that `describe_results` does not list, a line per task and then a line per suite; else
    empty."""
    several = len(results["per_task"] | results.get("per_suite", {})) > 1
    return rows_of_tasks(results) if several and not sets_in(results) else ""


def rows_of_tasks(results: dict[str, Any]) -> str:
    tasks = results["per_task"] | results.get("per_suite", {})
    width = max(map(len, tasks))
    how = {task: f"{words}: " if (words := sampling_of_set(results, task)) else "" for task in tasks}
    return "".join(
        f"\n  {task:<{width}}  {how[task]}{describe_results({'overall': figures_of_task})}"
        for task, figures_of_task in tasks.items()
    )


def reference_lines(comparison: dict[str, Any]) -> list[str]:
    """The published rate with its source, our rate minus it with an interval, and the settings that differ."""
    published = comparison["published"]
    lines = [
        f"published {comparison['name']} on {comparison['task']}, {comparison['hub']}: "
        f"{rate_in_words('success_once', published)} ({published['of']} episodes; {comparison['source']})"
    ]
    if "difference" in comparison:
        low, high = comparison["interval"]
        meaning = "may be chance" if low <= 0 <= high else "is more than chance"
        lines.append(f"here - published: {comparison['difference']:+.1%} [{low:+.1%}, {high:+.1%}], which {meaning}")
    differs = comparison["differs"]
    lines.append(f"settings that differ: {'; '.join(differs)}" if differs else "the same settings, as far as published")
    return lines


def describe_pair(pair: dict) -> str:
    """`b - a on the same 200 episodes: success_once +4.5% [0.2%, 8.9%], p 0.049; return ...`"""
    parts = []
    for name in ("success_once",) if "prompts" in pair else ("success_once", "success_at_end"):
        if (difference := pair[name]) is not None:
            low, high = difference["interval"]
            p_value = f", p {difference['p_value']:.2g}" if "p_value" in difference else ""
            parts.append(f"{name} {difference['difference']:+.1%} [{low:+.1%}, {high:+.1%}]{p_value}")
    if (difference := pair["return"]) is not None:
        low, high = difference["interval"]
        parts.append(f"return {difference['difference']:+.2f} [{low:+.2f}, {high:+.2f}]")
    differences = "; ".join(parts) or "nothing to compare"
    common = f"{pair['prompts']} prompts" if "prompts" in pair else f"{pair['episodes']} episodes"
    return f"{pair['second']} - {pair['first']} on the same {common}: {differences}"
