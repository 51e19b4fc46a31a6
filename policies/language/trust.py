"""Checks that a server's answers come from the learner's weights.

There are two checks. The gap of log-probs (`GapRecord`) needs only the log-probs that servers send anyway. A proof
(`policy.verify`) is similar to TOPLOC (arXiv 2501.16007): for every block of generated tokens the server sends the
largest numbers of the network's last hidden states. The policy worker recomputes the states by one prefill, and
compares the numbers. Since the noise of a token is known, it also checks whether the server drew the right tokens.

    server   writer.add(state) for every token; writer.proof() is sent with the answer
    worker   checked = check_proof(policy, request.tokens, answer, rule, noise)
             checked.mismatch or trial.add(checked)   # "" if the server's answers are this policy's so far

Differences below rounding's size are found over several answers (`trials.py`). Servers without proofs, such as vLLM's,
are checked by their log-probs (`check_logprobs`): over several answers only, and by less.

Other kernels round differently. How far rounding moves an answer's numbers depends on the answer, so a suspicious
answer is computed again with noise of rounding's size in every layer: `rounding_limits`. No server has a part in this,
so a single server that lies from the start gains nothing.

Without the weights nobody can compute the numbers. A server with the weights could generate with other weights and
compute the proof afterwards; but then its tokens differ from the tokens drawn by the noise.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf, sqrt
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.arrays import tensor_of
from embodied.core.types import SamplingRule
from embodied.policies.language import attention
from embodied.policies.language.engine import choose, draw_errors, probabilities
from embodied.policies.language.packing import lay_out
from embodied.policies.language.trials import CheckedAnswer

if TYPE_CHECKING:
    from embodied.policies.language.http_messages import ParsedAnswer
    from embodied.policies.language.policy import LanguagePolicy

JUDGED_TOKENS = 32  # the fewest tokens for a server's mean gap
RATIO = 10.0  # a mean gap is too large if it is above SMALL and RATIO times that of the other servers
SMALL = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.05}  # by dtype: servers may have the learner's kernels or not
BLOCK, KEPT, MEANS = 32, 128, 128  # tokens of a proof's block, and largest numbers and means sent per block
TOGETHER = 64  # tokens whose log-probs make a shift
PLACE, NUMBER = np.dtype("<u4"), np.dtype("<f4")


class GapRecord:
    """Differences between the log-probs of a server's last answers and the learner's."""

    def __init__(self) -> None:
        self.answers: deque[np.ndarray] = deque()  # differences by token, of at least JUDGED_TOKENS tokens if available
        self.tokens = 0

    def add(self, differences: np.ndarray) -> None:
        if not len(differences):
            return
        self.answers.append(np.abs(differences))
        self.tokens += len(differences)
        while self.tokens - len(self.answers[0]) >= JUDGED_TOKENS:
            self.tokens -= len(self.answers.popleft())

    @property
    def mean(self) -> float:
        return float(np.concatenate(self.answers).mean()) if self.tokens else 0.0

    @property
    def largest(self) -> float:
        return max((float(errors.max()) for errors in self.answers), default=0.0)

    def evidence(self, limit: float) -> str:
        """Why a server with this mean gap above the limit is dropped."""
        return (
            f"the log-probs of its answers differ from those of the learner's weights by {self.mean:.2g} a token, at "
            f"most {self.largest:.2g}, in its last {len(self.answers)} answers of {self.tokens} tokens; the limit is "
            f"{limit:.2g} (policy.gap_limit)"
        )

    def limit(self, most: float, others: Sequence[float], small: float) -> float:
        """The largest acceptable mean gap, given the mean gaps of other servers; beside them at least `small`. Means of
        fewer tokens vary more: for 8 tokens the limit is twice that for 32."""
        widened = most * sqrt(max(1.0, JUDGED_TOKENS / max(self.tokens, 1)))
        relative = max(RATIO * median(others), small) if others and self.tokens >= JUDGED_TOKENS else inf
        return min(widened, relative)


@dataclass(frozen=True)
class ProofBlock:
    """The K largest numbers of the hidden states [T, D] of T tokens, their places, and means over the tokens."""

    places: np.ndarray  # uint32 [K], rising; token * D + dimension
    numbers: np.ndarray  # float32 [K]
    means: np.ndarray  # float32 [M], of `dimensions`

    @classmethod
    def of(cls, states: Tensor) -> ProofBlock:
        states = states.detach().float()
        flat, means = states.flatten(), states.mean(0)[dimensions(states)]
        places = flat.abs().topk(min(KEPT, len(flat))).indices.sort().values
        numbers = (array.cpu().numpy().astype(NUMBER) for array in (flat[places], means))
        return cls(places.cpu().numpy().astype(PLACE), *numbers)

    def to_text(self) -> str:
        """The three lists in base64, with commas."""
        return ",".join(base64.b64encode(array).decode() for array in (self.places, self.numbers, self.means))

    @classmethod
    def from_text(cls, text: Any) -> ProofBlock:
        """Raises ValueError if the text is invalid."""
        try:
            places, numbers, means = (base64.b64decode(word, validate=True) for word in text.split(","))
            return cls(np.frombuffer(places, PLACE), np.frombuffer(numbers, NUMBER), np.frombuffer(means, NUMBER))
        except (AttributeError, TypeError, ValueError) as err:  # also of base64
            raise ValueError(f"a block of the proof cannot be read: {err}") from None

    def error(self, states: Tensor) -> float:
        """The norm of the difference between the block's numbers and these states, as a share of the numbers' norm;
        omitted larger numbers count, too. 1 or more if the block does not match the states at all, or has no
        finite means."""
        flat = states.detach().double().flatten().cpu()
        count, places = min(KEPT, len(flat)), self.places.astype(np.int64)
        if not len(self.numbers) == len(places) == count or places[-1] >= len(flat) or (np.diff(places) <= 0).any():
            return 1.0
        if len(self.means) != len(dimensions(states)) or not np.isfinite(self.means).all():
            return 1.0  # without them `shift` would say nothing
        numbers = flat[torch.from_numpy(places)]
        far = (torch.from_numpy(self.numbers.astype(np.float64)) - numbers).norm() / numbers.norm().clamp(min=1e-30)
        left_out = 1 - numbers.abs().sum() / flat.abs().topk(count).values.sum()
        return float(torch.nan_to_num(far, nan=1.0).clamp(max=1) + left_out)

    def shift(self, states: Tensor) -> np.ndarray:
        """How far the block's means [M] are from the means of these states, relative to the sizes of the states."""
        states = states.detach().float()[:, dimensions(states)]
        sizes = states.square().mean(0).sqrt()
        means, sizes = (array.cpu().numpy() for array in (states.mean(0), sizes + 0.1 * sizes.mean()))
        return (self.means - means) / np.maximum(sizes, 1e-30)


