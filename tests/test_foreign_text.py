"""Text of an env may hold any bytes: it costs what the same error in plain words costs, and no terminal obeys it."""

import json

from embodied.train import main as train

ENV = """
import os
from pathlib import Path
from embodied.envs.pointmass.config import PointMassConfig
from embodied.envs.pointmass.env import PointMassEnv

WORDS = os.fsdecode(b"no file /data/\\xff.obj \\x1b[2J")

class Odd(PointMassEnv):
    def __init__(self, config, num_envs):
        self.once = Path(config.kwargs["once"])
        super().__init__(PointMassConfig(name="pointmass", num_envs=config.num_envs, max_episode_steps=10), num_envs)

    def step_chunk(self, actions, on_frame=None):
        print(WORDS)
        if on_frame is not None:  # only evaluations film
            raise RuntimeError(WORDS)
        if not self.once.exists():
            self.once.touch()
            raise RuntimeError(WORDS)
        return super().step_chunk(actions, on_frame)
"""


def test_an_error_of_any_bytes_is_one_restart_and_every_file_and_page_holds_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "odd_env.py").write_text(ENV)
    monkeypatch.syspath_prepend(tmp_path)
    env = ["env.name=odd_env:Odd", "env.task=reach", f"env.kwargs={{once: {tmp_path}/struck}}", "env.num_envs=4"]
    short = "algo.rollout_decisions=8 algo.minibatch_size=16 run.iterations=2 eval.episodes=2 eval.videos=1".split()
    command = ["recipe=pointmass_ppo", *env, *short, f"run.dir={tmp_path}", "run.name=odd", "cluster.backend=local"]
    assert train(command) == 0
    (run,) = tmp_path.glob("odd-*")
    shown = "no file /data/\\udcff.obj \\x1b[2J"
    assert shown in capsys.readouterr().out and shown in (run / "logs" / "driver.log").read_text()
    assert [json.loads(line)["iteration"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    for path in run.rglob("*.html"):
        assert "\x1b" not in path.read_text(encoding="utf-8")
    assert any(shown in path.read_text(encoding="utf-8") for path in run.rglob("episodes.csv"))
