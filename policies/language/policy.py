"""A causal language model as a policy, for learning: it scores whole conversations, token by token.

Engines generate answers. The policy's weights have transformers' names, as if it were the model, and a head tied to the
embeddings is not a separate weight, so it is published, saved and loaded once. The value head is not part of the model:
engines do not get it, and folders keep it apart, so that other programs load the plain model. Hidden states are scored
a part at a time (`InParts`), so the logits of a whole batch never exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from embodied.core.arrays import host, tensor_of
from embodied.core.conversations import FIRST_PLACE
from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.files import as_path
from embodied.core.types import EnvSpec
from embodied.policies.base import Scores
from embodied.policies.language import attention
from embodied.policies.language import folder as files
from embodied.policies.language.attention import DividedPass, token_bytes
from embodied.policies.language.config import LanguageConfig
from embodied.policies.language.experts import BIAS, ExpertLoads, is_router, num_experts
from embodied.policies.language.folder import HEADS, head_size, heads_of, scaled_logits
from embodied.policies.language.packing import Packed, into_passes, lay_out
from embodied.policies.language.sight import SIGHTS, Sight, decoder_of, place_cost, tower_blocks_of
from embodied.policies.language.tokenizer import READERS, ConversationTokenizer, tokenizer_of
from embodied.policies.lora import add_lora, chosen_layers, initial_adapter, is_adapter, saved_layers
from embodied.policies.policy_folder import CONFIG, copy_files, published_family, read_blobs, write_shards, write_values
from embodied.policies.published import PublishedPolicy
from embodied.runtime.published_weights import Blob

COMPARED = 2e9  # limit of parameters for comparing the first layers with transformers in float32
ROUNDING = 1e-3  # nats; float32 differs far less


class ValueHead(nn.Linear):
    """Values [U] of hidden states [U, D], in float32 at least, without a matrix product, which autocast would round."""

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden.to(self.weight.dtype) * self.weight[0]).sum(-1) + self.bias


class LanguagePolicy(PublishedPolicy):
    speaks = True
    value_names = ("value_head.",)
    model: Any  # transformers' causal language model

    def __init__(self, config: LanguageConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        self.origin = as_path(config.pretrained) if config.pretrained else None
        where = f"policy.pretrained={self.origin}" if self.origin else f"policy.preset={config.preset}"
        shape = self.shape_of(self.origin) if self.origin else None
        self.tokenizer = self.choose_tokenizer(shape)
        if shape is None:
            shape = files.fresh_config(config.preset, len(self.tokenizer.base), min(self.tokenizer.stops))
        self.sight = self.choose_sight(shape)
        self.dtype = getattr(torch, config.dtype)
        self.exact = torch.promote_types(self.dtype, torch.float32)  # the dtype of log-probs
        model = files.empty_model(shape, self.dtype)
        files.check_kind(model, where)
        self.max_length = files.longest(config.max_length, shape)
        self.tied = files.tie(model)
        self.choose_trained(model)
        self.experts = ExpertLoads(model, config.expert_bias_rate, config.engine)
        files.allocate(model)
        self.adopt(model)
        self.temperature = config.temperature
        self.trained_tokens, self.products = 0, 0.0  # work of passes since `take_work`
        self.value_head = None
        if config.value_head:
            self.value_head = ValueHead(model.config.get_text_config().hidden_size, 1, device="cpu", dtype=self.exact)

    def shape_of(self, folder: Path) -> PreTrainedConfig:
        """The config of the folder's model."""
        return files.read_config(folder)

    def choose_tokenizer(self, shape: Any) -> ConversationTokenizer:
        return tokenizer_of(self.config, self.spec.max_episode_steps != 1, shape)

    def choose_sight(self, shape: PreTrainedConfig) -> Sight | None:
        """The picture encoder of a model that reads pictures; refuses an env with pictures for other models."""
        kind = SIGHTS.get(shape.model_type)
        if kind is None or self.tokenizer is None:
            if self.spec.pictures and kind is None:
                raise ConfigError(f"the env shows pictures, and a {shape.model_type} reads only text; {READERS}")
            return None
        self.tokenizer.sight = kind(shape, self.tokenizer.base, self.origin, **({} if self.origin else files.PROCESSED))
        return self.tokenizer.sight

    def choose_trained(self, model: Any) -> None:
        """Freeze all weights except the last layers or adapters, by the options."""
        config, blocks = self.config, files.blocks_of(model)
        if config.train_layers:
            if config.train_layers > len(blocks):
                raise ConfigError(f"policy.train_layers={config.train_layers}, but this model has {len(blocks)} layers")
            model.requires_grad_(False)
            for module in (*blocks[-config.train_layers :], *files.behind_blocks(model)):
                module.requires_grad_(True)
        if not config.lora_rank:
            return
        if not any(isinstance(module, nn.Linear) for block in blocks for module in block.modules()):
            kind = f"the layers of a {model.config.model_type} are not linear layers, which alone take adapters"
            raise ConfigError(f"policy.lora_rank={config.lora_rank}: {kind}; try policy.train_layers")
        layers, head = dict(model.named_modules()), model.get_output_embeddings()
        chosen = [*(layers[name] for name in chosen_layers(layers, config.lora_targets)), *saved_layers(model, config)]
        if self.tied and any(module in (head, model.get_input_embeddings()) for module in chosen):
            raise ConfigError(
                "this model's head is tied to its embeddings and can neither have an adapter of its own nor be trained "
                "alone; try policy.lora_targets=linear, and policy.lora_config without it"
            )
        with torch.device("meta"):
            add_lora({"": model}, config)
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.data = parameter.data.to(self.dtype)

    def adopt(self, model: Any) -> None:
        """Make the model's modules this policy's modules, except a head that is tied to the embeddings."""
        for name, child in model.named_children():
            if not (self.tied and child is model.get_output_embeddings()):
                self.add_module(name, child)
        self.__dict__["model"] = model  # not as a module: a part of it may be called model, too
        self._retie()

    def _apply(self, fn: Any, recurse: bool = True) -> LanguagePolicy:
        super()._apply(fn, recurse)
        self._retie()  # weights may have become other objects
        return self

    def _retie(self) -> None:
        if self.tied:
            self.model.get_output_embeddings().weight = self.model.get_input_embeddings().weight

    # Scores

    def pack(self, tokens: Any, mask: Any, lengths: Any, groups: Any, most: int) -> list[list[int]]:
        """Returns the conversations, by number, of each pass of `forward`: at most `most` tokens, a shared prompt
        counted once, whole groups if they fit. `tokens`, `mask` [n], `lengths`, `groups` [R]."""
        return into_passes(*(host(array).reshape(-1) for array in (tokens, mask, lengths, groups)), most)

    def forward(self, inputs: dict[str, Any]) -> Scores:
        """Score the tokens of R whole conversations, one after the other: "actions" [n, 1, 1], "mask" [n, 1] (False for
        the env's tokens, which score 0), "lengths" and "groups" [R]. Conversations of one group may share their prompt.
        A token's value is that of the text before it. With "ranks", several ranks score the same conversations
        together; it has their group and the rank that owns the loss. "is_padding": the pass only keeps other ranks
        company, so experts do not count its tokens."""
        self.experts.ignores = inputs.get("is_padding", False)
        tokens, mask, lengths, groups = (host(inputs[k]).reshape(-1) for k in ("actions", "mask", "lengths", "groups"))
        way = attention.attention_kernel(self.device, self.dtype)
        room = attention.wide_row(way, self.model.config.get_text_config().hidden_size)
        names = list(inputs.get("pictures", ()))
        shown, positions = self.number_pictures(tokens, lengths, names) if names else (tokens, None)
        packed = lay_out(shown, mask, lengths, groups, wide=room, token_positions=positions)
        score = partial(self.scores_of, tokens=tokens, way=way, names=list(dict.fromkeys(names)))
        whole = attention.implementation(way, self.model.config.get_text_config())
        ranks = DividedPass(*inputs["ranks"], whole) if "ranks" in inputs else None
        scores, which = (score(packed), packed.scored) if ranks is None else ranks.score(score, packed)
        empty, scored = scores[0].new_zeros(len(tokens)), tensor_of(which, self.device)
        logprobs, entropy, *values = (empty.index_put((scored,), of) for of in scores)
        return Scores(logprobs[:, None, None], entropy[:, None, None], *(values or [empty]))

    def number_pictures(
        self, tokens: np.ndarray, lengths: np.ndarray, names: list[str]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens, with picture places numbered over all different pictures, and all positions."""
        positions, begin = [], 0
        for stream in np.split(tokens, np.cumsum(lengths)[:-1]):
            count = int((stream == FIRST_PLACE).sum())
            positions.append(self.sight.positions(stream, names[begin : begin + count]))
            begin += count
        return self.sight.number_places(tokens, names)[0], np.concatenate(positions)

    def shown_tokens(self, tokens: Sequence[int]) -> list[int]:
        """The tokens for other programs, with the model's own picture tokens."""
        return [token if token >= 0 else self.model.config.image_token_id for token in tokens]

    def scores_of(
        self, packed: Packed, tokens: np.ndarray, way: str, ranks: DividedPass | None = None, names: Sequence[str] = ()
    ) -> list[Tensor]:
        """Log-probs, entropies and, with a value head, values [M] of the sampled tokens in these rows with these
        pictures."""
        hidden = self.hidden(packed, way, ranks, names)
        scores = [*self.words(hidden, packed.takes, tokens[packed.scored].astype(np.int64))]
        if self.value_head is not None:
            scores.append(self.value_head(hidden)[tensor_of(packed.takes, self.device)].to(scores[0].dtype))
        return scores

    def imitate(self, inputs: dict[str, Any], noise: Any) -> Tensor:
        """At temperature 1, independent of the temperature of rollouts."""
        with self.at_temperature_1():
            return super().imitate(inputs, noise)

    @contextmanager
    def at_temperature_1(self) -> Iterator[None]:
        drawn_at, self.temperature = self.temperature, 1.0
        try:
            yield
        finally:
            self.temperature = drawn_at

    def hidden(self, packed: Packed, way: str, ranks: DividedPass | None = None, names: Sequence[str] = ()) -> Tensor:
        """The network's last hidden states [U, D] at the places whose logits are needed."""
        ids, sources = (tensor_of(array, self.device) for array in (packed.ids, packed.sources))
        positions, at, blocks = tensor_of(packed.positions, self.device), packed.positions, packed.blocks
        if positions.ndim == 3:  # on several axes
            positions, at = positions.movedim(2, 0), at.max(-1)
        shape = self.model.config.get_text_config()
        more = attention.attention_masks(packed, way, self.device, shape) | {"use_cache": False}
        more |= {} if ranks is None else {"ranks": ranks}
        attention.use_kernel(self.decoder, attention.implementation(way, shape) if ranks is None else attention.DIVIDED)
        read = {"input_ids": ids}
        if self.sight is not None:
            read = {"inputs_embeds": self.sight.embed(self.model, ids, names, ranks)}
        shown = sum(self.sight.read(name).places for name in names)
        if ranks is not None:
            blocks, shown = blocks[:, ranks.group.place :: ranks.group.size], shown / ranks.group.size
        self.count_work(at[blocks >= 0], shown)
        with self.experts.counting(tensor_of(blocks >= 0, self.device)):
            states = self.decoder(**read, position_ids=positions, **more)
        return states.last_hidden_state.flatten(0, 1)[sources]

    def words(self, hidden: Tensor, takes: np.ndarray, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        """Log-probs of the tokens `chosen` [M] at the places `takes` [M] of `hidden` [U, D], and the entropies there.
        If the logits of all places would be large, it computes a part at a time."""
        most = max(1, LOGITS_BYTES // (self.model.config.get_text_config().vocab_size * self.exact.itemsize))
        score = partial(self.words_at, self.temperature)
        if len(hidden) <= most:
            return score(hidden, *(tensor_of(array, self.device) for array in (takes, chosen)))
        order = np.argsort(takes, kind="stable")
        firsts = range(0, len(hidden), most)
        cuts = np.searchsorted(takes[order], firsts)[1:]
        parts = [
            (first, tensor_of(takes[rows] - first, self.device), tensor_of(chosen[rows], self.device))
            for first, rows in zip(firsts, np.split(order, cuts), strict=True)
        ]
        head = self.model.get_input_embeddings() if self.tied else self.model.get_output_embeddings()
        weights = [p for p in head.parameters() if p.requires_grad]
        scores = InParts.apply(score, most, parts, hidden, *weights)
        back = tensor_of(np.argsort(order), self.device)
        return scores[0][back], scores[1][back]

    def words_at(self, temperature: float, hidden: Tensor, takes: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The same for all places at once."""
        logits = self.head(hidden).to(self.exact)
        likely = (logits if temperature == 1 else logits / temperature).log_softmax(-1)
        entropy = -(likely.exp() * likely).sum(-1)
        return likely[takes, chosen], entropy[takes]

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [U, vocabulary]."""
        if self.tied:
            return scaled_logits(F.linear(hidden, self.model.get_input_embeddings().weight), self.model.config)
        return scaled_logits(self.model.get_output_embeddings()(hidden), self.model.config)

    def end_step(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
        return self.experts.end_step(sum_over_ranks)

    @cached_property
    def decoder(self) -> Any:
        """The part of the model that reads tokens."""
        return decoder_of(self.model)

    def blocks(self) -> list[nn.Module]:
        return [*files.blocks_of(self.model), *tower_blocks_of(self.model)]

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token, in all layers."""
        return token_bytes(self.model)

    def pass_cost(self) -> tuple[float, float, float]:
        return self._pass_cost

    @cached_property
    def _pass_cost(self) -> tuple[float, float, float]:
        """All weights count except embeddings and idle experts, and attention's two products of its width for half of
        the pairs."""
        weights = self.model.get_input_embeddings().weight.numel()  # of the head
        for block in files.blocks_of(self.model):
            share = next((m.top_k / num_experts(m) for m in block.modules() if is_router(m)), 1.0)
            weights += sum(p.numel() * (share if ".experts." in name else 1.0) for name, p in block.named_parameters())
        shape = self.model.config.get_text_config()
        pairs = shape.num_hidden_layers * heads_of(shape)[0] * head_size(shape)
        return float(weights), float(pairs), place_cost(self.model)

    def counted_features(self, places: int) -> Tensor:
        return SIGHTS[self.model.config.model_type].count_features(self.model, places)

    def exchange_size(self) -> tuple[int, int]:
        """Queries, keys and values are exchanged before attention, and its output afterwards."""
        shape = self.model.config.get_text_config()
        return shape.num_hidden_layers * 2 * sum(heads_of(shape)) * head_size(shape), shape.num_hidden_layers * 2

    def count_work(self, positions: np.ndarray, places: float) -> None:
        """Count the work of a pass of tokens at these positions, and of pictures with `places` places."""
        (token, pair, place), taught = self._pass_cost, torch.is_grad_enabled()
        products = token * len(positions) + 2 * pair * float((positions + 1).sum()) + place * places
        self.trained_tokens += taught * len(positions)
        self.products += (3 if taught else 1) * products

    def take_work(self) -> tuple[int, float]:
        work, self.trained_tokens, self.products = (self.trained_tokens, self.products), 0, 0.0
        return work

    # Weights

    def start(self, name: str, shape: torch.Size, draw: torch.Generator) -> Tensor:
        """Initial weights: normal with config.json's deviation, less for layers that add up many terms; norms begin as
        1."""
        if is_adapter(name):
            return initial_adapter(name, shape, draw, self.config.lora_init)
        if name.startswith(self.value_names):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        spread = getattr(self.model.config.get_text_config(), "initializer_range", 0.02)
        if name.endswith("c_proj.weight"):
            spread /= (2 * len(self.blocks())) ** 0.5
        return torch.empty(shape).normal_(0.0, spread, generator=draw)

    def initialise(self, rng: np.random.Generator) -> None:
        super().initialise(rng)
        self.check_folder()

    def stored_weights(self) -> dict[str, Blob]:
        self.check_folder()
        return super().stored_weights()

    def check_folder(self) -> None:
        """Refuse a published folder whose first layers score some tokens differently from transformers."""
        if self.origin is None or published_family(self.origin) != "language":
            return
        ours = FirstLayers(self.config, self.spec)
        if sum(p.numel() for p in ours.parameters()) > COMPARED:
            print(f"{self.origin}: too large to be compared with transformers' own forward pass", flush=True)
        elif not (gap := ours.difference_from_transformers()) <= ROUNDING:
            raise CheckpointError(
                f"{self.origin} is a {self.model.config.model_type}, whose log-probs are computed otherwise here than "
                f"by transformers {transformers.__version__}: {gap:.2g} nats apart; take another model, and report this"
            )

    def read_stored(self) -> dict[str, Blob]:
        stored = self.read_weights(self.origin) if self.origin else {}
        return {name: blob for name, blob in stored.items() if self.config.value_head or self.is_models(name)}

    def read_weights(self, folder: Path) -> dict[str, Blob]:
        """The weights in a folder, without a head that is tied to the embeddings."""
        head, stored = self.model.get_output_embeddings(), files.as_modules(self.model, read_blobs(folder))
        tied = [f"{name}.weight" for name, module in self.model.named_modules() if self.tied and module is head]
        return {name: blob for name, blob in stored.items() if name not in tied and not name.endswith(files.LEFTOVERS)}

    def is_extra(self, name: str) -> bool:
        return is_adapter(name) or self.is_ours(name)

    def is_models(self, name: str) -> bool:
        """True if a weight belongs to the language model or an adapter, not to the value head."""
        return not name.startswith(self.value_names)

    def is_ours(self, name: str) -> bool:
        """True if transformers' model has no such weight, ignoring adapters."""
        return not self.is_models(name) or (self.experts.adds_bias and name.endswith(BIAS))

    def model_weights(self) -> dict[str, Tensor]:
        """The weights for engines."""
        return {name: tensor for name, tensor in self.state_dict().items() if self.is_models(name)}

    def begin_with(self, tensors: dict[str, Any]) -> None:
        """Begin with these weights of a policy. A missing value head or missing biases keep their initial values."""
        initial = self.state_dict()
        heads = {name: host(tensor) for name, tensor in initial.items() if self.is_ours(name)}
        self.load_weights(heads | {n: tensor for n, tensor in tensors.items() if n in initial or self.is_models(n)})

    # On disk

    def stored_names(self) -> dict[str, str]:
        return {name: name for name in self.read_stored() if name in self.state_dict()}

    def description(self) -> dict[str, Any]:
        """The model's config plus our settings, so that other programs can read the folder."""
        ours = super().description()
        if names := ours.get("base_names"):
            origins = files.origins(self.model, read_blobs(self.origin))  # combined weights keep their own names
            ours["base_names"] = {name: name if origins[name].rule else origins[name].names[0] for name in names}
        ours["policy"] |= {"pretrained": "." if self.origin else None}
        if self.config.engine == "http":  # its server belongs to the current run
            usual = type(self.config).model_fields
            ours["policy"] |= {key: usual[key].default for key in ("engine", *self.config.of_engine)}
        return files.describe(self.model.config) | ours

    def names_to_save(self) -> set[str]:
        return {name for name in super().names_to_save() if self.is_models(name)}

    def write_folder(self, folder: Path, tensors=None, specs=None) -> None:
        heads = {}

        def models() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.state_dict().items() if tensors is None else tensors:
                if self.is_models(name):
                    yield name, tensor
                else:
                    heads[name] = tensor

        super().write_folder(folder, models(), specs)
        if heads:
            write_values(folder, heads)
        self._write_companions(folder)

    def published_weights(self) -> dict[str, Tensor]:
        """The model's weights with merged adapters, as published folders have them."""
        merged = super().published_weights()
        return files.as_published(self.model, ((name, value) for name, value in merged.items() if self.is_models(name)))

    def save_published(self, folder: Path | str, shard_bytes: int = 5 * 10**9) -> None:
        """Write a folder for other programs: without our settings, adapters merged, large weights in shards."""
        self.experts.check_publishable()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_shards(folder, self.published_weights(), shard_bytes)
        (folder / CONFIG).write_text(files.json.dumps(files.describe(self.model.config), indent=2) + "\n")
        self._write_companions(folder)

    def _write_companions(self, folder: Path) -> None:
        """Write the other files of a model folder: copies from its origin, or our own."""
        if self.origin:
            copy_files(self.origin, folder, files.COMPANIONS)
            return
        self.tokenizer.save(folder)
        if self.tokenizer.sight:
            self.tokenizer.sight.save(folder)
        ends, padding = sorted(self.tokenizer.stops), self.tokenizer.base.pad_token_id
        transformers.GenerationConfig(eos_token_id=ends, pad_token_id=padding).save_pretrained(folder)

    @classmethod
    def choices(cls, config: LanguageConfig, task: str) -> dict[str, Any]:
        """The options that a published folder decides in evaluations: none."""
        return {}

    @classmethod
    def attention_heads(cls, config: LanguageConfig) -> tuple[int, int]:
        if not config.pretrained:
            return HEADS, HEADS
        return heads_of(files.read_config(as_path(config.pretrained)).get_text_config())

    @classmethod
    def check_engine(cls, config: LanguageConfig) -> None:
        """Refuse a published model that vLLM cannot run on a CPU."""
        shape = cls._shape_here(config)
        if getattr(shape, "n_routed_experts", None):
            odd = f"a {shape.model_type} takes no new weights there"
        elif shape is not None and (dim := head_size(shape)) not in files.CPU_HEADS:
            sizes = ", ".join(map(str, files.CPU_HEADS))
            odd = f"it supports heads of {sizes} numbers, and those of {config.pretrained} have {dim}"
        else:
            return
        raise ConfigError(f"policy.engine=vllm: on a CPU {odd}; try policy.engine=transformers")

    @classmethod
    def check_division(cls, config: LanguageConfig) -> None:
        """Refuse a model that vLLM cannot divide over `policy.tensor_parallel` GPUs."""
        shape = cls._shape_here(config)
        if shape is not None or not config.pretrained:
            files.check_division(shape, heads_of(shape) if shape else (HEADS, HEADS), config.tensor_parallel)

    @classmethod
    def for_memory_estimate(cls, config: LanguageConfig, spec: EnvSpec) -> LanguagePolicy | None:
        return None if cls._shape_here(config) is None else CountedLanguage(config, spec)

    @staticmethod
    def _shape_here(config: LanguageConfig) -> Any:
        """The config of the model in `policy.pretrained`; None if that is no folder of this machine."""
        folder = as_path(config.pretrained) if config.pretrained else None
        is_here = folder is not None and (folder / CONFIG).is_file()
        return files.read_config(folder).get_text_config() if is_here else None


class CountedLanguage(LanguagePolicy):
    """A policy without a tokenizer, whose memory is counted by shapes."""

    def choose_tokenizer(self, shape: Any) -> Any:
        return None


class FirstLayers(CountedLanguage):
    """The first layers of a published model in float32, for a comparison with transformers."""

    def __init__(self, config: LanguageConfig, spec: EnvSpec) -> None:
        plain = dict.fromkeys(("lora_rank", "train_layers", "expert_bias_rate", "max_length"))
        plain |= {"dtype": "float32", "temperature": 1.0, "lora_config": {}, "value_head": False}
        super().__init__(config.model_copy(update=plain), spec)

    def shape_of(self, folder: Path) -> PreTrainedConfig:
        return files.first_layers(files.read_config(folder))

    def read_stored(self) -> dict[str, Blob]:
        weights = self.state_dict()
        return {name: blob for name, blob in super().read_stored().items() if name in weights}

    def difference_from_transformers(self) -> float:
        """The largest difference of log-probs, in nats, over two short texts with a common beginning."""
        words = self.model.config.get_text_config().vocab_size
        ids = (np.arange(1, 18) * 7919 % words).astype(np.int64)
        texts = [text[: self.max_length] for text in (ids[:12], np.concatenate([ids[:8], ids[12:]]))]
        options = {"dtype": torch.float32, "attn_implementation": "eager", "trust_remote_code": False}
        with files.BUILDING, files.quiet():
            kind, options = files.auto_class(self.model.config), options | {"config": self.model.config}
            peer = kind.from_pretrained(self.origin, local_files_only=True, **options).eval()
        PublishedPolicy.initialise(self, np.random.default_rng(0))
        lengths = np.array([len(text) for text in texts])
        mask = np.concatenate([np.arange(length) > 0 for length in lengths])
        inputs = {"actions": np.concatenate(texts), "mask": mask, "groups": np.zeros(2, np.int64), "lengths": lengths}
        with torch.no_grad():
            ours = self(inputs).logprobs[:, 0, 0].split(lengths.tolist())
            rows = [(logprobs[1:], torch.from_numpy(ids)) for logprobs, ids in zip(ours, texts)]
            likely = [peer(ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1) for _, ids in rows]
        gaps = [ours - theirs.gather(1, ids[1:, None])[:, 0] for (ours, ids), theirs in zip(rows, likely)]
        return float(torch.cat(gaps).abs().max())


LOGITS_BYTES = 2**27  # most bytes of log-probs of the whole vocabulary at a time
PARTS = 5  # buffers of that size that exist at a time in the backward pass


class InParts(torch.autograd.Function):
    """Scores a part of the places at a time, and again in the backward pass, so the logits of all places never exist at
    once. Gradients of weights are summed in float32 at least."""

    @staticmethod
    def forward(ctx: Any, score: Any, most: int, parts: list, hidden: Tensor, *weights: Tensor) -> Any:
        ctx.score, ctx.most, ctx.parts = score, most, parts
        ctx.kind = "cpu" if hidden.is_meta else hidden.device.type  # of autocast, which does not know meta
        ctx.autocast = torch.is_autocast_enabled(ctx.kind), torch.get_autocast_dtype(ctx.kind)
        room = [hidden.new_empty(PARTS * LOGITS_BYTES, dtype=torch.uint8)] if hidden.is_meta else []  # to be counted
        ctx.save_for_backward(hidden, *weights, *room)
        ctx.set_materialize_grads(False)
        scores = [score(hidden[first : first + most], *which) for first, *which in parts]
        return tuple(torch.cat(rows) for rows in zip(*scores, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        hidden, *weights = ctx.saved_tensors
        ends = np.cumsum([len(takes) for _, takes, _ in ctx.parts])
        wanted = [number for number, grad in enumerate(grads) if grad is not None]
        sums = [torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) for w in weights]
        backwards = torch.empty_like(hidden)
        enabled, dtype = ctx.autocast
        for (first, *which), end in zip(ctx.parts, ends, strict=True):
            block = hidden[first : first + ctx.most].detach().requires_grad_()
            with torch.enable_grad(), torch.autocast(ctx.kind, dtype, enabled=enabled):
                scores = ctx.score(block, *which)
            of = [grads[number][end - len(which[0]) : end] for number in wanted]
            block_grad, *weight_grads = torch.autograd.grad(
                [scores[number] for number in wanted], [block, *weights], of
            )
            backwards[first : first + ctx.most] = block_grad
            for total, grad in zip(sums, weight_grads, strict=True):
                total += grad
        return None, None, None, backwards, *(s.to(w.dtype) for s, w in zip(sums, weights, strict=True))
