"""vLLM as the engine, in the policy worker's own process: fast on GPUs, with weights of its own.

Sampling is vLLM's, seeded by conversation and place; unlike with our own engine, an answer may depend on what runs
beside it. Log-probs are taken before the temperature is applied (vLLM's `raw_logprobs`), so that they are those the
learner computes; sampling that leaves tokens out (top_p, top_k, min_p) is never asked for.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import os
import tempfile
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.conversations import SamplingRule
from embodied.core.errors import ConfigError
from embodied.policies.language.config import LanguageConfig
from embodied.policies.language.engine import Answer, Engine, Request, cache_bytes, seed_of, unanswered
from embodied.policies.language.folder import as_published
from embodied.policies.language.vllm_worker import replace_weights
from embodied.policies.vla.lora import merged

if TYPE_CHECKING:
    from embodied.policies.language.policy import LanguagePolicy

SETTINGS = {  # of the environment; vLLM reads them while it is imported
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several workers share the cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


@dataclass
class Writing:
    """A conversation that vLLM continues."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def answer(self, truncated: bool, dropped: str = "") -> Answer:
        tokens, logprobs = np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32)
        return Answer(self.request.key, tokens, logprobs, truncated, dropped)


class VLLMEngine(Engine):
    """Continues conversations with vLLM."""

    def __init__(self, config: LanguageConfig, policy: LanguagePolicy) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError("policy.engine=vllm needs vLLM, which is not installed. Run: make vllm")
        if config.dtype == "float64":
            raise ConfigError("vLLM has no float64; try policy.dtype=float32 or policy.engine=transformers")
        self.config, self.policy, self.slots = config, policy, config.max_running
        self.stops, self.max_length = sorted(policy.tokenizer.stops), policy.max_length
        self.writing: dict[str, Writing] = {}
        self.ended: list[Answer] = []  # of conversations that have no room for an answer
        self.added = 0
        self.engine, self.sampling = start(config, policy)
        self.round: tuple[int, str, SamplingRule] = (0, "", SamplingRule())
        self.version: int | None = None  # of the weights; None: there are none yet

    @property
    def running(self) -> int:
        return len(self.writing) + len(self.ended)

    def begin(self, version: int, seed: int, stream: str, rule: SamplingRule) -> None:
        assert not self.running, "a round begins while answers of the one before are being written"
        assert version == self.version, f"vLLM has weights {self.version}, and is to write with {version}"
        self.round = (seed, f"act/{stream}", rule)

    def add(self, request: Request) -> None:
        self.check(request)
        if (most := self.longest_answer(request)) <= 0:
            self.ended.append(unanswered(request))
            return
        seed, stream, rule = self.round
        name, self.added = str(self.added), self.added + 1
        self.writing[name] = Writing(request)
        settings = self.sampling(
            max_tokens=most,
            temperature=rule.temperature,
            top_p=rule.top_p,
            top_k=rule.top_k,
            seed=seed_of(seed, stream, request),
            stop_token_ids=self.stops,
        )
        self.engine.add_request(name, {"prompt_token_ids": [int(token) for token in request.tokens]}, settings)

    def step(self) -> list[Answer]:
        answers, self.ended = self.ended, []
        if not self.writing:
            return answers
        for output in self.engine.step():
            if output.request_id not in self.writing:
                continue
            writing, (new,) = self.writing[output.request_id], output.outputs
            logprobs = [each[token].logprob for token, each in zip(new.token_ids, new.logprobs or ())]
            if bad := len(logprobs) < len(new.token_ids) or not all(
                x is not None and math.isfinite(x) for x in logprobs
            ):
                self.engine.abort_request([output.request_id])
                answers.append(self.writing.pop(output.request_id).answer(False, "a log-prob is not finite"))
            else:
                writing.tokens += new.token_ids
                writing.logprobs += logprobs
            if output.finished and not bad:
                answers.append(self.writing.pop(output.request_id).answer(new.finish_reason != "stop"))
        return answers

    def abort(self) -> list[Answer]:
        self.engine.abort_request([*self.writing])
        answers = [*self.ended, *(writing.answer(truncated=True) for writing in self.writing.values())]
        self.writing, self.ended = {}, []
        return answers

    def load(self, weights: dict[str, Tensor], version: int) -> None:
        assert not self.running, "new weights come while answers are being written"
        scale = self.config.lora_scale if self.config.lora_rank else None
        whole = weights.items() if scale is None else merged(weights.items(), scale)
        pairs = [*as_published(self.policy.model, whole).items()]
        with torch.inference_mode(False), torch.no_grad():
            self.engine.collective_rpc(replace_weights, args=(pairs,))
        if not self.engine.reset_prefix_cache():  # what it remembers of prompts is of the weights before
            raise AssertionError("vLLM did not forget its prefixes")
        self.engine.set_weight_version(str(version))
        self.version = version

    def close(self) -> None:
        self.engine.engine_core.shutdown()


def start(config: LanguageConfig, policy: LanguagePolicy) -> tuple[Any, Any]:
    """vLLM's engine for a model of this shape, without weights yet, and how to ask it for an answer."""
    bytes_ = cache_bytes(config, policy.model, policy.max_length)
    os.environ.update(SETTINGS)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, math.ceil(bytes_ / 2**30)))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    with tempfile.TemporaryDirectory(prefix="embodied-vllm-") as folder:
        shape = copy.deepcopy(policy.model.config)
        shape.architectures = [type(policy.model).__name__]
        shape.save_pretrained(folder)
        llm = LLM(
            folder,
            dtype=config.dtype,
            load_format="dummy",  # ours come with `load`
            skip_tokenizer_init=True,
            generation_config="vllm",  # not what the folder's authors like to sample with
            enforce_eager=True,
            max_model_len=policy.max_length,
            max_num_seqs=config.max_running,
            distributed_executor_backend="uni",
            logprobs_mode="raw_logprobs",
            **({"kv_cache_memory_bytes": bytes_} if policy.device.type == "cuda" else {}),
        )
    delta = RequestOutputKind.DELTA
    return llm.llm_engine, partial(
        SamplingParams, n=1, logprobs=0, ignore_eos=True, detokenize=False, output_kind=delta
    )
