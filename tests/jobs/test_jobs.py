"""Sweeps on a laptop and under a real SLURM: nothing runs twice or is lost, the bits are those of a reference run."""

from __future__ import annotations

import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import slurm_cluster
import toy

from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.stop import STOPPED
from hkd_hpc.jobs import executors, launcher, pool, task, watch
from hkd_hpc.jobs import slurm as slurm_jobs
from hkd_hpc.jobs.__main__ import main
from hkd_hpc.jobs.checks import check
from hkd_hpc.jobs.files import JOB_LOCK, LAUNCH_LOCK, Status, launch_lock, read_launches
from hkd_hpc.jobs.launcher import plan, top_up
from hkd_hpc.jobs.options import Options
from hkd_hpc.jobs.pool import Pool
from hkd_hpc.jobs.slurm import Queue
from hkd_hpc.jobs.study import resubmit, wait_or_cancel
from hkd_hpc.jobs.task import Task, begin
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.lock import LockWatch, RunLock
from jobs import Study, Sweep, launch

pytestmark = pytest.mark.slow

ROUNDS = 3
PATIENCE_S = 300  # of a test that has failed; jobs that import torch at once may need minutes on a busy machine
SCHEME = '''
import os, signal, time
from hkd_hpc.schemes.fedavg import FedAvg
from hkd_hpc.schemes.fedhkd import FedHKD
from hkd_hpc.schemes.moon import Moon


class Hold:
    """A scheme that does not get through round 2 while the file $HOLD is there."""

    def begin(self, client):
        super().begin(client)
        while client.round == 2 and os.path.exists(os.environ.get("HOLD", "")):
            time.sleep(0.02)


class Held(Hold, FedAvg): pass
class HeldMoon(Hold, Moon): pass
class HeldFedHKD(Hold, FedHKD): pass


class Noticed(FedAvg):
    """Its process is given notice in the last round, once: while the file $HOLD is there."""

    def begin(self, client):
        if client.round == 3 and os.path.exists(os.environ["HOLD"]):
            os.unlink(os.environ["HOLD"])
            os.kill(os.getpid(), signal.SIGUSR2)
'''


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.save_data(tmp_path_factory.mktemp("data") / "data.npz")


@pytest.fixture
def hold(tmp_path, monkeypatch):
    """The file that holds the scheme held:Held in round 2."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{toy.PROJECT}")
    monkeypatch.syspath_prepend(str(tmp_path))
    toy.write_module(tmp_path, "held", SCHEME)
    path = tmp_path / "hold"
    path.touch()
    monkeypatch.setenv("HOLD", str(path))
    return path


def sweep_of(data, **axes):
    settings = dict(text.split("=", 1) for text in toy.settings(data, f"fed.rounds={ROUNDS}", "model.name=small"))
    return Sweep(settings=settings, **axes)


def reference(trials, root):
    """The last weights of each trial, run in this process without launcher."""
    for trial in trials:
        toy.train_ok(1, *trial.arguments(), "--out", root / trial.name)
    return {trial.name: toy.last_sha(root / trial.name) for trial in trials}


def hashes(study):
    return {trial.name: toy.last_sha(study.root / trial.name) for trial in study.trials}


def states(study):
    return [state.state for state in study.status()]


# ---- SLURM


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    slurm_cluster.need(slurm_cluster.why_not())
    with slurm_cluster.running_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def slurm(cluster, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    monkeypatch.setenv("TMPDIR", cluster.env["TMPDIR"])
    yield cluster
    for job in cluster.cancel_all():
        print(f"left in the queue: {job}")  # of a test that failed; the next one must not find it


def write_spec(path, sweep):
    """The sweep as a TOML file; its axes are lists."""
    tables = [
        ("axes", {name: [label for label, _ in points] for name, points in sweep.axes.items()}),
        ("settings", sweep.settings),
    ]
    path.write_text(
        "\n".join(
            line
            for table, values in tables
            for line in (f"[{table}]", *(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in values.items()))
        )
    )
    return path


def test_slurm_jobs_that_are_signalled_requeued_or_killed_end_with_the_bits_of_an_undisturbed_run(
    slurm, data, hold, tmp_path
):
    """SLURM's notice of the time limit, a requeue, a KILL, and the death of the process that launched and waits."""
    sweep = sweep_of(data, scheme=["held:Held", "held:HeldMoon", "held:HeldFedHKD"])
    root = tmp_path / "my study"
    submitter = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "jobs",
            "launch",
            write_spec(tmp_path / "spec.toml", sweep),
            "--root",
            root,
            "--ranks",
            "2",
            "--time-min",
            "10",
            "--wait",
        ],
        cwd=toy.PROJECT,
        stdout=subprocess.DEVNULL,
    )
    folders = [root / trial.name for trial in sweep.trials()[0]]
    toy.wait_until(lambda: all(toy.rounds_done(folder) == 1 for folder in folders), PATIENCE_S)
    submitter.kill()
    study = launch(sweep, root=root, ranks=2)  # all are running: nothing is submitted
    assert submitter.wait() == -signal.SIGKILL
    assert states(study) == ["running"] * 3
    assert len(list((study.root / "launches").iterdir())) == 1
    jobs = [state.job for state in study.status()]
    slurm.run("scancel", "--signal=USR2", jobs[0])
    slurm.run("scontrol", "requeue", jobs[1])
    slurm.run("scancel", "--signal=KILL", jobs[2])
    toy.wait_until(lambda: states(Study(study.root))[2] == "lost", PATIENCE_S)  # asks SLURM's queue anew each time
    hold.unlink()
    launch(sweep, root=study.root, ranks=2)
    assert study.wait(), study.status()
    assert hashes(study) == reference(study.trials, tmp_path / "reference")
    assert [Status.read(folder).starts for folder in folders] == [2, 2, 2]
    logs = [(folder / "log.txt").read_text() for folder in folders]
    assert "stopped by SIGUSR2 after round 2" in logs[0]
    assert "resuming after round 2" in logs[0]
    assert all("resuming after round 1" in log for log in logs[1:])
    assert "2 ranks on 1 host" in logs[0]


