"""Shared by VLA policies: cameras, instructions and their ids, compiled acting, the keyframe head of imitation.

Actions teach small vision encoders little about the positions of objects. With `policy.keyframes` imitation also trains
image tokens to predict the robot's state at the next opening or closing of its gripper, and at the end: near the
objects.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Hashable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embodied.core.arrays import host, map_obs, num_rows, tensor_of
from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.types import EnvSpec, Observation
from embodied.policies.lora import is_adapter, read_adapters, with_adapter_options
from embodied.policies.policy_folder import CONFIG, TOKENIZER, copy_files, write_shards
from embodied.policies.published import PublishedPolicy
from embodied.policies.vla.config import TOKENIZERS
from embodied.runtime.published_weights import Blob


def fast_tokenizer(folder: Path | None, model: str, advice: str):
    """The tokenizer of a published folder's tokenizer.json; `advice` says where to get that file."""
    if folder is None:
        raise ConfigError(f"policy.preset=full has no vocabulary of its own; give policy.pretrained=FOLDER of {model}")
    places = [folder / TOKENIZER, folder / "tokenizer" / TOKENIZER]  # the second is lerobot's
    path = next(filter(Path.is_file, places), places[0])
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {TOKENIZER}; {advice}")
    TOKENIZERS.check(str(path))
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as err:  # the package raises nothing more specific
        raise CheckpointError(f"{path} is damaged: {err}") from None
    tokenizer.no_padding()  # a saved tokenizer may still pad or truncate as in training
    tokenizer.no_truncation()
    return tokenizer


def check_sizes(*sizes: Any) -> None:
    if odd := [size for size in sizes if type(size) is not int or size < 1]:
        raise ValueError(f"its sizes should be whole numbers, one is {odd[0]!r}")


def hashed_words(text: str, count: int) -> list[int]:
    """A number below `count` for every word: for small models without a vocabulary file."""
    return [zlib.crc32(word.encode()) % count for word in text.split()]


