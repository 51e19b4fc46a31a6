"""The machine: its packages, drivers and load (`machine`), and `probes`, which try simulators and engines out."""
