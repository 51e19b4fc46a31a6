"""Several runs of one recipe (`embodied/sweep.py`): `children` runs them as processes, `run_group` stores which run
belongs where."""