def test_slurm_jobs_are_cancelled_and_their_trials_resubmitted(slurm, data, hold, tmp_path):
    study = launch(sweep_of(data, scheme=["held:Held"]), root=tmp_path / "root", time_min=10)
    folder = study.root / study.trials[0].name
    toy.wait_until(lambda: toy.rounds_done(folder) == 1, PATIENCE_S)
    [job] = study.cancel()
    assert slurm.wait_for(job, PATIENCE_S)["JobState"] == "CANCELLED"
    toy.wait_until(lambda: states(study) == ["cancelled"], PATIENCE_S)
    hold.unlink()
    assert resubmit(study.root).wait()
    assert "resuming after round 1" in (folder / "log.txt").read_text()


def test_packed_job_that_is_signalled_or_loses_a_worker_resumes_to_the_bits_of_an_undisturbed_run(
    slurm, data, hold, tmp_path
):
    """Two workers for three trials: one is killed, a signal stops the other, and the requeued job goes on with all."""
    sweep = sweep_of(data, scheme=["held:Held"], seed=[0, 1, 2])
    study = launch(sweep, root=tmp_path / "root", pack=True, slots=2, time_min=10)
    folders = [study.root / trial.name for trial in study.trials]
    toy.wait_until(lambda: [toy.rounds_done(folder) for folder in folders] == [1, 1, 0], PATIENCE_S)
    assert states(study) == ["running", "running", "queued"]
    [job] = {state.job for state in study.status()}
    os.kill(json.loads((folders[1] / JOB_LOCK).read_text())["pid"], signal.SIGKILL)
    toy.wait_until(lambda: states(study)[1] != "running", PATIENCE_S)
    slurm.run("scancel", "--signal=USR2", job)
    hold.unlink()
    assert study.wait(), study.status()
    assert hashes(study) == reference(study.trials, tmp_path / "reference")
    logs = [(folder / "log.txt").read_text() for folder in folders]
    assert "stopped by SIGUSR2 after round 2" in logs[0]
    assert "resuming after round 2" in logs[0]
    assert "resuming after round 1" in logs[1]
    assert [Status.read(folder).starts for folder in folders] == [2, 2, 1]
    assert slurm.wait_for(job)["Restarts"] == "1"
    assert len(read_launches(study.root)[0].jobs) == 1


def test_where_requeue_is_rejected_another_job_follows(slurm, data, hold, tmp_path):
    study = launch(sweep_of(data, scheme=["held:Held"]), root=tmp_path / "root", time_min=10)
    folder = study.root / study.trials[0].name
    toy.wait_until(lambda: toy.rounds_done(folder) == 1, PATIENCE_S)
    [job] = [state.job for state in study.status()]
    slurm.run("scontrol", "update", f"JobId={job}", "Requeue=0")
    slurm.run("scancel", "--signal=USR2", job)
    hold.unlink()
    assert study.wait(), study.status()
    assert hashes(study) == reference(study.trials, tmp_path / "reference")
    [launched] = read_launches(study.root)
    first, second = launched.jobs
    assert first == job
    assert Status.read(folder).job == second
    assert Status.read(folder).starts == 2
    assert f"job {second} follows" in (folder / "log.txt").read_text()


@pytest.mark.parametrize("options", [{"ranks": 2}, {"pack": True, "slots": 2}])
def test_job_whose_round_outlasts_the_notice_is_requeued(slurm, data, hold, tmp_path, options):
    """SLURM is told that the time is up, after a notice in a round that does not end."""
    study = launch(sweep_of(data, scheme=["held:Held"]), root=tmp_path / "root", time_min=10, **options)
    folder = study.root / study.trials[0].name
    toy.wait_until(lambda: toy.rounds_done(folder) == 1, PATIENCE_S)
    [job] = [state.job for state in study.status()]
    slurm.run("scancel", "--signal=USR2", job)
    slurm.run("scontrol", "update", f"JobId={job}", "EndTime=now")
    toy.wait_until(lambda: slurm.job(job)["Restarts"] == "1", PATIENCE_S)
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    hold.unlink()
    assert study.wait(), study.status()
    assert hashes(study) == reference(study.trials, tmp_path / "reference")
    assert "resuming after round 1" in (folder / "log.txt").read_text()
    assert Status.read(folder).starts == 2


