"""comparison.html of several runs, or of settings with several seeds each: figures, learning curves, paired differences
on the same episodes (of single runs), differences between recipes, and provenance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from shlex import join as join_words
from typing import Any

from embodied.core.arrays import flat_dict
from embodied.core.yaml_text import read_yaml
from embodied.records.success_stats import Prompt, compare, prompt_of
from embodied.records.transcripts import transcript_lines
from embodied.reporting import page, sections, seed_sets_page
from embodied.reporting.runs import Evaluation, Run, read_run
from embodied.reporting.seed_sets_page import ComparedRun, SeedSet, sets_of
from embodied.run.run_group import RunGroup, is_group, read_group

MOST_PROMPTS = 20  # prompts whose answers are compared

# Keys of a protocol that decide an episode's conditions
SAME = ("env", "eval", "name", "backend", "max_episode_steps")
IRRELEVANT = {"env.num_envs", "eval.num_envs", "eval.videos"}  # keys that change no episode


def comparison(given: Sequence[Run | SeedSet], beside: Path, group: RunGroup | None = None) -> page.Block:
    """The page; links are relative to the folder `beside`. `group`: the group of all these runs, if they are one."""
    sets = with_names(given)
    colors = {seed_set.label: place for place, seed_set in enumerate(sets)}
    runs = [run for seed_set in sets for run in seed_set.runs]
    singles = len(sets) > 1 and all(len(seed_set.runs) == 1 and not seed_set.missing for seed_set in sets)
    entries = seed_sets_page.entries_of(sets, colors)
    dots = seed_sets_page.DOTS_NOTE * (len(sets) == 1 or any(len(seed_set.runs) == 1 for seed_set in sets))
    note = SINGLES_NOTE if singles else seed_sets_page.CURVES_NOTE + dots
    curves = page.section("Curves", *seed_sets_page.curve_charts(sets, colors), note=note)
    of_runs = (
        page.section("Runs", seed_sets_page.runs_table(entries, beside), note=seed_sets_page.RUNS_NOTE)
        if runs
        else None
    )
    parts = [of_runs, curves] if singles else [curves, of_runs]
    if group or not singles:
        note = seed_sets_page.ALONE_NOTE if singles else seed_sets_page.iqm_note(sets)
        verdict = page.text(seed_sets_page.name_best(sets), note=False) if len(sets) > 1 else None
        title = "Settings" if group and len(sets) > 1 else "Over seeds"
        parts.insert(0, page.section(title, verdict, seed_sets_page.ranking_table(sets, colors), page.text(note)))
    if singles:
        parts += same_episodes(entries, beside)
    if len(sets) > 1:
        parts.append(page.section("What differs", what_differs(sets)))
    recipe = page.fold(f"config.yaml of {runs[0].name}", runs[0].config) if group and runs else None
    parts.append(page.section("Where they come from", seed_sets_page.made_table(sets), recipe))
    code = seed_sets_page.commits(runs)
    mixed = [f"Code of {len(code)} commits made these runs: {', '.join(code)}."] if len(code) > 1 and group else []
    return page.page(
        f"{group.folder.resolve().name if group else ', '.join(colors)} - comparison",
        parts,
        heading_words(runs, code, group),
        [*seed_sets_page.problems(sets), *mixed],
        heading=group.folder.resolve().name if group else f"{len(runs)} runs compared",
        command=f"python -m {join_words(group.command)}" if group and group.command else "",
    )


def read_all(folders: Sequence[Path]) -> list[Run | SeedSet]:
    """The runs, and the groups' sets of seeds, in this order."""
    shown: list[Run | SeedSet] = []
    for folder in folders:
        shown += sets_of(read_group(folder), beside_others=True) if is_group(folder) else [read_run(folder)]
    return shown


def with_names(shown: Sequence[Run | SeedSet]) -> list[SeedSet]:
    """All entries as sets of seeds, with distinct labels."""
    names = iter(distinct_labels([one for one in shown if isinstance(one, Run)]))
    sets = [SeedSet(next(names), [one], [None], [True]) if isinstance(one, Run) else one for one in shown]
    same = {one.label for one in sets if [other.label for other in sets].count(one.label) > 1}
    return [replace(one, label=f"{one.label} ({i})") if one.label in same else one for i, one in enumerate(sets, 1)]


def same_episodes(entries: list[ComparedRun], beside: Path) -> list[page.Block | None]:
    """The sections that compare single runs episode by episode."""
    note = DIFFERENCES_NOTE + PROMPTS_NOTE * any(entry.run.last and entry.run.last.of_text for entry in entries)
    return [
        page.section("On the same episodes", *differences(entries), note=note),
        page.section("Answers to the same prompts", answers_to_same_prompts(entries)),
        page.section("Videos of the same episodes", *videos_of_same_episodes(entries, beside)),
    ]


