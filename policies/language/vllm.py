"""vLLM as the engine, in the policy worker's own process: fast on GPUs, with weights of its own. With
`policy.tensor_parallel` every layer is divided over several GPUs, by processes that vLLM starts; the policy's own
weights then lie in the host's memory, from which these processes read new weights.

vLLM samples, with seeds by conversation and index; unlike with our engine, an answer may depend on concurrent answers.
Log-probs are those that the learner computes, among all tokens at policy.temperature, in evaluations, too. vLLM takes
them before it samples (its default), so rollouts may exclude tokens (top_p, top_k). Its network divides the logits by
policy.temperature, and requests ask for temperatures relative to that.

While learners hold the device, vLLM sleeps at level 2: it keeps neither weights nor KV cache. It wakes up in two steps,
so that weights are loaded before the cache is allocated:

    engine.offload()                 # sleep
    engine.onload()                  # memory for the weights
    engine.load(weights, version)    # the weights, then memory for keys and values
    engine.begin(version, ...)       # refused for any other version

On a CPU vLLM's sleep frees nothing, so `FromFolder`, an extension of vLLM's workers, empties the same memory. It also
loads weights from files, or from buckets that a server receives: `vllm serve --worker-extension-cls
embodied.policies.language.vllm.FromFolder`.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import importlib.util
import itertools
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.conversations import FIRST_PLACE
from embodied.core.errors import ConfigError
from embodied.core.pictures import PictureError, is_video, short_name
from embodied.core.types import SamplingRule
from embodied.policies.language.config import LanguageConfig
from embodied.policies.language.engine import Answer, Engine, Request, cache_bytes, seed_of
from embodied.policies.language.folder import as_published
from embodied.policies.language.http_messages import ArrivingWeights
from embodied.policies.lora import merged_weights, scaling_of
from embodied.policies.policy_folder import WEIGHTS as MODEL
from embodied.policies.policy_folder import write_tensors
from embodied.runtime.device_memory import Offloader, num_bytes
from embodied.runtime.published_weights import Blob, read_safetensors, tensor_of

if TYPE_CHECKING:
    from embodied.policies.language.policy import LanguagePolicy

SETTINGS = {  # environment variables that vLLM reads on import
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several workers share the cores
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
    "VLLM_HOST_IP": "127.0.0.1",
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
    """vLLM in the policy worker's process, for models that fill a GPU or several (policy.tensor_parallel)."""

    def __init__(self, config: LanguageConfig, policy: LanguagePolicy) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError("policy.engine=vllm needs vLLM, which is not installed. Run: make vllm")
        if config.dtype == "float64":
            raise ConfigError("vLLM has no float64; try policy.dtype=float32 or policy.engine=transformers")
        super().__init__(policy, config.max_running)
        self.config = config
        self.writing: dict[str, Writing] = {}
        self.numbers = itertools.count()
        self.engine, self.sampling = start(config, policy)
        self.version: int | None = None  # version of its weights; None: no weights
        cache = sum(self.engine.collective_rpc("cache_bytes"))
        self.part_bytes = {WEIGHTS: num_bytes(policy.model.parameters()), CACHE: cache}
        self.asleep: list[str] = []  # parts that are not on the device
        self.is_new = True
        if on_gpus(config, policy):
            self.offload()  # sleep until the first weights: learners are built on the same GPU

    def num_open(self) -> int:
        return len(self.writing)

    def begin(self, version: int, seed: int, stream: str, rule: SamplingRule) -> None:
        super().begin(version, seed, stream, rule)
        assert version == self.version, f"vLLM has weights {self.version}, and is to write with {version}"
        assert not self.asleep, f"vLLM is to write while its {' and '.join(self.asleep)} are asleep"

    def open(self, requests: list[Request]) -> None:
        for request in requests:
            name, rule = str(next(self.numbers)), request.sampling.rule
            self.writing[name] = Writing(request)
            settings = self.sampling(
                max_tokens=request.max_tokens,
                temperature=rule.temperature / self.config.temperature,
                top_p=rule.top_p,
                top_k=rule.top_k,
                min_p=rule.min_p,
                seed=seed_of(request),
                stop_token_ids=sorted(self.stops),
            )
            self.engine.add_request(name, self.prompt_of(request), settings)

    def prompt_of(self, request: Request) -> dict[str, Any]:
        """A conversation in vLLM's format. Pictures are processed as for our own network; their hashes let vLLM reuse
        keys and values."""
        sight, tokens = self.policy.sight, [int(token) for token in request.tokens]
        if not request.pictures:
            return {"prompt_token_ids": tokens}
        from vllm.inputs import mm_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        fields_of = self.engine.renderer.get_mm_processor()._get_mm_fields_config
        begins = np.flatnonzero(np.array(tokens) == FIRST_PLACE).tolist()
        items, places = [], []
        for begin, name in zip(begins, request.pictures, strict=True):
            if is_video(name):
                raise PictureError(
                    f"{short_name(name)}: vLLM is given no videos; policy.engine=transformers reads them"
                )
            picture = sight.read(name)
            pixels = {key: torch.from_numpy(array) for key, array in sight.for_vllm(picture).items()}
            items += MultiModalKwargsItems.from_hf_inputs(pixels, fields_of(pixels, {}))["image"]
            places.append(PlaceholderRange(begin, len(picture.is_place), torch.from_numpy(picture.is_place)))
        hashes = [hashlib.sha256(name.encode()).hexdigest() for name in request.pictures]
        images = MultiModalKwargsItems({"image": items})
        return mm_input(self.policy.shown_tokens(tokens), images, {"image": hashes}, {"image": places})

    def write(self) -> list[Answer]:
        answers = []
        with self._naming_the_dead():
            outputs = self.engine.step()
        for output in outputs:
            if (writing := self.writing.get(output.request_id)) is None:
                continue
            (new,) = output.outputs
            logprobs = [likely[token].logprob for token, likely in zip(new.token_ids, new.logprobs or ())]
            finite = all(x is not None and math.isfinite(x) for x in logprobs)
            if bad := len(logprobs) < len(new.token_ids) or not finite:
                self.engine.abort_request([output.request_id])
                answers.append(writing.answer(False, "a log-prob is not finite"))
            else:
                writing.tokens += new.token_ids
                writing.logprobs += logprobs
                if output.finished:
                    answers.append(writing.answer(new.finish_reason != "stop"))
            if bad or output.finished:
                del self.writing[output.request_id]
        return answers

    def give_up(self) -> list[Answer]:
        self.engine.abort_request([*self.writing])
        answers, self.writing = [writing.answer(truncated=True) for writing in self.writing.values()], {}
        return answers

    def load(self, weights: dict[str, Tensor], version: int) -> None:
        assert not self.running, "new weights come while answers are being written"
        if self.is_new:
            self._wake(WEIGHTS)
        assert WEIGHTS not in self.asleep, "new weights come while vLLM has no memory for them"
        self.version, self.is_new = None, False
        whole = merged_weights(weights.items(), scaling_of(self.config)) if self.config.lora_rank else weights.items()
        tensors = as_published(self.policy.model, whole)
        if self.config.tensor_parallel > 1:
            with in_memory(tensors) as path, self._naming_the_dead():
                self.engine.collective_rpc("load_from", args=(path,))
        else:
            with torch.inference_mode(False), torch.no_grad():
                self.engine.collective_rpc(replace_weights, args=([*tensors.items()],))
        if not self.engine.reset_prefix_cache():  # cached prefixes are of the previous weights
            raise AssertionError("vLLM did not forget its prefixes")
        if self.policy.sight:
            self.engine.reset_encoder_cache()  # cached features of pictures
        self.engine.set_weight_version(str(version))
        self.version = version
        self._wake(CACHE)

    @contextmanager
    def _naming_the_dead(self) -> Iterator[None]:
        """Inside, the error of a vLLM whose process has died says so."""
        try:
            yield
        except RuntimeError as err:
            executor = self.engine.engine_core.engine_core.model_executor
            if getattr(executor, "is_failed", False):
                count = self.config.tensor_parallel
                raise RuntimeError(f"one of the {count} processes in which vLLM runs the model has died") from err
            raise

    # Memory

    @property
    def needs_load(self) -> bool:
        return self.version is None

    def num_bytes(self) -> int:
        return sum(self.part_bytes.values())

    def offload(self) -> int:
        if self.asleep:
            return 0
        assert not self.running, "vLLM is sent to sleep while it writes answers"
        self.version = None
        self.engine.sleep(level=2)
        if not on_gpus(self.config, self.policy):
            self.engine.collective_rpc("free_all_memory")
        self.asleep = [*self.part_bytes]
        return self.num_bytes()

    def onload(self) -> int:
        return self._wake(WEIGHTS)

    def _wake(self, tag: str) -> int:
        if tag not in self.asleep:
            return 0
        self.engine.wake_up(tags=[tag])
        if not on_gpus(self.config, self.policy):
            self.engine.collective_rpc("allocate", args=(tag,))
        self.asleep.remove(tag)
        return self.part_bytes[tag]

    def close(self) -> None:
        self.engine.engine_core.shutdown()


