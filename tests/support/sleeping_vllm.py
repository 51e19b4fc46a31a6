"""vLLM as the policy worker sees it, without vLLM: an engine with weights and a cache of its own that can sleep. It
raises whenever it is used asleep, or asked for answers before weights were loaded and their version set.

`SleepyLoop` is the embodied loop whose policy workers generate with it; everything but vLLM itself is the toolkit's.
"""

import copy
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import torch

from embodied.core.types import SamplingRule
from embodied.policies.language import vllm
from embodied.policies.language.engine import Request, Sampling
from embodied.policies.language.language_worker import LanguageWorker
from embodied.policies.language.slot_engine import SlotEngine
from embodied.policies.language.vllm import FromFolder
from embodied.workflows.rl_loop import LEARNER, POLICY, SIM, EmbodiedLoop

CACHE_BYTES = 3_000_000


class SleepyVLLM(FromFolder):
    """The part of vLLM's `LLMEngine` that `VLLMEngine` uses; our own engine writes the answers."""

    def __init__(self, config, policy):
        self.model = copy.deepcopy(policy.model)
        alike = {"tokenizer": policy.tokenizer, "max_length": policy.max_length, "sight": None}
        self.slots = SlotEngine(config, SimpleNamespace(model=self.model, **alike))
        self.kv_caches = [torch.zeros(CACHE_BYTES, dtype=torch.uint8)]
        self.asleep, self.version = set(), None
        self.model_runner = self

    # What the worker of vLLM has

    def get_model(self):
        return self.model

    def reload_weights(self, weights_iterator):
        if "weights" in self.asleep:
            raise RuntimeError("weights are loaded into memory that is asleep")
        self.version = None
        own = self.model.state_dict()
        for name, tensor in weights_iterator:
            own[name].copy_(tensor)

    def collective_rpc(self, method, args=()):
        return [method(self, *args) if callable(method) else getattr(self, method)(*args)]

    # What the engine does

    def sleep(self, level):
        if level != 2 or self.asleep or self.slots.running:
            raise RuntimeError(f"sleep at level {level} while asleep: {self.asleep}, running: {self.slots.running}")
        self.asleep, self.version = {"weights", "kv_cache"}, None

    def wake_up(self, tags):
        if "kv_cache" in tags and self.version is None:
            raise RuntimeError("the cache wakes up before there are weights")
        self.asleep -= set(tags)

    def reset_prefix_cache(self):
        return True

    def set_weight_version(self, version):
        self.version = version
        self.slots.begin(0, 0, "", SamplingRule())

    def add_request(self, name, prompt, settings):
        self._check_awake()
        sampling = Sampling(settings["seed"], "vllm", settings["rule"], frozenset(settings["stop_token_ids"]))
        self.slots.add(Request(name, prompt["prompt_token_ids"], settings["max_tokens"], 0, sampling))

    def step(self):
        self._check_awake()
        return [output_of(answer) for answer in self.slots.step()]

    def abort_request(self, names):
        for name in names:
            self.slots.cancel(name)

    def _check_awake(self):
        if self.asleep or self.version is None:
            raise RuntimeError(f"an answer is asked for while {self.asleep or 'its weights'} are not there")


def output_of(answer):
    logprobs = [
        {token: SimpleNamespace(logprob=float(logprob))}
        for token, logprob in zip(answer.tokens.tolist(), answer.logprobs, strict=True)
    ]
    reason = "length" if answer.truncated else "stop"
    output = SimpleNamespace(token_ids=answer.tokens.tolist(), logprobs=logprobs, finish_reason=reason)
    return SimpleNamespace(request_id=answer.key, outputs=[output], finished=True)


def settings(max_tokens, temperature, top_p, top_k, min_p, seed, stop_token_ids):
    rule = SamplingRule(temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    return {"max_tokens": max_tokens, "rule": rule, "seed": seed, "stop_token_ids": stop_token_ids}


class SleepyWorker(LanguageWorker):
    place = "cpu"

    def build(self, spec):
        super().build(spec)
        alike = self.config.model_copy(update={"dtype": "float32"})  # vLLM has no float64, which the test needs
        about = {"model": self.policy.model, "tokenizer": self.policy.tokenizer, "max_length": self.policy.max_length}
        about["sight"] = None
        stand_in = {
            "start": lambda config, policy: (SleepyVLLM(config, policy), settings),
            "importlib": SimpleNamespace(util=SimpleNamespace(find_spec=bool)),  # vLLM need not be installed
        }
        with patch.multiple(vllm, **stand_in):
            self.engine = vllm.VLLMEngine(alike, SimpleNamespace(**about, device=torch.device(self.place)))
        self.policy.cache_tensors = self.engine.cache_tensors


class SleepyWorkerOnGPU(SleepyWorker):
    """There the engine sleeps until its first weights come, and nothing but vLLM frees memory."""

    place = "cuda"


class SleepyLoop(EmbodiedLoop):
    roles = (SIM, replace(POLICY, worker="sleeping_vllm:SleepyWorker"), LEARNER)


class SleepyLoopOnGPU(EmbodiedLoop):
    roles = (SIM, replace(POLICY, worker="sleeping_vllm:SleepyWorkerOnGPU"), LEARNER)