def test_node_that_fails_takes_no_trial_with_it(slurm, data, hold, tmp_path):
    study = launch(sweep_of(data, scheme=["held:Held"]), root=tmp_path / "root", time_min=10)
    folder = study.root / study.trials[0].name
    toy.wait_until(lambda: toy.rounds_done(folder) == 1, PATIENCE_S)
    node = Status.read(folder).node
    for state in ("DRAIN", "DOWN"):  # it answers again at once; drained, it is not given the job while the old one ends
        slurm.run("scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=test")
    try:
        hold.unlink()
        assert study.wait(), study.status()
    finally:
        slurm.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    assert hashes(study) == reference(study.trials, tmp_path / "reference")
    status = Status.read(folder)
    assert status.starts == 2
    assert status.node != node
    assert slurm.job(status.job)["Restarts"] == "1"


def test_job_that_slurm_holds_is_told_with_what_releases_it(slurm, data, tmp_path):
    """As it does where a job's launch failed ("launch failed requeued held"): it would wait for ever without a word."""
    study = launch(
        sweep_of(data, scheme=["fedavg"]), root=tmp_path / "root", additional_parameters={"begin": "now+1hour"}
    )
    [job] = read_launches(study.root)[0].jobs
    assert study.status()[0].error == ""
    slurm.run("scontrol", "hold", job)
    told = []
    tell = watch.when_counts_change(told.append)
    for _ in range(2):
        tell(Study(study.root).status())
    line = f"SLURM holds job {job} (JobHeldAdmin): scontrol release {job} lets it continue"
    assert told == ["1 trials: 1 queued", line]
    assert line in watch.table(Study(study.root).status())
    slurm.run("scontrol", "release", job)
    assert Study(study.root).status()[0].error == ""


def test_launch_within_an_allocation_where_sacct_does_not_answer(slurm, data, tmp_path):
    """sacct is never asked: it may be missing, failing, slow or empty."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sacct").write_text(f"#!/bin/bash\ntouch '{tmp_path}/asked'\nsleep 600\n")
    (tmp_path / "bin/sacct").chmod(0o755)
    write_spec(tmp_path / "spec.toml", sweep_of(data, scheme=["fedavg"], seed=[0]))
    outcome = slurm.run(
        "salloc",
        "--quiet",
        "--ntasks=2",
        sys.executable,
        "-m",
        "jobs",
        "launch",
        tmp_path / "spec.toml",
        "--root",
        tmp_path / "root",
        "--wait",
        cwd=toy.PROJECT,
        env={**slurm.env, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
    )
    assert outcome.returncode == 0, outcome
    study = Study(tmp_path / "root")
    assert "1 of 1 runs are complete" in outcome.stdout
    assert states(study) == ["complete"]
    assert hashes(study) == reference(study.trials, tmp_path / "reference")
    assert not (tmp_path / "asked").exists()
    assert "1 rank on 1 host" in (study.root / study.trials[0].name / "log.txt").read_text()


def test_more_trials_than_an_array_may_have(slurm, data, tmp_path):
    """MaxArraySize is 10 there. The jobs wait for an hour that never comes."""
    sweep = sweep_of(data, scheme=["fedavg"], seed=range(37))
    study = launch(sweep, root=tmp_path / "root", additional_parameters={"begin": "now+1hour"})
    assert states(study) == ["queued"] * 37
    queued = slurm.run("squeue", "--noheader", "--array", "--states=PENDING", "--format=%i").stdout.split()
    assert sorted(queued) == sorted(read_launches(study.root)[0].jobs) == sorted(study.cancel())
    assert states(Study(study.root)) == ["cancelled"] * 37


def test_what_slurm_rejects_is_told_with_the_option_that_mends_it(slurm, data, tmp_path):
    trials, _ = sweep_of(data, scheme=["fedavg"]).trials()
    for options, mend in (
        (Options(ranks=1000), "fewer --ranks"),
        (Options(partition="none"), "another --partition"),
        (Options(gpus_per_node=9), "--gpus-per-node"),
    ):
        [line] = check(trials, "slurm", tmp_path, options)
        assert line.startswith("SLURM rejects a job of "), line
        assert "; mended by " in line, line
        assert mend in line, line


# ---- SLURM's programs, played by scripts: limits and rejections

FAKE = {
    "squeue": 'touch "$FAKE/queued"; cat "$FAKE/queued"',
    "scancel": "",
    "srun": "",
    "scontrol": 'echo "MaxArraySize            = 10"',
    "sbatch": '''
if [[ $1 == --test-only ]]; then cat >/dev/null; exit 0; fi
n=$(cat "$FAKE/count" 2>/dev/null || echo 0); n=$((n + 1)); echo $n > "$FAKE/count"
if [[ $n == "$REJECT" ]]; then echo "sbatch: error: Batch job submission failed: Job violates policy" >&2; exit 1; fi
env > "$FAKE/env.$n"; cp "$1" "$FAKE/script.$n"
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p' "$1")
if [[ -z $last ]]; then echo "$n"; else seq -f "${n}_%.0f" 0 "$last"; fi >> "$FAKE/queued"
echo "Submitted batch job $n"''',
}


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A folder of scripts in place of SLURM; MaxArraySize is 10."""
    folder = tmp_path / "fake"
    folder.mkdir()
    for name, text in FAKE.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(folder))
    return folder


