"""What share.jsonl of any runs has to obey."""

from itertools import pairwise


def check_hands(lines):
    """Devices change hands through free, and in the order of time. Returns who has which device at the end."""
    holders = {}
    for line in lines:
        if "device" in line:
            before = holders.get(line["device"])
            assert (before is None) != (line["run"] is None), "free, then held, then free"
            holders[line["device"]] = line["run"]
    assert all(a["at"] <= b["at"] for a, b in pairwise(lines))
    return holders


def check_record(lines, names):
    """What share.jsonl says fits together, and all runs have ended."""
    holders = check_hands(lines)
    assert (
        {line["run"] for line in lines if "joins" in line} == {line["run"] for line in lines if "ends" in line} == names
    )
    assert not any(holders.values())
