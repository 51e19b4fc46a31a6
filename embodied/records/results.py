"""The files of evaluations: results.json, episodes.csv, comparison.json, and partial.json of an interrupted one.

The same episodes give the same bytes, independent of the order in which they ended. An interrupted evaluation has its
finished episodes in episodes.csv and no results.json, so that continuing it plays only the missing episodes. It gets no
rates: successful episodes end early, so they are over-represented among the finished ones.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, NotRequired, get_type_hints

import numpy as np
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic requires this version below Python 3.12

from embodied.core.errors import CheckpointError
from embodied.core.files import read_object, reading, replace_text
from embodied.core.types import EpisodeResult
from embodied.records.success_stats import compare, figures, of_text, wilson
from embodied.records.transcripts import remove_transcripts
from embodied.records.videos import remove_drafts
from embodied.run.checkpoints import read_json
from embodied.run.provenance import provenance

RESULTS = "results.json"
EPISODES = "episodes.csv"
UNWRITTEN = ("prompt_tokens", "all_tokens", "places")  # used to distribute episodes over learners
FIELDS = {name: kind for name, kind in get_type_hints(EpisodeResult).items() if name not in UNWRITTEN}
TEXT_COLUMNS = ("truncated", "tokens")  # of language policies alone
COLUMNS = tuple(name for name in FIELDS if name not in TEXT_COLUMNS)
PARSERS = {
    int: int,
    float: float,
    str: str,
    bool | None: {"": None, "true": True, "false": False}.__getitem__,
}
COMPARISON = "comparison.json"
METHODS = {
    "success": "difference of paired rates: Newcombe's 95% interval (1998, method 10), exact McNemar test",
    "return": "mean of paired differences, normal 95% interval",
    "several answers to a prompt": "mean over prompts of the differences of their means, normal 95% interval",
}


def write_results(folder: Path, results: dict[str, Any], episodes: Iterable[EpisodeResult]) -> None:
    """Write results.json and episodes.csv, each whole or not at all."""
    write_episodes(folder, episodes)
    replace_text(folder / RESULTS, json.dumps(results, indent=2, allow_nan=False) + "\n")


def write_episodes(folder: Path, episodes: Iterable[EpisodeResult]) -> None:
    """Write episodes.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / EPISODES, episodes_csv(episodes))


def read_results(folder: Path) -> tuple[dict[str, Any], list[EpisodeResult]]:
    """Read the files of `write_results`; raises EmbodiedError for a damaged file."""
    results = read_object(folder / RESULTS)
    with reading(folder / RESULTS):
        check(results, Results)
    with reading(folder / EPISODES):
        return results, read_episodes(folder)


def read_episodes(folder: Path) -> list[EpisodeResult]:
    """Read episodes.csv."""
    with open(folder / EPISODES, encoding="utf-8", newline="") as file:
        try:
            return [episode(row) for row in csv.DictReader(file)]
        except csv.Error as err:  # for example a field of megabytes
            raise ValueError(str(err)) from None


def episodes_csv(episodes: Iterable[EpisodeResult]) -> str:
    """The text of episodes.csv: a line per episode by index. An empty success means that the env has none."""
    episodes = sorted(episodes, key=lambda result: result.index)
    columns = (*COLUMNS, *TEXT_COLUMNS) if of_text(episodes) else COLUMNS
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for result in episodes:
        writer.writerow(cell(getattr(result, name)) for name in columns)
    return text.getvalue()


def cell(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, (bool, np.bool_)) else str(value)


def episode(row: dict[str, str]) -> EpisodeResult:
    names = [name for name in FIELDS if name in row or name not in TEXT_COLUMNS]
    return EpisodeResult(**{name: PARSERS[FIELDS[name]](row[name]) for name in names})


def evaluation_numbers(results: dict[str, Any]) -> dict[str, float]:
    """The figures of an evaluation by the names of curves: eval/success_once and so on, if the env reports them; of
    every set of `eval.sets` eval/NAME/success_once."""
    parts = {"eval": results["overall"], **{f"eval/{name}": results["per_task"][name] for name in sets_in(results)}}
    return {f"{part}/{name}": value for part, each in parts.items() for name, value in numbers_of(each).items()}


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
    return {name: each for name, each in sets.items() if name in results.get("per_task", {})}


def write_comparison(folder: Path, played: dict[str, list[EpisodeResult]]) -> dict[str, Any]:
    """Write and return comparison.json: every pair of policies in the order they were named, second minus first."""
    pairs = [{"first": a, "second": b, **compare(played[a], played[b])} for a, b in combinations(played, 2)]
    comparison = {"policies": list(played), "methods": METHODS, "pairs": pairs}
    replace_text(folder / COMPARISON, json.dumps(comparison, indent=2, allow_nan=False) + "\n")
    return comparison


# The types of the keys that reports read. Other keys may hold anything.

