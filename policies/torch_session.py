"""Runs the exported program of this folder with torch and safetensors, in place of onnxruntime:

    policy = Policy(session=TorchSession())  # of run_policy.py

graph.json lists operations of PyTorch (ATen) and their arguments, and model.safetensors holds the weights. A folder is
data: only operations of ATen and the few below are called, and none gets a text that could name a file.
"""

import json
import operator
from pathlib import Path

import torch
from safetensors.torch import load_file

ON_NUMBERS = {name: getattr(operator, name) for name in ("getitem", "add", "sub", "mul", "floordiv", "neg")}
TEXTS = ("none", "tanh", "constant")  # kinds of GELU and of padding


class TorchSession:
    def __init__(self, folder=Path(__file__).parent, device="cpu"):
        graph = json.loads((Path(folder) / "graph.json").read_text(encoding="utf-8"))
        self.weights = load_file(Path(folder) / "model.safetensors", device)
        self.device, self.inputs, self.output = device, graph["inputs"], graph["output"]
        self.nodes = [(operation(node["calls"]), node) for node in graph["nodes"]]

    @torch.inference_mode()
    def run(self, _, inputs):
        """[the output] for arrays by name."""
        values = {
            input_name: torch.from_numpy(inputs[name]).to(self.device) for name, input_name in self.inputs.items()
        }
        for call, node in self.nodes:
            arguments, named = self.read(values, node["arguments"]), node["named"]
            values[node["name"]] = call(*arguments, **{key: self.read(values, value) for key, value in named.items()})
            for name in node["unused"]:  # from here on
                values.pop(name)
        return [values[self.output].cpu().numpy()]

    def read(self, values, value):
        """An argument: numbers are themselves, results and other objects are named."""
        if isinstance(value, list):
            return [self.read(values, item) for item in value]
        if isinstance(value, str) and value not in TEXTS:
            raise ValueError(f"{value!r} is no argument of an operation")
        if not isinstance(value, dict):
            return value
        ((kind, name),) = value.items()
        if kind == "result":
            return values[name] if name in values else self.weights[name]
        return torch.device(self.device) if kind == "device" else getattr(torch, name)  # a dtype, for example


def operation(name):
    """aten.add.Tensor, or an operation on sizes such as mul."""
    library, *path = name.split(".")
    if name in ON_NUMBERS:
        return ON_NUMBERS[name]
    call = getattr(getattr(torch.ops.aten, path[0]), path[1]) if library == "aten" and len(path) == 2 else None
    if not isinstance(call, torch._ops.OpOverload):
        raise ValueError(f"{name} is no operation of a program")
    return call