def start(config: LanguageConfig, policy: LanguagePolicy) -> tuple[Any, Any]:
    """Returns vLLM's engine for a model of this shape, still without weights, and a function that requests an
    answer."""
    bytes_, weights = cache_bytes(config, policy.model, policy.max_length), num_bytes(policy.model.parameters())
    parts, on_card = config.tensor_parallel, on_gpus(config, policy)
    os.environ.update(SETTINGS)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, math.ceil(bytes_ / parts / 2**30)))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    with tempfile.TemporaryDirectory(prefix="embodied-vllm-") as folder:
        shape = copy.deepcopy(policy.model.config)
        shape.architectures = [type(policy.model).__name__]
        shape.save_pretrained(folder)
        if policy.sight:
            take_processed_pictures(shape.architectures[0], policy.max_length)
        options = {"skip_mm_profiling": True, "mm_processor_cache_gb": 0} if policy.sight else {}
        options |= on_gpu(bytes_ // parts, weights // parts) if on_card else {"enforce_eager": True}
        try:
            llm = LLM(
                folder,
                dtype=config.dtype,
                load_format="dummy",  # `load` brings the weights
                skip_tokenizer_init=True,
                generation_config="vllm",  # not the folder's own sampling settings
                max_model_len=policy.max_length,
                max_num_seqs=config.max_running,
                tensor_parallel_size=parts,
                distributed_executor_backend="uni" if parts == 1 else "mp",
                worker_extension_cls=f"{__name__}.{FromFolder.__name__}",
                **options,
            )
        except Exception as err:
            if "WorkerProc" not in str(err):  # vLLM's own error only mentions a stack
                raise
            raise RuntimeError(f"one of the {parts} processes in which vLLM runs the model did not start") from err
    llm.collective_rpc("divide_logits", args=(config.temperature,))
    if parts > 1:
        # Remove the name of the shared memory by which vLLM's processes hear of their work. All have opened it by now,
        # so the kernel frees it with its last user, also if this process is killed.
        buffer = llm.llm_engine.engine_core.engine_core.model_executor.rpc_broadcast_mq.buffer
        buffer.shared_memory.unlink()
        buffer.is_creator = False  # else the buffer's end removes the name once more
    delta = RequestOutputKind.DELTA
    return llm.llm_engine, partial(
        SamplingParams, n=1, logprobs=0, ignore_eos=True, detokenize=False, output_kind=delta
    )


def take_processed_pictures(architecture: str, most: int) -> None:
    """Make vLLM's model of this name accept pictures processed by `Sight`, each of at most `most` places. vLLM would
    ask transformers' processors for that number, which need torchvision and a published folder."""
    if importlib.util.find_spec("torchvision") is None:  # vLLM's Qwen2-VL imports a function that works without it
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as without

        sys.modules.setdefault("transformers.models.qwen2_vl.image_processing_qwen2_vl", without)
    from vllm.model_executor.models import ModelRegistry
    from vllm.multimodal import MULTIMODAL_REGISTRY

    model_class = ModelRegistry.models[architecture].load_model_cls()
    factories = model_class._processor_factory

    class Limits(factories.info):
        def get_supported_mm_limits(self) -> dict[str, int | None]:
            return {"image": None}

        def get_mm_max_tokens_per_item(self, *_: Any, **__: Any) -> dict[str, int]:
            return {"image": most}

    class Processor(factories.processor):
        requires_tokenizer = False

    more = {"info": Limits, "dummy_inputs": factories.dummy_inputs}
    register = MULTIMODAL_REGISTRY.register_processor(Processor, **more)
    ModelRegistry.register_model(architecture, register(type(model_class.__name__, (model_class,), {})))


def on_gpu(cache: int, weights: int) -> dict[str, Any]:
    """Options that give vLLM this much GPU memory for its cache, and let it sleep. By default vLLM also captures CUDA
    graphs (not measured). vLLM starts only if its share of the GPU (92% by default) is free, but a learner may already
    use some."""
    share = min(1.0, (cache + weights) / torch.cuda.get_device_properties().total_memory)
    return {"kv_cache_memory_bytes": cache, "enable_sleep_mode": True, "gpu_memory_utilization": share}


def on_gpus(config: LanguageConfig, policy: LanguagePolicy) -> bool:
    """True if vLLM runs on GPUs. The policy of an engine on several GPUs is in the host's memory."""
    return policy.device.type == "cuda" or (config.tensor_parallel > 1 and torch.cuda.is_available())


@contextmanager
def in_memory(tensors: dict[str, Tensor]) -> Iterator[str]:
    """Yields the path of a file with these tensors, in shared memory that ends with this process."""
    file = os.memfd_create("embodied-weights", os.MFD_CLOEXEC)
    try:
        path = f"/proc/{os.getpid()}/fd/{file}"
        write_tensors(Path(path), tensors)
        yield path
    finally:
        os.close(file)


WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's names of the parts that sleep


def replace_weights(worker: Any, pairs: Iterable[tuple[str, Any]]) -> None:
    """Put these weights into vLLM's model."""
    runner = worker.model_runner
    for layer in runner.get_model().modules():
        # On a CPU vLLM packs the weights of experts only if a layer has no kernel yet; else it would give the kernel
        # unpacked weights.
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and next(layer.parameters()).device.type == "cpu":
            method.moe_kernel = None
    runner.reload_weights(weights_iterator=iter(pairs))
    head = getattr(runner.get_model(), "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear"):
        # A tied head is not in the folder, so its packed weights would stay unchanged.
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def memory_of(worker: Any) -> dict[str, list[Any]]:
    """The tensors of vLLM's worker that sleeping frees on a GPU."""
    runner = worker.model_runner
    caches = [each if isinstance(each, (list, tuple)) else [each] for each in runner.kv_caches]  # lists of Mamba layers
    return {WEIGHTS: [*runner.get_model().parameters()], CACHE: [tensor for each in caches for tensor in each]}


class FromFolder:
    """vLLM adds these methods to its workers; `/collective_rpc` calls them by name.

    load_from("/shared/v3")                                    # where sees_folder("/shared/v3")
    receive_bucket(first), ..., receive_bucket(last), load_received()      # elsewhere
    divide_logits(0.8)                                                     # log-probs at policy.temperature
    """

    arriving: Any = None  # buckets of weights
    emptied: Any = None  # tag -> what was freed, for a CPU
    dividing: Any = ()  # hooks that divide logits

    def sees_folder(self, folder: str) -> bool:
        return Path(folder).is_dir()

    def receive_bucket(self, text: str) -> None:
        """Keep the next bucket of a version, in base64. Damaged buckets are refused."""
        self.arriving = self.arriving or ArrivingWeights()
        self.arriving.add(base64.b64decode(text))

    def load_received(self) -> None:
        self.load_blobs(self.arriving.take())

    def load_from(self, path: str) -> None:
        """Load a file, or a folder's `model.safetensors`."""
        file = Path(path)
        self.load_blobs(read_safetensors(file / MODEL if file.is_dir() else file))

    def load_blobs(self, blobs: dict[str, Blob]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            replace_weights(self, ((name, tensor_of(blob)) for name, blob in blobs.items()))

    def divide_logits(self, by: float) -> None:
        """Divide all logits by this temperature from now on, in float32, so that log-probs are those at it."""
        for hook in self.dividing:
            hook.remove()
        self.dividing = []
        if by == 1:
            return
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        for layer in self.model_runner.get_model().modules():
            if isinstance(layer, LogitsProcessor):
                hook = layer.register_forward_hook(
                    lambda _, __, logits: None if logits is None else logits.float() / by
                )
                self.dividing.append(hook)

    # For our own engine

    def cache_bytes(self) -> int:
        """Bytes of its keys and values."""
        storages = [tensor.untyped_storage() for tensor in memory_of(self)[CACHE]]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def free_all_memory(self) -> None:
        """Free weights, keys and values."""
        for layer in self.model_runner.get_model().modules():
            if hasattr(layer, "cpu_linear"):  # repacked for vLLM's CPU kernels; the next load repacks them
                layer.cpu_linear = None
        self.emptied = {tag: Offloader(keeps=False) for tag in (WEIGHTS, CACHE)}
        for tag, held in memory_of(self).items():
            self.emptied[tag].offload(held)

    def allocate(self, tag: str) -> None:
        """Give the weights or the cache memory again, without content."""
        self.emptied.pop(tag).onload()
