"""A run's progress, on the console and in its folder.

`Console` shows the plan first, then one live line (off a terminal a plain line per iteration), then the results. It
computes the running means in the line and in metrics.jsonl. `RunLog` writes metrics.jsonl, logs/driver.log, and the
curves of `run.log` (`loggers.py`).
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache
from io import FileIO, StringIO
from itertools import pairwise
from pathlib import Path
from shlex import join, quote

from embodied.core.errors import printable
from embodied.core.files import encode, replace_text, show
from embodied.core.options import ROOT, version_of
from embodied.core.plugins import LOGGER_CLASSES
from embodied.core.types import EpisodeResult
from embodied.records.loggers import Logger, RayGauges

RECENT_EPISODES = "recent_episodes"  # in the state of a checkpoint
RECENT = 100  # window of the success rate and return of training, in episodes
MEANS = {
    "success_once": "success_once",
    "success_at_end": "success_at_end",
    "return": "total_reward",
    "length": "length",
}
PACKAGES = "embodied-loop torch numpy gymnasium mani_skill sapien mujoco robosuite transformers ray".split()
LARGEST_GAP = 1.0  # nats of one action's log-prob; rounding in bfloat16 stays well below


class Console:
    """Prints the progress of a run."""

    def __init__(
        self,
        folder: Path,
        note: Callable[[str], None] | None = None,
        stream=None,
        command: str = "train",
        advice: str = "",
        expert_plays: bool = False,
    ) -> None:
        """`note` also gets every line, for a log. `command` resumes the run. `advice` is printed if a third of the run,
        and at least RECENT episodes, had no success. `expert_plays`: some training episodes are an expert's."""
        self.folder = folder
        self.command = command
        self.counted = "examples" if command.split()[0] == "sft" else "env steps"
        self.note = note or (lambda _: None)
        self.stream = stream or sys.stdout or StringIO()  # stdout may be closed from the start
        self.live = self.stream.isatty()
        self.recent: deque[dict[str, float | None]] = deque(maxlen=RECENT)  # values named in `MEANS`
        self.last_checkpoint: Path | None = None
        self.warned = False
        self.advice = advice
        self.expert_plays = expert_plays

    def say(self, text: str) -> None:
        """Print a permanent line."""
        text = printable(text)
        show(f"\r\033[K{text}\n" if self.live else f"{text}\n", self.stream)
        self.note(text)

    def iteration(
        self, state: dict, finished: list[EpisodeResult], numbers: dict[str, float], elapsed_s: float, total: int
    ) -> dict:
        """Show one iteration and return its row for metrics.jsonl."""
        measured = [{name: getattr(episode, field) for name, field in MEANS.items()} for episode in finished]
        if any(episode.truncated is not None for episode in finished):  # conversations are many: this iteration's alone
            self.recent = deque(measured)
        else:
            self.recent.extend(measured)
        self._advise(state["iteration"], finished, total)
        steps = numbers["env_steps"]
        row = {
            "iteration": state["iteration"],
            "policy_version": state["version"],
            "env_steps": state["env_steps"],
            "train_s": round(state["train_s"], 3),
            "steps_per_s": round(steps / elapsed_s, 1),
            "episodes": len(finished),
            "recent_episodes": len(self.recent),
            **self._recent_means(),
            **({"faults/error_episodes": errors} if (errors := sum(bool(result.error) for result in finished)) else {}),
            **text_numbers(finished, elapsed_s),
            **{name: value for name, value in numbers.items() if name != "env_steps"},
        }
        left = (total - state["iteration"]) * state["train_s"] / state["iteration"]
        success, unit = row["success_once"], self.counted.rpartition(" ")[2]
        parts = [
            f"iteration {state['iteration']}/{total}",
            f"{state['env_steps']:,} {unit}",
            f"{row['steps_per_s']:,.0f} {unit}/s",
            *([f"success {success:.0%}"] if success is not None else []),
            f"return {row['return']:.2f}" if row["return"] is not None else "return -",
            *text_parts(row),
            *signal_parts(numbers),
            *([f"loss {numbers['train/loss']:.3f}"] if "train/loss" in numbers else []),
            f"ETA {left:.0f} s",
        ]
        text = "  ".join(parts)
        if numbers.get("train/logprob_gap", 0.0) > LARGEST_GAP and not self.warned:
            self.warned = True
            self.say(
                f"warning: the policy's act and forward differ by {numbers['train/logprob_gap']:.3g} nats in the "
                "log-prob of the same action with the same weights, so learning is wrong"
            )
        self.show_activity(text)
        return row

    def _advise(self, iteration: int, finished: list[EpisodeResult], total: int) -> None:
        """Print advice once, after a long time without success."""
        if any(episode.success_once for episode in finished):
            self.advice = ""
        has_outcomes = any(episode["success_once"] is not None for episode in self.recent)
        if self.advice and has_outcomes and iteration * 3 >= total and len(self.recent) >= RECENT:
            self.say(self.advice)
            self.advice = ""

    def show_activity(self, text: str) -> None:
        """Print the current activity; on a terminal the next line replaces it."""
        text = printable(text)
        if self.live:
            show("\r\033[K" + text, self.stream)
            self.note(text)
        else:
            self.say(text)

    def evaluating(self, version: int, episodes: int, played: int = 0, beside: bool = False) -> None:
        before = f", of which {played} were played before" if played else ""
        when = " beside the next rollout" if beside else ""
        self.show_activity(f"evaluating v{version:06d} on {episodes} episodes{before}{when}")

    def evaluated(self, version: int, results: dict) -> None:
        from embodied.records.success_stats import describe_results, greedy_gap, warn_of_errors

        self.say(f"evaluation of v{version:06d}: {describe_results(results)}{warn_of_errors(results)}")
        sampled = None if self.expert_plays else self._recent_means()["success_once"]
        if gap := greedy_gap(sampled, len(self.recent), results):
            self.say(f"note        {gap}")

    def resumed(self, checkpoint: Path, state: dict, abandoned: int, dropped: int) -> None:
        self.last_checkpoint = checkpoint
        self.advice = ""  # earlier episodes may have succeeded
        anew = "abandoned, since this simulator's state is not saved: new ones begin, and the learned weights are kept"
        lost = f"; {abandoned} open episodes were {anew}" if abandoned else ""
        batch, was = ("batch", "was") if dropped == 1 else ("batches", "were")
        lost += f"; {dropped} {batch} that {was} collected ahead {was} dropped" if dropped else ""
        self.say(
            f"resumed from {checkpoint} (iteration {state['iteration']}, {state['env_steps']:,} {self.counted}){lost}"
        )

    def restore(self, episodes: Sequence[dict[str, float | None]]) -> None:
        """Continue the running means with a checkpoint's `recent` episodes."""
        for episode in episodes:
            self.recent.append({name: None if (value := episode[name]) is None else float(value) for name in MEANS})

    def nothing_left(self, done: int, total: int) -> None:
        more = f"run.iterations={done + 10} would add 10"
        self.say(f"nothing left to train: {done} of {total} iterations are done; {more}")

    def end(self, state: dict, stopped: bool, spent: str, most: int | None = None) -> None:
        """Print the use of the time, the result files and the next commands. `most`: the largest number of different
        evaluation episodes, if it is limited; 0: `eval.sets` say which."""
        from embodied.records.transcripts import TRANSCRIPTS
        from embodied.records.videos import worth_seeing

        verb = "stopped" if stopped else "finished"
        self.say(f"{verb} after {state['env_steps']:,} {self.counted} in {state['train_s']:.1f} s of training")
        self.say(f"  time        {spent}")
        self.say(f"  results     {self.folder}")
        self.say(f"  report      {self.folder / 'report.html'}")
        for video in worth_seeing(self.folder.glob("eval/*/videos/*.mp4"))[:1]:
            self.say(f"  video       {video}")
        if transcripts := sorted(self.folder.glob(f"eval/*/{TRANSCRIPTS}")):
            self.say(f"  transcripts {transcripts[-1]}")
        if self.last_checkpoint:
            self.say(f"  checkpoint  {self.last_checkpoint}")
        evaluation = [f"checkpoint={self.folder}"]
        evaluation += [] if most == 0 else [f"eval.episodes={min(200, most or 200)}"]
        self.say(f"  evaluate    python -m embodied.evaluate {join(evaluation)}")
        self.say(f"  resume      python -m embodied.{self.command} {quote(f'resume={self.folder}')}")

    def _recent_means(self) -> dict[str, float | None]:
        means: dict[str, float | None] = {}
        for name in MEANS:
            numbers = [float(value) for episode in self.recent if (value := episode[name]) is not None]
            means[name] = round(sum(numbers) / len(numbers), 4) if numbers else None
        return means


