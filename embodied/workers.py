"""Add policy workers to a running run, or take them away: python -m embodied.workers runs/NAME-DATE policy=+1

usage: python -m embodied.workers RUN [policy=+N | policy=-N] [devices=...] [--help]

  RUN       the folder of a run, on the machine where it runs. Without policy= its policy workers are listed
  policy    +1: one more policy worker, which takes part from the next rollout on; -1: the last one leaves at once: it
            takes no more requests, another one goes on with its unfinished answers, and its device is free
  devices   where added workers are placed, as in placement=: cpu:3, gpu:0,gpu:1 or node2/gpu:0 [devices that the run
            does not use, or cores that only its learners use, in turns with rollouts]

Neither changes the run's episodes, its noise or what it learns (but for rounding where requests are merged).
Simulators and learners stay. run.json and the report name the present workers; a resumed run begins with those of its
placement.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote

from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.files import as_path, read_object
from embodied.run import launch
from embodied.run.run_folder import ANSWER, REQUEST, is_held, was_killed
from embodied.run.worker_changes import MOST

USAGE = __doc__ or ""
ANSWER_S = 1800.0  # the run answers between steps, and an added worker is built first
LOOK_S, HINT_S = 0.2, 5.0
EXAMPLE = "python -m embodied.workers runs/NAME-DATE policy=+1"


def main(argv: list[str] | None = None) -> int:
    return launch.run(start, argv, USAGE)


def start(argv: Sequence[str]) -> int:
    folder, change, devices = read_words(argv)
    info = running(folder)
    if not change:
        launch.say("\n".join(present(info)))
        return 0
    said, code = ask(folder, change, devices)
    if code:
        error = EmbodiedError(said)
        error.exit_code = code
        raise error
    launch.say(said)
    return 0


def read_words(argv: Sequence[str]) -> tuple[Path, int, str]:
    """The run's folder, the change of the number of policy workers, and the named devices."""
    folders, words = [word for word in argv if "=" not in word], dict(w.split("=", 1) for w in argv if "=" in w)
    if len(folders) != 1:
        raise ConfigError(f"name the folder of one run: {EXAMPLE}")
    if unknown := sorted(words.keys() - {"policy", "devices"}):
        raise ConfigError(f"{unknown[0]}={words[unknown[0]]}: only policy workers come and go; {EXAMPLE}")
    change, devices = words.get("policy", ""), words.get("devices", "")
    if "policy" in words and not (re.fullmatch(r"[+-][1-9]\d{0,3}", change) and abs(int(change)) <= MOST):
        raise ConfigError(f"policy={change}: should be +1 or -1, +2 and so on up to {MOST}")
    if devices and not change.startswith("+"):
        raise ConfigError(f"devices={devices} is for added workers; {EXAMPLE} devices={devices}")
    return as_path(folders[0]), int(change or 0), devices


def running(folder: Path) -> dict:
    """The facts in run.json; refuses a folder whose run is not running on this machine."""
    if not (folder / "run.json").is_file():
        raise ConfigError(f"{folder} is not the folder of a run: run.json is missing; {EXAMPLE}")
    info = read_object(folder / "run.json", ConfigError)
    again = f"python -m embodied.{info.get('command', 'train')} {quote(f'resume={folder}')}"
    if (state := info.get("state")) != "running":
        raise ConfigError(f"{folder} is not running: it has {state}; it goes on with {again}")
    newest = [info, *info.get("resumed", [])][-1]
    if (host := newest.get("provenance", {}).get("host")) != platform.node():
        raise ConfigError(f"{folder} runs on {host}: give the command there")
    if was_killed(folder, info):
        raise ConfigError(f"{folder} is not running: its process was killed; it goes on with {again}")
    return info


def present(info: dict) -> list[str]:
    """A line for each policy worker's process, and its devices."""
    hosts = [host for host in info.get("placement", {}).get("hosts", ()) if "policy" in host["roles"]]
    lines = []
    for host in hosts:
        devices = host["devices"] or [f"cpu:{core}" for core in host["cores"]]
        others = " and ".join(role for role in host["roles"] if role != "policy")
        node = f" of {host['node']}" if host.get("node") else ""
        lines.append(f"{host['name']:<16}{', '.join(devices)}{node}{f', with {others}' if others else ''}")
    return lines


def ask(folder: Path, change: int, devices: str, wait: Callable[[float], None] = time.sleep) -> tuple[str, int]:
    """The run's answer to this request, and the exit code."""
    wish = {"id": secrets.token_hex(8), "change": change, "devices": devices}
    write_once(folder / REQUEST, json.dumps(wish))
    began = looked = time.monotonic()
    hinted = False
    try:
        while (answer := answer_in(folder)).get("id") != wish["id"]:
            now = time.monotonic()
            if now - looked > 1.0:
                looked = now
                if is_held(folder) is False or read_object(folder / "run.json").get("state") != "running":
                    return "the run has ended meanwhile", 1
            if now - began > ANSWER_S:
                return f"the run has not answered within {ANSWER_S:g} s; its last lines: {folder}/logs/driver.log", 1
            if now - began > HINT_S and not hinted:
                hinted = True
                launch.say("waiting     the run answers when its current step is over, and an added worker is built")
            wait(LOOK_S)
    finally:
        with suppress(OSError, EmbodiedError):  # the run has taken it
            if read_object(folder / REQUEST).get("id") == wish["id"]:
                (folder / REQUEST).unlink()
    return str(answer.get("said")), int(answer.get("code", 1))


def write_once(path: Path, text: str) -> None:
    """Write a file that does not exist yet, in one step."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        draft.write_text(text)
        os.link(draft, path)
    except FileExistsError:
        raise ConfigError(f"another command asks this run for a change just now ({path}); try again") from None
    finally:
        draft.unlink(missing_ok=True)


def answer_in(folder: Path) -> dict:
    with suppress(EmbodiedError):
        return read_object(folder / ANSWER)
    return {}


if __name__ == "__main__":
    raise SystemExit(main())
