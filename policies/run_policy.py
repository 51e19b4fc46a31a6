"""Acts as the policy in this folder, with onnxruntime and numpy alone.

    policy = Policy()
    actions = policy.act({"state": states, "images": {"top": images}, "instruction": ["push the cube"]})  # [N, C, A]

States are [N, numbers] and images uint8 [N, height, width, 3], of N robots at a time. Play the C actions of a robot one
after the other, then observe again. config.json says under "program" what the policy observes.
"""

import json
from pathlib import Path

import numpy as np


class Policy:
    def __init__(self, folder=Path(__file__).parent, session=None, seed=0):
        """`session` runs the program; without one, onnxruntime does."""
        self.program = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["program"]
        self.session = session or onnx_session(folder)
        self.random = np.random.default_rng(seed)

    def act(self, observation, noise=None):
        """The best actions. Some policies make them out of `noise` [N, numbers], which is drawn if it is not given."""
        return self.session.run(None, self.inputs(observation, noise))[0]

    def inputs(self, observation, noise=None):
        """The program's inputs by name."""
        parts = {f"images.{camera}": images for camera, images in observation.get("images", {}).items()}
        parts["state"] = observation.get("state")
        if missing := [name for name in self.program["inputs"] if parts.get(name, ...) is None]:
            raise ValueError(f"{missing[0]} is missing; the program reads {', '.join(self.program['inputs'])}")
        rows = len(next(array for array in parts.values() if array is not None))
        if prompts := self.program["prompts"]:
            texts = observation.get("instruction") or rows * [self.program["instruction"]]
            if unknown := [text for text in texts if text not in prompts]:
                raise ValueError(f"instruction {unknown[0]!r} was not exported; there are: {', '.join(prompts)}")
            parts["words"], parts["is_word"] = zip(*(prompts[text] for text in texts))
        parts["noise"] = self.random.standard_normal((rows, self.program["noise"])) if noise is None else noise
        return {name: np.asarray(parts[name], dtype) for name, dtype in self.program["inputs"].items()}


def onnx_session(folder):
    import onnxruntime

    return onnxruntime.InferenceSession(str(Path(folder) / "policy.onnx"), providers=["CPUExecutionProvider"])
