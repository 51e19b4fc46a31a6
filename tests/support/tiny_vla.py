"""Tiny policies of the published families, what they see, their noise, and folders as others publish them."""

import json

import numpy as np
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file

from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies import make_policy
from embodied.policies.config import PolicyConfig
from embodied.policies.openvla import folder as openvla
from embodied.policies.pi0 import policy as pi0
from embodied.policies.smolvla import policy as smolvla

ROBOT = EnvSpec(ActionSpec(3), state_dim=4, images={"top": (48, 48, 3), "wrist": (32, 32, 3)}, instruction=True)
ARM = EnvSpec(ActionSpec(7), state_dim=8, images={"agentview": (64, 64, 3), "wrist": (64, 64, 3)}, instruction=True)
ONE = EnvSpec(ActionSpec(2), images={"top": (16, 16, 3)}, instruction=True)
TEXTS = ("pick up the red cup", "go")  # of two lengths, so there is padding


def build(name="openvla", seed=0, spec=ROBOT, **options):
    if name == "openvla" and len(spec.images) > 1:
        options = {"camera": next(iter(spec.images))} | options
    return make_policy(TypeAdapter(PolicyConfig).validate_python({"name": name, **options}), spec, seed).eval()


def shallow(policy, count=1):
    """With so many blocks of each kind, one more where the last is not looked at: the others do nothing else."""
    for part in [*policy.modules()]:
        for name, blocks in part.named_children():
            if isinstance(blocks, torch.nn.ModuleList):
                setattr(part, name, blocks[: count + (name == "blocks")])
    return policy


def observe(rows=4, spec=ROBOT, texts=TEXTS, seed=0):
    draw = np.random.default_rng(seed)
    obs = {"images": {name: draw.integers(0, 256, (rows, *size), np.uint8) for name, size in spec.images.items()}}
    if spec.state_dim:
        obs["state"] = draw.normal(size=(rows, spec.state_dim)).astype(np.float32)
    return obs | {"instruction": [texts[row % len(texts)] for row in range(rows)]}


def noise(policy, rows=4, seed=1):
    draw, spec = np.random.default_rng(seed), policy.noise_spec()
    return draw.random((rows, spec.width)) if spec.kind == "uniform" else draw.normal(size=(rows, spec.width))


def scored(policy, obs, output):
    """What the learner makes of a decision."""
    replay = {name: torch.from_numpy(array) for name, array in output.replay.items()}
    return policy({"obs": obs, "actions": torch.from_numpy(output.actions)} | replay)


class Whole(torch.nn.Module):
    """OpenVLA's networks under the names of the published class, as upstream gives them to peft."""

    def __init__(self, policy):
        super().__init__()
        for name in ("vision_backbone", "projector", "language_model"):
            setattr(self, name, getattr(policy, name))

    def get_input_embeddings(self):
        return self.language_model.model.embed_tokens

    def get_output_embeddings(self):
        return self.language_model.lm_head

    def linear_layers(self):
        """Last names of the layers that peft 0.11.1's all-linear adapts."""
        linear = [name for name, layer in self.named_modules() if isinstance(layer, torch.nn.Linear)]
        return {name.rpartition(".")[2] for name in linear}


def change_json(path, **changes):
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# Published folders: two shards, brain floats, statistics apart, and output layers that nobody uses

FAMILIES = {"openvla": "openvla", "oft": "openvla_oft", "pi0": "pi0", "pi05": "pi05", "smolvla": "smolvla"}
OFT = {"head": "l1", "proprio": True, "film": True, "chunk": 2}
PARTS = ("action_head", "proprio_projector", "vision_backbone")  # in files of their own
FIGURES = {
    "state": {"mean": [0.5] * 8, "std": [0.25] * 8, "q01": [0.0] * 8, "q99": [1.0] * 8},
    "actions": {"mean": [1.0, *[0] * 6], "std": [0.1, *[1] * 6], "q01": [-2.0] * 7, "q99": [4.0] * 7},
}
STEP = {"registry_name": "normalizer_processor", "state_file": "policy_preprocessor_step_5.safetensors"}


