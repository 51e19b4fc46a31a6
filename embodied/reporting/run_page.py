"""report.html: one file on a run and its results, readable from disk by any browser.

Training writes it after every evaluation and at the end, an evaluation into its own folder, and `python -m
embodied.report` makes it again from the files on disk. Each section of the page is one function of its files.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import Any

from embodied.core.yaml_text import read_yaml
from embodied.envs.config import played_task
from embodied.records.success_stats import greedy_gap, reference_lines, sampling
from embodied.records.transcripts import SAMPLES, read_samples
from embodied.reporting import page, sections
from embodied.reporting.runs import Evaluation, Run, read_run, start_of
from embodied.run.run_group import is_group, read_group
from embodied.sharing.run_turns import RECORD

REPORT = "report.html"
WHEN = "%Y-%m-%d %H:%M UTC"


def write_report(folder: Path) -> Path:
    """Write report.html of a run, an evaluation or a group of runs into its folder; returns its path. A live page of a
    running run stays live."""
    out = folder / REPORT
    shown, _ = page_of([folder], out.parent)
    page.write_page(out, shown, page.live_s_of(out) if shown.get("state") == "running" else 0)
    return out


def page_of(folders: Sequence[Path], beside: Path) -> tuple[page.Block, int]:
    """The page of a run, an evaluation, a group of runs or runs that share devices, or of several compared; and the
    number of unreadable files. Links are relative to the folder `beside`."""
    if len(folders) > 1:
        from embodied.reporting.comparison_page import comparison, read_all
        from embodied.reporting.seed_sets_page import unread_files

        entries = read_all(folders)
        return comparison(entries, beside), unread_files(entries)
    (folder,) = folders
    if (folder / RECORD).is_file():
        from embodied.sharing.page import share_page

        return share_page(folder), 0
    if not is_group(folder):
        run = read_run(folder)
        return report(run, beside), len(run.problems)
    from embodied.reporting.comparison_page import comparison
    from embodied.reporting.seed_sets_page import sets_of, unread_files

    group = read_group(folder)
    sets = sets_of(group)
    return comparison(sets, beside, group), unread_files(sets)


def report_or_say_why(folder: Path) -> None:
    """Write a report; if that fails print a line, so that the run continues."""
    try:
        write_report(folder)
    except Exception as err:
        why = f"{type(err).__name__}: {err}"
        again = f"python -m embodied.report {quote(str(folder))}"
        print(f"no report: {why}; {again} tries again", file=sys.stderr, flush=True)


def report(run: Run, beside: Path) -> page.Block:
    """The page of a run; links to its videos are relative to the folder `beside`."""
    timeline = sections.timeline_charts(run)  # before the problems, to which an unreadable trace is added
    parts = [page.section("", figures(run))]
    if run.metrics:
        parts.append(page.section("Results", *sections.result_charts(run), note=results_note(run)))
    if run.last:
        parts += evaluation_sections(run, run.last, beside)
    for name in run.partial:
        folder = run.folder if name == run.name else run.folder / "eval" / name
        parts.append(
            page.section(f"Episodes of evaluation {name}, before its end", sections.early_videos(folder, beside))
        )
    if run.metrics:
        parts.append(page.section("Learning", *sections.learning_charts(run)))
        if samples := page.samples_shown(read_samples(run.folder)):
            link = (SAMPLES, page.relative(run.folder / SAMPLES, beside))
            note = page.text("Some of every iteration (run.samples), long texts shortened:", link)
            parts.append(page.section("Conversations in training", note, *samples))
        parts.append(page.section("Where the time went", *sections.time_spent(run), *timeline))
    if run.info.get("placement"):
        changes = sections.worker_changes(run.info.get("worker_changes", ()))
        parts.append(page.section("Placement", *sections.placement_chart(run.info["placement"]), *changes))
    recipe = page.fold("config.yaml, the resolved recipe", run.config)
    parts.append(page.section("Recipe and provenance", sections.provenance_table(run), recipe))
    cause = run.info.get("cause")
    problems = [*([cause] if cause else []), *run.problems]
    words = f"{describe_subject(run)}{span_of_time(run)}"
    for name, how_far in run.partial.items():
        if run.info.get("state") == "running":
            words += f" \u00b7 evaluation {name}: {how_far} are over"
        else:
            problems.append(PARTLY.format(name, how_far))
    return page.page(
        f"{run.name} - report",
        parts,
        words,
        problems,
        heading=run.name,
        state=run.info.get("state", "evaluation"),
        footer=f"Written by Embodied Loop, {datetime.now(UTC):{WHEN}}.",
    )


PARTLY = (
    "Evaluation {} is partial: {} are over, in its episodes.csv. It has no rates, since successful episodes end first. "
    "A resumed run, or the same command, plays the rest."
)


def results_note(run: Run) -> str:
    """What the lines and dots of the results are, and why they differ in this run."""
    env = env_of(run)
    after = env.get("after_success")
    last = run.last.version if run.last else None
    trained = next((row for row in reversed(run.metrics) if row.get("policy_version") == last), {})
    labelled = bool(run.config) and (read_yaml(run.config).get("algo") or {}).get("name") == "dagger"
    sampled = None if labelled else trained.get("success_once")  # of DAgger's episodes some are the expert's
    gap = greedy_gap(sampled, trained.get("recent_episodes", 0), run.last.results) if trained else ""
    sentences = {
        f"{gap[:1].upper()}{gap[1:]}.": gap,
        "Lines: means over the latest training episodes. Dots: evaluations. Training draws new episodes and acts with "
        "noise; an evaluation plays a fixed list of episodes at eval.temperature (0: no noise).": True,
        f"A training episode ends {f'{after} env steps after' if after else 'at'} its first success (env.on_success); "
        "an evaluation's episode ends as eval.protocol says.": env.get("on_success", "continue") != "continue",
        "Each env's first training episode is cut short, so its return is lower (env.stagger).": env.get("stagger"),
        "Training repeats the initial states of failures, so its success is lower (env.retries).": env.get("retries"),
        "Whiskers and bands of success: 95% Wilson intervals.": True,
        "Other bands span the iterations of which a point is the mean.": len(run.metrics) > page.MOST_POINTS,
    }
    return " ".join(sentence for sentence, applies in sentences.items() if applies)


TEXT_NOTE = (
    "avg@k: the mean share of right answers of k to each prompt. pass@k: the chance that one of k answers is right, "
    "1 - C(n-c, k) / C(n, k) for c right ones of n. 95% Wilson intervals over prompts: several answers to one prompt "
    "count as what their spread shows."
)


def env_of(run: Run) -> dict[str, Any]:
    """The run's options of env."""
    return (read_yaml(run.config) if run.config else {}).get("env") or {}


