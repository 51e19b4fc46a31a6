"""Options of language models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from embodied.core.errors import CheckpointError
from embodied.core.files import as_path, read_object
from embodied.core.options import LocalPath, never_with, only_with
from embodied.core.plugins import ENGINE_CLASSES
from embodied.policies.config import OF_SERVER, LoraOptions, PublishedFolder, odd_addresses

SEEING = ("qwen2_5_vl", "idefics3", "smolvlm")  # config.json's model_type of models that read pictures


class LanguageConfig(LoraOptions):
    """A causal language model, for text envs; with pictures if it reads them."""

    policy = "embodied.policies.language.policy:LanguagePolicy"
    worker = "embodied.policies.language.language_worker:LanguageWorker"
    published = True
    speaks = True
    compile: ClassVar[bool] = False
    chunk: ClassVar[int] = 1
    of_engine: ClassVar = OF_SERVER

    name: Literal["language"] = Field(description="A causal language model, for text envs.")
    preset: Literal["tiny", "tiny_gpt2", "tiny_vl", "tiny_moe"] = Field(
        "tiny",
        description="A model with random weights and a tokenizer of characters, of the architecture of Qwen3, GPT-2, "
        "Qwen2.5-VL, which reads pictures, or Qwen3-MoE, with eight experts; policy.pretrained has its own.",
    )
    pretrained: str | None = Field(
        None, description="Published model (folder or hub id), or policy folder of ours, with whose weights it begins."
    )
    engine: Annotated[str, AfterValidator(ENGINE_CLASSES.checked_name)] = Field(
        "transformers",
        description="What generates answers: transformers, our own loop over the model; vllm, in the policy worker's "
        "process (make vllm); http, the servers at policy.url; or an engine of an installed package.",
    )
    tensor_parallel: int = Field(
        1,
        gt=0,
        description="With policy.engine=vllm: GPUs of one machine over which a policy worker divides every layer, for "
        "models that do not fit one GPU.",
    )
    url: str | tuple[str, ...] | None = Field(
        None,
        description="With policy.engine=http: the address of its server (python -m embodied.serve or vllm serve), "
        "such as http://127.0.0.1:8000, or a list of several, which may come and go.",
    )
    token_from: str = Field(
        "EMBODIED_SERVE_TOKEN",
        description="Environment variable, or file with a / in its name, that holds the server's token; no file of "
        "the run contains the token.",
    )
    weights: LocalPath | None = Field(
        None,
        description="Folder for new weights, with the same path for the run and its servers; our servers get them "
        "over HTTP if they do not see it. null: servers keep their own weights, which must be the "
        "checkpoint's; for evaluations only.",
    )
    answer_s: float = Field(600.0, gt=0, description="Seconds in which a server must answer, and take new weights.")
    away_s: float = Field(
        60.0,
        gt=0,
        description="Seconds that all servers may be away or failing before the run fails; requests are repeated "
        "meanwhile.",
    )
    gap_limit: float | None = Field(
        0.1,
        gt=0,
        description="Drop a server whose log-probs differ from the learner's by more than this on average over the "
        "last 32 tokens, or ten times as much as the other servers'; null: nothing is compared.",
    )
    verify: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of servers' answers that are checked, each and together: the computed hidden states and "
        "the drawn tokens of our servers, the log-probs of vLLM's. 0.1: a random tenth, unknown to the server. null: "
        "none.",
    )
    suspects: Literal["use", "drop", "stop"] = Field(
        "use",
        description="Answers of a dropped server that were released before it was dropped. use: they are named. drop: "
        "groups with such answers of the current version are left out, unless learners have them. stop: so, and the "
        "run ends if earlier versions had such answers, and names the checkpoints from before.",
    )
    temperature: float = Field(
        1.0, gt=0, description="Logits are divided by it in rollouts and losses; evaluations have eval.temperature."
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Rollouts draw only from the likeliest tokens whose probabilities reach this; losses take the "
        "probabilities among all tokens. Evaluations have eval.top_p.",
    )
    top_k: int = Field(
        0, ge=0, description="Rollouts draw only from so many of the likeliest tokens, likewise; 0: all."
    )
    min_p: float = Field(
        0.0, ge=0, lt=1, description="Rollouts draw no token below this share of the likeliest one's probability."
    )
    max_tokens: int = Field(512, gt=0, description="Most tokens of an answer; a longer one is cut off.")
    max_length: int | None = Field(
        None, gt=0, description="Most tokens of a conversation; null: the model's positions."
    )
    max_running: int = Field(
        64, gt=0, description="Conversations that a policy worker plays at the same time, on each of its servers."
    )
    cache_gb: float | None = Field(
        None, gt=0, description="Memory for keys and values; null: as much as max_running and max_length need."
    )
    chat: bool | None = Field(
        None, description="Format messages with the model's chat template; null: if it has one. false: contents alone."
    )
    system: str | None = Field(
        None, description="A system message before conversations of messages that have none; needs a chat template."
    )
    template_arguments: dict[str, bool | int | float | str] = Field(
        {}, description="Arguments of the chat template, such as {enable_thinking: false} for Qwen3."
    )
    thoughts: Literal["template", "keep"] = Field(
        "template",
        description="How later turns of a conversation show earlier answers. template: as the chat template renders "
        "them, which may leave out thoughts (Qwen3, R1). keep: as they were written.",
    )
    train_layers: int | None = Field(
        None, gt=0, description="Train only this many of the last layers and the final norm; null: all weights."
    )
    expert_bias_rate: float | None = Field(
        None,
        gt=0,
        description="Mixtures of experts: after every gradient step an expert's routing bias moves by this towards an "
        "even load, without a loss (0.001 is usual); null: it stays.",
    )
    value_head: bool = Field(
        False, description="Predict before every token the value of the rest of a conversation: for algo.name=ppo."
    )
    dtype: Literal["float32", "float64", "bfloat16"] = Field("float32", description="As for mlp.")

    @classmethod
    def recognise(cls, folder: PublishedFolder) -> str | None:
        kinds = folder.config.get("architectures") or ()
        speaks = any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in kinds)
        return "language" if speaks or folder.config.get("model_type") in SEEING else None

    @property
    def reads_pictures(self) -> bool:  # type: ignore[override]
        """True if the folder's model reads pictures, or if the folder is not on this machine."""
        if self.pretrained is None:
            return self.preset == "tiny_vl"
        path = as_path(self.pretrained) / "config.json"
        return not path.is_file() or read_object(path, CheckpointError).get("model_type") in SEEING

    @property
    def mixed_precision(self) -> bool:
        return False

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,) if isinstance(self.url, str) else self.url or ()

    @property
    def worker_gpus(self) -> int:  # type: ignore[override]
        return self.tensor_parallel

    @property
    def merged_rows(self) -> int:
        return self.max_running

    section = "policy."
    rules = (
        only_with(" ".join(OF_SERVER), {"engine": "http"}),
        only_with("tensor_parallel", {"engine": "vllm"}),
        never_with("system template_arguments thoughts", {"chat": False}, "there is no template; leave it out"),
        never_with({"url": None}, {"engine": "http"}, "it asks a server; set policy.url=http://127.0.0.1:8000"),
    )

    def conflicts(self) -> Iterator[str]:
        if self.url is not None and (not self.urls or len({*self.urls}) < len(self.urls)):
            yield "policy.url should name every server once"
        if not all(re.fullmatch(r"https?://[^/@\s?#]+(/[^@\s?#]*)?", url) for url in self.urls):
            yield "policy.url should be like http://127.0.0.1:8000, without a user's name or a password"
        else:
            yield from odd_addresses(*self.urls)
        if "/" not in self.token_from and not re.fullmatch(r"[A-Za-z_]\w*", self.token_from):
            yield "policy.token_from names an environment variable, or a file with a / in its name"
