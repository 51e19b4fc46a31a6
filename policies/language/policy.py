"""A causal language model as a policy: it is asked what it thinks of whole conversations, token by token.

What it writes comes from an engine; here is what learning needs. What surprises: the policy's weights have
transformers' own names, as if it were the model, and a head that is tied to the embeddings is no weight of its own, so
it is published, saved and loaded once. A head that predicts values is ours alone: engines do not get it, and in a
folder it lies apart, so that what others load is the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodied.core.arrays import host, tensor_of
from embodied.core.errors import ConfigError
from embodied.core.types import EnvSpec
from embodied.policies.base import Scores
from embodied.policies.config import LanguageConfig
from embodied.policies.folder import CONFIG, write_values
from embodied.policies.language import folder as files
from embodied.policies.language import tokenizer as words
from embodied.policies.language.attention import kernel, visible, wide
from embodied.policies.language.packing import Packed, into_passes, lay_out
from embodied.policies.language.settings import check_kind, fresh, longest
from embodied.policies.published import PublishedPolicy
from embodied.policies.vla.lora import add_lora, initial_adapter, is_adapter
from embodied.policies.vla.shards import write_shards
from embodied.runtime.tensor_bytes import Blob, blob_of


class ValueHead(nn.Linear):
    """What the rest of a conversation is worth [U], from hidden states [U, D]: in float32 at least, whatever the model
    computes in, and not as a product of matrices, which autocast would round."""

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden.to(self.weight.dtype) * self.weight[0]).sum(-1) + self.bias


class LanguagePolicy(PublishedPolicy):
    speaks = True
    value_names = ("value_head.",)
    model: Any  # transformers' causal language model

    def __init__(self, config: LanguageConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        self.origin = Path(config.pretrained).expanduser() if config.pretrained else None
        where = f"policy.pretrained={self.origin}" if self.origin else f"policy.preset={config.preset}"
        shape = files.read_config(self.origin) if self.origin else None
        self.tokenizer = self.choose_tokenizer(shape)
        if shape is None:
            shape = fresh(config.preset, len(self.tokenizer.own), min(self.tokenizer.stops))
        self.max_length = longest(config, shape)
        self.dtype = getattr(torch, config.dtype)
        self.exact = torch.promote_types(self.dtype, torch.float32)  # what log-probs are computed in
        model = files.empty_model(shape, self.dtype)
        check_kind(model, where)
        self.tied = files.tie(model)
        self.choose_trained(model)
        files.allocate(model)
        self.adopt(model)
        self.value_head = None
        if config.value_head:
            self.value_head = ValueHead(model.config.hidden_size, 1, device="cpu", dtype=self.exact)

    def choose_tokenizer(self, shape: Any) -> words.Tokenizer:
        if self.origin is None:
            return words.of_characters(self.config.chat)
        found = words.of_folder(
            self.origin, files.stops_of(self.origin, shape), shape.get_text_config().vocab_size, self.config.chat
        )
        if self.spec.max_episode_steps != 1:
            found.check_turns()
        return found

    def choose_trained(self, model: Any) -> None:
        """Freeze all but the last layers, or but adapters, as the options say."""
        config = self.config
        if config.train_layers:
            blocks = files.blocks_of(model)
            if config.train_layers > len(blocks):
                raise ConfigError(f"policy.train_layers={config.train_layers}, but this model has {len(blocks)} layers")
            model.requires_grad_(False)
            for part in (*blocks[-config.train_layers :], *files.behind_blocks(model)):
                part.requires_grad_(True)
        if not config.lora_rank:
            return
        if not any(isinstance(part, nn.Linear) for block in files.blocks_of(model) for part in block.modules()):
            raise ConfigError(
                f"policy.lora_rank={config.lora_rank}: the layers of a {model.config.model_type} are no linear layers, "
                "which alone take adapters; leave it out, or try policy.train_layers"
            )
        with torch.device("meta"):
            add_lora({"model": model}, config.lora_rank, config.lora_scale, targets=config.lora_targets)
        for layer in (layer for layer in model.modules() if hasattr(layer, "lora_A")):
            layer.lora_A.to(self.dtype)
            layer.lora_B.to(self.dtype)
        if self.tied and hasattr(model.get_output_embeddings(), "lora_A"):
            raise ConfigError(
                "this model's head is tied to its embeddings and can have no adapter of its own; "
                "try policy.lora_targets=linear"
            )

    def adopt(self, model: Any) -> None:
        """Make the model's parts this policy's, but for a head that is only another name of the embeddings."""
        for name, part in model.named_children():
            if not (self.tied and part is model.get_output_embeddings()):
                self.add_module(name, part)
        self.__dict__["model"] = model  # beside its parts, of which one may have the same name
        self._retie()

    def _apply(self, fn: Any, recurse: bool = True) -> LanguagePolicy:
        super()._apply(fn, recurse)
        self._retie()  # elsewhere weights may be other objects
        return self

    def _retie(self) -> None:
        if self.tied:
            self.model.get_output_embeddings().weight = self.model.get_input_embeddings().weight

    # Scores

    def pack(self, tokens: Any, mask: Any, lengths: Any, groups: Any, most: int) -> list[list[int]]:
        """Which conversations, by number, `forward` is to score together: at most so many tokens at a time, a shared
        prompt counted once, and whole groups where they fit. `tokens`, `mask` [n], `lengths`, `groups` [R]."""
        arrays = [host(each).reshape(-1) for each in (tokens, mask, lengths, groups)]
        return into_passes(*arrays, most)

    def forward(self, inputs: dict[str, Any]) -> Scores:
        """Score the tokens of R whole conversations, one after the other: "actions" [n, 1, 1], "mask" [n, 1] (False
        where the env spoke: 0 then), "lengths" and "groups" [R]. Those of one group may share their prompt. A token's
        value is that of the text before it."""
        tokens, mask, lengths, groups = (host(inputs[k]).reshape(-1) for k in ("actions", "mask", "lengths", "groups"))
        way = kernel(self.device, self.dtype)
        room = wide(way, self.model.config.hidden_size)
        packed = lay_out(tokens, mask, lengths, groups, wide=room)
        chosen, takes, scored = (
            tensor_of(each, self.device)
            for each in (tokens[packed.scored].astype(np.int64), packed.takes, packed.scored)
        )
        hidden = self.hidden(packed, way)
        likely = self.head(hidden).to(self.exact).log_softmax(-1)
        entropy = -(likely.exp() * likely).sum(-1)
        empty = likely.new_zeros(len(tokens))
        logprobs, entropy = (empty.index_put((scored,), of) for of in (likely[takes, chosen], entropy[takes]))
        values = empty
        if self.value_head is not None:
            values = empty.index_put((scored,), self.value_head(hidden)[takes].to(empty.dtype))
        return Scores(logprobs[:, None, None], entropy[:, None, None], values)

    def hidden(self, packed: Packed, way: str) -> Tensor:
        """The network's last hidden states [U, D] at the places whose logits are needed."""
        ids, positions, sources = (
            tensor_of(each, self.device) for each in (packed.ids, packed.positions, packed.sources)
        )
        if self.model.config._attn_implementation != way:
            self.model.set_attn_implementation(way)
        seen = visible(packed, way, self.device)
        states = self.model.base_model(input_ids=ids, position_ids=positions, attention_mask=seen, use_cache=False)
        return states.last_hidden_state.flatten(0, 1)[sources]

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [U, vocabulary]."""
        if self.tied:
            return F.linear(hidden, self.model.get_input_embeddings().weight)
        return self.model.get_output_embeddings()(hidden)

    def blocks(self) -> list[nn.Module]:
        return files.blocks_of(self.model)

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token, in all layers."""
        shape = self.model.config
        heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
        dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        return 2 * shape.num_hidden_layers * heads * dim * self.dtype.itemsize

    # Weights

    def start(self, name: str, shape: torch.Size, draw: torch.Generator) -> Tensor:
        """Normal numbers of the deviation that config.json asks for, less where many add up; norms begin as 1."""
        if is_adapter(name):
            return initial_adapter(name, shape, draw)
        if name.startswith(self.value_names):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        spread = getattr(self.model.config, "initializer_range", 0.02)
        if name.endswith("c_proj.weight"):
            spread /= (2 * len(self.blocks())) ** 0.5
        return torch.empty(shape).normal_(0.0, spread, generator=draw)

    def read_stored(self) -> dict[str, Blob]:
        stored = self.read_weights(self.origin) if self.origin else {}
        return {name: blob for name, blob in stored.items() if self.config.value_head or self.is_models(name)}

    def read_weights(self, folder: Path) -> dict[str, Blob]:
        """The weights in a folder, but for a head that is only another name of the embeddings."""
        return files.read_weights(folder, self._tied_head())

    def stored_name(self, stored: dict[str, Blob], name: str) -> str:
        """Some folders leave out how all names of a model begin."""
        short = name.removeprefix(f"{self.model.base_model_prefix}.")
        return short if name not in stored and short in stored else name

    def is_extra(self, name: str) -> bool:
        return is_adapter(name) or not self.is_models(name)

    def is_models(self, name: str) -> bool:
        """Whether a weight is the language model's own, or an adapter's, and not the value head's."""
        return not name.startswith(self.value_names)

    def model_weights(self) -> dict[str, Tensor]:
        """Those that write answers, for engines."""
        return {name: tensor for name, tensor in self.state_dict().items() if self.is_models(name)}

    def begin_with(self, tensors: dict[str, Any]) -> None:
        """With those weights, of a policy with or without a value head; ours stays as it is where that has none."""
        own = self.state_dict()
        heads = {name: host(tensor) for name, tensor in own.items() if not self.is_models(name)}
        self.load_weights(heads | {name: each for name, each in tensors.items() if name in own or self.is_models(name)})

    def _tied_head(self) -> str | None:
        head = self.model.get_output_embeddings()
        return next(f"{n}.weight" for n, part in self.model.named_modules() if part is head) if self.tied else None

    # On disk

    def stored_names(self) -> dict[str, str]:
        stored = self.read_stored()
        names = {name: self.stored_name(stored, name) for name in self.state_dict()}
        return {name: there for name, there in names.items() if there in stored}

    def description(self) -> dict[str, Any]:
        """The model's own config with ours beside it, so that others read the folder too."""
        ours = super().description()
        ours["policy"] |= {"pretrained": "." if self.origin else None}
        if self.config.engine == "http":  # whose server is that of a run, here and now
            usual = type(self.config).model_fields
            ours["policy"] |= {key: usual[key].default for key in ("engine", *self.config.of_engine)}
        return files.describe(self.model.config) | ours

    def saved(self) -> set[str]:
        return {name for name in super().saved() if self.is_models(name)}

    def save_pretrained(self, folder: Path | str, tensors=None, specs=None) -> None:
        heads = {}

        def models() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.state_dict().items() if tensors is None else tensors:
                if self.is_models(name):
                    yield name, tensor
                else:
                    heads[name] = tensor

        super().save_pretrained(folder, models(), specs)
        if heads:
            write_values(Path(folder), {name: blob_of(tensor) for name, tensor in heads.items()})
        files.write_companions(Path(folder), self.origin, self.tokenizer)

    def published_weights(self) -> dict[str, Tensor]:
        """Those of the model alone, adapters merged."""
        return {name: tensor for name, tensor in super().published_weights().items() if self.is_models(name)}

    def save_published(self, folder: Path | str, shard_bytes: int = 5 * 10**9) -> None:
        """The folder that other programs read: nothing of ours, adapters merged, large weights in shards."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_shards(folder, self.published_weights(), shard_bytes)
        (folder / CONFIG).write_text(files.json.dumps(files.describe(self.model.config), indent=2) + "\n")
        files.write_companions(folder, self.origin, self.tokenizer)

    @classmethod
    def choices(cls, config: LanguageConfig, task: str) -> dict[str, Any]:
        """Options for evaluating a published folder that the folder decides: none."""
        return {}

    @classmethod
    def counted(cls, config: LanguageConfig, spec: EnvSpec) -> LanguagePolicy | None:
        if config.pretrained is None or not (Path(config.pretrained).expanduser() / CONFIG).is_file():
            return None
        return CountedLanguage(config, spec)


class CountedLanguage(LanguagePolicy):
    """A policy without words, whose memory is counted on shapes alone."""

    def choose_tokenizer(self, shape: Any) -> Any:
        return None
