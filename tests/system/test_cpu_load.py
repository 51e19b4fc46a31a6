"""How many of our cores other programs keep busy, from the kernel's counters and our own."""

import os

from embodied.system.cpu_load import LoadMeter, under_load

TICKS = os.sysconf("SC_CLK_TCK")


def write(stat, **busy_s):
    """/proc/stat of four cores that have worked for so many seconds, and idled for a hundred."""
    rows = [f"cpu{n} {int(TICKS * busy_s.get(f'core{n}', 0))} 0 0 {100 * TICKS} 7 0 0 0 0 0" for n in range(4)]
    stat.write_text("\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *rows, "intr 1 2 3"]))


def test_others_are_what_our_cores_worked_less_what_we_did(tmp_path):
    now, own = [0.0], [0.0]
    write(tmp_path / "stat", core0=1, core1=1)
    meter = LoadMeter(tmp_path / "stat", {0, 1}, clock=lambda: now[0], own_s=lambda: own[0])
    now[0], own[0] = 10.0, 12.0
    write(tmp_path / "stat", core0=11, core1=8, core3=50)  # ten and seven seconds on our two, of which we twelve
    assert meter.others() == 0.5
    own[0] = 30.0  # counters of processes lag behind each other
    assert meter.others() == 0.0


def test_a_system_that_does_not_tell_is_not_called_quiet(tmp_path):
    now = [0.0]
    meter = LoadMeter(tmp_path / "none", {0, 1}, clock=lambda: now[0], own_s=lambda: 0.0)
    now[0] = 1.0
    assert meter.others() is None
    (tmp_path / "zeros").write_text("cpu0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0\n")
    meter = LoadMeter(tmp_path / "zeros", {0, 1}, clock=lambda: now[0], own_s=lambda: 0.0)
    now[0] = 2.0
    assert meter.others() is None


def test_a_machine_counts_as_busy_from_a_tenth_of_its_cores():
    assert under_load({"before": 0.2, "during": 0.1}, 2) == ""
    assert "0.3 during it, of 2" in under_load({"before": 0.0, "during": 0.3}, 2)
    assert under_load({"before": 1.0, "during": None}, 16) == "" == under_load({}, 2)
