"""Small language models, in folders as others publish them, and conversations to score."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies import make_policy
from embodied.policies.language.config import LanguageConfig
from embodied.policies.language.tokenizer import of_characters

SPEC = EnvSpec(ActionSpec(1), instruction=True, max_episode_steps=1, has_success=True, text=True)
SEES = replace(SPEC, pictures=True)
TALKS = EnvSpec(ActionSpec(1), instruction=True, max_episode_steps=4, has_success=True, text=True)  # of several turns
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
PLAIN = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def build(spec=SPEC, seed=0, **options):
    return make_policy(LanguageConfig(name="language", **options), spec, seed).eval()


def publish(
    folder: Path, kind: str, tied: bool, template: str | None = None, positions: int = 256, dim: int = 8
) -> Path:
    """A folder with a model of this kind as transformers writes it, and our tokenizer of characters."""
    words = {"vocab_size": 100, "eos_token_id": 1, "bos_token_id": None, "tie_word_embeddings": tied}
    if kind == "gpt2":
        shape = GPT2Config(**words, n_embd=32, n_layer=2, n_head=4, n_positions=positions)
    else:
        family = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind]
        shape = family(**words, **SIZES, head_dim=dim, max_position_embeddings=positions)
    return write(folder, shape, template)


def write(folder: Path, shape, template: str | None = None, kind=AutoModelForCausalLM, words=()) -> Path:
    """A folder with a model of this config as transformers writes it, and our tokenizer of characters."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = kind.from_config(shape)
        for parameter in model.parameters():  # so that nothing is equal by chance
            torch.nn.init.normal_(parameter, float(parameter.ndim == 1), 0.1)
    model.save_pretrained(folder)
    own = of_characters().base
    own.chat_template = template
    own.add_tokens(list(words), special_tokens=True)
    own.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
    return folder


def theirs(folder: Path, dtype=torch.float32, attention=None):
    """The folder as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()


def inputs_of(*conversations) -> dict:
    """What `forward` takes of conversations, each (group, parts) with parts (sampled, tokens) in turns."""
    tokens, mask, lengths = [], [], []
    for _, parts in conversations:
        lengths.append(sum(len(some) for _, some in parts))
        for sampled, some in parts:
            tokens += some
            mask += [sampled] * len(some)
    return {
        "actions": np.array(tokens, np.int32)[:, None, None],
        "mask": np.array(mask)[:, None],
        "lengths": np.array(lengths),
        "groups": np.array([group for group, _ in conversations]),
    }


def apart(inputs) -> dict:
    """The same, every conversation a group of its own: nothing is shared."""
    return inputs | {"groups": np.arange(len(inputs["groups"]))}


def answers(*found, prompt=(5, 6, 7), group=0):
    """Conversations of one group: a prompt and these answers."""
    return [(group, [(False, list(prompt)), (True, list(answer))]) for answer in found]


def alone(policy, inputs) -> list:
    """Log-probs and entropies of the sampled tokens of each conversation by itself, with transformers' own forward."""
    tokens, mask = (inputs[name].reshape(-1) for name in ("actions", "mask"))
    found, begin = [], 0
    for length in inputs["lengths"]:
        ids = torch.from_numpy(tokens[begin : begin + length].astype(np.int64))
        sampled = np.flatnonzero(mask[begin : begin + length])
        likely = policy.model(ids[None]).logits[0].to(policy.exact).log_softmax(-1)[sampled - 1]
        found.append((likely[range(len(sampled)), ids[sampled]], -(likely.exp() * likely).sum(-1)))
        begin += length
    return found