def heading_words(runs: list[Run], code: Sequence[str], group: RunGroup | None) -> str:
    """Number, commit and dates of the runs."""
    words = [f"{len(runs)} runs"] * bool(group) + [f"of commit {commit}" for commit in code if len(code) == 1]
    if dates := sorted(str(run.info["started"]) for run in runs if run.info.get("started")):
        words.append(" to ".join(dict.fromkeys(date[:16].replace("T", " ") for date in (dates[0], dates[-1]))) + " UTC")
    return " \u00b7 ".join(words)


SINGLES_NOTE = (
    "Lines: the last episodes of training, which explores. Dots: evaluations, which play a fixed list of episodes. "
    "With 95% Wilson intervals."
)
DIFFERENCES_NOTE = (
    "The newest evaluation of every run against that of the first, on the episodes that both played: rate minus the "
    "first's rate, with Newcombe's 95% interval for paired rates. An interval that holds 0 shows no difference."
)
PROMPTS_NOTE = (
    " Language policies are paired by prompt; of several answers to each the prompts' means, with the normal interval."
)


def distinct_labels(runs: list[Run]) -> list[str]:
    """Folder names, with as much of their paths as is needed to distinguish them."""
    parts = [run.folder.resolve().parts for run in runs]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(path)} ({i})" for i, path in enumerate(parts, 1)]


def differences(entries: list[ComparedRun]) -> list[page.Block]:
    """A table with a row per run: its differences from the first on the same episodes; then notes."""
    first, *others = entries
    if first.run.last is None:
        return [page.text(f"{first.label} has no evaluation.")]
    rows: list[tuple[object, dict[str, object]]] = []
    notes = []
    for entry in others:
        if entry.run.last is None:
            notes.append(f"{entry.label} has no evaluation.")
            continue
        unlike, both = (other_prompts(first.run.last, entry.run.last), (first.run.last, entry.run.last))
        ours, theirs = ([one for one in evaluation.episodes if prompt_of(one) not in unlike] for evaluation in both)
        if unlike:
            notes.append(f"{len(unlike)} prompts read otherwise in {entry.label} than in {first.label}: left out.")
        paired = compare(ours, theirs)
        if not paired["episodes"]:
            notes.append(f"{entry.label} and {first.label} played no episode in common: no paired difference.")
            continue
        if unlike := other_conditions(first.run, entry.run):
            notes.append(f"{entry.label} was evaluated under other conditions than {first.label}: {', '.join(unlike)}.")
        rows.append((page.cell(entry.label, color=entry.color), difference_cells(paired)))
    return [*([page.named_table(f"against {first.label}", rows)] if rows else []), *map(page.text, notes)]


def difference_cells(paired: dict[str, Any]) -> dict[str, object]:
    """Cells of a paired comparison by the names of their columns."""
    if "prompts" in paired:
        shown = {
            "success_once": percentage_points,
            "return": page.short,
            "truncated": percentage_points,
            "tokens": page.short,
        }
        names = {"success_once": "success (avg@k)", "truncated": "cut off", "tokens": "tokens"}
        counts = {"prompts": paired["prompts"], "answers": paired["episodes"]}
    else:
        shown, names = {**dict.fromkeys(sections.MEASURES, percentage_points), "return": page.short}, {}
        counts = {"episodes": paired["episodes"]}
    return counts | {names.get(name, name): difference_cell(paired[name], show) for name, show in shown.items()}


def other_prompts(first: Evaluation, second: Evaluation) -> set[Prompt]:
    """The numbers of prompts whose texts differ between both transcripts."""
    ours, theirs = (prompts_read(evaluation) for evaluation in (first, second))
    return {prompt for prompt in ours.keys() & theirs.keys() if ours[prompt] != theirs[prompt]}


def prompts_read(evaluation: Evaluation) -> dict[Prompt, str]:
    """The text of each prompt, from the transcripts."""
    prompts = {episode.index: prompt_of(episode) for episode in evaluation.episodes} if evaluation.of_text else {}
    written = ((index, json.loads(line)) for index, line in transcript_lines(evaluation.folder, prompts))
    return {prompts[index]: json.dumps(one["turns"][0]["said"]) for index, one in written if page.can_be_shown(one)}