def dimensions(states: Tensor) -> Tensor:
    """The dimensions of states [T, D] whose means are in a proof, evenly spread."""
    dim = states.shape[-1]
    return torch.linspace(0, dim - 1, min(dim, MEANS), device=states.device).round().long()


class ProofWriter:
    """Builds the proof of an answer, a token's state [D] at a time."""

    def __init__(self) -> None:
        self.blocks: list[ProofBlock] = []
        self.states: list[Tensor] = []

    def add(self, state: Tensor) -> None:
        self.states.append(state)
        if len(self.states) == BLOCK:
            self.blocks.append(ProofBlock.of(torch.stack(self.states)))
            self.states = []

    def proof(self) -> tuple[ProofBlock, ...]:
        return (*self.blocks, *([ProofBlock.of(torch.stack(self.states))] if self.states else []))


@dataclass(frozen=True)
class Limits:
    """Errors of honest answers are below these."""

    proof: float  # the largest error of a block
    drawn: float  # the mean error of an answer's draws
    # Or the change of a suspicious answer by noise, times this: sums in float32 round more than their end.
    spread: float
    pooled: float  # the same for most answers of a server
    directed: bool  # True: rounding has no common direction. In float32 it has one, and other checks find more


EXACT, NOISES = Limits(1e-4, 1e-5, 5.0, 5.0, False), 8
LIMITS = {
    torch.float64: EXACT,
    torch.float32: EXACT,
    torch.bfloat16: Limits(0.03, 0.01, 2.0, 1.0, True),
}  # docs/results.md
LIKELIER = 0.05  # tolerated excess of likely tokens, among those a server draws by a noise of its own


