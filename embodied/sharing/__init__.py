"""Several runs on the devices of one machine or cluster (`python -m embodied.share`).

`runs` starts and watches them, `lease_server` grants devices, `replay` predicts how long they take, `page` shows who
had which device. A run itself knows only the four hooks of `runtime/shared_leases.py`.
"""
