import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from episode_files import check_same_episodes
from safetensors.torch import load_file, save_file

from embodied import collect, evaluate, sft, train
from embodied.config.recipe import load
from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.types import ActionSpec, EnvSpec
from embodied.learners.memory_estimate import estimate
from embodied.policies import hub, load_policy, make_policy
from embodied.policies.config import Pi0Config
from embodied.policies.pi0.policy import (
    EXPERT_HEAD,
    FULL,
    TIED,
    TINY,
    WORDS,
    Pi0Network,
    in_half,
    own_name,
    settings_of,
)

SPEC = EnvSpec(ActionSpec(3), state_dim=4, images={"top": (48, 64, 3), "near": (32, 32, 3)}, instruction=True)
ARM = {"state": 8, "actions": 7}
FIGURES = {
    "state": {"mean": [0.5] * 4, "std": [0.25] * 4, "q01": [0.0] * 4, "q99": [1.0] * 4},
    "actions": {"mean": [1.0, 0, 0], "std": [0.1, 1, 1], "q01": [-2.0] * 3, "q99": [4.0] * 3},
}


def build(name="pi0", seed=0, spec=SPEC, **options):
    return make_policy(Pi0Config(name=name, **options), spec, seed)


def observe(rows=4, texts=("pick up the red cup", "go")):
    draw = np.random.default_rng(0)
    return {
        "images": {name: draw.integers(0, 256, (rows, *size), np.uint8) for name, size in SPEC.images.items()},
        "state": draw.normal(size=(rows, 4)).astype(np.float32),
        "instruction": [texts[row % len(texts)] for row in range(rows)],
    }


def noise(policy, rows, seed=1):
    return np.random.default_rng(seed).normal(size=(rows, policy.noise_spec().width))


def replayed(policy, obs, output):
    replay = {name: torch.from_numpy(array) for name, array in output.replay.items()}
    return policy({"obs": obs, "actions": output.actions, **replay})


def test_every_step_of_flow_sde_is_noisy_for_some():
    policy = build(steps=3)
    first = policy.act(observe(), noise(policy, 4)).replay["first"]
    many = policy._split(torch.from_numpy(noise(policy, 2000)))[2]
    assert set(first) <= {0, 1, 2} and np.allclose(np.bincount(many) / 2000, 1 / 3, atol=0.05)


def test_imitation_at_time_one_by_hand():
    policy = build(chunk=8)
    obs = observe(2)
    actions = np.random.default_rng(3).normal(size=(2, 8, 3))
    draws = np.random.default_rng(4).normal(size=(2, policy.imitation_noise().width))
    draws[:, -1] = 40.0  # a uniform number of 1, so time 1: only noise is seen
    losses = policy.imitate({"obs": obs, "actions": torch.from_numpy(actions)}, draws)
    start = draws[:, :-1].reshape(2, 8, 8)
    wanted = start - np.pad(actions, ((0, 0), (0, 0), (0, 5)))
    with torch.no_grad():
        _, velocity = policy.denoise(policy.read(obs), torch.from_numpy(start).float(), torch.ones(2))
    np.testing.assert_allclose(losses.detach().numpy(), (wanted - velocity.numpy()) ** 2, atol=1e-4, rtol=1e-4)


def publish(folder, layout, name="pi0", figures=FIGURES):
    """A folder as others publish it: shards, brain floats but for the norms, an output layer nobody uses."""
    folder.mkdir()
    draw = torch.Generator().manual_seed(0)
    weights = {}
    for ours, tensor in build(name).model.state_dict().items():
        published = TIED if ours == WORDS else ours
        exact = torch.float32 if "layernorm" in ours else torch.bfloat16
        weights[published if layout == "openpi" else f"model.{published}"] = tensor.to(exact)
    prefix = "" if layout == "openpi" else "model."
    weights[prefix + EXPERT_HEAD] = torch.randn(7, 3, generator=draw).bfloat16()
    names, index = sorted(weights), {}
    for number, part in enumerate((names[:80], names[80:]), 1):
        shard = f"model-{number:05d}-of-00002.safetensors"
        save_file({key: weights[key] for key in part}, folder / shard)
        index |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    if layout == "openpi":
        (folder / "config.json").write_text(json.dumps(TINY))
        (folder / "assets" / "lab" / "kitchen").mkdir(parents=True)
        path = folder / "assets" / "lab" / "kitchen" / "norm_stats.json"
        path.write_text(json.dumps({"norm_stats": figures}))
        return folder
    sizes = {"chunk_size": 8, "max_action_dim": 8, "max_state_dim": 32, "tokenizer_max_length": 48}
    keep = {key: TINY[key] for key in ("paligemma_variant", "action_expert_variant")}
    (folder / "config.json").write_text(json.dumps({"type": name, **sizes, **keep}))
    step = {"registry_name": "normalizer_processor", "state_file": "policy_preprocessor_step_5.safetensors"}
    (folder / "policy_preprocessor.json").write_text(json.dumps({"steps": [{"registry_name": "x"}, step]}))
    flat = {"observation.state": FIGURES["state"], "action": FIGURES["actions"]}
    tensors = {f"{part}.{key}": torch.tensor(value) for part in flat for key, value in flat[part].items()}
    save_file(tensors, folder / step["state_file"])
    return folder


