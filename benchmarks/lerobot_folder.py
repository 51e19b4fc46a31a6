"""A folder that lerobot writes goes through RL here and back: do lerobot and the toolkit act alike, before and after?

    python3.11 -m venv LEROBOT && LEROBOT/bin/python -m pip install 'lerobot[smolvla]==0.4.4'
    python -m benchmarks.lerobot_folder LEROBOT/bin/python

lerobot saves a small SmolVLA of random weights, with its processors; `embodied.train` improves it on a point mass for
two iterations; `embodied.push` shows the folder that it would upload; lerobot loads that folder, too. Both act on the
same observations and noise, and lerobot decodes with its own normalisation. Words are numbers (a model this small has
no tokenizer), and image patches have the places of transformers 5, see docs/published.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

STATE, ACTIONS, CAMERA, SIDE, STEPS, ROWS, TIMEOUT_S = 6, 2, "top", 64, 3, 4, 900.0
TEXT = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0}
VISION = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
RECIPE = "pointmass_grpo_smolvla_tiny"
RL = ("run.start_from=null", "run.iterations=2", "algo.lr=1e-3", "eval.episodes=4", "eval.videos=0")


def main() -> None:
    if sys.argv[1:2] in (["write"], ["act"]):
        from_lerobot = {"write": write, "act": act_as_lerobot}[sys.argv[1]]
        return from_lerobot(*map(Path, sys.argv[2:]))
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("python", help="interpreter that has lerobot")
    asked = ask.parse_args()
    from benchmarks import common

    print(common.machine(), common.code_commit(), flush=True)
    for name, largest, difference in differences(asked.python):
        print(f"{name}: actions up to {largest:.3g}, largest difference {difference:.2g}")


def differences(python: str) -> list[tuple[str, float, float]]:
    """Of lerobot's folder and the one after RL: name, largest action, largest difference of an action."""
    from benchmarks import common

    found = []
    with tempfile.TemporaryDirectory() as place:
        begun, pushed, runs, seen = (Path(place) / name for name in ("begun", "pushed", "runs", "seen"))
        call(python, __file__, "write", begun)
        call(*common.train_command(RECIPE, f"policy.pretrained={begun}", f"run.dir={runs}", *RL))
        call(sys.executable, "-m", "embodied.push", common.only_run(runs), "ada/arm", f"out={pushed}")
        seen.mkdir()
        for name, folder in (("as lerobot wrote it", begun), ("after RL", pushed)):
            largest = act(folder, seen)
            found.append((name, largest, float(call(python, __file__, "act", folder, seen).split()[-1])))
    return found


