"""Turns a recipe and key=value arguments into one validated, frozen RunConfig, and explains mistakes in them.

`recipe` loads a recipe and `sections` defines its keys, `read` reads and merges files and values, `recipe_files` and
`base_recipe` find recipes. `cli` reads arguments and answers users; `suggestions` has the answers to mistakes.
"""

__all__ = ["base_recipe", "cli", "read", "recipe", "recipe_files", "sections", "suggestions"]