def weights_of(folder):
    files = sorted(folder.glob("model*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


@pytest.mark.parametrize(("layout", "name"), [("openpi", "pi0"), ("lerobot", "pi05")])
def test_a_published_folder_comes_back_byte_by_byte(tmp_path, layout, name):
    folder = publish(tmp_path / "there", layout, name)
    policy = build(name, seed=3, pretrained=str(folder), dtype="bfloat16")
    policy.save_pretrained(tmp_path / "ours")
    again = load_policy((tmp_path / "ours").rename(tmp_path / "moved"))
    one, two = (p.act(observe(2), noise(p, 2)) for p in (policy, again))
    assert np.array_equal(one.actions, two.actions) and np.array_equal(one.values, two.values)
    again.save_published(tmp_path / "back", shard_bytes=1_000_000)
    before, after = weights_of(folder), weights_of(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(before[key].dtype == after[key].dtype and torch.equal(before[key], after[key]) for key in before)
    assert json.loads((folder / "config.json").read_text()) == json.loads((tmp_path / "back/config.json").read_text())
    build(name, pretrained=str(tmp_path / "back"))  # statistics went along


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "name"), [("openpi", "pi0"), ("lerobot", "pi05")])
def test_adapters_are_saved_alone_and_merged_for_others(tmp_path, layout, name):
    folder = publish(tmp_path / "there", layout, name)
    plain, made = build(name, pretrained=str(folder)), build(name, pretrained=str(folder), lora_rank=2, lora_scale=0.5)

    def played(policy):
        return policy.act(observe(2), noise(policy, 2)).actions

    np.testing.assert_allclose(played(made), played(plain), atol=1e-6)
    assert made.reference().source is made.source, "its files are not copied into memory"
    frozen = {n for n, p in made.named_parameters() if not p.requires_grad}
    assert all(".paligemma_with_expert." in n and "lora" not in n for n in frozen)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for n, p in made.named_parameters():
            if "lora_B" in n:
                p.normal_(0, 0.05, generator=draw)
    scores = replayed(made, observe(2), made.act(observe(2), noise(made, 2)))
    (scores.logprobs.sum() + scores.values.sum()).backward()
    assert not [n for n, p in made.named_parameters() if p.requires_grad and p.grad is None]
    assert not np.allclose(played(made), played(plain), atol=1e-3)
    made.save_pretrained(tmp_path / "ours")
    assert not any("base_layer" in n for n in weights_of(tmp_path / "ours"))
    begun = build(name, seed=9, pretrained=str(tmp_path / "ours"), lora_rank=2, lora_scale=0.5)
    begun.save_pretrained(tmp_path / "next")
    for policy in (load_policy(tmp_path / "ours"), begun, load_policy(tmp_path / "next")):
        assert np.array_equal(played(policy), played(made))
    made.save_published(tmp_path / "back")
    assert weights_of(tmp_path / "back").keys() == weights_of(folder).keys()


def test_statistics_lie_in_assets_or_as_rlinf_puts_them(tmp_path):
    folder = publish(tmp_path / "there", "openpi")
    (folder / "assets" / "lab").rename(folder / "lab")
    assert build(pretrained=str(folder)).state_scale.scale.any()


def test_statistics_give_states_and_actions_their_units(tmp_path):
    policy = build(pretrained=str(publish(tmp_path / "there", "openpi")), relative_actions=1)
    obs = observe(2)
    np.testing.assert_allclose(policy._unit_state(obs).numpy(), (obs["state"] - 0.5) / (0.25 + 1e-6), rtol=1e-5)
    unit = torch.ones(2, 8, 8)
    played = policy._played(unit, obs)
    np.testing.assert_allclose(played[:, 0, 0], 1.1 + obs["state"][:, 0], rtol=1e-5)  # 1 * 0.1 + 1, and the state
    np.testing.assert_allclose(played[:, :, 1:], 1.0, rtol=1e-5)
    np.testing.assert_allclose(policy._unit_actions(torch.from_numpy(played), obs)[:, :, :3], 1.0, atol=1e-4)
    other = build("pi05", statistics=str(tmp_path / "there"))  # of a data set, without its model; by quantiles
    np.testing.assert_allclose(other._played(unit, obs), 4.0, rtol=1e-5)
    assert other.state_dict()["action_scale.scale"].tolist() == pytest.approx([3.0] * 3, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("assets", None, "no statistics.*norm_stats.json"),
        ("model-00002-of-00002.safetensors", None, "incomplete: model-00002"),
        ("config.json", None, "config.json is missing"),
        ("config.json", {"type": "act"}, "type='act'"),
        ("config.json", {"type": "pi0"}, "has no 'paligemma_variant'"),
        ("config.json", TINY | {"paligemma_variant": "gemma_2b"}, "no tokenizer.json.*paligemma-3b-pt-224"),
        ("config.json", TINY | {"action_expert_variant": "dummy"}, "this policy has"),
    ],
)
def test_an_incomplete_folder_is_refused_and_says_what_is_missing(tmp_path, name, content, reason):
    folder = publish(tmp_path / "whole", "openpi")
    (tmp_path / "part").mkdir()
    for file in folder.iterdir():
        if file.name != name:
            (tmp_path / "part" / file.name).symlink_to(file)
    if content is not None:
        (tmp_path / "part" / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=reason):
        build(pretrained=str(tmp_path / "part"))
    with pytest.raises(CheckpointError, match=r"holds a pi0, not a pi05: policy\.name=pi0"):
        build("pi05", pretrained=str(folder))


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        ({"images": {}}, {}, "needs images"),
        ({"state_dim": None}, {}, "env.state=proprio"),
        ({"state_dim": 33}, {}, "room for 32 state numbers"),
        ({"instruction": False}, {}, r"policy\.instruction"),
        ({"action": ActionSpec(1, 4)}, {}, "takes a choice"),
        ({}, {"chunk": 9}, "try policy.chunk=8"),
        ({}, {"cameras": ("wrist",)}, r"policy\.cameras='wrist' is none of this env's cameras: top, near"),
        ({}, {"statistics": "nowhere"}, "neither a data set that the model knows"),
    ],
)
def test_an_env_it_cannot_act_in_is_refused_with_a_way_out(change, options, reason):
    with pytest.raises(ConfigError, match=reason):
        build(spec=replace(SPEC, **change), **options)


