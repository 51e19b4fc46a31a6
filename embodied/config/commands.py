"""The commands with a recipe: the purpose of each, its own arguments, and the sections without effect."""

from __future__ import annotations

from dataclasses import dataclass

from embodied.policies.language.config import ANSWERING


@dataclass(frozen=True)
class Command:
    """A command: its own arguments besides the recipe's keys, and the sections without effect."""

    name: str
    purpose: str
    own: dict[str, str]  # key -> help
    unused: tuple[str, ...] = ()

    def ignores(self, key: str) -> bool:
        kept = self.name == "evaluate" and (key in ANSWERING or key == "policy.name")  # the class of a policy folder
        return not kept and any(key == name or key.startswith(f"{name}.") for name in self.unused)


NOT_ENV = ("policy", "algo", "sft", "collect", "learner", "roles", "placement", "pipeline", "eval", "resume")
COMMANDS = {
    "train": Command(
        "train",
        "Train a policy.",
        {"program": "A workflow of your own, my_pkg.my_module:MyLoop; unset: collect, update, publish."},
        unused=("sft", "collect"),
    ),
    "sft": Command(
        "sft",
        "Train a policy to imitate demonstrations, for sft.epochs passes over sft.data.",
        {},
        unused=("algo", "roles", "run.env_steps", "run.iterations", "eval.interleave"),
    ),
    "collect": Command(
        "collect",
        "Play episodes with a scripted expert or a policy and write them down as demonstrations.",
        {
            "out": "New folder for the dataset, in LeRobot's layout 3.0.",
            "checkpoint": "Source of the episodes: expert, or any value of embodied.evaluate's checkpoint [expert].",
        },
        unused=("run", "policy", "algo", "sft", "learner", "roles", "resume", "eval.interleave"),
    ),
    "check": Command(
        "check",
        "Check that an env keeps the contract, and list its observations and actions.",
        {
            "images": "true writes the images that a policy sees as PNG files, into run.dir/images/TASK [false].",
            "limit_s": "Seconds after which the check gives up and names its last step [1800].",
        },
        unused=NOT_ENV,
    ),
    "evaluate": Command(
        "evaluate",
        "Play a fixed list of episodes with a trained policy and report its success.",
        {
            "checkpoint": "A run's folder, one of its checkpoints, a policy folder, a hub id, random, zero, "
            "or my_pkg.my_module:MyPolicy; several as [A,B,random] play the same episodes and are compared."
        },
        unused=("policy", "algo", "sft", "collect", "roles", "resume", "eval.interleave"),
    ),
}
