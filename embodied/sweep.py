"""Train a recipe with several settings: python -m embodied.sweep recipe=pointmass_ppo algo.lr=1e-4,3e-4,1e-3 seeds=0-2

Every setting, with each of its seeds, is an ordinary run, which `seeds_and_sweeps.py` starts, resumes and watches;
one page compares the settings.

usage: python -m embodied.sweep recipe=NAME KEY=A,B,C [KEY=A,B ...] [seeds=0-2] [key=value ...] [--dry-run | --help]

  recipe    a name (python -m embodied.list recipes), or path/to/my.yaml
  KEY=A,B   a key of the recipe with several values: every combination is a run. Commas inside brackets or quotes
            belong to a value: 'policy.hidden=[64,64],[256,256]'
  seeds     0-2 or 0,2,5: every setting with each of these seeds [0]
  at_once   number of simultaneous runs, each on its own cores and GPUs [as many as fit on the machine, by the
            plan of the first run]; shared: each run owns some devices and lends them while it has no work for them,
            as in embodied.share
  group     the folder that names the runs [the newest of the same command in run.dir, else a new one]
  program   a workflow of your own, my_module:MyLoop
  --dry-run print the runs, their states and the number of simultaneous runs, and stop

The same command again continues: finished runs stay, unfinished ones are resumed, missing ones begin; more values or
seeds are added to the same group. Keys and their meaning: python -m embodied.train --help
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from embodied import let_call
from embodied.config.command_line import from_python
from embodied.core.errors import ConfigError
from embodied.reporting.seed_sets_page import sets_of, summary
from embodied.run import launch
from embodied.sweeps.run_group import RunGroup, read_group
from embodied.sweeps.seeds_and_sweeps import run_several

RATES = ("success_once", "success_at_end", "return")
USAGE = __doc__ or ""


def main(argv: list[str] | None = None) -> int:
    return launch.run(start, argv, USAGE)


def start(argv: list[str]) -> int:
    return run_several(argv, sweep=True)[0]


def call(*words: str | Mapping[str, Any]) -> RunGroup:
    """Run a sweep (or only several seeds) from Python, like the command. Returns the group with its runs, and with the
    rates of its page: embodied.sweep("pointmass_ppo", "algo.lr=1e-4,1e-3", "seeds=0-2").rates."""
    argv = from_python(words)
    _, folder = run_several(argv, sweep=True)
    if folder is None:
        raise ConfigError("--cfg and --dry-run are for the command line")
    group = read_group(folder)
    return replace(group, rates={one.label: {name: summary(one, name) for name in RATES} for one in sets_of(group)})


let_call(__name__)
if __name__ == "__main__":
    raise SystemExit(main())
