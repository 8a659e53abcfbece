"""Under a real SLURM (a private one, see slurm_cluster.py): srun and the sbatch scripts give the bits of one process.

Skipped, with the reason, where no SLURM can be had; with HKD_REQUIRE_SLURM=1 that is a failure.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import faulty_doctor
import pytest
import slurm_cluster
import toy
from comm_launch import SCRIPT
from comm_launch import command as mpirun_command

pytestmark = pytest.mark.slow

SCRIPTS = sorted(path.name for path in (toy.PROJECT / "slurm").glob("*.sh"))
HELPERS = ("common.sh", "rank.sh", "stage_env.sh")
SHORT = ("doctor.sh",)  # trains nothing: needs no notice of a time limit
ROUNDS, HALT = 4, 3


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name not in HELPERS])
def test_a_script_that_is_not_submitted_says_so_in_one_line(script):
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(["bash", f"slurm/{script}"], cwd=toy.PROJECT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"slurm/{script}: submit me with sbatch\n")


def test_a_rank_does_not_believe_a_folder_that_somebody_else_made(tmp_path):
    """Its place in /tmp can be guessed; a link there stands for all that is not the user's own."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "scratch").symlink_to(tmp_path / "theirs")
    env = {**os.environ, "HKD_SCRATCH": str(tmp_path / "scratch")}
    done = subprocess.run(["bash", "slurm/rank.sh", "true"], cwd=toy.PROJECT, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"hkd_hpc: {tmp_path}/scratch is not of " in done.stderr
    assert list((tmp_path / "theirs").iterdir()) == []
    (tmp_path / "scratch").unlink()
    assert subprocess.run(["bash", "slurm/rank.sh", "true"], cwd=toy.PROJECT, env=env).returncode == 0
    assert (tmp_path / "scratch/outcome").read_text() == "0\n"


SCHEME = f'''
import os, signal, subprocess, time
from hkd_hpc.schemes.fedhkd import FedHKD
from hkd_hpc.schemes.moon import Moon


class Halting(FedHKD):
    """FedHKD; the first run of a SLURM job never gets through the training of round {HALT}."""

    def begin(self, client):
        super().begin(client)
        if client.round == {HALT} and "SLURM_JOB_ID" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
            time.sleep(600)


class Stopping(Moon):
    """MOON; SLURM's notice of the time limit comes in round {HALT} of a job's first run."""

    def begin(self, client):
        super().begin(client)
        first = "SLURM_RESTART_COUNT" not in os.environ and "HKD_FOLLOWS" not in os.environ
        if client.round == {HALT} and client.id == 0 and first and "SLURM_JOB_ID" in os.environ:
            subprocess.run(["scancel", "--batch", "--signal=USR2", os.environ["SLURM_JOB_ID"]])
            while not signal.getsignal(signal.SIGUSR2).__self__.asked:
                time.sleep(0.05)
'''


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    slurm_cluster.need(slurm_cluster.why_not())
    with slurm_cluster.running_cluster(tmp_path_factory.mktemp("slurm")) as running:
        temporary = tmp_path_factory.mktemp("tmp")
        paths = os.pathsep.join([str(toy.PROJECT), str(temporary), os.environ.get("PYTHONPATH", "")])
        running.env.update(
            {
                **toy.MPI_ENV,
                "PYTHONPATH": paths,
                "TMPDIR": str(temporary),
                "PRTE_MCA_hwloc_default_binding_policy": "none",  # SLURM's CPUs outnumber the real ones
                "OMPI_MCA_btl_sm_backing_directory": str(temporary),
            }
        )  # otherwise worlds of one rank litter /dev/shm
        toy.write_module(temporary, "halting", SCHEME)
        yield running


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A user's folder, with a blank in its path as everything below it: .venv and data.npz."""
    folder = tmp_path_factory.mktemp("site") / "my work"
    folder.mkdir()
    toy.save_data(folder / "data.npz")
    if (Path(sys.prefix) / "bin/activate").exists():
        (folder / ".venv").symlink_to(sys.prefix)
    return folder


def settings(site, *more):
    return toy.settings(site / "data.npz", "model.name=small", f"fed.rounds={ROUNDS}", "data.beta=0.3", *more)


@pytest.fixture(scope="module")
def expected(site):
    """The last weights of the same run in one process, without SLURM."""
    toy.train_ok(1, "--preset", "cifar10", *settings(site), "--out", site / "whole")
    return toy.last_sha(site / "whole")


def sbatch(cluster, site, *options, script="fedhkd_cifar10", settings=(), **env):
    """Submit a script from the user's folder; returns the job's number and its log."""
    venv = {} if (site / ".venv").exists() else {"VENV": ""}
    job = cluster.run(
        "sbatch",
        "--parsable",
        *options,
        "--cpus-per-task=1",
        toy.PROJECT / f"slurm/{script}.sh",
        *settings,
        cwd=site,
        env={**cluster.env, **venv, **env},
    )
    assert re.fullmatch(r"\d+\n", job.stdout), job
    number = job.stdout.strip()
    return number, site / f"{script.replace('_', '-')}-{number}.log"


def read(log):
    return log.read_text() if log.exists() else ""


@pytest.mark.parametrize(
    "flavour, backend, why", [("none", "auto", "started without MPI"), ("pmi2", "gloo", "asked for")]
)
def test_srun_over_two_nodes_without_an_mpi(cluster, site, expected, flavour, backend, why):
    step = cluster.run(
        "srun",
        f"--mpi={flavour}",
        "-N2",
        "-n3",
        sys.executable,
        "-m",
        "hkd_hpc.train",
        "--preset",
        "cifar10",
        *settings(site, f"comm.backend={backend}"),
        "--out",
        site / flavour,
        cwd=site,
    )
    assert step.returncode == 0, step
    assert f"3 ranks on 1 host, weights by gloo ({why})" in step.stdout
    assert toy.last_sha(site / flavour) == expected


def test_batch_script_of_11_tasks_on_two_nodes_ends_with_the_bits_of_one_process(cluster, site):
    gpu = ["--gres=gpu:1"] * bool(cluster.gpus_per_node)
    own = settings(site, "fed.clients=10", "fed.rounds=2")
    number, log = sbatch(cluster, site, "-N2", "--ntasks=11", *gpu, settings=own)
    assert cluster.wait_for(number)["JobState"] == "COMPLETED", read(log)
    assert "11 ranks on " in read(log)
    assert not list(Path(cluster.env["TMPDIR"]).glob("hkd-*"))
    toy.train_ok(1, "--preset", "cifar10", *own, "--out", site / "alone")
    assert toy.last_sha(site / f"runs/fedhkd-cifar10-{number}") == toy.last_sha(site / "alone")


def test_requeued_job_goes_on_from_its_checkpoint(cluster, site, expected):
    number, log = sbatch(cluster, site, "-N2", "--ntasks=3", settings=settings(site, "scheme.name=halting:Halting"))
    out = site / f"runs/fedhkd-cifar10-{number}"
    checkpoint = out / f"checkpoints/round_{HALT - 1:04d}.h5"
    toy.wait_until(lambda: checkpoint.exists() or "srun: error" in read(log))
    assert checkpoint.exists(), read(log)
    cluster.run("scontrol", "requeue", number)
    job, text = cluster.wait_for(number), read(log)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), text
    assert text.index(f"round 1/{ROUNDS}") < text.index(f"resuming after round {HALT - 1}"), "one log for both runs"
    assert toy.last_sha(out) == expected