def describe_subject(run: Run) -> str:
    """A short description of the trained or evaluated policy and task."""
    if run.config:
        config = read_yaml(run.config)
        policy, algo = (config.get(key) or {} for key in ("policy", "algo"))
        learning = "imitation" if imitates(run) else algo.get("name")
        return f"{what_is_played(env_of(run))}, policy {policy.get('name')}, {learning}"
    if not run.last:
        return ""
    env = run.last.results.get("protocol", {}).get("env", {})
    return f"{what_is_played(env)}, policy version {run.last.version}"


def imitates(run: Run) -> bool:
    """True for a run of embodied.sft, whose steps are examples."""
    return run.info.get("command") == "sft"


def what_is_played(env: dict[str, Any]) -> str:
    return played_task(env.get("name"), env.get("task"))


def span_of_time(run: Run) -> str:
    started, ended = run.info.get("started"), run.info.get("ended")
    if not started:
        return ""
    begin = datetime.fromisoformat(started)
    if not ended:
        return f" \u00b7 since {begin:{WHEN}}"
    return f" \u00b7 {begin:{WHEN}}, {duration((datetime.fromisoformat(ended) - begin).total_seconds())}"


def figures(run: Run) -> page.Block | None:
    """The most important figures, one per tile."""
    shown: list[tuple[str, str, str]] = []
    if run.last:
        shown += evaluation_tiles(run.last, f", v{run.last.version}" * bool(run.metrics))  # it may be an older version
        shown += start_tiles(run)
        if errors := run.last.results["overall"]["errors"]:
            shown.append(("error episodes", str(errors), "neither success nor failure"))
    if run.metrics:
        row = run.metrics[-1]
        speed = f"{row['env_steps'] / max(row['train_s'], 1e-9):,.0f}"
        steps = "examples" if imitates(run) else "env steps"
        shown += [
            (steps, f"{row['env_steps']:,}", f"{row['iteration']} iteration{'s' * (row['iteration'] != 1)}"),
            ("training time", duration(row["train_s"]), "without start and evaluations"),
            (f"{steps} per second", speed, "on average"),
        ]
        items = "episodes" if "faults/lost_episodes" in row else "decisions"  # of groups, or of a fixed horizon
        faults = [f"faults/{name}" for name in ("restarts", f"lost_{items}")]
        restarts, lost = (int(sum(row.get(name, 0) for row in run.metrics)) for name in faults)
        if restarts:  # conversations without a usable answer are lost without a restart
            shown.append(("workers restarted", f"{restarts:,}", f"{lost:,} {items} lost"))
    return page.tiles(shown)


