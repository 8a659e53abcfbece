"""The processes that made a run: what is known of each, and in which order they stand."""

from __future__ import annotations

import json

from hkd_hpc.comm.launchers import batch_job
from hkd_hpc.state import sessions


def text(*after_rounds: int) -> str:
    return json.dumps([{"after_round": round} for round in after_rounds])


def test_the_longer_record_of_the_earlier_ones_counts():
    """The checkpoint of round 2 does not know a process that was killed after it, in round 3; metrics.h5 does."""
    found = sessions.resumed(text(0), [text(0), text(0, 2)], after_round=2)
    assert json.loads(found) == [{"after_round": 0}, {"after_round": 2}, {"after_round": 2}]


def test_a_run_of_an_older_version_has_none():
    assert json.loads(sessions.resumed(text(0), ["[]", "[]"], after_round=4)) == [{"after_round": 4}]


def test_the_batch_job():
    assert batch_job({"SLURM_JOB_ID": "17", "HOME": "/"}) == {"scheduler": "slurm", "job_id": "17"}
    assert batch_job({"PBS_JOBID": "3.head"}) == {"scheduler": "pbs", "job_id": "3.head"}
    assert batch_job({"SLURM_JOB_ID": ""}) == {}
