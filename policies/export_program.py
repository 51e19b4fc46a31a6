"""Records a policy's best actions as a program: ONNX, or operations of PyTorch as JSON with weights as safetensors.

Normalisation, resizing of images and scaling of actions are in the program, as `Policy.best_actions` computes them. The
number of rows is free; the sizes of images are those of the env, and the words of instructions are looked up.

Files of torch.export hold a pickle, and their reader runs it, so the operations are written here.
"""

from __future__ import annotations

import json
import logging
import operator
import shutil
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embodied.core.errors import EmbodiedError
from embodied.core.types import Observation
from embodied.policies import run_policy, torch_session
from embodied.policies.base import Policy
from embodied.policies.config import ONNX
from embodied.policies.policy_folder import CONFIG, WEIGHTS, write_tensors

GRAPH = "graph.json"
OBJECTS = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}
LARGE = 2**30  # bytes of weights that ONNX keeps in a file of their own: a message holds 2 GB
CHECKS = ("aten._assert_tensor_metadata.default", "aten._assert_scalar.default")
IMAGES = "images."


class Program(nn.Module):
    """The best actions as a function of arrays in the order of these names."""

    def __init__(self, policy: Policy, names: list[str]) -> None:
        super().__init__()
        self.policy, self.names = policy, names

    def forward(self, *arrays: Tensor) -> Tensor:
        parts = dict(zip(self.names, arrays, strict=True))
        obs: Observation = {key: parts[key] for key in ("state",) if key in parts}
        obs["images"] = {name.removeprefix(IMAGES): parts[name] for name in self.names if name.startswith(IMAGES)}
        if "words" in parts:
            obs["instruction"] = {"ids": parts["words"], "is_word": parts["is_word"]}
        return self.policy.best_actions(obs, parts.get("noise"))


def describe(policy: Policy, obs: Observation, texts: list[str]) -> dict[str, Any]:
    """What the runner must know of the program: its inputs, the words of these instructions, its noise."""
    inputs = {f"{IMAGES}{camera}": "uint8" for camera in policy.spec.images}
    prompts: dict[str, Any] = {}
    if policy.spec.state_dim:
        inputs["state"] = obs["state"].dtype.name
    if texts:
        inputs |= {"words": "int64", "is_word": "bool"}
        ids, is_word = policy.prompt_tokens(texts)
        prompts = {text: [row.tolist(), here.tolist()] for text, row, here in zip(texts, ids, is_word, strict=True)}
    if policy.starting_noise:
        inputs["noise"] = "float64"
    fixed = None if policy.spec.instruction else next(iter(prompts), None)
    return {"inputs": inputs, "prompts": prompts, "instruction": fixed, "noise": policy.starting_noise}


def record(policy: Policy, inputs: dict[str, np.ndarray]) -> torch.export.ExportedProgram:
    """The operations of its best actions for inputs like these, of any number of rows."""
    rows = {0: torch.export.Dim.DYNAMIC}
    arrays = tuple(torch.from_numpy(array) for array in inputs.values())
    policy.before_export()
    with torch.no_grad():
        module = Program(policy.eval(), [*inputs])
        return torch.export.export(module, arrays, dynamic_shapes=(tuple(rows for _ in arrays),), strict=False)


def write(
    folder: Path, file_format: str, description: dict[str, Any], policy: Policy, obs: Observation
) -> run_policy.Policy:
    """Write the program, its runner and the description (config.json). Returns the runner."""
    (folder / CONFIG).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    copy_module(run_policy, folder)
    inputs = run_policy.Policy(folder, session=True).inputs(obs)
    recorded = record(policy, inputs)
    if file_format == "onnx":
        write_onnx(folder, recorded, [*inputs])
        return run_policy.Policy(folder)
    write_torch(folder, recorded, [*inputs])
    copy_module(torch_session, folder)
    return run_policy.Policy(folder, torch_session.TorchSession(folder))


def copy_module(module: ModuleType, folder: Path) -> None:
    source = Path(str(module.__file__))
    shutil.copyfile(source, folder / source.name)


def write_onnx(folder: Path, recorded: torch.export.ExportedProgram, names: list[str]) -> None:
    large = sum(tensor.nbytes for tensor in recorded.state_dict.values()) > LARGE
    logging.getLogger("torch.onnx._internal.exporter").setLevel(logging.ERROR)  # packages that it could use
    with warnings.catch_warnings(action="ignore"):  # of its own code, and of numbers that it computes beforehand
        program = torch.onnx.export(recorded, (), input_names=names, output_names=["actions"], verbose=False)
    for node in program.model.graph:
        node.metadata_props.clear()  # lines of this machine's files
    program.save(folder / ONNX, external_data=large)


def write_torch(folder: Path, recorded: torch.export.ExportedProgram, names: list[str]) -> None:
    recorded.graph.eliminate_dead_code()
    signature, nodes = recorded.graph_signature, [*recorded.graph.nodes]
    held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    stored = {key: recorded.state_dict[name] for key, name in held.items() if name in recorded.state_dict}
    constants = {**held, **signature.inputs_to_lifted_tensor_constants}
    stored |= {key: recorded.constants[name] for key, name in constants.items() if key not in stored}
    used = {node.name for node in nodes if node.users}
    write_tensors(folder / WEIGHTS, {key: tensor.detach() for key, tensor in stored.items() if key in used})
    last = {before.name: node.name for node in nodes for before in node.all_input_nodes if before.name not in stored}
    output = next(node for node in nodes if node.op == "output")
    called = [as_json(node, [name for name, at in last.items() if at == node.name]) for node in nodes if is_call(node)]
    content = {
        "inputs": dict(zip(names, signature.user_inputs, strict=True)),
        "nodes": called,
        "output": output.args[0][0].name,
    }
    (folder / GRAPH).write_text(json.dumps(content) + "\n", encoding="utf-8")


def is_call(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and str(node.target) not in CHECKS


def as_json(node: torch.fx.Node, unused: list[str]) -> dict[str, Any]:
    """One operation; `unused` are the results that no later operation reads."""
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
        calls = str(node.target)
    elif getattr(operator, getattr(node.target, "__name__", ""), None) is node.target:
        calls = node.target.__name__
    else:
        raise EmbodiedError(f"the operation {node.target} of this policy cannot be written in format=torch")
    named = {key: argument(value) for key, value in node.kwargs.items()}
    arguments = [argument(value) for value in node.args]
    return {"name": node.name, "calls": calls, "arguments": arguments, "named": named, "unused": unused}


def argument(value: Any) -> Any:
    if isinstance(value, torch.fx.Node):
        return {"result": value.name}
    if isinstance(value, list | tuple):
        return [argument(item) for item in value]
    if isinstance(value, torch.device):
        return {"device": ""}
    kind = next((kind for cls, kind in OBJECTS.items() if isinstance(value, cls)), None)
    return {kind: str(value).removeprefix("torch.")} if kind else value