def text_parts(row: dict) -> list[str]:
    """The part of an iteration's line about a language policy's answers."""
    if "text/tokens" not in row:
        return []
    length, speed = (row[f"text/{name}"] for name in ("tokens", "tokens_per_s"))
    return [f"{row['text/truncated']:.0%} cut off", f"{length:,.1f} tokens an answer", f"{speed:,.0f} tokens/s"]


def signal_parts(numbers: dict[str, float]) -> list[str]:
    """The part of an iteration's line about skipped groups."""
    if numbers.get("groups/used", 1):
        return []
    kinds = {"equal": "of equal returns", "out_of_bounds": "out of bounds", "incomplete": "incomplete"}
    dropped = {why: int(numbers.get(f"groups/dropped_{kind}", 0)) for kind, why in kinds.items()}
    return [f"no group to learn from: {', '.join(f'{n} {why}' for why, n in dropped.items() if n) or 'none came'}"]


def text_numbers(finished: list[EpisodeResult], elapsed_s: float) -> dict[str, float]:
    """Training metrics of the conversations of an iteration; empty for robot policies."""
    played = [episode for episode in finished if episode.truncated is not None]
    turns, tokens = (sum(getattr(episode, name) for episode in played) for name in ("length", "tokens"))
    if not turns:
        return {}
    metrics = {
        "text/truncated": sum(bool(episode.truncated) for episode in played) / len(played),
        "text/tokens": tokens / turns,  # per answer, on average
        "text/tokens_per_s": tokens / elapsed_s,
    }
    if any(episode.rewards for episode in played):
        from embodied.records.success_stats import mean_rewards

        metrics |= {f"reward/{name}": score for name, score in mean_rewards(played).items()}
    by_task: dict[str, list[EpisodeResult]] = {}
    for episode in played:
        by_task.setdefault(episode.task, []).append(episode)
    for task, some in sorted(by_task.items()) if len(by_task) > 1 else ():
        metrics[f"task/{task}/conversations"] = len(some)
        metrics[f"task/{task}/success"] = sum(bool(episode.success_once) for episode in some) / len(some)
        metrics[f"task/{task}/return"] = sum(episode.total_reward for episode in some) / len(some)
        metrics[f"task/{task}/tokens"] = sum(episode.tokens for episode in some) / len(some)
    return metrics


