"""Where figures are from: the fields that results of several benchmarks begin with."""

from __future__ import annotations

import os

from nsm_lab.bench.machine import machine
from nsm_lab.provenance import command_line, source_commit


def about_this_run() -> dict[str, object]:
    """Command, commit, machine, and the load of its last minute."""
    return {"command": command_line(), "commit": source_commit(), "machine": machine(), "load": os.getloadavg()[0]}