Count = Annotated[int, Field(ge=0, lt=2**63)]
LARGEST = 1e100
Share = Annotated[float, Field(ge=-1e-6, le=1 + 1e-6)]  # rounding may leave the unit interval


class PromptRate(TypedDict):
    rate: Share
    interval: Annotated[list[Share], Field(min_length=2, max_length=2)]
    of: Count


class Measure(PromptRate):
    count: Count


TextFigures = TypedDict(
    "TextFigures",
    {
        "prompts": Count,
        "samples": Count,
        "avg": PromptRate | None,
        "pass": dict[Annotated[str, Field(pattern=r"^\d+$")], PromptRate | None],
        "truncated": Measure | None,
        "tokens": FiniteFloat | None,
    },
)


class AtReset(TypedDict):
    count: Count


Figures = TypedDict(
    "Figures",
    {
        "success_once": Measure | None,
        "success_at_end": Measure | None,
        "success_at_reset": AtReset | None,
        "episodes": Count,
        "errors": Count,
        "return": FiniteFloat | None,
        "length": FiniteFloat | None,
        "text": NotRequired[TextFigures],
    },
)


class EvalOptions(TypedDict):
    seed: NotRequired[int]
    temperature: NotRequired[FiniteFloat]


class EvalProtocol(TypedDict):
    name: NotRequired[str]
    eval: NotRequired[EvalOptions]
    env: NotRequired[dict[str, Any]]


class Reference(TypedDict):
    name: str
    task: str
    hub: str
    source: str
    published: PromptRate
    difference: NotRequired[FiniteFloat]
    interval: NotRequired[Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]]
    differs: list[str]


class Results(TypedDict):
    policy_version: Count
    overall: Figures
    per_task: dict[str, Figures]
    per_suite: NotRequired[dict[str, Figures]]
    protocol: NotRequired[EvalProtocol]
    provenance: NotRequired[dict[str, Any]]
    reference: NotRequired[Reference]


class HostEntry(TypedDict):
    name: str
    roles: list[str]


class PlacementEntry(TypedDict):
    hosts: list[HostEntry]


class RunInfo(TypedDict, total=False):
    state: str
    cause: str
    command: str
    started: str
    ended: str
    provenance: dict[str, Any]
    placement: PlacementEntry
    resumed: list[dict[str, Any]]
    started_from: dict[str, Any] | None


class MetricsRow(TypedDict):
    iteration: Count
    env_steps: Count
    policy_version: Count
    train_s: Annotated[FiniteFloat, Field(ge=0)]


_reader = cache(TypeAdapter)  # making one takes longer than reading a row of metrics


def check(content: Any, shape: Any) -> None:
    """Raise ValueError for the first part of `content` that does not have this type."""
    try:
        _reader(shape).validate_python(content, strict=True)
    except ValidationError as err:
        first = err.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'all of it'}: {first['msg'].lower()}") from None


def check_info(info: dict[str, Any]) -> None:
    """Raise ValueError if a report cannot show this run.json."""
    check(info, RunInfo)
    for key in ("started", "ended"):
        if key in info:
            datetime.fromisoformat(info[key])


def check_row(row: Any) -> None:
    """Raise ValueError if a report cannot show this line of metrics.jsonl."""
    check(row, MetricsRow)
    if odd := [key for key, value in row.items() if type(value) not in (int, float, type(None))]:
        raise ValueError(f"{odd[0]} is not a number")
    if odd := [key for key, value in row.items() if value and LARGEST < abs(value) < float("inf")]:
        raise ValueError(f"{odd[0]}={row[odd[0]]:g} is more than a chart can show")


# In words


def describe_results(results: dict) -> str:
    """Both success measures with their intervals, or the return for an env without success."""
    overall = results["overall"]
    if sets := sets_in(results):
        return f"{overall['episodes']} answers to {len(sets)} set{'s' * (len(sets) > 1)}{rows_of_tasks(results)}"
    if "text" in overall:
        return describe_answers(results)
    known = {name: overall[name] for name in ("success_once", "success_at_end") if overall[name]}
    rates = [f"{rate_in_words(name, rate)} ({rate['count']}/{overall['episodes']})" for name, rate in known.items()]
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
    own = {key: value for key, value in sets_in(results).get(name, {}).items() if value is not None}
    return sampling_in_words(results["protocol"]["eval"] | own) if own else ""


def sampling_in_words(how: dict[str, Any]) -> str:
    if how.get("temperature") is None:
        return ""
    usual = {"top_p": 1, "top_k": 0}
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


PARTIAL = "partial.json"
BUFFERS = "episode_buffers"  # the folder of the dataset's episodes
TELL_EVERY_S = 15.0
EVERY_S = 1.0  # minimum time between two writes
SHARE = 1 / 50  # largest share of the time spent on writing