# Metrics, in metrics.jsonl and with other loggers


class RunLog:
    """Writes the console's lines and the iterations' numbers into a run's folder."""

    def __init__(self, run: Path) -> None:
        self.path = run
        self.metrics = run / "metrics.jsonl"
        self._file: FileIO | None = None
        self._loggers: list[Logger] = []

    def begin(self, names: Sequence[str], on_ray: bool = False) -> list[str]:
        """Open the loggers of `run.log`, and on a Ray cluster its metrics. Returns the lines of loggers that have
        something to say."""
        if on_ray:
            self._loggers.append(RayGauges(self.path))
        lines = []
        for name in dict.fromkeys(names):
            logger = LOGGER_CLASSES[name](self.path)
            self._loggers.append(logger)
            if line := logger.describe():
                lines.append(f"{name:<12}{line}")
        return lines

    def note(self, text: str) -> None:
        """Write a line of the console into logs/driver.log."""
        with (self.path / "logs" / "driver.log").open("ab", buffering=0) as file:
            file.write(encode(f"{timestamp()} {printable(text)}\n"))

    def row(self, row: dict) -> None:
        """Write one iteration's numbers."""
        if self._file is None:
            self._file = self.metrics.open("ab", buffering=0)  # nothing is left to flush later
        self._file.write((json.dumps(row) + "\n").encode())
        self._point(row["env_steps"], row)

    def samples(self, iteration: int, samples: Sequence[dict]) -> None:
        """Add conversations of an iteration to samples.jsonl."""
        if samples:
            from embodied.records.transcripts import add_samples

            add_samples(self.path, iteration, samples)

    def answers(self, iteration: int, ends: Sequence[tuple[int, float]]) -> None:
        """Add an iteration's line to answers.jsonl."""
        if ends:
            from embodied.records.transcripts import add_ends

            add_ends(self.path, iteration, ends)

    def evaluated(self, version: int, results: dict) -> None:
        """Add an evaluation's figures to the row of the iteration that made this version, and to the curves."""
        rows = self._rows()
        row = next((row for row in reversed(rows) if row["policy_version"] == version), None)
        if row is None:  # the evaluation of the initial policy
            return
        from embodied.records.success_stats import evaluation_numbers

        figures = evaluation_numbers(results)
        row.update(figures)
        self._rewrite(rows)
        self._point(row["env_steps"], figures)

    def last_iteration(self) -> int:
        """The newest iteration that has a row; 0 without any."""
        return max((row["iteration"] for row in self._rows()), default=0)

    def keep_rows(self, iteration: int) -> str:
        """Drop the rows and samples of iterations after `iteration`, which a resumed run repeats. Returns the missing
        earlier rows, like `3 to 39`, or ""."""
        rows = [row for row in self._rows() if row["iteration"] <= iteration]
        if self.metrics.is_file():  # an iteration's conversations are written after its row
            from embodied.records.transcripts import keep_conversations

            self._rewrite(rows)
            keep_conversations(self.path, iteration)
        return missing_rows([0, *sorted({row["iteration"] for row in rows}), iteration + 1])

    def close(self, failed: bool = False) -> None:
        if self._file is not None:
            self._file.close()
        for logger in self._loggers:
            logger.close(failed)
        self._file, self._loggers = None, []

    def _point(self, step: int, numbers: dict) -> None:
        for logger in self._loggers:
            logger.add(step, in_folders(numbers))

    def _rows(self) -> list[dict]:
        if not self.metrics.is_file():
            return []
        return [row for row in map(row_of, self.metrics.read_text(errors="replace").splitlines()) if row]

    def _rewrite(self, rows: list[dict]) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        replace_text(self.metrics, "".join(json.dumps(row) + "\n" for row in rows))


