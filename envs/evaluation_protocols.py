"""Evaluation protocols: how the episodes of an evaluation are played, under a name with a version.

A plug-in declares its own in `EnvCapabilities.protocols`. When a rule changes, the name gets a new version, so results
under the same name were played by the same rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from embodied.core.errors import ConfigError

if TYPE_CHECKING:
    from embodied.envs.capabilities import EnvCapabilities


@dataclass(frozen=True)
class EvaluationProtocol:
    name: str
    rules: str  # in words, for results.json and the report
    options: dict[str, Any] = field(default_factory=dict)  # env options it fixes
    stored_states: int = 0  # stored initial states of a task, taken in order; 0: an episode draws its own from its seed

    def apply(self, config: Any) -> Any:
        """The config of evaluation envs."""
        return config.model_copy(update=self.options)

    @property
    def published_name(self) -> str:
        """Its name with the physics of published results."""
        return self.name.partition("+")[0]

    def in_mujoco(self, versions: tuple[str, ...]) -> EvaluationProtocol:
        """This protocol if one of these versions of MuJoCo is installed, else one whose name contains the installed
        version."""
        try:
            installed = version("mujoco")
        except PackageNotFoundError:  # planned here, played on another machine
            return self
        if installed in versions:
            return replace(self, rules=f"{self.rules}; MuJoCo {installed}")
        rules = f"{self.rules}; MuJoCo {installed} simulates otherwise than {versions[-1]}, that of {self.name}"
        return replace(self, name=f"{self.name}+mujoco{installed}", rules=rules)


AS_TRAINED = EvaluationProtocol(
    "as-trained-v1", "episodes are played as in training: on_success, the step limit and the physics of the recipe"
)


def choose_protocol(kind: type[EnvCapabilities], config: Any, name: str | None) -> EvaluationProtocol:
    """The protocol of this name, or the env's first one. Which protocols exist may depend on the resolved env
    config."""
    known = {protocol.name: protocol for protocol in kind.protocols(config)}
    if name is None:
        return next(iter(known.values()))
    if name not in known:
        raise ConfigError(f"eval.protocol={name!r}: {config.name} {config.task} has {', '.join(known)}")
    return known[name]
