"""A result of ours beside the published one."""

import json

import pytest

from embodied.config.recipe import load
from embodied.evaluate import main as evaluate
from embodied.run import published_models
from embodied.run.published_models import compare_with_published, differing_before

POINT = """
point:
  {family: mlp, hub: lab/point, evaluate: pointmass_ppo, train: [pointmass_ppo], episodes: 500, rates: {reach: 99.0},
  options: {eval.temperature: 1.0}, source: nobody}
"""


def played(*words):
    """The config of an evaluation of a published model, and its results but for the episodes."""
    config = load(
        ["recipe=libero_published_openvla_oft", "eval.reference=openvla_oft", *words], entry="evaluate"
    ).config
    env = config.env.model_dump(mode="json") | {"max_episode_steps": None, "on_success": "terminate"}
    rate = {"count": 480, "of": 500, "rate": 0.96, "interval": [0.94, 0.97]}
    return {"protocol": {"name": "libero-v1", "env": env}, "overall": {"success_once": rate}}, config, config.policy


def test_the_published_protocol_is_distinguished_from_another_one():
    same = compare_with_published(*played())
    assert same["hub"] == "moojink/openvla-7b-oft-finetuned-libero-spatial" and not same["differs"]
    low, high = same["interval"]  # 480 of 500 against 1,464 of 1,500
    assert same["difference"] == pytest.approx(-0.016) and low < -0.016 < high < 0.01
    other = compare_with_published(*played("env.image_size=128", "eval.temperature=1"))
    assert other["differs"] == ["eval.temperature=1.0 here, 0.0 there", "env.image_size=128 here, 256 there"]


def test_an_evaluation_of_a_part_of_the_published_one_is_marked_as_different():
    results, *told = played("env.task=libero_spatial/0")
    results["overall"]["success_once"] |= {"count": 1, "of": 2}
    assert compare_with_published(results, *told)["differs"] == [
        "env.task=libero_spatial/0 here, libero_spatial there",
        "2 episodes here, 500 there",
    ]


def test_statistics_of_another_suite_are_reported_before_anything_is_played():
    _, config, policy = played()
    for statistics, differs in (
        ("libero_10_no_noops", ["policy.statistics=libero_10_no_noops here, libero_spatial there"]),
        ("libero_spatial_no_noops", []),
    ):
        assert differing_before(config, policy.model_copy(update={"statistics": statistics})) == differs


def test_an_evaluation_says_how_far_it_is_from_the_published_rate(tmp_path, monkeypatch, capsys):
    (tmp_path / "models.yaml").write_text(POINT)
    monkeypatch.setattr(published_models, "FILE", tmp_path / "models.yaml")
    published_models.published_models.cache_clear()
    told = ["recipe=pointmass_ppo", "checkpoint=random", "eval.episodes=4", "eval.videos=0", "cluster.backend=inline"]
    try:
        assert evaluate([*told, "eval.reference=point", f"run.dir={tmp_path}"]) == 0
    finally:
        published_models.published_models.cache_clear()
    out = capsys.readouterr().out
    (results,) = tmp_path.glob("*/results.json")
    found = json.loads(results.read_text())["reference"]
    assert found["published"]["rate"] == 0.99 and found["difference"] < -0.2
    assert "random is not played as eval.reference=point: eval.temperature=0.0 here, 1.0 there" in out
    assert out.index("is not played as") < out.index("results.json")
    for text in (out, (results.parent / "report.html").read_text()):
        assert "here - published: " in text and "is more than chance" in text
        assert "eval.temperature=0.0 here, 1.0 there" in text
