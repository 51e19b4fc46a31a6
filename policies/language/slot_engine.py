"""Our own engine: continuous batching over the policy's model, whose weights it shares.

Running conversations are the first rows of the KV cache, without gaps. The cache has all tokens of a conversation
except the last; a step feeds the last tokens and generates the next ones. A conversation that ends frees its row at
once: the last row moves into its place. If another turn may follow, its keys and values move to an idle row, and the
next turn computes only the new tokens.

A token depends on its conversation, its episode and its index there, never on other conversations or earlier content of
the row: its noise is keyed by these, and the model reads nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from embodied.core import rng
from embodied.core.conversations import FIRST_PLACE
from embodied.core.types import SamplingRule
from embodied.policies.language.attention import DENSE, implementation, is_special, token_bytes, use_kernel, window_of
from embodied.policies.language.config import LanguageConfig
from embodied.policies.language.engine import (
    Answer,
    Engine,
    Request,
    cache_bytes,
    choose,
    empty_answer,
    likeliest_tokens,
)
from embodied.policies.language.sight import decoder_of

if TYPE_CHECKING:
    from embodied.policies.language.policy import LanguagePolicy

PREFILL_TOKENS = 8192  # tokens per prefill pass, padding included
NOISE_STEPS = 32  # steps for which the noise of all rows is drawn in one call
SHORTEST = 64  # initial length of the cache's rows; it doubles when needed


class KeyValues:
    """Keys and values [rows, heads, length, dim] of every layer. The model knows it as `past_key_values`."""

    def __init__(self, rows: int, limit: int) -> None:
        self.rows, self.limit = rows, limit
        self.length = 0
        self.layers: list[tuple[Tensor, Tensor]] = []
        # The rows and places that the model writes to: one place per row, several [rows, new], or the first ones.
        self.at: tuple[Tensor, Tensor | slice] = ()
        self.seen = 0  # tokens of every row that attention reads
        self.bias: Tensor | None = None  # [rows, 1, 1, seen], added to attention scores: 0 for a row's tokens

    def reserve(self, length: int) -> None:
        """Make every row at least this long."""
        if length <= self.length:
            return
        old, self.length = self.length, min(self.limit, max(length, 2 * self.length, SHORTEST))
        self.layers = [tuple(self._longer(tensor, old) for tensor in layer) for layer in self.layers]

    def _longer(self, tensor: Tensor, old: int) -> Tensor:
        rows, heads, _, dim = tensor.shape
        # Zeros: masked values are multiplied by 0, and uninitialised memory may hold NaN.
        longer = torch.zeros((rows, heads, self.length, dim), dtype=tensor.dtype, device=tensor.device)
        longer[:, :, :old] = tensor
        return longer

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values [rows, heads, new, dim]; return those to attend to. Called by the model."""
        if layer_idx == len(self.layers):
            empty = (tensor.new_empty(self.rows, tensor.shape[1], 0, tensor.shape[3]) for tensor in (keys, values))
            self.layers.append(tuple(self._longer(tensor, 0) for tensor in empty))
        kept, (rows, places) = self.layers[layer_idx], self.at
        if isinstance(places, slice):
            for cache, new in zip(kept, (keys, values)):
                cache[rows, :, places] = new
            return keys, values
        if places.ndim == 2:
            for cache, new in zip(kept, (keys, values)):
                cache[rows[:, None], :, places] = new.transpose(1, 2)
            return kept[0][rows, :, : self.seen], kept[1][rows, :, : self.seen]
        for cache, new in zip(kept, (keys, values)):
            cache[rows, :, places] = new[:, :, 0]
        return kept[0][: len(rows), :, : self.seen], kept[1][: len(rows), :, : self.seen]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of earlier tokens, for transformers."""
        return max(self.seen - 1, 0)

    def copy(self, sources: Any, targets: Any, length: int) -> None:
        """Copy the first `length` tokens of `sources` to `targets`, all at once: a source may be a target, too."""
        for layer in self.layers:
            for tensor in layer:
                tensor[targets, :, :length] = tensor[sources, :, :length]

    def clear(self, row: int) -> None:
        for layer in self.layers:
            for tensor in layer:
                tensor[row] = 0


class SlotEngine(Engine):
    """Our own loop over the policy's weights, on cores and GPUs."""

    def __init__(self, config: LanguageConfig, policy: LanguagePolicy) -> None:
        self.model, self.sight, self.device = policy.model, policy.sight, policy.model.device
        self.shape = self.model.config.get_text_config()
        row_bytes = token_bytes(self.model) * policy.max_length
        fit = cache_bytes(config, self.model, policy.max_length) // row_bytes
        super().__init__(policy, min(fit, config.max_running))
        self.cache = KeyValues(self.slots, self.max_length)
        self.rows: list[Request] = []  # running requests, by row
        # Free row -> tokens of a conversation whose keys and values stay there until its next turn, oldest first.
        self.between_turns: dict[int, np.ndarray] = {}
        self.lengths = np.zeros(self.slots, np.int64)  # tokens in the cache
        self.pending = np.zeros(self.slots, np.int64)  # the token after the cached tokens
        # Token number minus position, here and for later tokens: pictures take fewer positions than tokens.
        self.behind = np.zeros(self.slots, np.int64)
        self.counts = np.zeros(self.slots, np.int64)  # tokens written
        self.limits = np.zeros(self.slots, np.int64)  # the most tokens to write
        self.noise = np.zeros((self.slots, NOISE_STEPS))
        self.phase = 0  # the noise column of the next token
        self.written = np.zeros((self.slots, 0), np.int32)
        exact = next(self.model.parameters()).dtype == torch.float64
        self.logprobs = np.zeros((self.slots, 0), np.float64 if exact else np.float32)
        self.likeliest: list[Any] = [()] * self.slots  # by row, for the written tokens
        self.proofs: list[Any] = [None] * self.slots  # by row, the ProofWriter of an answer with a proof
        self.fast: Step | None = None
        self.totals = dict.fromkeys(("prefilled", "copied", "kept"), 0)  # numbers of tokens whose keys and values were

    @property
    def decoder(self) -> Any:
        """The part of the model that reads tokens."""
        return decoder_of(self.model)

    def num_open(self) -> int:
        return len(self.rows)

    def begin(self, version: int, seed: int, stream: str, rule: SamplingRule) -> None:
        super().begin(version, seed, stream, rule)
        self.between_turns = {}  # of older weights
        self.model.eval()
        self.device = self.model.device
        use_kernel(self.decoder, implementation(DENSE, self.shape))  # learning may have set another kernel
        with torch.inference_mode(False), torch.no_grad():
            self.fast = fast_step(self.model, self.max_length)

    def write(self) -> list[Answer]:
        # Inference mode is not used: caches made in it could not be written outside.
        with torch.inference_mode(False), torch.no_grad():
            return self.keep(*self.next_tokens())

    def so_far(self) -> list[Answer]:
        """The partial answers of the running conversations."""
        return [self.answer(row, truncated=True) for row in range(len(self.rows))]

    def cancel(self, key: Any) -> Answer | None:
        """Cancel a conversation, and return its answer so far; None if no conversation has this key."""
        for row, request in enumerate(self.rows):
            if request.key == key:
                answer = self.answer(row, truncated=True)
                with torch.inference_mode(False), torch.no_grad():
                    self.take_out([row])
                return answer
        given_up = next((request for request in self.added if request.key == key), None)
        self.added = [request for request in self.added if request is not given_up]
        return empty_answer(given_up) if given_up else None

    def give_up(self) -> list[Answer]:
        answers, self.rows = self.so_far(), []
        return answers

    def cache_tensors(self) -> list[Tensor]:
        return [tensor for layer in self.cache.layers for tensor in layer]

    # New conversations

    @torch.inference_mode(False)
    @torch.no_grad()
    def open(self, requests: list[Request]) -> None:
        """Give each conversation a row with its keys and values."""
        first, row_of_prefix = len(self.rows), {prefix(r): row for row, r in reversed([*enumerate(self.rows)])}
        had = self.move_in(requests)
        fresh, copies = [], []  # rows that compute their prefix, or copy it from another row
        for row in range(first, len(self.rows)):
            request = self.rows[row]
            self.lengths[row], self.pending[row] = len(request.tokens) - 1, request.tokens[-1]
            if self.sight:
                self.behind[row] = self.lengths[row] - self.positions(request)[-1].max()
            self.counts[row], self.limits[row] = 0, request.max_tokens
            self.likeliest[row], self.proofs[row] = (), None
            if request.sampling.proves:
                from embodied.policies.language.trust import ProofWriter

                self.proofs[row] = ProofWriter()
            if row in had:
                continue
            if (words := prefix(request)) in row_of_prefix:
                copies.append((row_of_prefix[words], row))
            else:
                row_of_prefix[words] = row
                fresh.append(row)
        more = int(self.limits[: len(self.rows)].max(initial=0)) - self.written.shape[1]
        if more > 0:  # the longest answer does not fit into the buffers
            self.written, self.logprobs = (np.pad(x, ((0, 0), (0, more))) for x in (self.written, self.logprobs))
        self.draw_noise(np.arange(first, len(self.rows)))
        self.prefill(dict.fromkeys(fresh, 0))
        if copies:
            sources, targets = np.array(copies).T
            self.cache.copy(self.to_device(sources), self.to_device(targets), int(self.lengths[targets].max()))
            self.totals["copied"] += int(self.lengths[targets].sum())
        self.prefill(had)

    def prefill(self, had: dict[int, int]) -> None:
        """Compute the keys and values of these rows' prefixes after the first tokens that they have, several rows per
        pass."""
        missing = {row: int(self.lengths[row]) - count for row, count in had.items() if self.lengths[row] > count}
        rows = sorted(missing, key=missing.get)
        while rows:
            count = max(PREFILL_TOKENS // missing[rows[-1]], 1)
            batch, rows = rows[:count], rows[count:]
            before, width = np.array([had[row] for row in batch]), max(missing[row] for row in batch)
            seen = min(int(before.max()) + width, self.max_length)
            self.cache.reserve(seen)
            places = self.to_device(before)[:, None] + torch.arange(width, device=self.device)
            # Tokens after a prefix in its row are masked, and will be overwritten.
            at = places.clamp(max=self.cache.length - 1) if before.any() else slice(width)
            self.cache.at, self.cache.seen = (self.to_device(np.array(batch)), at), seen
            self.read(batch, before, width, self.masks(places, seen))
            self.totals["prefilled"] += sum(missing[row] for row in batch)

    def masks(self, places: Tensor, seen: int) -> dict[str, Tensor]:
        """The masks, as arguments of transformers' model, for new tokens that are the `places`-th [N, new] of their
        conversations: of the first `seen` tokens in their rows they see the earlier ones."""
        here, now, window = torch.arange(seen, device=self.device), places[:, None, :, None], window_of(self.shape)
        earlier = here <= now
        masks = {"attention_mask": earlier}
        return masks if window is None else masks | {"window_mask": earlier & (here > now - window)}

    def read(self, rows: list[int], before: np.ndarray, width: int, masks: dict[str, Tensor]) -> None:
        """Compute the keys and values of these rows' prefixes after their first `before` tokens."""
        ids, shown, names = np.zeros((len(rows), width), np.int64), [], []
        places = before[:, None] + np.arange(width)
        if self.sight:
            places = np.repeat(places[:, :, None], 3, 2) if self.sight.two_axes else places
        for number, (row, start) in enumerate(zip(rows, before)):
            request, new = self.rows[row], slice(start, self.lengths[row])
            tokens = np.asarray(request.tokens, np.int64)
            ids[number, : new.stop - start] = tokens[new]
            if self.sight and request.pictures:
                first, last = (int((tokens[:end] == FIRST_PLACE).sum()) for end in (start, new.stop))
                shown += request.pictures[first:last]
                places[number, : new.stop - start] = self.positions(request)[new]
                places[number, new.stop - start :] -= self.behind[row]
        given = {"input_ids": self.to_device(ids)}
        if self.sight:
            if shown:
                ids, names = self.sight.number_places(ids, shown)
            given = {"inputs_embeds": self.sight.embed(self.model, self.to_device(ids), names)}
        places = self.to_device(places.clip(max=self.max_length - 1))
        self.decoder(
            **given,
            **masks,
            position_ids=places if places.ndim == 2 else places.movedim(2, 0),
            past_key_values=self.cache,
            use_cache=True,
        )

    def positions(self, request: Request) -> np.ndarray:
        """Positions of all tokens of a conversation."""
        return self.sight.positions(np.asarray(request.tokens), request.pictures)

    # Conversations with another turn

    def kept_of(self, request: Request) -> int | None:
        """The free row with the longest beginning of a conversation; None if there is none."""
        tokens, best = tokens_and_pictures(request)[:-1], None
        for row, kept in self.between_turns.items():
            longer = best is None or len(kept) > len(self.between_turns[best])
            if longer and len(kept) <= len(tokens) and np.array_equal(kept, tokens[: len(kept)]):
                best = row
        return best

    def move_in(self, requests: list[Request]) -> dict[int, int]:
        """Give each of these conversations a row with its kept keys and values; returns the number of kept tokens by
        row."""
        first, kept = len(self.rows), self.between_turns
        rows = range(first, first + len(requests))
        lies_in = {place: self.kept_of(request) for place, request in enumerate(requests)}
        at = {row: place for place, row in lies_in.items() if row in rows}  # these stay in their row
        others = iter([place for place in range(len(requests)) if place not in at.values()])
        at |= {row: next(others) for row in rows if row not in at}
        had = {}
        for row in rows:
            source = lies_in[at[row]]
            if source in kept:
                tokens = kept.pop(source)
                if source != row:
                    self.cache.copy(source, row, len(tokens))
                had[row] = len(tokens)
            kept.pop(row, None)
        self.rows += [requests[at[row]] for row in rows]
        self.totals["kept"] += sum(had.values())
        return had

    # Generating a token

    def next_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """The next token of every row, and its log-prob."""
        count = len(self.rows)
        if self.phase == NOISE_STEPS:
            self.phase = 0
            self.draw_noise(np.arange(count))
        seen = int(self.lengths[:count].max()) + 1
        self.cache.reserve(seen)
        lengths = self.to_device(self.lengths[:count])
        self.cache.at, self.cache.seen = (torch.arange(count, device=self.device), lengths), seen
        masks = self.masks(lengths[:, None], seen)
        pending, positions = self.to_device(self.pending[:count]), self.to_device((self.lengths - self.behind)[:count])
        if self.fast:
            self.cache.bias = torch.where(masks["attention_mask"], 0.0, -torch.inf).to(self.model.dtype)
            logits, states = self.fast(pending, positions, self.cache)
        else:
            with last_states(self.model) as hidden:
                logits = self.model(
                    input_ids=pending[:, None],
                    **masks,
                    position_ids=positions[:, None],
                    past_key_values=self.cache,
                    use_cache=True,
                ).logits[:, 0]
            states = hidden[0][:, 0]
        tokens, logprobs = np.zeros(count, np.int64), np.zeros(count)
        by_rule: dict[SamplingRule, list[int]] = {}
        for row, request in enumerate(self.rows):
            by_rule.setdefault(request.sampling.rule, []).append(row)
        for rule, rows in by_rule.items():
            of_rows = logits if len(rows) == count else logits[self.to_device(np.array(rows))]
            chosen = choose(of_rows, rule, self.to_device(self.noise[rows, self.phase]))
            tokens[rows], logprobs[rows] = (array.cpu().numpy() for array in chosen)
        for row in (row for row, request in enumerate(self.rows) if request.sampling.likeliest):
            self.likeliest[row] += (likeliest_tokens(logits[row], self.rows[row].sampling.likeliest),)
        for row in (row for row, request in enumerate(self.rows) if request.sampling.proves):
            self.proofs[row].add(states[row])
        self.phase += 1
        return tokens, logprobs

    def keep(self, tokens: np.ndarray, logprobs: np.ndarray) -> list[Answer]:
        """Append the tokens, and remove rows that end."""
        count = len(self.rows)
        here = np.arange(count)
        bad = ~np.isfinite(logprobs)
        self.written[here, self.counts[:count]] = tokens
        self.logprobs[here, self.counts[:count]] = logprobs
        self.counts[:count] += ~bad
        self.lengths[:count] += 1
        self.pending[:count] = tokens
        stopped = np.array([token in r.sampling.stops for token, r in zip(tokens.tolist(), self.rows)])
        ended = np.flatnonzero(stopped | bad | (self.counts[:count] >= self.limits[:count]))
        answers = []
        for row in map(int, ended):
            why = "a log-prob is not finite" if bad[row] else ""
            answers.append(self.answer(row, truncated=not (stopped[row] or why), dropped=why))
        for row in np.flatnonzero(bad).tolist():
            self.cache.clear(row)  # non-finite values would count even if masked
        if answers:
            self.take_out(ended.tolist(), np.flatnonzero(stopped & ~bad).tolist())
        return answers

    def answer(self, row: int, truncated: bool, dropped: str = "") -> Answer:
        count = self.counts[row]
        written, logprobs = self.written[row, :count].copy(), self.logprobs[row, :count].copy()
        proof = self.proofs[row].proof() if self.proofs[row] else ()
        return Answer(self.rows[row].key, written, logprobs, truncated, dropped, self.likeliest[row][:count], proof)

    def take_out(self, ended: list[int], stopped: Sequence[int] = ()) -> None:
        """Free these rows; the last rows move into their places. The keys and values of conversations that `stopped`
        and have another turn stay in a free row, while there is one."""
        left = len(self.rows) - len(ended)
        sources = sorted({*range(left, len(self.rows))} - {*ended})
        targets = [row for row in ended if row < left]
        moves = dict(zip(sources, targets, strict=True))
        kept = [row for row in stopped if self.rows[row].keep]
        free = [row for row in range(left, self.slots) if row not in self.between_turns and row not in kept]
        for row in kept:
            place = row if row >= left else free.pop() if free else None
            if place is not None:
                written = self.written[row, : self.counts[row] - 1]
                self.between_turns[place] = np.concatenate([tokens_and_pictures(self.rows[row]), written])
                moves |= {} if place == row else {row: place}
        if moves:
            at, to = (np.array([*rows]) for rows in (moves.keys(), moves.values()))
            self.cache.copy(self.to_device(at), self.to_device(to), int(self.lengths[at].max()))
        numbers = self.lengths, self.pending, self.behind, self.counts, self.limits, self.noise
        for array in (*numbers, self.written, self.logprobs):
            array[targets] = array[sources]
        for of_row in (self.rows, self.likeliest, self.proofs):
            for source, target in zip(sources, targets):
                of_row[target] = of_row[source]
        del self.rows[left:]

    def draw_noise(self, rows: np.ndarray) -> None:
        """Draw these rows' noise for the steps until the next draw for all rows."""
        steps = np.arange(NOISE_STEPS - self.phase)
        if not len(rows) or not len(steps):
            return
        by_source: dict[tuple[int, str], list[int]] = {}
        for row in rows:
            how = self.rows[row].sampling
            by_source.setdefault((how.seed, how.stream), []).append(row)
        for (seed, stream), alike in by_source.items():
            episodes = np.array([self.rows[row].episode for row in alike], np.uint64)
            places = (self.lengths[alike, None] + 1 + steps).ravel()
            numbers = rng.uniform(seed, stream, episodes.repeat(len(steps)), places, 1)
            self.noise[alike, self.phase :] = numbers.reshape(len(alike), len(steps))

    def to_device(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers.copy()).to(self.device)


def prefix(request: Request) -> bytes:
    """A key for the tokens that must be cached before the first step."""
    return tokens_and_pictures(request)[:-1].tobytes()


def tokens_and_pictures(request: Request) -> np.ndarray:
    """The tokens of a conversation, int64 [n], with digests of picture names where pictures begin, so that
    conversations with different pictures differ."""
    tokens = np.array(request.tokens, np.int64)
    if request.pictures:
        digests = [hashlib.blake2b(name.encode(), digest_size=7).digest() for name in request.pictures]
        tokens[tokens == FIRST_PLACE] = [-(2**31) - int.from_bytes(digest) for digest in digests]
    return tokens


@contextlib.contextmanager
def last_states(model: Any) -> Iterator[list[Tensor]]:
    """Yields a list that receives the last hidden states [N, new, D] of the model's next pass, the input of its
    head."""
    states: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda head, given: states.append(given[0]))
    try:
        yield states
    finally:
        hook.remove()


