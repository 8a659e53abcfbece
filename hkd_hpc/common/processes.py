"""Processes of this machine, as /proc shows them."""

from __future__ import annotations


def stat_of(pid: int) -> list[str]:
    """What /proc/PID/stat has behind the name: state, parent ...; nothing of a process that is gone or hidden."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return []
