"""What a language model takes of memory, counted from its config.json alone, and what is refused because of it."""

import json
import os
import re
import shlex
from functools import partial

import pytest
import tiny_language
import torch
from tiny_language import SEES, SPEC, answers, build, inputs_of
from tiny_sight import publish

from embodied.config.recipe import load
from embodied.core.errors import ConfigError
from embodied.core.pictures import drawing
from embodied.learners.config import LearnerConfig
from embodied.learners.memory_estimate import Memory, count, longest_conversation, longest_pass
from embodied.policies import hub
from embodied.policies.language.config import SEEING
from embodied.run import launch
from embodied.run.memory_check import acting_bytes
from embodied.train import main
from embodied.workflows import roles_of_run
from embodied.workflows.rl_loop import EmbodiedLoop

SHAPES = {  # layers, width, heads, of keys, mlp
    "Qwen2.5-1.5B": (28, 1536, 12, 2, 8960),
    "Qwen2.5-7B": (28, 3584, 28, 4, 18944),
    "Qwen2.5-14B": (48, 5120, 40, 8, 13824),
    "Qwen2.5-32B": (64, 5120, 40, 8, 27648),
}
SHARDED = ("learner.shard=true",)
RECIPE = ("recipe=sums_grpo", "run.start_from=null", "policy.max_length=2048", "learner.pack_tokens=2048")


@pytest.fixture
def shape_of(tmp_path):
    """A folder that says what shape a model has, and holds nothing of it."""

    def shape_of(name):
        layers, width, heads, keys, mlp = SHAPES[name]
        about = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064}
        about |= {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
        about |= {"num_key_value_heads": keys, "intermediate_size": mlp, "max_position_embeddings": 32768}
        about |= {"tie_word_embeddings": name == "Qwen2.5-1.5B"}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(about))
        return tmp_path / name

    return shape_of


def planned(folder, cluster, *more):
    config = load([*RECIPE, f"policy.pretrained={folder}", f"cluster.machines={cluster}", *more]).config
    return launch.planned(config, dry=True)[1]


def test_seven_billion_weights_are_planned_for_machines_that_are_not_here(shape_of):
    folder = shape_of("Qwen2.5-7B")
    sharded = ("learner.shard=true", "learner.checkpoint_activations=true", "policy.dtype=bfloat16")
    told = " ".join(planned(folder, "8xGPU", *sharded).memory)
    # 7.6e9 weights: an eighth of 20 bytes each, and a whole gradient of 4; keys and values of 32 conversations of 2048
    # tokens are 28 layers x 2 x 4 heads x 128 numbers of two bytes
    assert "gpu:0 and 7 more alike" in told and "of 80 GB" in told
    learner, policy = (float(told.partition(f" {role} ")[2].split(" ")[0]) for role in ("learner", "policy"))
    assert 7.6 * (20 / 8 + 4) < learner < 7.6 * (20 / 8 + 4) + 12
    assert policy == pytest.approx(15.2 + 32 * 2048 * 28 * 2 * 4 * 128 * 2 / 1e9, abs=0.1)
    with pytest.raises(ConfigError) as refused:
        planned(folder, "1xGPU")
    assert "gpu:0: CUDA 0.78 + weights of both 30.5 + in turns (rollout: policy 60.1; update: l" in str(refused.value)
    assert "of 80 GB" in str(refused.value)
    advised = str(refused.value).rpartition("that is more than the machines have; try ")[2]
    assert advised.startswith("policy.lora_rank=32")
    assert planned(folder, "1xGPU", *advised.split())


@pytest.mark.parametrize(
    ("gigabytes", "more", "advised"),
    [
        (80, ["policy.cache_gb=60"], "learner.shard=true policy.cache_gb=48"),
        (48, [*SHARDED, "learner.reduce_each_pass=false", "policy.cache_gb=8"], "learner.reduce_each_pass=true"),
        (48, ["policy.cache_gb=8"], "learner.shard=true"),
    ],
)
def test_the_advice_that_helps_most_comes_first_and_the_cache_is_as_large_as_fits(shape_of, gigabytes, more, advised):
    given = ["policy.engine=vllm", "policy.dtype=bfloat16", f"cluster.memory_gb={gigabytes}", *more]
    folder = shape_of("Qwen2.5-7B")
    with pytest.raises(ConfigError, match=f"try {advised}$"):
        planned(folder, "8xGPU", *given)
    keys = [word.partition("=")[0] for word in advised.split()]
    given = [word for word in given if word.partition("=")[0] not in keys]
    assert planned(folder, "8xGPU", *given, *advised.split())


