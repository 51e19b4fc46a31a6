"""Turns a recipe and key=value arguments into one validated, frozen RunConfig, and explains mistakes in them.

`recipe` has the options of a run and loads them; `sections` has those of the whole run. `command_line` knows the
commands, their arguments and the recipe that they start from; `read` merges recipes and arguments, `recipe_files`
finds packaged ones; `answers` has the help and explains mistakes.
"""