def in_folders(numbers: dict) -> dict[str, float]:
    """The numbers by the curves' names; names without a folder get `run/`."""
    return {
        name if "/" in name else f"run/{name}": float(number)
        for name, number in numbers.items()
        if isinstance(number, int | float)
    }


def missing_rows(iterations: Sequence[int]) -> str:
    """The missing numbers between these, in words: `3 to 39, 41` for 2, 40 and 42."""
    gaps = [(before + 1, after - 1) for before, after in pairwise(iterations) if after - before > 1]
    return ", ".join(f"{first} to {last}" if last > first else f"{first}" for first, last in gaps)


def row_of(line: str) -> dict | None:
    """A line of metrics.jsonl; None for a line cut short by a crash or a full disk."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("iteration"), int) else None


def timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def command_line() -> list[str]:
    """The command that started this process, as its user typed it: `python -m embodied.train recipe=NAME`."""
    if "-m" in sys.orig_argv[:-1]:
        return ["python", *sys.orig_argv[sys.orig_argv.index("-m") :]]
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


def provenance() -> dict:
    """Origin of a result: command, code, packages, machine."""
    return {
        "command": command_line(),
        "commit": commit(),
        "host": platform.node(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "packages": {name: version for name in PACKAGES if (version := version_of(name))},
        "time": time.time(),
    }


@cache  # cached: the commit of the imported code, even if files change later
def commit() -> str | None:
    """The commit of the code that runs, marked when it has uncommitted changes; None outside a checkout."""
    if not (ROOT / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