@pytest.mark.parametrize(
    "words",
    [
        "resolve_ctls_from_dns_srv: res_nsearch error: Unknown host",
        "sbatch: error: fetch_config: DNS SRV lookup failed\nsbatch: error: Could not establish a configuration source",
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
    ],
)
def test_where_there_is_no_slurm_to_ask_it_is_not_said_to_reject(fake, tmp_path, data, words):
    (fake / "sbatch").write_text(f"#!/bin/sh\necho {shlex.quote(words)} >&2\nexit 1\n")
    trials, _ = sweep_of(data, scheme=["fedavg"]).trials()
    [line] = check(trials, "slurm", tmp_path, Options())
    assert line.startswith("SLURM cannot be reached from here: "), line
    assert line.endswith("; launch on a login node, or use --executor local"), line


def test_arrays_keep_to_the_limit_and_a_rejected_one_leaves_the_rest_to_the_next_launch(fake, tmp_path, monkeypatch):
    sweep = Sweep(scheme=["fedavg"], seed=range(37))
    monkeypatch.setenv("REJECT", "3")
    with pytest.raises(
        UsageError, match=r"rejected array 3 of 4 \(.*Job violates policy\); 20 of 37 trials are submitted"
    ):
        launch(sweep, root=tmp_path / "root")
    study = launch(sweep, root=tmp_path / "root")
    launch(sweep, root=tmp_path / "root")  # all are queued now
    scripts = [(fake / f"script.{n}").read_text() for n in (1, 2, 4, 5)]
    arrays = [line for text in scripts for line in text.splitlines() if line.startswith("#SBATCH --array=")]
    assert arrays == ["#SBATCH --array=0-9%10"] * 3 + ["#SBATCH --array=0-6%7"]
    assert (fake / "count").read_text() == "5\n"
    assert states(study) == ["queued"] * 37
    given = [name for launched in read_launches(study.root) for names in launched.jobs.values() for name in names]
    assert sorted(given) == sorted(trial.name for trial in study.trials)


def test_jobs_submitted_from_within_a_job_inherit_nothing_of_it(fake, tmp_path, monkeypatch):
    inherited = {
        "SLURM_CPU_BIND": "quiet",
        "SLURM_MEM_PER_CPU": "4000",
        "SLURM_JOB_ID": "1",
        "SBATCH_EXPORT": "NONE",
        "OMPI_COMM_WORLD_RANK": "0",
        "SLURM_CONF": "/x/slurm.conf",
        "MYVAR": "1",
    }
    for name, value in inherited.items():
        monkeypatch.setenv(name, value)
    launch(
        Sweep(scheme=["fedavg"], clients=[3, 4]),
        root=tmp_path / "root",
        ranks="clients",
        nodes=2,
        cpus_per_task=3,
        time_min=90,
        partition="gpu",
        comment="a b",
    )
    left = dict(line.partition("=")[::2] for line in (fake / "env.1").read_text().splitlines())
    assert {name: left[name] for name in inherited if name in left} == {"SLURM_CONF": "/x/slurm.conf", "MYVAR": "1"}
    scripts = [(fake / f"script.{n}").read_text() for n in (1, 2)]  # two sizes: two submissions
    assert "#SBATCH --ntasks=4\n" in scripts[0]
    assert "#SBATCH --ntasks=5\n" in scripts[1]
    assert "#SBATCH --ntasks-per-node=2\n" in scripts[0]
    assert "#SBATCH --ntasks-per-node=3\n" in scripts[1]
    for line in (
        "--nodes=2",
        "--cpus-per-task=3",
        "--time=90",
        "--partition=gpu",
        "--requeue",
        "--open-mode=append",
        "--signal=USR2@120",
        "--comment='a b'",
    ):
        assert f"#SBATCH {line}\n" in scripts[0]
    assert """bash -c 'trap "" USR1 USR2; exec "$@"' bash """ in scripts[0]
    assert "--mpi=none --kill-on-bad-exit=1 --wait=0 --open-mode=append --export=ALL --cpus-per-task=3 " in scripts[0]


def test_never_more_jobs_in_the_queue_than_the_site_allows(fake, tmp_path, capsys):
    (fake / "queued").write_text("900\n901\n")  # jobs of other studies
    study = launch(Sweep(scheme=["fedavg"], seed=range(9)), root=tmp_path / "root", max_queued=6)
    assert states(study) == ["queued"] * 4 + ["missing"] * 5
    assert "5 trials wait outside the queue (max_queued=6)" in capsys.readouterr().out
    resubmit(study.root)
    assert (fake / "count").read_text() == "1\n"  # none fits
    ended = ["900", "1_0", "1_1"]
    (fake / "queued").write_text("\n".join(set((fake / "queued").read_text().split()) - set(ended)) + "\n")
    study = Study(study.root)
    top_up(study.root, study.trials, study.status(), Queue(), print)
    assert (
        states(study) == ["lost"] * 2 + ["queued"] * 5 + ["missing"] * 2
    )  # what was tried is for resubmit, not for this


def test_nothing_is_submitted_after_a_cancellation_that_came_while_it_was_checked(fake, tmp_path, monkeypatch):
    (fake / "queued").write_text("900\n")
    study = launch(Sweep(scheme=["fedavg"], seed=range(3)), root=tmp_path / "root", max_queued=2)
    (fake / "queued").write_text("")
    check = launcher.preflight

    def checked(*arguments):
        found = check(*arguments)
        study.cancel()
        return found

    monkeypatch.setattr(launcher, "preflight", checked)
    with pytest.raises(UsageError, match="the launch was cancelled"):
        top_up(study.root, study.trials, study.status(), Queue(), print)
    assert (fake / "count").read_text() == "1\n"
    assert [record.cancelled for record in read_launches(study.root)] == [True]