def test_names_of_both_layouts_become_ours():
    tower = "paligemma_with_expert.paligemma.model.vision_tower"
    assert own_name(TIED) == own_name(f"model.{TIED}") == f"model.{WORDS}"
    assert own_name(f"model.{tower}.encoder.x") == own_name(f"{tower}.vision_model.encoder.x")
    assert own_name(EXPERT_HEAD) is None


@pytest.mark.parametrize(("name", "title"), [("pi0", "Pi0"), ("pi05", "Pi0.5")])
def test_the_page_tells_the_memory_of_full_size(name, title):
    with torch.device("meta"):
        network = Pi0Network(settings_of(FULL, (), name))
    in_half(network)
    weights = list(network.named_parameters())

    def learner_gb(trained):
        """Copy, gradient twice, two moments; what is float32 needs no copy."""
        sizes = [(p.numel(), p.element_size()) for p in trained]
        return sum(count * (20 if size == 2 else 16) for count, size in sizes) / 1e9

    expert = learner_gb(p for key, p in weights if ".paligemma." not in key)
    everything = learner_gb(p for _, p in weights if p.requires_grad)
    count, held = (sum(p.numel() * size(p) for _, p in weights) / 1e9 for size in (lambda p: 1, lambda p: p.itemsize))
    row = f"| {title} | {count:.2f} B | {held:.1f} GB | {expert:.1f} GB | {everything:.1f} GB |"
    assert row in (Path(__file__).parents[2] / "docs" / "vla.md").read_text()