def answers_to_same_prompts(entries: list[ComparedRun]) -> page.Block | None:
    """The first answers of every run to some common prompts; prompts with different outcomes come first."""
    evaluations = [entry.run.last for entry in entries]
    if not all(one and one.of_text for one in evaluations):
        return None
    unlike = set().union(*[other_prompts(evaluations[0], one) for one in evaluations[1:]])
    first = [
        {prompt_of(one): one for one in reversed(evaluation.episodes) if not one.error} for evaluation in evaluations
    ]
    shared = sorted(set.intersection(*map(set, first)) - unlike)
    shared.sort(key=lambda prompt: len({sections.outcome(one[prompt]) for one in first}) == 1)
    wanted = [[one[prompt].index for prompt in shared[:MOST_PROMPTS]] for one in first]
    written = [sections.transcripts_of(*evaluation) for evaluation in zip(evaluations, wanted, strict=True)]
    room, shown = page.Conversations(), []
    for prompt in shared[:MOST_PROMPTS]:
        answers = [evaluation[prompt] for evaluation in first]
        if all(one.index in found for one, found in zip(answers, written, strict=True)):
            shown += [
                room.show(
                    one, found[one.index], sections.outcome(one), f"{entry.label}, {sections.prompt_name(one)}", True
                )
                for one, found, entry in zip(answers, written, entries, strict=True)
            ]
    return page.conversations(shown, columns=len(entries)) if shown else None


def difference_cell(difference: dict[str, Any] | None, show) -> object:
    if difference is None:
        return "-"
    low, high = difference["interval"]
    more = f"[{signed(low, show)}, {signed(high, show)}]"
    if "only_first" in difference:
        more += f"\nonly this one {difference['only_second']}, only the first {difference['only_first']}"
    return page.cell(signed(difference["difference"], show), more, value=difference)


def signed(value: float, show) -> str:
    return f"{'+' if value > 0 else ''}{show(value)}"


def percentage_points(value: float) -> str:
    return f"{100 * value:.1f} pp"


def other_conditions(first: Run, second: Run) -> list[str]:
    """The keys that differ between two runs' protocols and affect episodes."""
    protocols = [run.last.results.get("protocol", {}) for run in (first, second)]
    ours, theirs = (flat_dict({key: protocol[key] for key in SAME if key in protocol}) for protocol in protocols)
    return sorted(key for key in {*ours, *theirs} - IRRELEVANT if ours.get(key) != theirs.get(key))


def videos_of_same_episodes(entries: list[ComparedRun], beside: Path) -> list[page.Block | None]:
    """A row for each episode with a video of every run; episodes with different outcomes come first."""
    if any(entry.run.last is None for entry in entries):
        return []
    paths = [sections.videos_by_episode(entry.run.last) for entry in entries]
    played = [{episode.index: episode for episode in entry.run.last.episodes} for entry in entries]
    shared = sorted(set.intersection(*map(set, paths), *map(set, played)))
    same = [index for index in shared if len({(one[index].task, one[index].seed) for one in played}) == 1]
    same.sort(key=lambda index: (len({sections.outcome(one[index]) for one in played}) == 1, index))
    return [
        sections.videos(
            [
                sections.episode_video(files[index], episodes[index], beside, entry.label)
                for files, episodes, entry in zip(paths, played, entries, strict=True)
            ]
        )
        for index in same[: sections.MOST_VIDEOS]
    ]


def what_differs(sets: list[SeedSet]) -> page.Block:
    """A table of the recipe's keys and the facts of provenance that differ between runs, with all values of a set of
    seeds."""
    facts = [settings_of(one) for one in sets]
    expected = {"seed", "run.name"} if any(len(one.runs) > 1 for one in sets) else set()
    rows = [
        [key, *[str(one.get(key, "-")) for one in facts]]
        for key in dict.fromkeys(chain.from_iterable(facts))
        if key not in expected and len({str(one.get(key)) for one in facts}) > 1
    ]
    if not rows:
        return page.text("Nothing in recipe, code, packages or machine.")
    return page.table(["", *[page.cell(one.label, color=place) for place, one in enumerate(sets)]], rows, numeric=False)


def settings_of(seed_set: SeedSet) -> dict[str, Any]:
    """The settings of the runs of a set, with all values of a key that differs among them."""
    settings_by_run = [settings(run) for run in seed_set.runs]
    return {
        key: ", ".join(dict.fromkeys(str(recipe.get(key)) for recipe in settings_by_run))
        for key in dict.fromkeys(chain.from_iterable(settings_by_run))
    }


def settings(run: Run) -> dict[str, Any]:
    """The recipe's keys and the facts of provenance."""
    flat = flat_dict(read_yaml(run.config) or {})
    values = {key: value for key, value in flat.items() if key not in {"run.dir", *IRRELEVANT}}
    values |= {key: run.provenance.get(key) for key in ("commit", "python", "platform", "cores")}
    return values | {f"package {name}": version for name, version in run.provenance.get("packages", {}).items()}