def test_a_vision_tower_is_counted_with_its_model(tmp_path, capsys):
    """3.75 billion weights, those of the vision tower among them, as Qwen2.5-VL-3B's config.json says."""
    about = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    about |= {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2}
    about |= {"intermediate_size": 11008, "vocab_size": 151936, "max_position_embeddings": 128000}
    about |= {"tie_word_embeddings": True, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    about |= {"vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}}
    about["vision_config"] |= {"out_hidden_size": 2048, "fullatt_block_indexes": [7, 15, 23, 31]}
    (tmp_path / "config.json").write_text(json.dumps(about))
    (tmp_path / "a.png").write_bytes(b"")
    lines = [{"question": f"<image>Find {name}.", "images": ["a.png"], "answer": "1"} for name in "abc"]
    (tmp_path / "shown.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = [f"policy.pretrained={tmp_path}", f"env.file={tmp_path / 'shown.jsonl'}", "cluster.machines=8xGPU"]
    assert main(["recipe=geometry_grpo", *words, "--dry-run"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "3.75 billion weights, 3.75 of them trained" in told and "8 x policy + learner on gpu:0-7" in told


def test_the_memory_of_roles_that_a_recipe_adds_is_counted(shape_of):
    folder, large = shape_of("Qwen2.5-1.5B"), shape_of("Qwen2.5-7B")
    words = [f"policy.pretrained={folder}", "policy.max_length=2048", "policy.max_running=32", "policy.dtype=bfloat16"]
    words += ["recipe=sums_ppo_critic", "run.start_from=null", "algo.kl_coef=0.01", "cluster.machines=8xGPU"]
    words += ["learner.pack_tokens=2048"]
    (large / "model.safetensors").touch()
    os.truncate(large / "model.safetensors", 15_200_000_000)  # takes no place on the disk

    def told(*more):
        config = load([*words, *more]).config
        return launch.planned(config, dry=True, roles=roles_of_run(EmbodiedLoop, config))[1].memory[0]

    def of(role, line):
        return float(re.search(rf"\b{role} ([\d.]+)", line)[1])

    inside, apart = told(), told("roles.reference=true")
    assert of("reference", apart) == pytest.approx(3.09, abs=0.01)  # 1.54e9 weights of two bytes
    assert of("learner", inside) - of("learner", apart) == pytest.approx(3.09, abs=0.1)
    assert of("critic", apart) == pytest.approx(of("learner", apart) + 3.09, abs=0.1)  # whose weights are the policy's
    assert of("reward", told(f"roles.reward_model={large}")) == 15.2
    cache = 32 * 2048 * 28 * 2 * 4 * 128 * 2 / 1e9
    assert of("judge", told(f"roles.judge={large}")) == pytest.approx(15.2 + cache, abs=0.1)


@pytest.mark.parametrize(
    ("name", "cluster", "places", "most"),
    [
        ("Qwen2.5-7B", "8xGPU", {"policy": "gpu:0-1", "critic": "gpu:2-4", "learner": "gpu:5-7"}, 64),
        (
            "Qwen2.5-14B",
            "2x8xGPU",
            {"policy": "node0/gpu:0-3", "critic": "node0/gpu:4-7,node1/gpu:0-1", "learner": "node1/gpu:2-7"},
            66,
        ),
    ],
)
def test_a_critic_with_shards_is_planned_beside_learners_with_shards(shape_of, name, cluster, places, most):
    words = ["recipe=sums_ppo_critic", "run.start_from=null", f"policy.pretrained={shape_of(name)}"]
    words += ["policy.dtype=bfloat16", "policy.max_length=2048", "learner.pack_tokens=2048", "policy.max_running=32"]
    words += [*SHARDED, "learner.checkpoint_activations=true"]
    sims = {"sim": "node0/cpu:0-3*4" if "x8" in cluster else "cpu:0-3*4"}
    words += [f"cluster.machines={cluster}", f"placement={json.dumps(sims | places)}"]
    config = load(words).config
    told = " ".join(launch.planned(config, dry=True, roles=roles_of_run(EmbodiedLoop, config))[1].memory)
    critic, learner = (float(re.search(rf"\b{role} ([\d.]+)", told)[1]) for role in ("critic", "learner"))
    assert critic == pytest.approx(learner, rel=0.01) and learner < most


@pytest.mark.slow
def test_the_map_in_which_a_critic_has_processes_of_its_own_is_advised_and_fits(shape_of):
    words = ["recipe=sums_ppo_critic", "run.start_from=null", f"policy.pretrained={shape_of('Qwen2.5-7B')}"]
    words += ["policy.dtype=bfloat16", "policy.max_length=2048", "learner.pack_tokens=2048", "policy.max_running=32"]
    words += ["policy.engine=vllm", "policy.cache_gb=9", "learner.checkpoint_activations=true"]
    words += ["cluster.machines=8xGPU"]

    def plan(*more):
        config = load([*words, *more]).config
        return launch.planned(config, dry=True, roles=roles_of_run(EmbodiedLoop, config))[1]

    with pytest.raises(ConfigError, match="rollout: critic 1") as refused:
        plan("placement=collocated")
    advised = shlex.split(str(refused.value).rpartition("try ")[2])
    assert '"critic": "gpu:0-7"' in advised[0] and "learner.shard=true" in advised
    assert re.search(r"critic [1-6]\d\.", plan(*advised).memory[0])


def test_an_engine_on_several_gpus_is_advised_for_30_billion_weights_of_experts_and_fits(tmp_path):
    """Qwen3-30B-A3B's shape."""
    shape = {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32}
    shape |= {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
    shape |= {"moe_intermediate_size": 768, "max_position_embeddings": 40960, "tie_word_embeddings": False}
    about = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **shape}
    (tmp_path / "config.json").write_text(json.dumps(about))
    given = ["policy.engine=vllm", "policy.dtype=bfloat16", "policy.cache_gb=16", *SHARDED]
    with pytest.raises(ConfigError, match="that is more than the machines have") as refused:
        planned(tmp_path, "2x8xGPU", *given)
    advised = str(refused.value).rpartition("try ")[2].split()
    assert advised[0].startswith("policy.tensor_parallel=") and "learner.reduce_each_pass=true" not in advised
    plan = planned(tmp_path, "2x8xGPU", *given, *advised)
    assert "of 80 GB" in plan.memory[0] and "gradients are summed after each pass" in plan.reason
    with pytest.raises(ConfigError, match=r"try learner\.reduce_each_pass=true"):
        planned(tmp_path, "2x8xGPU", *given, *advised, "learner.reduce_each_pass=false")


TURNS = {  # the sum where it is larger: of the rollout
    "hybrid": r"CUDA 0.78 \+ weights of both 3.09 \+ in turns \(rollout: vLLM 63.1; update: learner ([\d.]+)\) = 67",
    "collocated": r"2 x CUDA 0.78 \+ in turns \(rollout: policy 3.09 \+ vLLM 63.1; update: learner ([\d.]+)\) = 67.7",
}


@pytest.mark.parametrize("placement", TURNS)
def test_vllm_leaves_the_gpu_to_the_learner_where_both_do_not_fit(shape_of, placement):
    given = ["policy.engine=vllm", "policy.dtype=bfloat16", f"placement={placement}"]
    folder = shape_of("Qwen2.5-1.5B")
    (fits, *_) = planned(folder, "1xGPU", *given, "policy.cache_gb=16").memory
    assert "vLLM 19.1" in fits and "in turns" not in fits
    told, host = planned(folder, "1xGPU", *given, "policy.cache_gb=60").memory
    learner = float(re.fullmatch(f"gpu:0: {TURNS[placement]} of 80 GB", told).group(1))
    # Meanwhile the learner's averages and float32 copy lie in the host's memory, vLLM's weights and cache nowhere.
    aside = float(host.partition("set aside from GPUs ")[2].split(" ")[0])
    assert 12 * 1.54 < aside < learner


@pytest.mark.slow
def test_a_model_for_which_one_gpu_is_too_small_acts_on_two_and_its_policy_lies_in_the_host(shape_of):
    folder, given = shape_of("Qwen2.5-32B"), ["policy.engine=vllm", "policy.cache_gb=16", "policy.dtype=bfloat16"]
    given += ["policy.lora_rank=32", "learner.checkpoint_activations=true", "placement=collocated"]
    with pytest.raises(ConfigError, match=r"policy 66\.1"):
        planned(folder, "8xGPU", *given)
    told, host = planned(folder, "8xGPU", *given, "policy.tensor_parallel=4").memory
    assert (
        "vLLM 20.5" in told and "policy" not in told
    )  # a quarter of 66.1 GB of weights and adapters, and of the cache
    assert "2 x policy 66.1" in host and "2 x weights on their way to vLLM 66.1" in host


def test_the_cache_that_vllm_reserves_counts_for_a_small_model_too():
    with pytest.raises(ConfigError, match=r"4 x vLLM's cache 48 = 192 of 32 GB\n.*try policy.cache_gb=8$"):
        launch.planned(config("cluster.machines=4xCPU", "policy.engine=vllm", "policy.cache_gb=48"), dry=True)


def config(*more):
    return load([*RECIPE, *more]).config


def test_keys_and_values_are_those_of_the_conversations_that_go_on_at_a_time():
    each = Memory(1, 1, 1, 1, 1, acting=10**9)
    assert acting_bytes(config("policy.max_running=8"), each, 128) == 8e9
    assert acting_bytes(config("policy.max_running=8"), each, 4) == 4e9
    assert acting_bytes(config("policy.max_running=8", "policy.engine=vllm"), each, 4) == 8e9  # reserved at the start
    served = ("policy.engine=http", "policy.url=http://127.0.0.1:8000", "policy.weights=/dev/shm")
    assert acting_bytes(config(*served), each, 4) == 0  # they are the server's
    assert acting_bytes(config("policy.max_running=8", "policy.cache_gb=2.5"), each, 128) == 2.5e9


def test_a_conversation_of_unknown_length_counts_as_a_pack_unless_vllm_reserves_all_of_it():
    learner = LearnerConfig(pack_tokens=300)
    assert longest_conversation(build(), learner) == longest_pass(build(), learner) == 300
    assert longest_conversation(build(max_length=512), learner) == longest_pass(build(max_length=512), learner) == 512
    assert longest_conversation(build(engine="vllm"), learner) == 1024  # positions
    divided = LearnerConfig(pack_tokens=300, sequence_degree=2)
    assert [longest_pass(build(max_length=most), divided) for most in (512, 1024)] == [300, 512]  # a learner's half


@pytest.mark.parametrize("kind", ["tiny", "tiny_gpt2", "tiny_vl", *SEEING])
def test_the_counted_activations_equal_those_that_a_pass_keeps(kind, tmp_path):
    """The pass, with pictures where a model sees them."""
    prompt, pictures = [5] * 20, [drawing("count", seed, 128) for seed in range(4)]
    made_of = {"pretrained": str(publish(tmp_path, kind))} if kind in SEEING else {"preset": kind}
    build = partial(tiny_language.build, SEES if kind in (*SEEING, "tiny_vl") else SPEC, **made_of)
    policy, kept = build(), {}
    if policy.sight:
        prompt = [5, *(token for name in pictures for token in policy.sight.read(name).tokens)]
    inputs = inputs_of(*answers([7] * 60, [8] * 60, prompt=prompt))
    places = {"places": sum(token < 0 for token in prompt)}
    shown = {"pictures": 2 * pictures} if policy.sight else {}
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (tensor.detach(), storage.nbytes())
        return tensor.detach()  # an output that its graph kept would stay for ever

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy(inputs | shown).logprobs.sum()
    held = sum(size for _, size in kept.values())
    inputs["actions"] = inputs["actions"].clip(0)
    counted = count(build(), LearnerConfig(), inputs | places)
    assert 0.8 * held <= counted.activations <= 1.1 * held  # on cores tables of who sees whom are kept, too
    again = count(build(), LearnerConfig(checkpoint_activations=True), inputs | places)
    assert again.activations < 0.6 * counted.activations


def test_a_dry_run_fetches_of_a_language_model_only_its_shape(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(hub, "fetch", lambda name, key, files: asked.append(files) or tmp_path)
    policy = load(["recipe=math_grpo"]).config.policy
    assert hub.with_folder(policy, dry=True).pretrained == hub.with_folder(policy).pretrained == str(tmp_path)
    assert asked == [["config.json"], hub.FILES]


def test_a_model_that_a_script_makes_is_asked_of_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match=r"there is no such folder; make it: python scripts/smollm2\.py"):
        launch.planned(load(["recipe=smol_grpo"]).config)
