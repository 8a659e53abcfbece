"""The doctor on set-ups that are broken on purpose: under launchers, in forked ranks, on broken disks.

Under a real SLURM: tests/jobs/test_slurm.py. The faults of a rank: tests/support/faulty_doctor.py.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import faulty_doctor
import pytest
import toy
from comm_launch import environment, mpirun_path, ours

from hkd_hpc.common.errors import UsageError
from hkd_hpc.doctor import collectives, files
from hkd_hpc.doctor.__main__ import main, parse
from tools.forked_ranks import end_when_last, run_ranks, watch_ranks

SECTIONS = ["launch", "transport", "placement", "packages", "clocks", "batch", "files", "collectives"]


def doctor_rank(rank: int, arguments: list[str], patch) -> None:
    """One rank; `patch(rank)` changes this process only."""
    faulty_doctor.make_small()
    patch(rank)
    sys.exit(main(arguments))


def healthy(rank: int) -> None:
    pass


def doctor(size: int, *arguments: object, patch=healthy):
    """(exit codes by rank, output of rank 0) of a job that ends by itself."""
    results = run_ranks(size, doctor_rank, [str(argument) for argument in arguments], patch)
    return [result.exit_code for result in results], results[0].output


def names(document: dict) -> set[str]:
    """The findings of a document."""
    return {finding["name"] for section in document["sections"].values() for finding in section["findings"]}


def alone(*arguments: object, patch=healthy) -> tuple[int | None, set[str]]:
    """(exit code, findings) of one process."""
    codes, output = doctor(1, "--json", *arguments, patch=patch)
    return codes[0], names(json.loads(output))


# ---- whole examinations


MPIRUN = [mpirun_path(), "-n", "3", "--bind-to", "none"]
DOCTOR = [faulty_doctor.__file__, "-m", "hkd_hpc.doctor", "comm.timeout_s=240", "comm.start_timeout_s=240"]


def launched(*command: object, **env: str) -> subprocess.CompletedProcess[str]:
    """A launcher's whole command, to its end."""
    return subprocess.run(list(map(str, command)), env=environment(**env), capture_output=True, text=True, timeout=300)


def test_torchrun_tells_all_sections_and_leaves_the_folder_as_it_was(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    done = launched(*torchrun, *DOCTOR, "--json", "--out", tmp_path / "out/runs")
    found = json.loads(done.stdout)
    assert (done.returncode, found["exit_code"], found["format"]) == (0, 0, 1)
    assert list(found["sections"]) == SECTIONS
    assert started(found) == ("torchrun", "RANK", 2, "gloo")
    transfers = found["sections"]["collectives"]["facts"]["transfers"]
    assert [transfer["wrong"] for transfer in transfers] == [[0, 0]] * 4
    assert all(0 < len(transfer["seconds"]) <= collectives.TURNS for transfer in transfers)
    assert list(tmp_path.iterdir()) == []


def started(document: dict) -> tuple:
    """How the ranks were, and what carries their weights."""
    launch, transport = (document["sections"][name]["facts"] for name in ("launch", "transport"))
    return launch["launcher"], launch["variable"], launch["ranks"], transport["backend"]


ERRORS = {
    "placement.one_core",
    "packages.different",
    "clocks.far",
    "files.full",
    "files.little_room",
    "files.no_lock",
    "collectives.wrong",
}


@pytest.mark.mpi
def test_mpirun_names_each_of_many_faults(tmp_path):
    """One core and one GPU for all, few open files, a full disk without locks; rank 1 adds wrongly, rank 2 has another
    torch and a clock that is ahead.
    """
    core = min(os.sched_getaffinity(0))
    ranks = ["bash", "-c", f'ulimit -n 100; exec taskset -c {core} "$@"', "bash", sys.executable, *DOCTOR]
    with toy.full_disk(tmp_path / "disk") as place:
        faults = "one_gpu wrong_sum other_torch fast_clock no_locks"
        done = launched(*MPIRUN, *ranks, "--json", "--out", place / "runs", "fed.clients=2", FAULTS=faults)
        assert os.listdir(place) == ["much"]
    document = json.loads(done.stdout)
    findings = [finding for section in document["sections"].values() for finding in section["findings"]]
    found = {finding["name"]: finding["found"] for finding in findings}
    assert (done.returncode, document["exit_code"], list(document["sections"])) == (1, 1, SECTIONS)
    assert started(document) == ("mpi", "OMPI_COMM_WORLD_RANK", 3, "mpi")
    assert {finding["name"] for finding in findings if finding["level"] == "error"} == ERRORS
    assert found.keys() >= {"placement.shared_device", "batch.open_files", "files.in_memory", "files.no_flock"}
    assert f"all 3 ranks of {socket.gethostname()} are bound to core {core}; " in found["placement.one_core"]
    assert "ranks 1-2 of " in found["placement.shared_device"]
    assert "2.4.1 on rank 2" in found["packages.different"]
    assert "(rank 2) is " in found["clocks.far"]
    assert found["batch.open_files"] == "100 open files, rank 0 of 3 may need 109"
    assert found["collectives.wrong"].endswith("a rank): wrong values: 1 on rank 1")


def signal_before_packages(number: signal.Signals) -> Callable[[int], None]:
    """Rank 1 gets a signal before it looks at its packages."""

    def patch(rank: int) -> None:
        from hkd_hpc.doctor import packages

        collect = packages.collect

        def signalled(context):
            if context.comm.rank == 1:
                os.kill(os.getpid(), number)
            return collect(context)

        packages.collect = signalled

    return patch


def test_a_rank_that_stops_is_named_within_the_limit_after_what_was_found_before(tmp_path):
    arguments = ["--out", str(tmp_path), "comm.timeout_s=2"]
    late, results = watch_ranks(
        3, doctor_rank, arguments, signal_before_packages(signal.SIGSTOP), watch=end_when_last(1)
    )
    assert late == []
    assert [results[rank].exit_code for rank in (0, 2)] == [1, 1]
    assert results[0].output.startswith("launch      ok ")
    assert f"rank 1 (host {socket.gethostname()}, pid " in results[0].output
    assert " did not reach gather of control (phase doctor, packages" in results[0].output
    assert "it is stopped (SIGSTOP, or a debugger)" in results[0].output


def test_a_rank_that_is_gone_is_named_and_no_advice_for_a_training_is_given(tmp_path):
    codes, output = doctor(3, "--out", tmp_path, patch=signal_before_packages(signal.SIGKILL))
    assert codes == [1, None, 1]
    assert f"hkd_hpc: rank 1 (host {socket.gethostname()}, pid " in output
    assert " ended without an error message; last seen in phase doctor, " in output
    assert "What to do: the machine or the launcher lost it, if nobody ended it: look for " in output
    assert output.endswith("The examination ends here, as a run would.\n")
    assert "--resume" not in output


# ---- no world of ranks


BARE = [f"PATH={os.environ['PATH']}", f"PYTHONPATH={toy.PROJECT}"]


@pytest.mark.mpi
@pytest.mark.parametrize(
    "without, finding, found",
    [
        (
            ["-u", "PMIX_NAMESPACE"],
            "launch.singletons",
            "the launcher started 3 ranks (OMPI_COMM_WORLD_RANK says rank 0), but MPI sees a world of 1",
        ),
        (["-i", *BARE], "launch.strange_launcher", "started 3 processes of this command"),
    ],
    ids=["an MPI that does not know its launcher's PMI", "a container that lets no variable through"],
)
def test_mpirun_of_singletons_is_named_once(tmp_path, without, finding, found):
    """Each process is behind a shell, as behind slurm/rank.sh; rank 2 comes late."""
    shell = ["bash", "-c", 'sleep $((OMPI_COMM_WORLD_RANK / 2)); "$@"; exit', "bash"]
    rank = [*shell, "env", *without, sys.executable, "-m", "hkd_hpc.doctor"]
    done = launched(*MPIRUN, *rank, "--out", tmp_path)
    assert (done.returncode, done.stdout.count(f"ERROR {finding}: ")) == (1, 1), done
    assert found in " ".join(done.stdout.split())
    assert done.stdout.endswith("doctor: 1 error, 0 warnings, 0 notes; exit code 1\n")
    assert os.listdir(tmp_path) == []


# ---- broken file systems


def test_a_disk_that_is_read_only(tmp_path):
    with toy.full_disk(tmp_path / "disk") as place:
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        code, found = alone("--out", place / "runs")
        assert (code, "files.read_only" in found) == (1, True)


def without_large_files(rank: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))