def publish(folder, family, spec=ROBOT):
    """The layout of the family's authors: OpenVLA's, openpi's for Pi0, lerobot's for Pi0.5 and SmolVLA."""
    folder.mkdir(parents=True)
    made = build(FAMILIES[family], spec=spec, dtype="bfloat16", **OFT if family == "oft" else {})
    if made.config.name.startswith("openvla"):
        write_shards(folder, openvla_weights(folder, made))
        (folder / "config.json").write_text(json.dumps(openvla.TINY))
        dim = spec.action.dim
        action = {"q01": [-0.1] * dim, "q99": [0.3] * dim, "mask": [True] * (dim - 1) + [False]}
        ranges = {"action": action, "proprio": {"q01": [-2.0] * spec.state_dim, "q99": [2.0] * spec.state_dim}}
        (folder / "dataset_statistics.json").write_text(json.dumps({"shelf_no_noops": ranges}))
        return folder
    weights = {name: tensor.bfloat16() for name, tensor in made.model.state_dict().items()}
    if family != "smolvla":
        exact = [name for name in weights if "layernorm" in name]
        weights |= {name: weights[name].float() for name in exact} | {pi0.EXPERT_HEAD: torch.ones(7, 3)}
        weights[pi0.TIED] = weights.pop(pi0.WORDS)
    else:
        weights["vlm_with_expert.vlm.lm_head.weight"] = torch.ones(3, 2)
    figures = {
        part: {
            key: numbers[: {"state": spec.state_dim, "actions": spec.action.dim}[part]] for key, numbers in of.items()
        }
        for part, of in FIGURES.items()
    }
    if family == "pi0":
        write_shards(folder, weights)
        (folder / "config.json").write_text(json.dumps(pi0.TINY))
        place = folder / "assets" / "lab" / "kitchen"
        place.mkdir(parents=True)
        (place / "norm_stats.json").write_text(json.dumps({"norm_stats": figures}))
        return folder
    write_shards(folder, {f"model.{name}": tensor for name, tensor in weights.items()})
    config = smolvla.TINY | {"n_action_steps": 8, "attention_mode": "cross_attn"}
    if family == "pi05":
        sizes = {"chunk_size": 8, "max_action_dim": 8, "max_state_dim": 32, "tokenizer_max_length": 48}
        variants = {key: pi0.TINY[key] for key in ("paligemma_variant", "action_expert_variant")}
        config = {"type": "pi05", **sizes, **variants}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "policy_preprocessor.json").write_text(json.dumps({"steps": [{"registry_name": "x"}, STEP]}))
    flat = {"observation.state": figures["state"], "action": figures["actions"]}
    tensors = {f"{part}.{key}": torch.tensor(value) for part in flat for key, value in flat[part].items()}
    save_file(tensors, folder / STEP["state_file"])
    return folder


def openvla_weights(folder, made):
    """The weights in shards; those of parts are written beside them."""
    film = (".scale.weight", ".scale.bias", ".shift.weight", ".shift.bias")
    weights = {name: w for name, w in made.state_dict().items() if not name.startswith(("value_head.", "ranges."))}
    weights.pop("log_scale", None)
    for part in PARTS if made.config.name == "openvla_oft" else ():
        whole = part == "vision_backbone"
        own = {name: tensor for name, tensor in weights.items() if name.startswith(f"{part}.")}
        prefix = "module." if part == "action_head" else ""  # trained on several devices
        named = {prefix + (name if whole else name.removeprefix(f"{part}.")): w for name, w in own.items()}
        torch.save(named, folder / f"{part}--150_checkpoint.pt")
        weights = {name: w for name, w in weights.items() if name not in own or (whole and not name.endswith(film))}
    return {name.replace(".block.", "."): tensor for name, tensor in weights.items()}


def write_shards(folder, weights):
    names, index = sorted(weights), {}
    for number, part in enumerate((names[:80], names[80:]), 1):
        shard = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: weights[name].contiguous() for name in part}, folder / shard)
        index |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def weights_of(folder):
    """All weights, under the names of their files without numbers."""
    weights = {}
    for path in [*folder.glob("model*.safetensors"), *folder.glob("*--*")]:
        stored = torch.load(path, weights_only=True) if path.suffix == ".pt" else load_file(path)
        part = path.name.partition("--")[0] if "--" in path.name else ""
        weights |= {f"{part}/{name.removeprefix('module.')}": tensor for name, tensor in stored.items()}
    return weights
