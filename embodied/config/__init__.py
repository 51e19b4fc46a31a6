"""Turns a recipe and key=value arguments into one validated, frozen RunConfig, and explains mistakes in them.

`recipe` loads a recipe, `sections` and `key_tree` define its keys, `commands` the arguments of each command. `cli`
reads arguments and `yaml_values` their values, `merge` merges files and arguments, `recipe_files` and `base_recipe`
find recipes. `published_models` lists published models and their recipes; `help` and `mistakes` write the answers to
users.
"""

__all__ = [
    "base_recipe",
    "cli",
    "commands",
    "help",
    "key_tree",
    "merge",
    "mistakes",
    "published_models",
    "recipe",
    "recipe_files",
    "sections",
    "yaml_values",
]