def evaluation_tiles(evaluation: Evaluation, version: str) -> list[tuple[str, str, str]]:
    """The figures of an evaluation's table, without counts; of several pass@k the largest k."""
    overall = evaluation.results["overall"]
    cells, samples = sections.figure_cells(overall), overall.get("text", {}).get("samples", 1)
    names = {"success (avg@k)": f"avg@{samples}" if samples > 1 else "success", "cut off": "answers cut off"}
    remarks = {"return": f"mean of {overall['episodes']} episodes", "tokens an answer": "on average"}
    how = f", {sampling(evaluation.results)}{version}" if evaluation.of_text else version
    counts = {"episodes", "errors", "answers", "length"}
    left_out = counts.union([name for name in cells if name.startswith("pass@")][:-1])  # k rises
    shown = [(name, *page.words_of(value)) for name, value in cells.items() if name not in left_out]
    return [(f"{names.get(name, name)}{how}", words, more or remarks.get(name, "")) for name, words, more in shown]


def start_tiles(run: Run) -> list[tuple[str, str, str]]:
    """The success of the policy that the run started from, if it was evaluated on the same episodes; else a language
    policy's success in the first iteration, before any update."""
    if start := start_of(run):
        figures = start.results["overall"]
        measured = figures["text"]["avg"] if "text" in figures else figures["success_once"]
        if not measured:
            return []
        rate, interval, *_ = sections.describe_rate(measured)
        return [("success of the start", rate, f"{interval} same episodes")]
    first = run.metrics[0] if run.metrics else {}
    if first.get("iteration") != 1 or "text/tokens" not in first or first.get("success_once") is None:
        return []
    basis = f"{first.get('episodes', 'the')} answers of iteration 1, before any update"
    return [("success at the start", page.percent(first["success_once"]), basis)]


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def evaluation_sections(run: Run, shown: Evaluation, beside: Path) -> list[page.Block | None]:
    note = f"{shown.name}: {protocol_words(shown.results)}"
    if shown.results["overall"].get("text", {}).get("samples", 1) > 1:
        note = f"{note}. {TEXT_NOTE}"
    reference = shown.results.get("reference")
    several = len(run.evaluations) > 1 or start_of(run)
    return [
        page.section(
            f"Evaluation of version {shown.version}",
            sections.per_task_table(shown),
            *sections.histograms(shown),
            note=note,
        ),
        page.section("Beside the published rate", page.bullets(reference_lines(reference))) if reference else None,
        page.section("Conversations", *sections.conversation_blocks(shown, beside)),
        page.section("Episodes", sections.video_gallery(shown, beside)),
        page.section("All evaluations", sections.evaluations_table(run)) if several else None,
    ]


def protocol_words(results: dict[str, Any]) -> str:
    """The conditions of an evaluation's episodes, in words."""
    protocol = results.get("protocol", {})
    how = protocol.get("eval", {})
    overall, limited = results["overall"], protocol.get("max_episode_steps")
    text = overall.get("text")
    words = [
        protocol.get("name", ""),
        f"{overall['episodes'] + overall['errors']} episodes",
        f"{text['samples']} to each of {text['prompts']} prompts" if text and text["samples"] > 1 else "",
        f"seed {how['seed']}" if "seed" in how else "",
        f"temperature {how['temperature']:g}{'' if how['temperature'] else ' (greedy)'}"
        if "temperature" in how
        else "",
        f"at most {limited} {'turns' if text else 'steps'}" if limited else "",
        f"physics {protocol['backend']}" if protocol.get("backend") else "",
    ]
    return ", ".join(word for word in words if word)