class PartialEvaluation:
    """The state of an evaluation. `finished` holds its finished episodes by index, of earlier sessions too."""

    def __init__(
        self,
        folder: Path,
        asked: dict[str, Any],
        policy: dict[str, Any],
        clock: Callable[[], float] = time.monotonic,
        notify: Callable[[str], object] = lambda line: None,
    ) -> None:
        """`asked`: everything that decides an episode's outcome. Episodes of earlier sessions with the same `asked` are
        kept. `policy` is the entry in results.json. `notify` gets lines on its progress."""
        self.folder, self.asked, self.policy, self.clock = folder, asked, policy, clock
        self.num_episodes = asked["eval"]["episodes"]
        self.finished: dict[int, EpisodeResult] = {}
        self.earlier: list[dict[str, Any]] = []
        if partial := is_part_of(folder, asked):
            with suppress(OSError, ValueError, KeyError, TypeError):  # else it is played from the start
                self.finished = {episode.index: episode for episode in read_episodes(folder)}
                self.earlier = partial["provenance"]
        if not self.finished:
            remove_transcripts(folder)
        self.session = provenance()
        self.notify, self.began = notify, len(self.finished)
        self.began_s = self.ended_s = clock()  # `ended_s`: the time of the last end of an episode
        self.told, self.told_s = self.began, self.began_s  # episodes that were over at the last line, and when it came
        self.wait_s = TELL_EVERY_S  # seconds until the next line, if no episode ends
        remove_drafts(folder)
        (folder / RESULTS).unlink(missing_ok=True)  # of the same version, evaluated before the run was resumed
        self.write()

    def __str__(self) -> str:
        return f"{len(self.finished)} of {self.num_episodes} episodes"

    def add(self, episodes: Iterable[EpisodeResult]) -> None:
        """Add finished episodes; they are written if the last write is long enough ago."""
        before = len(self.finished)
        self.finished |= {episode.index: episode for episode in episodes}
        if len(self.finished) > before:
            self.changed, self.ended_s = True, self.clock()
        if self.changed and self.clock() >= self.next_s:
            self.write()
        new = len(self.finished) > self.told
        quiet_s = self.clock() - self.told_s
        if quiet_s >= (TELL_EVERY_S if new else self.wait_s) and len(self.finished) < self.num_episodes:
            # Without news the time between two lines doubles.
            self.wait_s = TELL_EVERY_S if new else 2 * self.wait_s
            self.told, self.told_s = len(self.finished), self.clock()
            self.notify(self.progress())

    def progress(self) -> str:
        """The number of finished episodes, their outcomes, the speed, and the remaining time at this speed."""
        over, results = len(self.finished), figures(list(self.finished.values()))
        parts = [f"{over:,} of {self.num_episodes:,} episodes are over"]
        if results["success_once"]:
            parts.append(f"success_once {results['success_once']['rate']:.0%} of these")
        elif results["return"] is not None:
            parts.append(f"return {results['return']:.2f}")
        if played := over - self.began:
            speed = played / (self.clock() - self.began_s)
            left_s = (self.num_episodes - over) / speed
            parts += [f"{speed:.3g} a second", f"about {left_s:,.0f} s left"]
        if (quiet_s := self.clock() - self.ended_s) >= 2 * TELL_EVERY_S:
            parts.append(f"none has ended for {quiet_s:,.0f} s")
        return "evaluation  " + ", ".join(parts)

    def write(self) -> None:
        """Write the finished episodes and partial.json."""
        began = self.clock()
        write_episodes(self.folder, self.finished.values())
        progress = {"over": len(self.finished), "episodes": self.num_episodes}
        mark(self.folder, {**progress, "asked": self.asked, "provenance": [*self.earlier, self.session]})
        self.changed = False
        self.next_s = self.clock() + max(EVERY_S, (self.clock() - began) / SHARE)

    def end(self) -> None:
        """Remove partial.json and the buffers, once results.json is written."""
        shutil.rmtree(self.folder / BUFFERS, ignore_errors=True)
        remove_partial(self.folder)

    def provenance(self) -> dict[str, Any]:
        """The provenance of the results; `earlier` holds that of earlier sessions."""
        return {**self.session, **({"earlier": self.earlier} if self.earlier else {})}


def mark(folder: Path, content: dict[str, Any]) -> None:
    """Write partial.json, which marks the folder as an interrupted evaluation."""
    replace_text(folder / PARTIAL, json.dumps({"state": "partial", **content}, indent=2) + "\n")


def remove_partial(folder: Path) -> None:
    """Remove partial.json."""
    (folder / PARTIAL).unlink()


def is_part_of(folder: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """The content of partial.json, if it belongs to the evaluation `asked`."""
    partial = partial_in(folder)
    return partial if partial and partial.get("asked") == json.loads(json.dumps(asked)) else None


def partial_in(folder: Path) -> dict[str, Any] | None:
    """The content of an interrupted evaluation's partial.json; None without one."""
    with suppress(CheckpointError):
        if not (folder / RESULTS).is_file():
            return read_json(folder / PARTIAL)
    return None