@torch.no_grad()
def check_proof(
    policy: LanguagePolicy,
    said: Sequence[int],
    answer: ParsedAnswer,
    rule: SamplingRule,
    uniform: np.ndarray,
    pooled: bool = True,
) -> CheckedAnswer:
    """Compare an answer to the tokens `said`, which has a proof, with the learner's numbers; `uniform` [A] is the noise
    of its tokens. An answer that is not `pooled` with others needs no bets."""
    try:
        proof = [ProofBlock.from_text(text) for text in answer.proof]
    except ValueError as err:
        return CheckedAnswer(str(err))
    states, limits = states_behind(policy, said, answer.tokens), LIMITS[policy.dtype]
    far, drawn = errors = answer_errors(policy, states, answer.tokens, proof, rule, uniform)
    if far > limits.proof or drawn > limits.drawn:
        limits = rounding_limits(policy, states, said, answer.tokens, rule)
    count = len(answer.tokens)
    if far > limits.proof:
        what = f"the proof of an answer of {count} tokens is of other hidden states than those of the learner's weights"
        return CheckedAnswer(f"{what}: {far:.2g} apart, and rounding is below {limits.proof:.2g}")
    if drawn > limits.drawn:
        what = f"the {count} tokens of an answer were not drawn as they were asked for: the noise misses them by"
        return CheckedAnswer(f"{what} {drawn:.2g}, and rounding is below {limits.drawn:.2g}")
    if not pooled:
        return CheckedAnswer()
    with rounding_noise(policy, noise_seed(uniform)):
        other = states_behind(policy, said, answer.tokens).split(BLOCK)
    numbers = tensor_of(np.asarray(uniform), policy.device).split(BLOCK)
    redrawn = [choose(policy.head(rows).to(policy.exact), rule, noise)[0] for rows, noise in zip(other, numbers)]
    rounded = answer_errors(policy, states, torch.cat(redrawn).tolist(), [*map(ProofBlock.of, other)], rule, uniform)
    size, draws = (float(np.sign(error - limits.pooled * usual)) for error, usual in zip(errors, rounded))
    shifts = [block.shift(rows) for block, rows in zip(proof, states.split(BLOCK))] if limits.directed else []
    return CheckedAnswer("", shifts, size, np.array([draws]))


@torch.no_grad()
def answer_errors(
    policy: LanguagePolicy,
    states: Tensor,
    written: Sequence[int],
    proof: Sequence[ProofBlock],
    rule: SamplingRule,
    uniform: np.ndarray,
) -> tuple[float, float]:
    """Returns the largest error of a block and the mean error of the draws, by the learner's states [A, D] before the
    `written` tokens."""
    blocks = states.split(BLOCK)
    far = max(block.error(rows) for block, rows in zip(proof, blocks)) if len(proof) == len(blocks) else 1.0
    tokens, numbers = (tensor_of(np.asarray(array), policy.device) for array in (written, uniform))
    drawn = [
        draw_errors(policy.head(part).to(policy.exact), tokens[at : at + BLOCK], rule, numbers[at : at + BLOCK])
        for at, part in zip(range(0, len(written), BLOCK), blocks)
    ]
    return far, float(torch.cat(drawn).mean())


def noise_seed(uniform: np.ndarray) -> int:
    """A seed of an answer's own."""
    return int(uniform[0] * 2**31)


def check_logprobs(
    policy: LanguagePolicy, said: Sequence[int], answer: ParsedAnswer, rule: SamplingRule, uniform: np.ndarray
) -> CheckedAnswer:
    """Compare an answer's log-probs with the learner's; `uniform` [A] is noise that the server does not know. A block's
    shift is the change of its states that explains the differences of its log-probs with the least change per token."""
    tokens = tensor_of(np.asarray(answer.tokens), policy.device)
    states = states_behind(policy, said, answer.tokens)
    with rounding_noise(policy, noise_seed(uniform)):
        other = states_behind(policy, said, answer.tokens)
    limits = LIMITS[policy.dtype]
    shifts: list[np.ndarray] = []
    outcomes, gaps, usual = [], [], []
    for at in range(0, len(tokens), TOGETHER):
        some, hidden = tokens[at : at + TOGETHER], states[at : at + TOGETHER].requires_grad_()
        with torch.enable_grad():
            logits = policy.head(hidden).to(policy.exact)
            logprobs = token_logprobs(logits, some, rule)
            (slopes,) = torch.autograd.grad(logprobs.sum(), hidden)
        with torch.no_grad():
            rounded = token_logprobs(policy.head(other[at : at + TOGETHER]).to(policy.exact), some, rule)
            told = torch.tensor(answer.logprobs[at : at + TOGETHER], dtype=logprobs.dtype, device=policy.device)
            gap, steep = told - logprobs, slopes.float().norm(dim=-1) + 1e-9
            moved = gap / steep
            moved = moved.clamp(-(most := moved.abs().float().quantile(0.9)), most)
            if limits.directed:
                shifts.append(((moved / steep)[:, None] * slopes.float()).sum(0).cpu().numpy())
            gaps.append(gap.abs())
            usual.append((rounded - logprobs).abs())
            if rule.temperature:
                outcomes.append(likelier(logits, some, rule, tensor_of(uniform[at : at + TOGETHER], policy.device)))
    size = float(torch.cat(gaps).mean() - limits.pooled * torch.cat(usual).mean())
    return CheckedAnswer("", shifts, float(np.sign(size)), np.concatenate(outcomes or [np.zeros(0)]))


