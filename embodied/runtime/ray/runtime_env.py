"""What nodes of another machine need to import: this package, and the user's own modules that a recipe names."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from embodied.core.errors import ConfigError

_LIMIT_BYTES = 100_000_000
_PARTS = ("envs", "policies", "placement", "recipes", "assets")  # in a checkout they lie beside the package
_LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*", "runs")


@contextmanager
def pack_modules(modules: Sequence[str]) -> Iterator[Path]:
    """A folder that can stand on the import path, for as long as it takes to upload it."""
    with tempfile.TemporaryDirectory(prefix="embodied-ship-") as folder:
        target = Path(folder)
        _copy_package("embodied", target / "embodied")
        for part in _PARTS:
            _copy_package(f"embodied.{part}", target / "embodied" / part)
        for name in sorted({module.partition(".")[0] for module in modules} - {"embodied"}):
            _copy_own(name, target)
        size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
        if size > _LIMIT_BYTES:
            raise ConfigError(
                f"the modules {', '.join(modules)} and what lies beside them are {size / 1e6:.0f} MB, too much to send "
                "to every node; install them there, or keep them in a folder without data"
            )
        yield target


def _copy_package(name: str, target: Path) -> None:
    if not target.exists():
        (source,) = importlib.util.find_spec(name).submodule_search_locations
        shutil.copytree(source, target, ignore=_LEFT_OUT)


def _copy_own(name: str, target: Path) -> None:
    """A package, or a module with the modules and packages beside it. What is installed is to be installed there."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ConfigError(f"there is no module {name!r} to send to the nodes of the cluster")
    origin = Path(spec.origin)
    installed = [Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib", "stdlib")]
    if any(origin.is_relative_to(folder) for folder in installed):
        return
    if spec.submodule_search_locations:
        shutil.copytree(origin.parent, target / name, ignore=_LEFT_OUT, dirs_exist_ok=True)
        return
    for beside in origin.parent.iterdir():
        if beside.suffix == ".py":
            shutil.copy(beside, target)
        elif (beside / "__init__.py").is_file() and beside.name != "embodied":
            shutil.copytree(beside, target / beside.name, ignore=_LEFT_OUT, dirs_exist_ok=True)
