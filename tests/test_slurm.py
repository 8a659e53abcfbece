"""Under a real SLURM (a private one, see slurm_cluster.py): srun and the sbatch script give the bits of one process.

Skipped, with the reason, where no SLURM can be had; with HKD_REQUIRE_SLURM=1 that is a failure.
"""
from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import slurm_cluster
import toy
from comm_launch import SCRIPT, command as mpirun_command

SCRIPTS = sorted(path.name for path in (toy.PROJECT / "slurm").glob("*.sh"))
ROUNDS, HALT = 4, 3

SCHEME = f'''
import os, time
from hkd_hpc.schemes.fedhkd import FedHKD


class Halting(FedHKD):
    """FedHKD; the first run of a SLURM job never gets through the training of round {HALT}."""

    def begin(self, client):
        super().begin(client)
        if client.round == {HALT} and "SLURM_JOB_ID" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
            time.sleep(600)
'''


def need(reason: str | None) -> None:
    """Skip for this reason, or fail where SLURM is required."""
    if reason and os.environ.get("HKD_REQUIRE_SLURM") == "1":
        pytest.fail(f"HKD_REQUIRE_SLURM=1, but {reason}")
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    need(slurm_cluster.why_not())
    with slurm_cluster.running_cluster(tmp_path_factory.mktemp("slurm")) as running:
        temporary = tmp_path_factory.mktemp("tmp")
        paths = os.pathsep.join([str(toy.PROJECT), str(temporary), os.environ.get("PYTHONPATH", "")])
        running.env.update({
            **toy.MPI_ENV, "PYTHONPATH": paths, "TMPDIR": str(temporary),
            "PRTE_MCA_hwloc_default_binding_policy": "none",  # SLURM's CPUs outnumber the real ones
            "OMPI_MCA_btl_sm_backing_directory": str(temporary)})  # otherwise worlds of one rank litter /dev/shm
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


def sbatch(cluster, site, *options, settings=()):
    """Submit the script from the user's folder; returns the job's number and its log."""
    venv = {} if (site / ".venv").exists() else {"VENV": ""}
    job = cluster.run("sbatch", "--parsable", *options, "--cpus-per-task=1",
                      toy.PROJECT / "slurm/fedhkd_cifar10.sh", *settings, cwd=site, env={**cluster.env, **venv})
    assert re.fullmatch(r"\d+\n", job.stdout), job
    number = job.stdout.strip()
    return number, site / f"fedhkd-cifar10-{number}.log"


def read(log):
    return log.read_text() if log.exists() else ""


@pytest.mark.parametrize("flavour, backend, why",
                         [("none", "auto", "started without MPI"), ("pmi2", "gloo", "asked for")])
def test_srun_over_two_nodes_without_an_mpi(cluster, site, expected, flavour, backend, why):
    step = cluster.run("srun", f"--mpi={flavour}", "-N2", "-n3", sys.executable, "-m", "hkd_hpc.train",
                       "--preset", "cifar10", *settings(site, f"comm.backend={backend}"), "--out", site / flavour,
                       cwd=site)
    assert step.returncode == 0, step
    assert f"3 ranks on 1 host, weights by gloo ({why})" in step.stdout
    assert toy.last_sha(site / flavour) == expected


def test_batch_script_to_the_end(cluster, site, expected):
    gpu = ["--gres=gpu:1"] * bool(cluster.gpus_per_node)
    number, log = sbatch(cluster, site, "--ntasks=3", *gpu, settings=settings(site))
    assert cluster.wait_for(number)["JobState"] == "COMPLETED", read(log)
    assert toy.last_sha(site / f"runs/fedhkd-cifar10-{number}") == expected
    assert not list(Path(cluster.env["TMPDIR"]).glob("hkd-*"))


def test_requeued_job_goes_on_from_its_checkpoint(cluster, site, expected):
    number, log = sbatch(cluster, site, "-N2", "--ntasks=3", settings=settings(site, "scheme.name=halting:Halting"))
    out = site / f"runs/fedhkd-cifar10-{number}"
    checkpoint = out / f"checkpoints/round_{HALT - 1:04d}.h5"
    toy.wait_until(lambda: checkpoint.exists() or "srun: error" in read(log), timeout_s=120)
    assert checkpoint.exists(), read(log)
    cluster.run("scontrol", "requeue", number)
    job, text = cluster.wait_for(number), read(log)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), text
    assert text.index(f"round 1/{ROUNDS}") < text.index(f"resuming after round {HALT - 1}"), "one log for both runs"
    assert toy.last_sha(out) == expected


def test_wrong_setting_ends_the_batch_job_with_one_line(cluster, site):
    number, log = sbatch(cluster, site, "-N2", "--ntasks=3", settings=["fed.rounds=none"])
    assert cluster.wait_for(number)["ExitCode"] == "2:0"
    lines = toy.our_lines([read(log)])
    assert len(lines) == 1 and "fed.rounds" in lines[0], read(log)
    assert not (site / f"runs/fedhkd-cifar10-{number}").exists()


def meeting(cluster, *launcher):
    """Start four ranks that only find each other."""
    return cluster.run(*launcher, sys.executable, SCRIPT, "meet")


def test_srun_without_pmi_is_one_world_whatever_mpi_is_installed(cluster):
    step = meeting(cluster, "srun", "--mpi=none", "-N4", "-n4")
    assert (step.returncode, step.stdout) == (0, "4 ranks of several jobs\n"), step


def test_srun_with_pmi2_never_runs_worlds_of_one_rank_each(cluster):
    """MPICH speaks PMI-2. Open MPI does not, and would run as four worlds: that is refused with one line."""
    step = meeting(cluster, "srun", "--mpi=pmi2", "-N2", "-n4")
    lines = toy.our_lines([step.stderr])
    if step.returncode == 0:
        assert step.stdout == "4 ranks of several jobs\n", step
    else:
        assert step.returncode == 2 and len(lines) == 1 and step.stdout == "", step
        assert "started 4 ranks" in lines[0] and "world of 1" in lines[0]


def test_mpirun_in_a_batch_job_over_two_nodes(cluster, site):
    job = cluster.run("sbatch", "--parsable", "-N2", "--ntasks=4", "--output=mpirun.log", "--wrap",
                      shlex.join(mpirun_command(4, "meet")), cwd=site)
    state, text = cluster.wait_for(job.stdout.strip())["JobState"], (site / "mpirun.log").read_text()
    assert (state, text) == ("COMPLETED", "4 ranks of one job\n")


def test_a_killed_rank_ends_the_step(cluster):
    step = cluster.run("srun", "--mpi=none", "-N2", "-n4", sys.executable, SCRIPT, "fail", "kill", "2")
    lines = toy.our_lines([step.stderr])
    assert step.returncode and len(lines) == 1 and "rank 2 " in lines[0], step


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_clean(name):
    path = toy.PROJECT / "slurm" / name
    subprocess.run(["bash", "-n", path], check=True)
    need(None if shutil.which("shellcheck") else "no shellcheck here: apt-get install shellcheck")
    check = subprocess.run(["shellcheck", path], capture_output=True, text=True)
    assert check.returncode == 0, check.stdout