def test_whoever_launches_waits_for_who_launches(fake, tmp_path, monkeypatch):
    monkeypatch.setattr("hkd_hpc.jobs.files.LAUNCH_WAIT_S", 0.2)
    with (
        launch_lock(tmp_path),
        pytest.raises(UsageError, match="is in use by another command that launches or cancels: host .* do it again"),
    ):
        launch(Sweep(scheme=["fedavg"]), root=tmp_path)


@pytest.mark.parametrize("look_s, slept", [(0.01, 2.0), (3.0, 150.0)])
def test_waiting_takes_a_fiftieth_of_a_core(monkeypatch, look_s, slept):
    """However long a look at all trials takes."""
    now, sleeps, found = [0.0], [], [["running"], ["running"], ["complete"]]

    def look():
        now[0] += look_s
        return [watch.TrialState("trial", state, 1, 1) for state in found.pop(0)]

    monkeypatch.setattr(watch, "time", SimpleNamespace(process_time=lambda: now[0], sleep=sleeps.append))
    assert [state.state for state in watch.wait(look, lambda states: None)] == ["complete"]
    assert sleeps == pytest.approx([slept] * 2)


def test_waiting_goes_on_while_trials_are_outside_the_queue(fake, tmp_path, monkeypatch):
    monkeypatch.setattr("hkd_hpc.jobs.slurm.QUEUE_S", 0.0)
    (fake / "queued").write_text("900\n")  # a job of another study: none fits
    study, said = launch(Sweep(scheme=["fedavg"]), root=tmp_path / "root", max_queued=1), []

    def say(text):
        said.append(text)
        (fake / "queued").write_text("")  # whatever is queued has ended

    assert not study.wait(say)
    assert said == [
        "1 trials: 1 missing",
        "1 trials: 1 missing; 1 to start",
        "submitted job 1: 1 trials of 1 rank(s)",
        "1 trials: 1 lost",
    ]


def test_the_jobs_at_a_time_are_those_of_all_arrays_together(fake, tmp_path):
    """20 trials and MaxArraySize 10: two arrays share 4; one at least runs of each."""
    launch(Sweep(scheme=["fedavg"], seed=range(20)), root=tmp_path / "four", array_parallelism=4)
    launch(Sweep(scheme=["fedavg"], seed=range(20)), root=tmp_path / "one", array_parallelism=1)
    arrays = [
        line for n in range(1, 5) for line in (fake / f"script.{n}").read_text().splitlines() if "--array=" in line
    ]
    assert arrays == ["#SBATCH --array=0-9%2"] * 2 + ["#SBATCH --array=0-9%1"] * 2


def test_packed_launch_is_a_few_jobs_that_may_have_all_trials(fake, tmp_path):
    sweep = Sweep(scheme=["fedavg"], seed=range(9))
    study = launch(
        sweep, root=tmp_path / "root", pack=True, slots=2, gpus_per_node=2, nodes=1, allocations=5, max_queued=2
    )
    assert states(study) == ["queued"] * 9
    script = (fake / "script.1").read_text()
    for line in ("--array=0-1%2", "--ntasks=4", "--ntasks-per-node=4", "--gpus-per-node=2"):
        assert f"#SBATCH {line}\n" in script
    assert "--kill-on-bad-exit=0 --wait=0 " in script
    assert read_launches(study.root)[0].jobs == {f"1_{n}": [trial.name for trial in study.trials] for n in range(2)}


@pytest.mark.parametrize(
    "options, text",
    [
        ({"pack": True}, "pack: on nodes without GPU, slots=N says how many trials at a time"),
        ({"pack": True, "slots": 2, "ranks": 3}, "pack: each trial is one process; leave ranks=3 away"),
        ({"pack": True, "slots": 2, "allocations": 0}, "allocations=0: must be a whole number >= 1"),
        ({"slots": 4}, "slots and allocations: are for a packed launch"),
        ({"max_queued": -1}, "max_queued=-1: must be a whole number >= 0"),
    ],
)
def test_packing_that_cannot_be_meant_is_rejected(fake, tmp_path, options, text):
    with pytest.raises(UsageError, match=text):
        launch(Sweep(scheme=["fedavg"]), root=tmp_path / "root", **options)
    assert text in plan(Sweep(scheme=["fedavg"]), "slurm", tmp_path / "root", Options(**options))
    assert not (tmp_path / "root").exists()


def test_a_silent_queue_means_unknown_not_failed(fake, tmp_path):
    study = launch(Sweep(scheme=["fedavg"]), root=tmp_path / "root")
    (fake / "squeue").write_text("#!/bin/bash\nexit 1\n")
    assert states(Study(study.root)) == ["queued"]
    (fake / "squeue").write_text("#!/bin/bash\n")
    [state] = Study(study.root).status()
    assert (state.state, state.error) == ("lost", "job 1 ended before it began with this trial")
    (study.root / "submitit/1_0_log.err").write_text(
        "bash: line 1: /x/python: No such file or directory\nsrun: launch/slurm: Terminating\n"
    )
    [state] = Study(study.root).status()
    assert state.error == (
        "job 1 ended before it began with this trial; bash: line 1: /x/python: No such file or "
        f"directory ({study.root}/submitit/1_0_log.err)"
    )