def token_logprobs(logits: Tensor, tokens: Tensor, rule: SamplingRule) -> Tensor:
    return (logits / rule.logprob_temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def likelier(logits: Tensor, tokens: Tensor, rule: SamplingRule, uniform: Tensor) -> np.ndarray:
    """Outcomes [N] of -1 to 1 of bets that tokens are likelier than they should be. Of tokens drawn by the rule, the
    probability of likelier tokens, plus a uniform part of the token's own, is uniform.

    Probabilities .2 .5 .3 and the number .6: token 2 has .5 + .6 * .3 = .68, so its outcome is 1 - 2 * .68 = -.36, less
    what is tolerated.
    """
    likely = probabilities(logits, rule)
    chosen = likely.gather(-1, tokens[:, None])
    place = (likely * (likely > chosen)).sum(-1) + uniform * (likely * (likely == chosen)).sum(-1)
    return (1 - 2 * place - LIKELIER).clamp(min=-1).cpu().numpy()


@torch.no_grad()
def rounding_limits(
    policy: LanguagePolicy, states: Tensor, said: Sequence[int], written: Sequence[int], rule: SamplingRule
) -> Limits:
    """The limits for an answer to the tokens `said` with these `states` [A, D]: at least those of `LIMITS`, and what
    noise of rounding's size changes in its states and in the probabilities of its tokens. Rounding decides few draws of
    an answer: no more than `spread` of its tokens may miss by as much as probabilities move."""
    blocks, limits = states.split(BLOCK), LIMITS[policy.dtype]
    for seed in range(NOISES):
        with rounding_noise(policy, seed):
            other = states_behind(policy, said, written).split(BLOCK)
        far = max(ProofBlock.of(there).error(here) for there, here in zip(other, blocks))
        moved = 0.0  # most probability that moves between a token's alternatives
        for pair in zip(other, blocks):
            there, here = (probabilities(policy.head(states), rule) for states in pair)
            moved = max(moved, float((there - here).abs().sum(-1).max()) / 2)
        proof, drawn = limits.spread * far, limits.spread * moved / len(written)
        limits = replace(limits, proof=max(limits.proof, proof), drawn=max(limits.drawn, drawn))
    return limits


@contextmanager
def rounding_noise(policy: LanguagePolicy, seed: int) -> Iterator[None]:
    """The outputs of all innermost modules change by about half of their numbers' last digit."""
    draw = torch.Generator(policy.device).manual_seed(seed)

    def add_noise(module: Any, inputs: Any, output: Any) -> Any:
        if not (isinstance(output, Tensor) and output.is_floating_point()):
            return output
        noise = torch.randn(output.shape, generator=draw, dtype=output.dtype, device=output.device)
        return output + output * noise * (torch.finfo(output.dtype).eps / 2)

    innermost = [module for module in policy.model.modules() if not any(module.children())]
    hooks = [module.register_forward_hook(add_noise) for module in innermost]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def states_behind(policy: LanguagePolicy, said: Sequence[int], written: Sequence[int]) -> Tensor:
    """The last hidden states [A, D] before each of the `written` tokens, by the learner's forward pass."""
    tokens = np.array([*said, *written], np.int64)
    mask = np.arange(len(tokens)) >= len(said)
    way = attention.attention_kernel(policy.device, policy.dtype)
    wide = attention.wide_row(way, policy.model.config.get_text_config().hidden_size)
    packed = lay_out(tokens, mask, np.array([len(tokens)]), np.zeros(1, np.int64), wide=wide)
    return policy.hidden(packed, way)[tensor_of(packed.takes, policy.device)]
