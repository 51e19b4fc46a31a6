"""An extension of vLLM's workers that loads weights from a folder: `vllm serve --worker-extension-cls
embodied.policies.language.vllm_worker.FromFolder`. Without a common folder, weights arrive in the buckets of
`runtime/weights.py`; only then more of the toolkit is imported. Our own vLLM engine uses it to load weights from a
file, and to free memory on a CPU, where vLLM's sleep frees nothing."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's names of the parts that sleep


def replace_weights(worker: Any, pairs: Iterable[tuple[str, Any]]) -> None:
    """Put these weights into vLLM's model."""
    runner = worker.model_runner
    pack_experts_again(runner.get_model())
    runner.reload_weights(weights_iterator=iter(pairs))
    head = getattr(runner.get_model(), "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear"):
        # A tied head is not in the folder, so its packed weights would stay unchanged.
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def pack_experts_again(model: Any) -> None:
    """Make the next load repack the weights of experts for a CPU. vLLM does so only if a layer has no kernel yet;
    otherwise it would give the kernel unpacked weights."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and next(layer.parameters()).device.type == "cpu":
            method.moe_kernel = None


def memory_of(worker: Any) -> dict[str, list[Any]]:
    """The tensors of vLLM's worker that sleeping frees on a GPU."""
    runner = worker.model_runner
    caches = [each if isinstance(each, (list, tuple)) else [each] for each in runner.kv_caches]  # lists of Mamba layers
    return {WEIGHTS: [*runner.get_model().parameters()], CACHE: [tensor for each in caches for tensor in each]}


def forget_packed_weights(worker: Any) -> None:
    """Free the weights that vLLM has repacked for its CPU kernels; the next load repacks them."""
    for layer in worker.model_runner.get_model().modules():
        if hasattr(layer, "cpu_linear"):
            layer.cpu_linear = None


def tensors(files: Iterable[Path]) -> Iterator[tuple[str, Any]]:
    """The tensors of these files, one by one."""
    from safetensors import safe_open

    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is not a dict
                yield name, file.get_tensor(name)


class FromFolder:
    """vLLM adds these methods to its workers; `/collective_rpc` calls them by name.

    load_folder("/shared/v3")                                  # where sees_folder("/shared/v3")
    receive_bucket(first), ..., receive_bucket(last), load_received()      # elsewhere
    """

    arriving: Any = None  # partially received weights
    emptied: Any = None  # part -> what was freed, for a CPU

    def sees_folder(self, folder: str) -> bool:
        return Path(folder).is_dir()

    def receive_bucket(self, text: str) -> None:
        """Keep a bucket (`bucket_bytes`, in base64), the next of its version. Damaged buckets are refused."""
        from embodied.policies.language.arriving_weights import ArrivingWeights
        from embodied.policies.language.http_messages import read_bucket

        head, bucket, specs = read_bucket(base64.b64decode(text))
        if not bucket.number:
            self.arriving = ArrivingWeights(head["sender"], bucket.version, specs, math.inf)
        if self.arriving is None or not self.arriving.add(head["sender"], bucket):
            raise ValueError("this is not the next bucket of the weights that are coming; begin again")

    def load_received(self) -> None:
        import torch

        from embodied.runtime.tensor_bytes import tensor_of

        arriving, self.arriving = self.arriving, None
        with torch.inference_mode(False), torch.no_grad():
            replace_weights(self, ((name, tensor_of(blob)) for name, blob in arriving.blobs.items()))

    def load_folder(self, folder: str) -> None:
        import torch

        if not (at := Path(folder)).is_dir():
            raise ValueError(f"{folder} is not a folder that this worker sees")
        with torch.inference_mode(False), torch.no_grad():
            replace_weights(self, tensors(sorted(at.glob("*.safetensors"))))

    # For our own engine

    def load_file(self, path: str) -> None:
        import torch

        with torch.inference_mode(False), torch.no_grad():
            replace_weights(self, tensors([Path(path)]))

    def cache_bytes(self) -> int:
        """Bytes of its keys and values."""
        storages = [tensor.untyped_storage() for tensor in memory_of(self)[CACHE]]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def empty(self) -> None:
        """Free weights, keys and values."""
        from embodied.runtime.device_memory import Offloader

        forget_packed_weights(self)
        self.emptied = {part: Offloader(keeps=False) for part in (WEIGHTS, CACHE)}
        for part, held in memory_of(self).items():
            self.emptied[part].offload(held)

    def allocate(self, part: str) -> None:
        """Give a part its memory back, without content."""
        self.emptied.pop(part).onload()
