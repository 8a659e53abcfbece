"""The processes that made a run, one entry for each start of its job: `sessions_json` in metrics.h5 and checkpoints."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence

from hkd_hpc.comm.launchers import batch_job, read_hint
from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.runtime.machine import cpu_kind


def begun(comm: Comm) -> str:
    """The sessions of a run that begins in this process, as JSON: a list of one, which docs/files.md describes."""
    session = {
        "started_unix_s": int(time.time()),
        "after_round": 0,
        "command_line": shlex.join(sys.orig_argv).encode("utf-8", "backslashreplace").decode(),
        "ranks": comm.size,
        "hosts": Counter(comm.hosts),
        "devices": Counter(comm.devices),
        "cpu": cpu_kind(),
        "launcher": read_hint(os.environ).launcher,
        **batch_job(os.environ),
    }
    return json.dumps([session])


def resumed(own: str, earlier: Sequence[str], after_round: int) -> str:
    """The sessions of a run that this process resumes, as JSON.

    Args:
        own: those of a run that begins in this process.
        earlier: what the files of the run say. A process that was killed before its first checkpoint is in metrics.h5
            alone, and none of them is where an earlier version wrote the files.
        after_round: what this process resumes from.
    """
    [session] = json.loads(own)
    return json.dumps([*max(map(json.loads, earlier), key=len), session | {"after_round": after_round}])