def test_a_launch_that_is_cancelled_while_another_command_changes_its_record_stays_cancelled(fake, tmp_path):
    study = launch(Sweep(scheme=["fedavg"]), root=tmp_path / "root")
    with RunLock(study.root, name=LAUNCH_LOCK):
        [record] = read_launches(study.root)
        cancelling = threading.Thread(target=study.cancel)
        cancelling.start()
        cancelling.join(1.0)  # it waits for the lock
        record.jobs["2"] = [study.trials[0].name]
        record.write(study.root)
    cancelling.join()
    [record] = read_launches(study.root)
    assert (list(record.jobs), record.cancelled) == (["1", "2"], True)
    with pytest.raises(UsageError, match="the launch was cancelled"):
        slurm_jobs.follow(study.root, Task(study.root, study.trials[0], "0001"), study.trials, "0001", "1")
    assert (fake / "count").read_text() == "1\n"


def test_what_scancel_rejects_keeps_no_other_launch_from_its_end(fake, tmp_path):
    """Where squeue does not answer, ids are passed that SLURM has forgotten."""
    launch(Sweep(scheme=["fedavg"]), root=tmp_path / "root")
    study = launch(Sweep(scheme=["fedavg"], seed=[1]), root=tmp_path / "root")
    (fake / "squeue").write_text("#!/bin/bash\nexit 1\n")
    line = "scancel: error: Kill job error on job id 1: Invalid job id specified"
    (fake / "scancel").write_text(
        f'#!/bin/bash\necho "$@" >> "$FAKE/cancelled"\nif [[ $1 == 1 ]]; then echo "{line}" >&2; exit 1; fi\n'
    )
    with pytest.raises(UsageError) as error:
        study.cancel()
    assert str(error.value) == f"scancel rejected: {line}; all else is cancelled"
    assert (fake / "cancelled").read_text() == "1\n2\n"
    assert [record.cancelled for record in read_launches(study.root)] == [True, True]


def test_an_sbatch_that_does_not_answer_is_one_line(fake, tmp_path, monkeypatch):
    (fake / "sbatch").write_text("#!/bin/bash\nexec sleep 600\n")
    monkeypatch.setattr(slurm_jobs, "ANSWER_S", 0.5)
    trials, _ = Sweep(scheme=["fedavg"]).trials()
    assert slurm_jobs.rejections(trials, tmp_path, Options()) == [
        "SLURM rejects a job of 1 rank(s) on 1 node(s): sbatch --test-only did not answer within 0.5 s; sinfo says "
        "whether SLURM is up"
    ]


# ---- a laptop


def test_local_study_is_cancelled_grows_and_goes_on(data, hold, tmp_path):
    root = tmp_path / "my study"
    study = launch(sweep_of(data, scheme=["held:Held"], seed=[0, 1]), "local", root=root, parallel=1)
    folder = root / study.trials[0].name
    toy.wait_until(lambda: toy.rounds_done(folder) == 1, PATIENCE_S)
    assert states(study) == ["running", "queued"]
    grown = sweep_of(data, scheme=["held:Held"], seed=[0, 1, 2])
    study = launch(grown, "local", root=root, parallel=1)
    toy.wait_until(lambda: states(study) == ["running", "queued", "running"], PATIENCE_S)
    assert len(study.cancel()) == 2
    toy.wait_until(lambda: states(study) == ["cancelled"] * 3, PATIENCE_S)
    hold.unlink()
    before = toy.file_hashes(folder / "checkpoints")
    assert list(before) == ["round_0001.h5"]
    study = resubmit(root)
    assert study.wait()
    assert hashes(study) == reference(study.trials, tmp_path / "reference")
    assert "resuming after round 1" in (folder / "log.txt").read_text()
    assert watch.table(study.status()).endswith("\n3 trials: 3 complete")


