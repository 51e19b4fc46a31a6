"""Pages of the site that are made while it is built (mkdocs.yml): README, CHANGELOG, CONTRIBUTING and examples, where
they lie; every option, from the models; and the Python API, from docstrings.

Nothing made here is kept, so nothing can fall behind.
"""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
FROM_ROOT = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
STYLE = "td:first-child code { white-space: nowrap } .md-grid { max-width: 76rem }"  # tables are wide
LINK = re.compile(r"(\]\()(?!https?:|#)([^)#\s]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.mdx_configs["toc"]["slugify"] = anchor
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page in [file for file in files if file.src_uri.endswith(".md")]:
        files.remove(page)
        text = Path(page.abs_src_path or "").read_text()
        files.append(File.generated(config, page.src_uri, content=moved(text, "docs")))
    made = {target: moved((ROOT / name).read_text(), "") for name, target in FROM_ROOT.items()}
    made |= {"examples.md": moved((ROOT / "examples/README.md").read_text(), "examples")}
    made |= {"options.md": options(), "python.md": python_api(), "site.css": STYLE}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    shown = [path for path in (ROOT / "assets").iterdir() if path.suffix in (".png", ".gif", ".svg")]
    for path in [*shown, *examples(), ROOT / "CITATION.cff"]:
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def examples() -> list[Path]:
    return [path for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")]


def moved(text: str, folder: str) -> str:
    """The page with its links as they are in the site, where pages lie beside each other."""

    def link(found: re.Match[str]) -> str:
        target = ((ROOT / folder / found[2]).resolve()).relative_to(ROOT).as_posix()
        target = {**FROM_ROOT, "examples/README.md": "examples.md", "LICENSE": "index.md"}.get(target, target)
        return found[1] + target.removeprefix("docs/")

    return LINK.sub(link, text)


def anchor(title: str, separator: str = "-") -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", separator)


def options() -> str:
    from embodied.config.answers import describe
    from embodied.config.read import leaves, root
    from embodied.config.recipe import RunConfig

    owners: dict[tuple[str, str], list[str]] = {}
    for key, field, kind in leaves(root(RunConfig)):
        owners.setdefault((key, describe(field)), []).append(kind)
    lines, section = ["# Options", "", "Every key of recipes and command lines, read from the code."], ""
    for (key, text), kinds in owners.items():
        if (here := key.partition(".")[0]) != section:
            section = here
            lines += ["", f"## {section}", "", "| key | value [default] | meaning |", "| --- | --- | --- |"]
        only = f" *({', '.join(kinds)})*" if kinds[0] else ""
        value, _, meaning = text.partition("  ")
        value = cell(value).replace(r"\|", r"\|<wbr>")  # long lists of choices may wrap
        lines.append(f"| `{key}` | {value} | {cell(meaning)}{only} |")
    return "\n".join(lines)


def cell(text: str) -> str:
    return re.sub(r"([|\[\]<*_])", r"\\\1", " ".join(text.split()))


def python_api() -> str:
    import embodied

    lines = ["# Python", "", "What `import embodied` offers. Each name is imported on first use.", ""]
    for name in embodied._COMMANDS:
        call = import_module(f"embodied.{name}").call
        lines += [
            f"## embodied.{name}",
            "",
            "```python",
            f"{name}{inspect.signature(call)}".replace("'", ""),
            "```",
            "",
        ]
        lines += [
            f"::: embodied.{name}.call",
            "    options: {show_root_heading: false, show_root_toc_entry: false}",
            "",
        ]
    for name, home in embodied._HOMES.items():
        lines += [f"::: embodied.{home}.{name}", f"    options: {{heading: embodied.{name}, toc_label: {name}}}", ""]
    return "\n".join(lines)