# A decoding step without the modules' overhead, which takes most of the time of a small model's step: for Llama, Qwen3,
# GPT-2 and Qwen2.5-VL in float32 or less precise. It computes the same as transformers' modules, through which other
# models run. Linear layers with adapters are called unchanged.

Step = Callable[[Tensor, Tensor, KeyValues], tuple[Tensor, Tensor]]


def fast_step(model: Any, length: int) -> Step | None:
    """Returns a function of the last tokens [N], their positions [N] and the cache, which returns logits [N,
    vocabulary] and the last hidden states [N, D]; None for other architectures. It is valid while the model's
    parameters are the same objects."""
    shape = model.config.get_text_config()
    if (
        is_special(shape)
        or model.dtype == torch.float64
        or torch.is_autocast_enabled(next(model.parameters()).device.type)
    ):
        return None
    if shape.model_type == "gpt2" and not shape.add_cross_attention:
        return of_gpt2(model)
    if shape.model_type not in ("llama", "qwen3", "qwen2_5_vl_text") or shape.hidden_act != "silu":
        return None
    turns_by_place = decoder_of(model).rotary_emb.rope_type in ("default", "linear", "llama3")  # not by length as well
    return of_llama(model, length) if turns_by_place else None


def as_function(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """A linear layer as a function."""
    if type(layer) is nn.Linear:
        weight, bias = layer.weight, layer.bias
        return lambda x: F.linear(x, weight, bias)
    if type(layer) is Conv1D:
        weight, bias = layer.weight, layer.bias
        return lambda x: torch.addmm(bias, x, weight)
    return layer


def attend(query: Tensor, keys: Tensor, values: Tensor, layer: int, cache: KeyValues, scale: float) -> Tensor:
    """Store a token's keys and values [N, KV, D], and attend with its queries [N, H, D]; returns [N, H * D].

    Queries that share keys are passed like tokens of a sequence: they attend to the same keys."""
    rows, _, dim = query.shape
    keys, values = cache.update(keys[:, :, None], values[:, :, None], layer)
    groups = query.view(rows, keys.shape[1], -1, dim)
    return F.scaled_dot_product_attention(groups, keys, values, attn_mask=cache.bias, scale=scale).view(rows, -1)


def of_llama(model: Any, length: int) -> Step:
    body = decoder_of(model)
    places = torch.arange(length, device=body.embed_tokens.weight.device)[None]
    cosines, sines = (table[0, :, None] for table in body.rotary_emb(body.embed_tokens.weight[:1], places))
    half = sines.shape[-1] // 2
    sines = torch.cat((-sines[..., :half], sines[..., half:]), -1)
    embeddings, head = body.embed_tokens.weight, as_function(model.lm_head)

    def embed(tokens: Tensor, places: Tensor) -> tuple[Tensor, Any]:
        return F.embedding(tokens, embeddings), (cosines[places], sines[places])

    return stack(embed, [llama_layer(layer) for layer in body.layers], norm(body.norm), head)


def stack(embed: Callable[..., Any], layers: list[Any], last: Callable[[Tensor], Tensor], head: Any) -> Step:
    """A step through these layers. `embed` also returns what layers need of the positions."""

    def step(tokens: Tensor, places: Tensor, cache: KeyValues) -> tuple[Tensor, Tensor]:
        hidden, turn = embed(tokens, places)
        for index, layer in enumerate(layers):
            hidden = layer(hidden, turn, index, cache)
        hidden = last(hidden)
        return head(hidden), hidden

    return step


def norm(layer: Any) -> Callable[[Tensor], Tensor]:
    """A root mean square norm as a function."""
    weight, eps = layer.weight, layer.variance_epsilon
    size = weight.shape
    return lambda x: F.rms_norm(x, size, weight, eps)


def llama_layer(layer: Any) -> Callable[..., Tensor]:
    attention, mlp = layer.self_attn, layer.mlp
    before, behind = norm(layer.input_layernorm), norm(layer.post_attention_layernorm)
    q, k, v, o = (
        as_function(projection)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    )
    gate, up, down = as_function(mlp.gate_proj), as_function(mlp.up_proj), as_function(mlp.down_proj)
    dim, scale = attention.head_dim, attention.scaling
    norms = (norm(attention.q_norm), norm(attention.k_norm)) if hasattr(attention, "q_norm") else None

    def run(hidden: Tensor, turn: tuple[Tensor, Tensor], index: int, cache: KeyValues) -> Tensor:
        x = before(hidden)
        query, key, value = (projection(x).view(len(x), -1, dim) for projection in (q, k, v))
        if norms:
            query, key = norms[0](query), norms[1](key)
        heads = query.shape[1]
        both = torch.cat((query, key), 1)
        low, high = both.chunk(2, -1)
        both = torch.addcmul(both * turn[0], torch.cat((high, low), -1), turn[1])
        hidden = hidden + o(attend(both[:, :heads], both[:, heads:], value, index, cache, scale))
        x = behind(hidden)
        return hidden + down(F.silu(gate(x)) * up(x))

    return run


def of_gpt2(model: Any) -> Step:
    body = model.transformer
    words, positions, head = body.wte.weight, body.wpe.weight, as_function(model.lm_head)

    def embed(tokens: Tensor, places: Tensor) -> tuple[Tensor, Any]:
        return F.embedding(tokens, words) + F.embedding(places, positions), None

    return stack(embed, [gpt2_layer(block) for block in body.h], body.ln_f, head)


def gpt2_layer(block: Any) -> Callable[..., Tensor]:
    attention, mlp = block.attn, block.mlp
    before, behind, act = block.ln_1, block.ln_2, mlp.act
    into, out, wide, narrow = (
        as_function(layer) for layer in (attention.c_attn, attention.c_proj, mlp.c_fc, mlp.c_proj)
    )
    dim, scale = attention.head_dim, attention.scaling

    def run(hidden: Tensor, _: Any, index: int, cache: KeyValues) -> Tensor:
        query, key, value = (tensor.view(len(hidden), -1, dim) for tensor in into(before(hidden)).chunk(3, -1))
        hidden = hidden + out(attend(query, key, value, index, cache, scale))
        return hidden + narrow(act(wide(behind(hidden))))

    return run
