"""From a recipe and key=value words to one validated, frozen RunConfig, and the answers to mistakes in them.

`recipe` loads one, `sections` and `key_tree` say what it may hold, `commands` what a command asks of it, `cli` reads
words and `yaml_values` their values, `merge` puts files and words together, `recipe_files` and `base_recipe` find them;
`published_models` knows the models of others and their recipes;
`help` and `mistakes` are what a user is answered.
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
