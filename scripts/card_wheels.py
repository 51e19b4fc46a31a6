"""Downloads wheels that a GPU machine without a network lacks for `benchmarks.gpu_card`, for another Python if named.

    python -m pip freeze > have.txt                              # on the GPU machine, carried here
    python scripts/card_wheels.py have.txt wheels --python 3.12  # here; then carry the folder `wheels`
    python -m pip install --no-index --no-deps --target site wheels/*.whl && export PYTHONPATH=$PWD/site

Versions are those of constraints.txt. torch and NVIDIA's libraries are never downloaded: the GPU machine has its own.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
MORE = ("liger-kernel==0.8.5",)  # of a block alone
OF_GPU = ("torch", "triton", "nvidia-", "cuda-", "vllm", "ray", "xformers")
MANYLINUX = [f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31, 34, 35)] + ["manylinux2014_x86_64", "any"]


def name_of(requirement: str) -> str:
    return re.split(r"[ \[=<>!~;@]", requirement.strip(), maxsplit=1)[0].lower().replace("_", "-")


def missing(have: set[str]) -> list[str]:
    """Pins of the packages that the toolkit and its simulators ask for and that are not installed there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = {name_of(line) for line in [*project["dependencies"], *extras["maniskill"], *extras["libero"], "pytest"]}
    pins = {name_of(line): line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    needed, waiting = set(), sorted(asked)
    while waiting:
        name = waiting.pop()
        if name in needed or name in have or name.startswith(OF_GPU):
            continue
        needed.add(name)
        waiting += needs_of(name)
    return sorted([*(pins[name] for name in needed if name in pins), *(p for p in MORE if name_of(p) not in have)])


def needs_of(name: str) -> list[str]:
    """The packages that this one, installed here, asks for outside extras."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires(name) or []
    except PackageNotFoundError:
        return []
    return [name_of(line) for line in lines if "extra ==" not in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("have", type=Path, help="output of pip freeze on the GPU machine")
    parser.add_argument("out", type=Path, help="the folder for wheels")
    parser.add_argument(
        "--python", default=f"{sys.version_info[0]}.{sys.version_info[1]}", help="its version of Python"
    )
    parser.add_argument("--list", action="store_true", help="only print the pins")
    asked = parser.parse_args()
    pins = missing({name_of(line) for line in asked.have.read_text().splitlines() if line.strip()})
    if asked.list:
        print("\n".join(pins))
        return
    where = [word for platform in MANYLINUX for word in ("--platform", platform)]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", asked.python, "--implementation", "cp", *where]
    failed = []
    for pin in pins:
        command = [sys.executable, "-m", "pip", "download", "-q", *options, "-d", str(asked.out), pin]
        if subprocess.run(command, check=False, timeout=600).returncode:
            failed.append(pin)
    size = sum(file.stat().st_size for file in asked.out.glob("*.whl")) / 1e6
    print(f"{len(pins) - len(failed)} wheels, {size:.0f} MB, in {asked.out}")
    if failed:
        print(f"no wheel for Python {asked.python}: {', '.join(failed)}; carry their source, or leave them out")


if __name__ == "__main__":
    main()