@pytest.fixture(scope="module")
def expected_moon(site):
    """MOON, in one process and never stopped."""
    toy.train_ok(1, *settings(site, "scheme.name=moon"), "--out", site / "moon")
    return toy.last_sha(site / "moon")


def test_job_stopped_before_its_time_limit_is_requeued_and_goes_on(cluster, site, expected_moon):
    number, log = sbatch(
        cluster,
        site,
        "-N2",
        "--ntasks=3",
        script="train",
        MPI="none",
        settings=settings(site, "scheme.name=halting:Stopping"),
    )
    job, text = cluster.wait_for(number), read(log)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), text
    assert f"stopped by a signal, after round {HALT}: requeue\n" in text
    assert f"after round {HALT}; requeues without a new round: 1 of at most 3\n" in text
    assert toy.last_sha(site / f"runs/train-{number}") == expected_moon


def test_where_requeue_is_rejected_a_second_job_goes_on_in_the_same_folder(cluster, site, expected_moon):
    gpu = ["--gres=gpu:1"] * bool(cluster.gpus_per_node)
    number, log = sbatch(
        cluster,
        site,
        "-N2",
        "--ntasks=3",
        "--no-requeue",
        *gpu,
        script="train",
        settings=settings(site, "scheme.name=halting:Stopping"),
    )
    first = cluster.wait_for(number)
    follower = re.search(r"requeue rejected .*: job (\d+) resumes\n", read(log))
    assert follower, read(log)
    assert (first["JobState"], first["ExitCode"]) == ("FAILED", "75:0"), read(log)
    second = cluster.wait_for(follower[1])
    assert second["JobState"] == "COMPLETED", read(log)
    same = ("NumNodes", "NumTasks", "CPUs/Task", "TimeLimit", "Partition", "JobName", "TresPerNode")
    assert {name: second.get(name) for name in same} == {name: first.get(name) for name in same}
    assert f"follows job {number}, restart 0" in read(log), "one log for both jobs"
    assert toy.last_sha(site / f"runs/train-{number}") == expected_moon


