"""Several runs on the devices of one machine or cluster (`python -m embodied.share`).

`runs` divides devices among them and starts them, `lease_server` grants devices, `plan` predicts how long they take,
`page` shows who had which device. A run itself knows only the four hooks of `runtime/shared_leases.py`.
"""
