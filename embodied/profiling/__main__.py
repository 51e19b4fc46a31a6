"""python -m embodied.profiling recipe=maniskill_ppo: see `measure`."""

from embodied.profiling.measure import main

if __name__ == "__main__":
    raise SystemExit(main())
