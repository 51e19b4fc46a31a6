"""The machine: its devices (`discovery`), packages, drivers and load (`machine`, `vulkan_driver`), and `probes`."""

from functools import cache
from importlib import metadata


@cache
def version_of(package: str) -> str | None:
    """The version of an installed distribution; cached, since its whole metadata is parsed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