def test_requeues_without_a_new_round_have_a_bound(cluster, site):
    """Each time the signal meets Python before it listens."""
    number, log = sbatch(
        cluster,
        site,
        "--ntasks=2",
        MAX_IDLE_REQUEUES="2",
        MPI="none",
        settings=settings(site),
        PYTHON="timeout --preserve-status --signal=USR2 0.02 python",
    )
    job, text = cluster.wait_for(number), read(log)
    assert (job["JobState"], job["Restarts"], job["ExitCode"]) == ("FAILED", "2", "1:0"), text
    assert text.count("stopped by a signal, after round 0: requeue\n") == 2
    assert "no new round after round 0 in 2 requeues (MAX_IDLE_REQUEUES): not requeued again." in text


def test_a_complete_run_ends_at_once(cluster, site, expected):
    number, log = sbatch(cluster, site, "--ntasks=2", MPI="none", OUT=str(site / "whole"), settings=settings(site))
    assert cluster.wait_for(number)["JobState"] == "COMPLETED"
    assert f"already complete ({ROUNDS} rounds); nothing to do" in read(log)


PATIENT = ["comm.timeout_s=240", "comm.start_timeout_s=240"]  # of a loaded machine


def test_the_doctor_examines_a_job_of_two_nodes_and_leaves_nothing(cluster, site):
    out = site / "doctored"
    out.mkdir()
    number, log = sbatch(
        cluster,
        site,
        "-N2",
        "--ntasks=2",
        "--no-requeue",
        "--time=5",
        script="doctor",
        MPI="none",
        OUT=str(out),
        settings=["--json", "comm.backend=gloo", *PATIENT],
    )
    job, text = cluster.wait_for(number), read(log)
    assert job["ExitCode"] == "0:0", text
    found = json.loads(text[text.index("\n{") :])
    batch = found["sections"]["batch"]
    assert batch["facts"].items() >= {"job": number, "NumNodes": "2", "NumTasks": "2", "Requeue": "0"}.items()
    assert {finding["name"] for finding in batch["findings"]} == {"batch.short", "batch.no_requeue"}
    assert found["sections"]["launch"]["facts"]["variable"] == "SLURM_PROCID"
    assert [measured["wrong"] for measured in found["sections"]["collectives"]["facts"]["transfers"]] == [[0, 0]] * 7
    assert list(out.iterdir()) == []