def test_workers_of_a_command_that_ignores_interrupts_can_be_cancelled(data, hold, tmp_path):
    """As `nohup python -m hkd_hpc.jobs launch ... &` does: what it starts would ignore them too."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        study = launch(sweep_of(data, scheme=["held:Held"]), "local", root=tmp_path / "root")
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    toy.wait_until(lambda: toy.rounds_done(study.root / study.trials[0].name) == 1, PATIENCE_S)
    assert len(study.cancel()) == 1
    toy.wait_until(lambda: states(study) == ["cancelled"], PATIENCE_S)


def test_workers_that_were_started_before_an_interrupt_can_be_cancelled(data, hold, tmp_path, monkeypatch):
    made = []

    def interrupted(*arguments):
        made.append(arguments)
        if len(made) == 2:
            raise KeyboardInterrupt
        return Pool(*arguments)

    monkeypatch.setattr(executors, "Pool", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch(sweep_of(data, scheme=["held:Held"], seed=[0, 1]), "local", root=tmp_path / "root", parallel=2)
    study = Study(tmp_path / "root")
    toy.wait_until(lambda: toy.rounds_done(study.root / study.trials[0].name) == 1, PATIENCE_S)
    assert states(study) == ["running", "queued"]
    assert len(study.cancel()) == 1
    toy.wait_until(lambda: states(study) == ["cancelled"] * 2, PATIENCE_S)


def test_a_copy_of_a_study_has_no_hold_on_the_jobs_of_the_original(data, hold, tmp_path):
    study = launch(sweep_of(data, scheme=["held:Held"]), "local", root=tmp_path / "root")
    folder = study.root / study.trials[0].name
    toy.wait_until(lambda: toy.rounds_done(folder) == 1, PATIENCE_S)
    copy = Study(shutil.copytree(study.root, tmp_path / "copy"))
    assert copy.cancel() == []
    assert states(study) == ["running"]
    study.cancel()
    toy.wait_until(lambda: states(study) == ["cancelled"], PATIENCE_S)
    moved = Study(shutil.move(study.root, tmp_path / "moved"))
    assert [list(record.jobs) for record in read_launches(moved.root)] == [["here"]]


def test_ctrl_c_while_somebody_waits_ends_the_runs_on_this_machine_as_it_says(data, hold, tmp_path):
    study, said = launch(sweep_of(data, scheme=["held:Held"]), "local", root=tmp_path / "root"), []
    folder = study.root / study.trials[0].name

    def interrupt():
        toy.wait_until(lambda: toy.rounds_done(folder) == 1, PATIENCE_S)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        wait_or_cancel(study, "local", said.append, lambda states: None)
    assert said[0] == "interrupted: the runs end now; the same command resumes them from their last checkpoints"
    assert (states(study), toy.rounds_done(folder)) == (["cancelled"], 1)


def test_a_status_of_an_earlier_version_is_read(tmp_path):
    status = Status("stopped", "0001", "7", "node1", 2, 3, starts=4)
    (tmp_path / "status.json").write_text(json.dumps({**asdict(status), "heartbeat": 1700000000.0}))
    assert Status.read(tmp_path) == status
    status.write(tmp_path)
    assert "heartbeat" not in json.loads((tmp_path / "status.json").read_text())


def test_a_trial_that_fails_is_told_with_its_line_and_does_not_stop_the_others(data, tmp_path, capsys):
    sweep = sweep_of(data, fraction={"too few": {"data.fraction": 0.0001}, "enough": {}})
    study = launch(sweep, "debug", root=tmp_path / "root")
    first, second = study.status()
    assert (first.state, second.state) == ("failed", "complete")
    assert first.error.startswith("hkd_hpc: ")
    assert "data.fraction=0.0001 of 300 training images is 0" in first.error
    lines = watch.table(study.status()).splitlines()
    capsys.readouterr()
    assert main(["status", str(study.root), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(row["state"], row["round"], row["local"] is None) for row in shown] == [
        ("failed", 0, True),
        ("complete", ROUNDS, False),
    ]
    assert lines[1].split()[1] == "complete"
    assert lines[2].split()[1] == "failed"
    assert first.error in lines[3]


def test_a_trial_that_another_job_has_is_left_alone(data, tmp_path):
    sweep = sweep_of(data, scheme=["fedavg"])
    [trial] = sweep.trials()[0]
    (tmp_path / trial.name).mkdir()
    with RunLock(tmp_path / trial.name, name=JOB_LOCK):
        Pool(tmp_path, [trial], "0001", place=0)()
        assert [path.name for path in (tmp_path / trial.name).iterdir() if path.is_file()] == [JOB_LOCK]
    Pool(tmp_path, [trial], "0001", place=0)()
    assert toy.rounds_done(tmp_path / trial.name) == ROUNDS


@pytest.fixture
def impatient(monkeypatch):
    """Locks of other hosts are watched for moments."""
    monkeypatch.setattr(pool, "LockWatch", functools.partial(LockWatch, stale_s=0.3))
    monkeypatch.setattr(pool, "POLL_S", 0.05)
    monkeypatch.setattr(task, "RunLock", functools.partial(RunLock, stale_s=0.3))


@pytest.mark.parametrize("age_s", [0, 600, -86400])
def test_a_trial_whose_job_died_with_its_node_goes_to_the_job_that_follows(data, tmp_path, impatient, age_s):
    """At once or later, whatever the clocks of the two nodes say."""
    [trial] = sweep_of(data, scheme=["fedavg"]).trials()[0]
    lock = lock_of_another_node(tmp_path / trial.name)
    os.utime(lock, (time.time() - age_s,) * 2)
    Pool(tmp_path, [trial], "0001", place=0)()
    assert toy.rounds_done(tmp_path / trial.name) == ROUNDS
    assert not lock.exists()


def test_a_trial_that_a_job_on_another_node_has_is_left_to_it(data, tmp_path, impatient):
    [trial] = sweep_of(data, scheme=["fedavg"]).trials()[0]
    lock, ended = lock_of_another_node(tmp_path / trial.name), threading.Event()

    def live():
        while not ended.wait(0.02):
            os.utime(lock)

    thread = threading.Thread(target=live)
    thread.start()
    Pool(tmp_path, [trial], "0001", place=0)()
    ended.set()
    thread.join()
    assert [path.name for path in lock.parent.iterdir() if path.is_file()] == [JOB_LOCK]


def test_a_trial_that_cannot_be_written_is_told_once_and_stops_no_other(data, tmp_path, capsys):
    first, second = sweep_of(data, scheme=["fedavg"], seed=[0, 1]).trials()[0]
    (tmp_path / first.name).mkdir()
    (tmp_path / first.name / "checkpoints").write_text("")
    Pool(tmp_path, [first, second], "0001", place=0)()
    assert toy.rounds_done(tmp_path / second.name) == ROUNDS
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith(first.name)]
    assert len(told) == 1
    assert f"{tmp_path / first.name / 'checkpoints'}" in told[0]


def lock_of_another_node(folder):
    folder.mkdir()
    holder = {"host": "elsewhere", "pid_space": "x", "pid": 1, "pid_start": 1, "user": "me", "since": "then"}
    (folder / JOB_LOCK).write_text(json.dumps(holder))
    return folder / JOB_LOCK


def test_a_file_in_the_place_of_a_trial_is_told_before_anything_is_submitted(data, tmp_path):
    sweep = sweep_of(data, scheme=["fedavg"])
    [trial] = sweep.trials()[0]
    (tmp_path / trial.name).write_text("")
    with pytest.raises(UsageError, match=f"{trial.name} is no folder; move it away"):
        launch(sweep, "debug", root=tmp_path)
    assert not (tmp_path / "launches").exists()


def test_a_notice_in_the_last_round_of_a_trial_leaves_the_others_to_the_requeued_job(data, hold, tmp_path):
    """submitit's handler of the signal, which asks for the requeue, is played by a list of its calls."""
    trials, _ = sweep_of(data, scheme=["held:Noticed"], seed=[0, 1, 2]).trials()
    folders, requeues = [tmp_path / trial.name for trial in trials], []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: requeues.append(number))
    try:
        with pytest.raises(SystemExit) as end:
            Pool(tmp_path, trials, "0001", place=0)()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert end.value.code == STOPPED
    assert requeues == [signal.SIGUSR2]
    assert list(map(toy.rounds_done, folders)) == [ROUNDS, 0, 0]
    Pool(tmp_path, trials, "0001", place=0)()
    assert list(map(toy.rounds_done, folders)) == [ROUNDS] * 3