@pytest.mark.parametrize("recipe", ["libero_ppo_pi0", "maniskill_ppo_pi0"])
def test_full_size_recipes_are_whole(recipe):
    config = load([f"recipe={recipe}", "policy.pretrained=somewhere"]).config
    assert config.policy.preset == "full" and config.policy.chunk <= config.policy.horizon
    with pytest.raises(ConfigError, match=r"norms are float32; try policy\.dtype=float32"):
        load([f"recipe={recipe}", "policy.pretrained=somewhere", "learner.shard=true"])


@pytest.mark.skipif(find_spec("libero") is None, reason="needs LIBERO")
def test_a_published_folder_is_evaluated_as_its_authors_do(tmp_path, capsys):
    arm = {part: {key: [float(key in ("std", "q99"))] * size for key in FIGURES[part]} for part, size in ARM.items()}
    folder = publish(tmp_path / "there", "openpi", "pi05", arm)
    assert evaluate.main([f"checkpoint={folder}", "env.name=libero", "env.task=libero_spatial", "--dry-run"]) == 0
    told = capsys.readouterr().out
    for key in ("policy.state_in_prompt=false", "policy.steps=10", "policy.horizon=10", "env.mirrored=true"):
        assert key in told
    assert evaluate.main([f"checkpoint={folder}", "recipe=pointmass_ppo_pi0_tiny", "--dry-run"]) == 2


def test_memory_of_a_recipe_is_counted_without_its_folder():
    asked = ["recipe=libero_ppo_pi0", "policy.name=pi05", "policy.pretrained=nowhere", "learner.micro_batch_size=1"]
    found = estimate(load(asked).config)
    assert found.num_weights == pytest.approx(3.36e9, rel=2e-3)
    assert 0.3e9 < found.num_trained < 0.45e9 and found.activations > 1e7


def test_a_model_named_by_its_hub_id_is_fetched(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(hub, "fetch", lambda name, key, *more: asked.append((name, key)) or tmp_path)
    config = Pi0Config(name="pi0", pretrained="lab/pi0")
    assert hub.with_folder(config).pretrained == str(tmp_path) and asked == [("lab/pi0", "policy.pretrained")]
    build().save_pretrained(tmp_path)
    assert hub.with_folder(Pi0Config(name="pi0", pretrained=str(tmp_path))).pretrained == str(tmp_path)
    with pytest.raises(CheckpointError, match=r"policy.pretrained=/not/here: there is no such folder"):
        hub.with_folder(Pi0Config(name="pi0", pretrained="/not/here"))


# Whole runs of the tiny preset in one process: RL by both kinds of noise, and imitation


SHORT = (
    "recipe=pointmass_ppo_pi0_tiny env.num_envs=4 cluster.backend=inline placement=collocated eval.episodes=2 "
    "eval.videos=0"
).split()
TWO = ["env.max_episode_steps=8", "run.iterations=2", "algo.rollout_decisions=3", "algo.minibatch_size=6"]


def rows_of(folder):
    (run,) = (folder / "runs").iterdir()
    return run, [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("options", [[], ["policy.name=pi05", "policy.exploration=flow_noise", "policy.train=expert"]])
def test_it_trains_and_its_checkpoint_evaluates_alike(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    assert train.main([*SHORT, *TWO, *options]) == 0
    run, rows = rows_of(tmp_path)
    assert max(row["train/logprob_gap"] for row in rows) < 1e-4
    assert all(row["train/grad_norm"] > 0 and np.isfinite(row["train/value_loss"]) for row in rows)
    if not options:
        assert evaluate.main([f"checkpoint={run}", "eval.videos=0", "cluster.backend=inline"]) == 0
        check_same_episodes(run / "eval" / "v000002", run / "eval" / "v000002-evaluate", rel=1e-5)


@pytest.mark.slow
def test_it_imitates_demonstrations_and_their_statistics_stay_with_it(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    assert collect.main([*SHORT[:-2], "out=demos", "collect.episodes=3"]) == 0
    few = ["sft.data=demos", "sft.epochs=6", "sft.minibatch_size=32", "sft.lr=1e-3", "policy.statistics=demos"]
    assert sft.main([*SHORT, *few]) == 0
    run, rows = rows_of(tmp_path)
    assert rows[-1]["train/loss"] < 0.8 * rows[0]["train/loss"]
    (tmp_path / "demos").rename(tmp_path / "gone")
    assert train.main([*SHORT, *TWO, "run.name=rl", f"run.start_from={run}"]) == 0