def test_the_doctor_names_each_fault_of_a_job(cluster, site):
    """One core and one GPU for all, few open files, a full disk without locks; and MaxTime is lowered meanwhile."""
    (site / "limits.sh").write_text("ulimit -n 100\nscontrol update partitionname=debug maxtime=3\n")
    core = min(os.sched_getaffinity(0))
    try:
        with toy.full_disk(site / "disk") as disk:
            number, log = sbatch(
                cluster,
                site,
                "--ntasks=3",
                "--time=5",
                script="doctor",
                MPI="none",
                OUT=str(disk / "runs"),
                SETUP="limits.sh",
                PYTHON=f"taskset -c {core} python '{faulty_doctor.__file__}'",
                FAULTS="one_gpu no_locks",
                settings=["--json", "fed.clients=2", *PATIENT],
            )
            job, text = cluster.wait_for(number), read(log)
            assert os.listdir(disk) == ["much"]
    finally:
        cluster.run("scontrol", "update", "partitionname=debug", "maxtime=INFINITE")
    assert job["ExitCode"] == "1:0", text
    sections = json.loads(text[text.index("\n{") :])["sections"]
    found = {finding["name"]: finding for section in sections.values() for finding in section["findings"]}
    assert found.keys() >= {"files.full", "files.little_room", "files.no_lock", "files.no_flock"}, text
    assert "all 3 ranks of " in found["placement.one_core"]["found"]
    assert "ranks 1-2 of " in found["placement.shared_device"]["found"]
    assert found["batch.open_files"]["found"] == "100 open files, rank 0 of 3 may need 109"
    beyond = found["batch.beyond_partition"]
    assert beyond["found"] == "TimeLimit=00:05:00, but partition debug has MaxTime=00:03:00"
    assert beyond["mend"].startswith(f"scontrol update jobid={number} timelimit=00:03:00; ")
    assert found["batch.short"]["mend"].startswith("sbatch --time=00:03:00, ")


def test_the_doctor_names_tasks_that_do_not_know_of_each_other(cluster, site):
    """As in a container that lets none of SLURM's variables through."""
    clean = 'env -i PATH="$PATH" PYTHONPATH="$PYTHONPATH" python'
    number, log = sbatch(cluster, site, "--ntasks=3", "--time=5", script="doctor", MPI="none", PYTHON=clean)
    job, text = cluster.wait_for(number), read(log)
    assert (job["ExitCode"], text.count("ERROR launch.strange_launcher: ")) == ("1:0", 1), text
    assert "slurmstepd started 3 processes of this command" in text


def test_a_launcher_that_ends_with_0_while_no_rank_does_is_not_believed(cluster, site):
    """As Open MPI's mpirun when it loses a node."""
    (site / "setup.sh").write_text("mpirun() { true; }\n")
    number, log = sbatch(cluster, site, "--ntasks=2", LAUNCHER="mpirun", SETUP="setup.sh", settings=settings(site))
    assert cluster.wait_for(number)["ExitCode"] == "1:0", read(log)


def test_wrong_setting_ends_the_batch_job_with_one_line(cluster, site):
    number, log = sbatch(cluster, site, "-N2", "--ntasks=3", settings=["fed.rounds=none"])
    assert cluster.wait_for(number)["ExitCode"] == "2:0"
    lines = toy.our_lines([read(log)])
    assert len(lines) == 1, read(log)
    assert "fed.rounds" in lines[0], read(log)
    assert not (site / f"runs/fedhkd-cifar10-{number}").exists()


# ---- an environment on the nodes' own disks

