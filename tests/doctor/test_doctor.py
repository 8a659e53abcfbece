"""The doctor on set-ups that are broken on purpose: under mpirun, in forked ranks, on disks with something wrong.

The small transfers only: those of a ResNet18 take seconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import toy
from comm_launch import environment, mpirun_path, ours

from hkd_hpc.doctor import collectives, files, launch
from hkd_hpc.doctor.__main__ import main, parse
from hkd_hpc.errors import UsageError
from tools.forked_ranks import end_when_last, run_ranks, watch_ranks

SECTIONS = ["launch", "transport", "placement", "packages", "clocks", "batch", "files", "collectives"]


def doctor_rank(rank: int, arguments: list[str], patch) -> None:
    """One rank; `patch(rank)` changes this process only."""
    collectives.TRANSFERS = tuple(t for t in collectives.TRANSFERS if t.nbytes < 10**6)
    files.WRITTEN_BYTES = 1 << 20
    patch(rank)
    sys.exit(main(arguments))


SMALL = """
import sys
from hkd_hpc.doctor import __main__ as doctor, collectives
collectives.TRANSFERS = [t for t in collectives.TRANSFERS if t.nbytes < 10**6]
sys.exit(doctor.main())
"""


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


@pytest.mark.mpi
def test_mpirun_tells_all_sections_and_leaves_the_folder_as_it_was(tmp_path):
    command = [mpirun_path(), "-n", "2", "--bind-to", "none", sys.executable, "-c", SMALL, "--json"]
    done = subprocess.run(
        [*command, "--out", tmp_path / "out/runs"], env=environment(), cwd=tmp_path, capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    assert (done.returncode, found["exit_code"], found["format"]) == (0, 0, 1)
    assert list(found["sections"]) == SECTIONS
    launch = found["sections"]["launch"]["facts"]
    assert (launch["launcher"], launch["variable"], launch["ranks"]) == ("mpi", "OMPI_COMM_WORLD_RANK", 2)
    assert found["sections"]["transport"]["facts"]["backend"] == "mpi"
    transfers = found["sections"]["collectives"]["facts"]["transfers"]
    assert [transfer["wrong"] for transfer in transfers] == [[0, 0]] * 4
    assert all(0 < len(transfer["seconds"]) <= collectives.TURNS for transfer in transfers)
    assert list(tmp_path.iterdir()) == []


def many_faults(rank: int) -> None:
    """One core for all; one GPU for all; rank 2 has another torch and a clock that is ahead; rank 1 adds wrongly."""
    from hkd_hpc.comm.transports.torch_dist import TorchComm
    from hkd_hpc.doctor.job import Job
    from hkd_hpc.runtime import versions

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    Job.device = property(lambda job: "GPU-8a")
    if rank == 1:
        TorchComm._sum = with_a_wrong_bit(TorchComm._sum)
    if rank == 2:
        installed, clock = versions.installed, time.time
        versions.installed = lambda package: "2.4.1" if package == "torch" else installed(package)
        time.time = lambda: clock() + 40


def with_a_wrong_bit(sum_):
    def wrong(self, piece):
        sum_(self, piece)
        piece[5] += 1

    return wrong


def test_each_of_many_faults_is_named(tmp_path):
    codes, output = doctor(3, "--json", "--out", tmp_path, "fed.clients=2", patch=many_faults)
    document = json.loads(output)
    assert codes == [1, 1, 1]
    assert {
        "placement.one_core",
        "placement.shared_device",
        "packages.different",
        "clocks.far",
        "collectives.wrong",
    } <= names(document)
    found = {finding["name"]: finding for part in document["sections"].values() for finding in part["findings"]}
    assert "all 3 ranks of " in found["placement.one_core"]["found"]
    assert "ranks 1-2 of " in found["placement.shared_device"]["found"]
    assert "2.4.1 on rank 2" in found["packages.different"]["found"]
    assert "(rank 2) is " in found["clocks.far"]["found"]
    assert found["collectives.wrong"]["found"].endswith("a rank): wrong values: 1 on rank 1")


def signal_before_packages(number: signal.Signals) -> Callable[[int], None]:
    """Rank 1 gets a signal before it looks at its packages."""

    def patch(rank: int) -> None:
        from hkd_hpc.doctor import packages

        look = packages.look

        def signalled(job):
            if job.comm.rank == 1:
                os.kill(os.getpid(), number)
            return look(job)

        packages.look = signalled

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


def test_processes_whose_launcher_claims_more_than_mpi_sees(tmp_path):
    """As after an mpirun of another MPI that sets these variables too."""
    claimed = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    jobs = [
        subprocess.Popen(
            [sys.executable, "-m", "hkd_hpc.doctor", "--json", "--out", tmp_path],
            env=environment(**claimed, OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    outputs = [job.communicate(timeout=300)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [1, 1, 1]
    assert outputs[1:] == ["", ""]
    [finding] = json.loads(outputs[0])["sections"]["launch"]["findings"]
    assert finding["name"] == "launch.singletons"
    assert (
        "the launcher started 3 ranks (OMPI_COMM_WORLD_RANK says rank 0), but MPI sees a world of 1" in finding["found"]
    )


@pytest.mark.mpi
def test_processes_of_a_launcher_that_nobody_knows(tmp_path):
    bare = [f"PATH={os.environ['PATH']}", f"PYTHONPATH={toy.PROJECT}"]
    command = [mpirun_path(), "-n", "2", "env", "-i", *bare, sys.executable, "-m", "hkd_hpc.doctor", "--out", tmp_path]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout.count("ERROR launch.strange_launcher: ") == 1
    assert " started 2 processes of this command, and each takes itself for the only one\n" in done.stdout


def test_the_others_of_a_strange_launcher_wait_for_the_first():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"]) as first:
        threading.Thread(target=first.wait).start()  # as a launcher does
        launch.await_end(first.pid)
        assert first.poll() == 0


# ---- broken file systems


def test_a_full_disk_and_one_that_is_read_only(tmp_path):
    with toy.small_disk(tmp_path / "disk", "3m") as place:
        (place / "much").write_bytes(b"\1" * (5 << 19))
        code, found = alone("--out", place / "runs")
        assert (code, {"files.full", "files.little_room", "files.in_memory"} <= found) == (1, True)
        assert os.listdir(place) == ["much"]
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        code, found = alone("--out", place / "runs")
        assert (code, "files.read_only" in found) == (1, True)


def without_large_files(rank: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))


def test_a_limit_of_the_size_of_files(tmp_path):
    code, found = alone("--out", tmp_path, patch=without_large_files)
    assert (code, "files.full" in found, os.listdir(tmp_path)) == (1, True, [])


def without_locks(rank: int) -> None:
    """The kernel knows no flock in this process, as on Lustre mounted without it; and nobody keeps O_EXCL."""
    forbid_flock()
    make = os.open
    os.open = lambda path, flags, mode=0o777, **other: make(path, flags & ~os.O_EXCL, mode, **other)


def forbid_flock() -> None:
    """By a seccomp filter: of the system calls flock alone fails, with ENOSYS."""
    number = {"x86_64": 73, "aarch64": 32}[platform.machine()]
    load_number, if_equal, fail, allow = (
        (0x20, 0, 0, 0),
        (0x15, 0, 1, number),
        (0x06, 0, 0, 0x50026),
        (0x06, 0, 0, 0x7FFF0000),
    )
    instructions = [load_number, if_equal, fail, allow]
    program = b"".join(
        code.to_bytes(2, "little") + bytes([yes, no]) + value.to_bytes(4, "little")
        for code, yes, no, value in instructions
    )
    held = ctypes.create_string_buffer(program, len(program))

    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, filter_mode, ctypes.byref(Filter(len(instructions), ctypes.addressof(held)))) == 0


def test_a_file_system_without_locks(tmp_path):
    code, found = alone("--out", tmp_path, patch=without_locks)
    assert (code, {"files.no_lock", "files.no_flock"} <= found, os.listdir(tmp_path)) == (1, True, [])


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
