"""Measure the costs of a recipe on this machine, for plans: python -m embodied.profiling recipe=maniskill_ppo"""

from embodied.profiling.measure import main

if __name__ == "__main__":
    raise SystemExit(main())