STAGE = toy.PROJECT / "slurm/stage_env.sh"


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder with a small environment, `my venv`, and the tar of it, `my env.tar`."""
    folder = tmp_path_factory.mktemp("stage")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "my venv"], check=True)
    tool = folder / "my venv/bin/tool"  # as pip writes it where the path has no blanks
    tool.write_text(f"#!{folder}/my venv/bin/python\nimport sys\nprint('tool', sys.prefix)\n")
    tool.chmod(0o755)
    with open(folder / "my venv/bin/activate", "a") as file:
        file.write('echo "beside: $VIRTUAL_ENV/../tools"\n')
    subprocess.run(["bash", STAGE, "pack", folder / "my venv", folder / "my env.tar"], check=True)
    assert sorted(path.name for path in folder.iterdir()) == ["my env.tar", "my venv"]
    return folder


def test_a_tar_may_have_a_colon_in_its_name(tmp_path):
    """Which tar takes for a host and a path."""
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/activate").write_text("")
    subprocess.run(["bash", STAGE, "pack", "env", "2026-11-30T10:02.tar"], cwd=tmp_path, check=True)
    assert sorted(os.listdir(tmp_path)) == ["2026-11-30T10:02.tar", "env"]


def use_staged(packed, tmp, *commands, **env):
    """A shell that uses the tar, with `tmp` as the node's disk."""
    tmp.mkdir(exist_ok=True)
    own = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp), **env}
    code = "\n".join(["set -euo pipefail", f'source "{STAGE}" use "{packed}/my env.tar"', *commands])
    return subprocess.run(["bash", "-c", code], env=own, capture_output=True, text=True)


def test_staged_environment_knows_its_place(packed, tmp_path):
    shell = use_staged(
        packed,
        tmp_path / "my tmp",
        "which python",
        'python -c "import sys; print(sys.prefix)"',
        "tool",
        'echo "$VIRTUAL_ENV"',
    )
    [folder] = (tmp_path / "my tmp").glob("hkd-env-*[0-9]")
    assert shell.stdout.splitlines() == [
        f"beside: {packed}/my venv/../tools",
        f"{folder}/bin/python",
        str(folder),
        f"tool {folder}",
        str(folder),
    ], shell
    assert folder.stat().st_mode & 0o777 == 0o700
    inside = folder / "bin/python"
    inode = inside.lstat().st_ino
    assert use_staged(packed, tmp_path / "my tmp", "true").returncode == 0, "again"
    assert inside.lstat().st_ino == inode, "again"
    assert sorted(path.name for path in (tmp_path / "my tmp").iterdir()) == [folder.name, f"{folder.name}.lock"]


def test_without_space_or_tar_there_is_one_line_and_the_job_ends(packed, tmp_path):
    (tmp_path / "df").write_text("#!/bin/bash\necho Filesystem; echo disk 100 95 5 95% /tmp\n")
    (tmp_path / "df").chmod(0o755)
    shell = use_staged(packed, tmp_path / "tmp", "echo on", PATH=f"{tmp_path}:{os.environ['PATH']}")
    [line] = shell.stderr.splitlines()
    assert shell.returncode == 1
    assert shell.stdout == ""
    assert f"no space in {tmp_path}/tmp: 1 MB are needed, 0 free" in line
    shell = use_staged(tmp_path, tmp_path / "tmp", "echo on")
    [line] = shell.stderr.splitlines()
    assert shell.returncode == 1
    assert shell.stdout == ""
    assert f"{tmp_path}/my env.tar is missing: " in line


def test_environment_is_staged_on_all_nodes_of_a_job(cluster, packed, site):
    """The nodes are one machine: the two tasks that unpack meet in one folder."""
    tmp = site / "node tmp"
    tmp.mkdir()
    code = (
        'export TMPDIR="$PWD/node tmp"; set -e; source "$1" use "$2"\n'
        'srun --mpi=none -N2 -n4 tool; echo "$SLURM_JOB_NUM_NODES $(which python)"'
    )
    (site / "staged.sh").write_text(f"#!/bin/bash\n{code}\n")
    job = cluster.run(
        "sbatch",
        "--parsable",
        "-N2",
        "--ntasks=4",
        "--output=staged.log",
        "staged.sh",
        STAGE,
        packed / "my env.tar",
        cwd=site,
    )
    state, text = cluster.wait_for(job.stdout.strip())["JobState"], read(site / "staged.log")
    [folder] = tmp.glob("hkd-env-*[0-9]")
    assert state == "COMPLETED", text
    assert text.splitlines()[1:] == [f"tool {folder}"] * 4 + [f"2 {folder}/bin/python"], text