def test_a_job_that_is_requeued_without_a_new_round_is_not_started_for_ever(data, tmp_path):
    [trial] = sweep_of(data, scheme=["fedavg"]).trials()[0]
    folder = tmp_path / trial.name
    for start in range(1, 5):  # each time it dies before its first round ends
        status = begin(trial, RunFolder(folder), Status.read(folder), "0001", job="7")
        folder.mkdir(exist_ok=True)
        status.write(folder)
        assert (status.starts, status.stalls) == (start, start - 1)
    with pytest.raises(SystemExit) as end:
        Task(tmp_path, trial, "0001")()
    assert end.value.code == 1
    assert toy.rounds_done(folder) == 0
    assert Status.read(folder).state == "failed"
    assert "brought no new round" in Status.read(folder).error
    Task(tmp_path, trial, "0002")()  # launched again: it counts anew
    assert toy.rounds_done(folder) == ROUNDS


def test_each_launch_tries_a_trial_anew_that_always_fails_alike_and_tries_it_once(tmp_path, monkeypatch):
    monkeypatch.setattr(task, "exit_code_of", lambda *_: print("NameError: name 'los' is not defined") or 1)
    [trial], _ = Sweep(scheme=["fedavg"]).trials()
    for number, name in enumerate(("0001", "0002", "0003"), 1):
        assert [task.start(trial, tmp_path, name, "here", 0.0) for _ in range(2)] == [1, 0]
        status = Status.read(tmp_path / trial.name)
        assert (status.state, status.starts, status.stalls) == ("failed", number, 0)
        assert status.error == "NameError: name 'los' is not defined"


@pytest.mark.parametrize(
    "first, second, starts",
    [
        (
            "MemoryError: at 0x12",
            "MemoryError: at 0x34f",
            2,
        ),  # the same, whatever addresses and process numbers it names
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=8.0",
            "slurmstepd: error: Detected 1 oom_kill event in StepId=9.0",
            2,
        ),
        ("MemoryError: at 0x12", "OSError: [Errno 5] Input/output error", 3),
        ("hkd_hpc: rank 0 was ended by signal 15 (SIGTERM).", "hkd_hpc: rank 0 was ended by signal 15 (SIGTERM).", 3),
        ("hkd_hpc: warning: slow", "hkd_hpc: warning: slow", 3),
        ("round 1", "round 1", 3),
    ],
)
def test_the_same_error_twice_is_enough_to_give_a_trial_up(tmp_path, monkeypatch, first, second, starts):
    """A job that dies without an exit code, its error last in the log; how many starts it gets."""
    errors = iter([first, second, "the third start"])

    def die(trial, root, launch, stop):
        print(next(errors))
        raise BrokenPipeError  # as a kill would, it leaves the status as it was

    monkeypatch.setattr(task, "exit_code_of", die)
    [trial], _ = Sweep(scheme=["fedavg"]).trials()
    for _ in range(starts):
        with pytest.raises(BrokenPipeError):
            task.start(trial, tmp_path, "0001", "7", 0.0)
    assert task.start(trial, tmp_path, "0001", "7", 0.0) == 1
    told = Status.read(tmp_path / trial.name).error
    assert told == (
        f"hkd_hpc: the last {starts} starts brought no new round; not started again: "
        + (f"both ended with {second}" if starts == 2 else "give it a longer time limit, or see above")
    )