def pad_rows(
    sequences: list[list[int]],
    pad: int = 0,
    most: int | None = None,
    least: int = 0,
    in_front: bool = False,
    multiple: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """Pads rows to ids [N, L] and a mask, with at most and at least so many ids per row, a `multiple` if that is not
    more than `most`. Padding comes last, or with `in_front` after a row's first id."""
    rows = [sequence[:most] for sequence in sequences]
    width = -(-max(least, *map(len, rows)) // multiple) * multiple
    width = width if most is None else min(width, most)
    ids, present = np.full((len(rows), width), pad, np.int64), np.zeros((len(rows), width), bool)
    for row, sequence in enumerate(rows):
        places = np.arange(len(sequence))
        places[1:] += (width - len(sequence)) * in_front
        ids[row, places], present[row, places] = sequence, True
    return ids, present


KEYFRAMES = "keyframe_head."
IDS, IS_WORD = "ids", "is_word"  # an instruction as tensors [N, L]; without a mask nothing is padded
PROMPT_STEP = 32  # captured programs take prompts whose length is a multiple, once there are several lengths
AHEAD = 2  # the next keyframe and the end
COMPILERS = ("g++", "clang++", "c++")


class VLAPolicy(PublishedPolicy):
    """A published policy with images and an instruction. Families implement the methods that raise."""

    takes_device_noise = True
    reads_words = True
    any_image_size = True
    gap_limits = (0.001, 0.2)  # rounding makes 5e-6 and 0.08 at published depth (docs/results.md)
    value_names = ("value_head.",)
    vocabulary: tuple[str, str]  # for `fast_tokenizer`: the model's name, and where to get its vocabulary
    companions: tuple[str, ...]  # patterns of files that are copied unchanged beside the weights
    is_counted = False  # True: its memory is counted by shapes, without files
    settings: Any
    fast: Any  # the folder's tokenizer; None: words are hashed

    def __init__(self, config: Any, spec: EnvSpec) -> None:
        super().__init__(with_adapter_options(config), spec)
        self.adapters = config.lora_path and Path(config.lora_path)
        self.lengths: set[int] = set()  # of prompts in captured decisions
        self.source = self.folder_of(self.config) if self.config.pretrained else None
        self.origin = self.source and self.source.path

    @classmethod
    def for_memory_estimate(cls, config: Any, spec: EnvSpec) -> VLAPolicy:
        options = with_adapter_options(config)
        unset = dict.fromkeys({"pretrained", "statistics", "rlds_images"} & type(options).model_fields.keys())
        return type(cls.__name__, (cls,), {"is_counted": True})(options.model_copy(update=unset), spec)

    def read_folder(self) -> dict[str, Blob]:
        """The published folder's weights by our names; {} without a folder."""
        raise NotImplementedError

    def read_stored(self) -> dict[str, Blob]:
        """The folder's weights and the weights of `policy.lora_path`."""
        stored = self.read_folder()
        if self.adapters is None or not stored:
            return stored
        adapters = {name for name in self.state_dict() if is_adapter(name)}
        below = {name: blob for name, blob in stored.items() if not is_adapter(name)}
        return below | read_adapters(self.adapters, adapters, stored, self.config)

    @classmethod
    def folder_of(cls, config: Any) -> Any:
        """The published folder, without its weights."""
        raise NotImplementedError

    @classmethod
    def check_statistics(cls, folder: Any, config: Any) -> None:
        """Refuse a folder without the statistics of `policy.statistics`."""
        raise NotImplementedError

    @classmethod
    def check_folder(cls, config: Any) -> None:
        folder = cls.folder_of(config)
        if folder.settings.tokenizer != "words":
            fast_tokenizer(folder.path, *cls.vocabulary)
        cls.check_statistics(folder, config)

    def choose_tokenizer(self) -> None:
        small = self.is_counted or self.settings.tokenizer == "words"
        self.fast = None if small else fast_tokenizer(self.origin, *self.vocabulary)

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, after the begin token, if any."""
        raise NotImplementedError

    def vision_encoder(self) -> nn.Module:
        """The module that returns image tokens, camera by camera."""
        raise NotImplementedError

    def unit_state(self, state: Tensor) -> Tensor:
        """States [..., S] in the model's units."""
        raise NotImplementedError

    def imitate_actions(self, inputs: dict[str, Any], noise: np.ndarray | None) -> Tensor:
        """The loss of demonstrated actions, as `imitate` returns it."""
        return super().imitate(inputs, noise)

    def add_keyframe_head(self, image_tokens: int, dim: int) -> None:
        """Create the head with `policy.keyframes`."""
        places, state_dim = self.config.keyframes, self.spec.state_dim or 0
        if not places:
            return
        if max(places) >= state_dim:
            raise ConfigError(
                f"policy.keyframes={list(places)} are indices of the state, but this env gives {state_dim or 'none'}; "
                "set env.state=proprio, or leave it out"
            )
        if not any(p.requires_grad for p in self.vision_encoder().parameters()):
            raise ConfigError("policy.keyframes trains the vision encoder, which policy.train freezes; leave it out")
        self.auxiliary_loss = "keyframe_loss"
        self.keyframe_head = nn.Linear(image_tokens * dim, AHEAD * len(places), dtype=self.exact)

    def imitate(self, inputs: dict[str, Any], noise: np.ndarray | None) -> Tensor | tuple[Tensor, Tensor]:
        if not self.config.keyframes:
            return self.imitate_actions(inputs, noise)
        seen: list[Tensor] = []
        watching = self.vision_encoder().register_forward_hook(lambda _module, _inputs, tokens: seen.append(tokens))
        try:
            losses = self.imitate_actions(inputs, noise)
        finally:
            watching.remove()
        return losses, self._keyframe_loss(seen[0], inputs["keyframes"])

    def _keyframe_loss(self, tokens: Tensor, states: Tensor) -> Tensor:
        """Squared errors [B], in the model's units, of the predicted states ahead [B, 2, S]."""
        wanted = self.unit_state(tensor_of(states, self.device))[..., list(self.config.keyframes)].flatten(1)
        head = self.keyframe_head
        predicted = head(tokens.reshape(len(wanted), head.in_features).to(head.weight.dtype))
        return (predicted.to(torch.float32) - wanted.to(torch.float32)).square().mean(1)

    def use_weights(self, tensors: dict[str, Any]) -> None:
        """Published weights come one by one; layers that read the same input want theirs side by side. A learner's own
        weights already lie so, and are used where they lie."""
        super().use_weights(tensors)
        self._apply(lambda tensor: tensor)

    def begin_with(self, tensors: dict[str, Any]) -> None:
        """Accepts weights with or without the keyframe head."""
        state = self.state_dict()
        kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(KEYFRAMES) or name in state}
        fresh = {name: tensor.float() for name, tensor in state.items() if name.startswith(KEYFRAMES)}
        self.load_weights(fresh | kept)

    def check_env(self) -> None:
        """Refuse an env in which these families cannot act."""
        config, spec = self.config, self.spec
        if spec.action.discrete:
            raise ConfigError(f"policy.name={config.name} makes continuous actions, but this env takes a choice")
        if not spec.instruction and config.instruction is None:
            raise ConfigError(
                f"policy.name={config.name} needs an instruction, but this env gives none; set "
                "policy.instruction='...', or env.instruction=true where the env has that option"
            )

    def check_cameras(self, chosen: tuple[str, ...], key: str = "policy.cameras") -> None:
        """Refuse cameras that the env does not have; `key` is the option that names them."""
        spec = self.spec
        self.config.check_images(spec.images)
        if unknown := [name for name in chosen if name not in spec.images]:
            raise ConfigError(f"{key}={unknown[0]!r} is none of this env's cameras: {', '.join(spec.images)}")

    def instructions(self, obs: Observation, count: int) -> list[str]:
        """The instruction of each of `count` rows."""
        return obs["instruction"] if self.spec.instruction else [self.config.instruction] * count

    def prompts(self, obs: Observation, count: int, multiple: int = 1, **_: int) -> tuple[np.ndarray, np.ndarray]:
        """The word ids [N, L] of the prompts of `count` rows, and their mask."""
        return self.prompt_tokens(self.instructions(obs, count), multiple)

    def word_ids(self, obs: Observation, count: int, **width: int) -> tuple[Tensor, Tensor, bool]:
        """The word ids [N, L] of the prompts of `count` rows, their mask, and whether there may be padding."""
        if isinstance(given := obs.get("instruction"), dict):
            ids = given[IDS]
            is_word = given.get(IS_WORD)
            return (ids, torch.ones_like(ids, dtype=torch.bool), False) if is_word is None else (ids, is_word, True)
        ids, is_word = self.prompts(obs, count, **width)
        return tensor_of(ids, self.device), tensor_of(is_word, self.device), not is_word.all()

    def as_tensors(self, obs: Observation, device: torch.device | str | None = None) -> Observation:
        """The observation as tensors, with the words of its prompts as instruction. With a `device` (of a learner's
        captured passes) they stay there; else they are sent to the policy's."""
        seen = {name: obs[name] for name in ("images", "state") if name in obs}
        count, captured = num_rows(seen), self.captured_graphs is not None or device is not None
        several = captured and len(self.lengths) > 1
        ids, is_word = self.prompts(obs, count, PROMPT_STEP if several else 1)
        if captured and not several:
            self.lengths.update(is_word.sum(1).tolist())
            if len(self.lengths) > 1:
                ids, is_word = self.prompts(obs, count, PROMPT_STEP)
        words = {IDS: ids} if is_word.all() else {IDS: ids, IS_WORD: is_word}
        device = device or self.device
        return map_obs(lambda array: tensor_of(array, device), seen | {"instruction": words})

    @torch.inference_mode()
    def value(self, obs: Observation) -> np.ndarray:
        return host(self.compute("value", self.judge, {"obs": self.as_tensors(obs)})["values"])

    def judge(self, obs: Observation) -> dict[str, Tensor]:
        """The values [N] of observations as `as_tensors` returns them."""
        raise NotImplementedError

    def for_acting(self, function: Callable) -> Callable:
        """The function, compiled on a CPU with `policy.compile=true`."""
        acts = self.config.compile and torch.is_inference_mode_enabled() and self.device.type == "cpu"
        return compiled(function) if acts else function

    def compute(self, name: Hashable, work: Callable[..., Observation], inputs: Observation) -> Observation:
        """The results of `work(**inputs)` on tensors; a policy worker on a GPU captures it."""
        if self.captured_graphs is None or not torch.is_inference_mode_enabled():
            return work(**inputs)
        addresses = (*self.parameters(), *self.buffers(), *self.cache_tensors())
        return self.captured_graphs.run_padded(name, work, inputs, addresses)

    def write_folder(self, folder: Path, tensors=None, specs=None) -> None:
        super().write_folder(folder, tensors, specs)
        if self.origin:
            copy_files(self.origin, folder, self.companions)

    def write_published(
        self, folder: Path, config: dict[str, Any], weights: dict[str, Tensor], shard_bytes: int
    ) -> None:
        """Write config.json, weights in shards of at most `shard_bytes`, and the files beside the weights."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if self.origin:
            copy_files(self.origin, folder, self.companions)
        write_shards(folder, weights, shard_bytes)

    def description(self) -> dict[str, Any]:
        ours = super().description()
        ours["policy"] |= {"compile": False}  # a setting of acting, not of the policy
        return ours


# Acting with functions compiled by torch.compile, on CPUs: GPUs capture whole decisions (`compute`). Learning is not
# compiled. Fused operations round like separate ones, so log-probs still equal the learner's. For a second number of
# rows or length of prompts a function is compiled again, then for all sizes.


@cache
def compiled(function: Callable) -> Callable:
    """A compiled function of modules and tensors on a CPU. Modules are arguments, so that copies of a policy share the
    program."""
    if not any(map(shutil.which, (os.environ.get("CXX", ""), *COMPILERS))):
        raise ConfigError(
            "policy.compile=true needs a C++ compiler, and there is none: install g++ (apt install g++), or set "
            "policy.compile=false"
        )
    fast = torch.compile(function, options={"emulate_precision_casts": True, "compile_threads": 1})

    @wraps(function)
    def call(*inputs: Any, **named: Any) -> Any:
        try:
            return fast(*inputs, **named)
        except RuntimeError as error:
            if not (cut_off := re.search(r"(/\S+\.so): file too short", str(error))):
                raise
            Path(cut_off[1]).unlink(missing_ok=True)  # a killed process was writing it; torch's compiler keeps it
            return call(*inputs, **named)

    return call