def test_batch_script_takes_a_staged_environment(cluster, site, packed, expected):
    libraries = next(path for path in sys.path if path.endswith("site-packages"))  # torch is not in the small one
    number, log = sbatch(
        cluster,
        site,
        "--ntasks=2",
        OUT=str(site / "whole"),
        MPI="none",
        STAGE=str(packed / "my env.tar"),
        PYTHONPATH=os.pathsep.join([cluster.env["PYTHONPATH"], libraries]),
        settings=settings(site),
    )
    assert cluster.wait_for(number)["JobState"] == "COMPLETED", read(log)
    assert "nothing to do" in read(log)
    assert f"beside: {packed}/my venv/../tools" in read(log)


def one_job(cluster, *launcher):
    """Start four ranks that only find each other."""
    return cluster.run(*launcher, sys.executable, SCRIPT, "one_job")


def test_srun_without_pmi_is_one_world_whatever_mpi_is_installed(cluster):
    step = one_job(cluster, "srun", "--mpi=none", "-N4", "-n4")
    assert (step.returncode, step.stdout) == (0, "4 ranks of several jobs\n"), step


def test_srun_with_pmi2_never_runs_worlds_of_one_rank_each(cluster):
    """MPICH speaks PMI-2. Open MPI does not, and would run as four worlds: that is rejected with one line."""
    step = one_job(cluster, "srun", "--mpi=pmi2", "-N2", "-n4")
    lines = toy.our_lines([step.stderr])
    if step.returncode == 0:
        assert step.stdout == "4 ranks of several jobs\n", step
    else:
        assert step.returncode == 2, step
        assert len(lines) == 1, step
        assert step.stdout == "", step
        assert "started 4 ranks" in lines[0]
        assert "world of 1" in lines[0]


def test_mpirun_in_a_batch_job_over_two_nodes(cluster, site):
    job = cluster.run(
        "sbatch",
        "--parsable",
        "-N2",
        "--ntasks=4",
        "--output=mpirun.log",
        "--wrap",
        shlex.join(mpirun_command(4, "one_job")),
        cwd=site,
    )
    state, text = cluster.wait_for(job.stdout.strip())["JobState"], (site / "mpirun.log").read_text()
    assert (state, text) == ("COMPLETED", "4 ranks of one job\n")


def test_a_killed_rank_ends_the_step(cluster):
    step = cluster.run("srun", "--mpi=none", "-N2", "-n4", sys.executable, SCRIPT, "fail", "kill", "2")
    lines = toy.our_lines([step.stderr])
    assert step.returncode, step
    assert len(lines) == 1, step
    assert "rank 2 " in lines[0], step


def rank(tmp_path, *command, **env):
    """A rank's wrapper around a command, without SLURM."""
    own = {"PATH": os.environ["PATH"], "HKD_SCRATCH": str(tmp_path / "my tmp")}
    return subprocess.run(
        ["bash", toy.PROJECT / "slurm/rank.sh", *command], env={**own, **env}, capture_output=True, text=True
    )


def test_a_rank_of_the_doctor_tells_an_error_by_a_file_too(tmp_path):
    assert rank(tmp_path, "bash", "-c", "exit 1", HKD_TOLD_CODES="0 1").returncode == 0
    assert read(tmp_path / "my tmp/outcome") == "1\n"
    assert rank(tmp_path, "bash", "-c", "exit 75", HKD_TOLD_CODES="0 1").returncode == 75


@pytest.mark.parametrize("code, told, outcome", [(0, 0, "0\n"), (1, 1, ""), (2, 2, ""), (75, 0, "75\n")])
def test_a_rank_tells_a_good_end_by_a_file(tmp_path, code, told, outcome):
    assert rank(tmp_path, "bash", "-c", f"exit {code}").returncode == told
    assert read(tmp_path / "my tmp/outcome") == outcome


