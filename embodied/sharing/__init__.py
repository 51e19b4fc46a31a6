"""Several runs on the devices of one machine or cluster (`python -m embodied.share`), also seeds and sweeps.

`children` runs them as processes, `runs` divides devices among them, `lease_server` grants devices, `page` shows who
had which device. A run itself knows only the four hooks of `runtime/shared_leases.py`.
"""