def call(*command: object) -> str:
    """The output of a command that must succeed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return done.stdout


def act(folder: Path, seen: Path) -> float:
    """Act here, and keep observations, noise and actions in `seen`. Returns the actions' largest size."""
    from pydantic import TypeAdapter

    from embodied.core.types import ActionSpec, EnvSpec
    from embodied.policies import make_policy
    from embodied.policies.config import PolicyConfig

    values = {"name": "smolvla", "pretrained": str(folder), "chunk": 8, "steps": STEPS}
    spec = EnvSpec(ActionSpec(ACTIONS), state_dim=STATE, images={CAMERA: (SIDE, SIDE, 3)}, instruction=True)
    policy = make_policy(TypeAdapter(PolicyConfig).validate_python(values), spec, seed=0).eval()
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (ROWS, SIDE, SIDE, 3), np.uint8)
    state = draw.normal(size=(ROWS, STATE)).astype(np.float32)
    texts = ["pick up the red cup", "go"] * (ROWS // 2)
    noise = draw.normal(size=(ROWS, policy.noise_spec().width))
    obs = {"state": state, "images": {CAMERA: images}, "instruction": texts}
    actions = policy.act(obs, noise, temperature=0.0).actions
    words, is_word = policy.prompt_tokens(texts)
    np.savez(seen / "seen.npz", state=state, images=images, words=words, is_word=is_word, noise=noise, actions=actions)
    return float(abs(actions).max())


# In lerobot's interpreter


def small_smolvla() -> tuple[Any, Any]:
    """lerobot's class, and its options for a SmolVLA that the toolkit calls tiny."""
    import lerobot.policies.smolvla.smolvlm_with_expert as network
    import torch
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
    from transformers import LlamaConfig, SmolVLMConfig

    vision = VISION | {"patch_size": 8, "image_size": SIDE}
    whole = SmolVLMConfig(text_config=LlamaConfig(**TEXT, **HEADS).to_dict(), vision_config=vision, scale_factor=2)
    tokens = SimpleNamespace(fake_image_token_id=1, global_image_token_id=2)
    network.AutoConfig = SimpleNamespace(from_pretrained=lambda _: whole)
    network.AutoProcessor = SimpleNamespace(from_pretrained=lambda _: SimpleNamespace(tokenizer=tokens))
    bucket = torch.bucketize  # patches in float32: the place of the patch itself, not of the one before
    torch.bucketize = lambda values, *rest, **options: bucket(values + 1e-5, *rest, **options)
    torch.manual_seed(0)
    sizes = {"chunk_size": 8, "n_action_steps": 8, "max_action_dim": 8, "num_vlm_layers": 4, "num_steps": STEPS}
    config = SmolVLAConfig(
        vlm_model_name="tiny", resize_imgs_with_padding=(SIDE, SIDE), device="cpu", push_to_hub=False, **sizes
    )
    config.input_features = {
        "observation.state": PolicyFeature(FeatureType.STATE, (STATE,)),
        f"observation.images.{CAMERA}": PolicyFeature(FeatureType.VISUAL, (3, SIDE, SIDE)),
    }
    config.output_features = {"action": PolicyFeature(FeatureType.ACTION, (ACTIONS,))}
    return SmolVLAPolicy, config


def write(folder: Path) -> None:
    """Save a small SmolVLA of random weights and its processors as lerobot does."""
    import lerobot.processor.tokenizer_processor as tokenizing
    import torch
    from lerobot.policies.smolvla.processor_smolvla import make_smolvla_pre_post_processors

    kind, config = small_smolvla()
    kind(config).float().save_pretrained(folder)
    tokenizing.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *_, **__: None)
    moments = {"observation.state": (STATE, 0.1, 0.5), "action": (ACTIONS, 0.2, 0.4)}
    stats = {
        name: {"mean": torch.full((size,), mean), "std": torch.full((size,), deviation)}
        for name, (size, mean, deviation) in moments.items()
    }
    for processor in make_smolvla_pre_post_processors(config, dataset_stats=stats):
        processor.save_pretrained(folder)


def act_as_lerobot(folder: Path, seen: Path) -> None:
    """Load the folder with lerobot, act as it does, and print the largest difference from the actions in `seen`."""
    import torch
    from lerobot.processor import PolicyProcessorPipeline, TokenizerProcessorStep
    from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action

    kind, config = small_smolvla()
    policy = kind.from_pretrained(folder, config=config).float().eval()
    TokenizerProcessorStep.__post_init__ = lambda _: None
    TokenizerProcessorStep.observation = lambda _, observation: observation
    load, name = PolicyProcessorPipeline.from_pretrained, "policy_{}processor.json"
    before = load(folder, config_filename=name.format("pre"))
    both = {"to_transition": policy_action_to_transition, "to_output": transition_to_policy_action}
    after = load(folder, config_filename=name.format("post"), **both)
    kept = {name: torch.from_numpy(array) for name, array in np.load(seen / "seen.npz").items()}
    frames = kept["images"].permute(0, 3, 1, 2).float() / 255
    task = ["words are numbers already"] * ROWS
    batch = before({"observation.state": kept["state"], f"observation.images.{CAMERA}": frames, "task": task})
    batch |= {"observation.language.tokens": kept["words"], "observation.language.attention_mask": kept["is_word"]}
    size = config.chunk_size * config.max_action_dim
    noise = kept["noise"][:, :size].float().view(ROWS, config.chunk_size, config.max_action_dim)
    with torch.no_grad():
        actions = after(policy.predict_action_chunk(batch, noise=noise))
    print(float((actions - kept["actions"]).abs().max()))


if __name__ == "__main__":
    main()
