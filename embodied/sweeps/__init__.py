"""Several runs of one recipe: seeds, and the settings of a sweep.

`seeds_and_sweeps` starts them, `children` runs them as processes, `run_group` stores which run belongs where.
"""