NOTE = 'echo "$(basename "$0") $* with ${SRUN_CPUS_PER_TASK-none}" >>"$NOTES"'
FAKES = {  # a launcher that notes how it was called, and the number of cores that it would take from its environment
    "srun": NOTE,
    "mpirun": f'[[ $1 == --version ]] && echo "mpirun (Open MPI) 5.0.9" || {{ {NOTE}; srun prted; }}',
    "python": 'echo "Open MPI v5.0.9"',
}


@pytest.mark.parametrize(
    "launcher, calls",
    [
        (
            "mpirun",
            ["mpirun -n 4 --bind-to none bash {rank} python -m hkd_hpc.train with none", "srun prted with none"],
        ),
        (
            "srun",
            [
                "srun --mpi=none --kill-on-bad-exit=1 --wait=0 --export=ALL --cpus-per-task=7 bash {rank} python -m "
                "hkd_hpc.train with 3"
            ],
        ),
    ],
)
def test_only_srun_is_told_the_cores_of_a_task(tmp_path, launcher, calls):
    """What mpirun starts on a node is for all its ranks, also where the site's profile sets srun's variable."""
    noted, _ = faked_job(tmp_path, LAUNCHER=launcher, SRUN_CPUS_PER_TASK="3")
    rank = f"{toy.PROJECT}/slurm/rank.sh"
    assert noted == [call.format(rank=rank) for call in calls]


def test_a_setup_file_may_say_what_a_shell_would_take(tmp_path):
    """Modules read variables that are not set, and a test that is false ends no job; nor does PATH have the file."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/modules").write_text("export SRUN_CPUS_PER_TASK=wrong\n")
    (tmp_path / "modules").write_text(
        'echo "$LMOD_NOT_SET"\n[ -d /nonexistent ] && echo never\nexport SRUN_CPUS_PER_TASK=5\n'
    )
    path = f"{tmp_path}/bin:{tmp_path}:{os.environ['PATH']}"
    noted, errors = faked_job(tmp_path, LAUNCHER="srun", SETUP="modules", PATH=path)
    assert (noted[0].split(" with ")[1], errors) == ("5", "")


def faked_job(folder: Path, **env: str) -> tuple[list[str], str]:
    """What a job's script calls, by stand-ins that note it, without its --out; and what came on stderr."""
    for name, line in FAKES.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", f"script=mine; source '{toy.PROJECT}/slurm/common.sh'; run_job ''"],
        cwd=folder,
        env={
            "PATH": f"{folder}:{os.environ['PATH']}",
            "HOME": str(folder),
            "NOTES": str(folder / "notes"),
            "TMPDIR": str(folder),
            "OUT": str(folder / "run"),
            "VENV": "",
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NAME": "fake",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_NTASKS": "4",
            "SLURM_CPUS_PER_TASK": "7",
            **env,
        },
        capture_output=True,
        text=True,
    )
    return [re.sub(r" --out .*? with ", " with ", line) for line in read(folder / "notes").splitlines()], done.stderr


def test_the_scripts_ask_for_the_same():
    """sbatch reads its options from each script alone, so that they cannot share them."""
    blocks = {
        name: [
            line
            for line in (toy.PROJECT / "slurm" / name).read_text().splitlines()
            if "#SBATCH" in line and "--job-name" not in line
        ]
        for name in SCRIPTS
        if name not in (*HELPERS, *SHORT)
    }
    assert len(blocks) == 4
    assert len(set(map(tuple, blocks.values()))) == 1
    assert {"#SBATCH --signal=B:USR2@120", "#SBATCH --requeue"} < set(blocks["train.sh"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_clean(name):
    path = toy.PROJECT / "slurm" / name
    subprocess.run(["bash", "-n", path], check=True)
    slurm_cluster.need(None if shutil.which("shellcheck") else "no shellcheck here: apt-get install shellcheck")
    check = subprocess.run(["shellcheck", path], capture_output=True, text=True)
    assert check.returncode == 0, check.stdout