def test_a_limit_of_the_size_of_files(tmp_path):
    code, found = alone("--out", tmp_path, patch=without_large_files)
    assert (code, "files.full" in found, os.listdir(tmp_path)) == (1, True, [])


def hang_in_files(rank: int) -> None:
    files.measure = lambda folder, needed: time.sleep(600)


def test_a_file_system_that_does_not_answer_ends_one_process_too(tmp_path):
    [result] = run_ranks(1, doctor_rank, ["--out", str(tmp_path), "comm.timeout_s=1"], hang_in_files)
    assert result.exit_code == 1
    assert f"hkd_hpc: the file system of {tmp_path} did not answer within 1 s (comm.timeout_s)" in result.output


# ---- the command line


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--nope"], "unrecognized arguments: --nope; python -m hkd_hpc.doctor --help lists the options"),
        (["comm.timeout=3"], "comm.timeout: no such setting"),
        (["--out", __file__], f"--out {__file__}: is a file; name a folder, or one that is new"),
        (["--out", f"{__file__}/x"], f"--out {__file__}/x: a file is in the way ({__file__}); name a folder"),
        (["--out", "x" * 300], ": cannot be looked at (File name too long)"),
        (["--out", "$NOT_SET_HERE/x"], "--out $NOT_SET_HERE/x: the variable NOT_SET_HERE is not set"),
    ],
)
def test_wrong_input_is_told(arguments, text):
    with pytest.raises(UsageError) as rejected:
        parse(arguments)
    assert text in str(rejected.value)


def test_wrong_input_is_one_line_and_exit_code_2():
    command = [sys.executable, "-m", "hkd_hpc.doctor", "fed.clients=0"]
    done = subprocess.run(command, env=environment(), cwd=toy.PROJECT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, len(ours(done))) == (2, "", 1)
    assert "fed.clients=0: not allowed" in ours(done)[0]


def test_words_are_one_screen_and_strict_makes_a_warning_count(tmp_path):
    """A disk in memory is a warning."""
    with toy.small_disk(tmp_path / "disk", "60m") as place:
        codes, output = doctor(1, "--strict", "--out", place)
        lines = output.splitlines()
        assert (codes, doctor(1, "--out", place)[0], os.listdir(place)) == ([1], [0], [])
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [*SECTIONS, "doctor:"]
    assert "      WARNING files.in_memory: " in output
    assert len(lines) < 50
