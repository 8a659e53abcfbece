"""Jobs of a real mpirun end with one message, none of their ranks outlives it, and several at once do not meet."""

from __future__ import annotations

import signal
import socket
import subprocess

import pytest
import toy
from comm_launch import LIMIT_S, ROOT, command, environment, mpirun, ours

from tools.forked_ranks import held_port

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.mark.parametrize(
    "way, victim, text",
    [
        ("kill", 2, "rank 2 ("),
        ("kill", 0, "rank 0 ("),
        ("os._exit", 2, "rank 2 ("),
        ("raise", 3, "rank 3 ("),
        ("sys.exit", 1, "rank 1 ("),
        ("terminate", 2, "signal 15"),
    ],
)
def test_mpirun_ends_with_one_message(way, victim, text):
    result = mpirun(4, "fail", way, victim)
    assert result.returncode != 0
    assert len(ours(result)) == 1, result.stderr
    assert text in ours(result)[0]
    assert "round 2, phase training, client 5" in ours(result)[0]
    assert ("ArithmeticError" in result.stderr) == (way == "raise")


def test_mpirun_with_a_stopped_rank_ends_after_the_time_out():
    result = mpirun(2, "fail", "stop", 1, TEST_TIMEOUT_S="2")
    assert result.returncode != 0
    assert len(ours(result)) == 1
    assert "rank 1 (" in ours(result)[0]
    assert "within 2 s" in ours(result)[0]


@pytest.mark.parametrize(
    "where, text",
    [
        ("split", "the making of the client ranks' group by MPI did not end within"),
        ("finalize", "MPI_Finalize did not end within"),
    ],
)
def test_mpirun_with_a_rank_stopped_before_mpi_waits_for_it(where, text):
    result = mpirun(3, "stop_in_mpi", where, TEST_TIMEOUT_S="20")
    assert result.returncode != 0
    assert text in ours(result)[0], result.stderr


def test_mpirun_with_a_rank_killed_inside_the_sum():
    result = mpirun(3, "kill_in_sum")
    assert result.returncode != 0
    assert len(ours(result)) == 1
    assert "rank 2 (" in ours(result)[0]
    assert "round 3, phase weights" in ours(result)[0]


def test_mpirun_with_a_mistake_found_by_all_ranks_exits_with_2():
    result = mpirun(4, "raise_everywhere")
    assert result.returncode == 2
    assert ours(result) == ["hkd_hpc: scheme.name=nope is unknown; allowed: fedavg"]


@pytest.mark.parametrize("victim", [0, 1])
def test_mpirun_with_a_rank_that_ends_before_mpi_starts(victim, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        f"import os\nif os.environ.get('OMPI_COMM_WORLD_RANK') == '{victim}': os._exit(0)\n"
    )
    result = mpirun(3, "wait", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert result.returncode != 0
    assert ours(result) == [
        f"hkd_hpc: rank {victim} ended before it joined the job; 2 of 3 ranks are left on this host"
    ]


@pytest.mark.parametrize("wrapper", [False, True], ids=["python", "wrapper script"])
def test_no_rank_outlives_a_killed_mpirun(wrapper, tmp_path):
    script = tmp_path / "wrapper.sh"
    script.write_text('#!/bin/sh\n"$@"\nexit $?\n')
    script.chmod(0o755)
    line = command(3, "wait")
    line[3:3] = [str(script)] if wrapper else []
    job = subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pids = [int(job.stdout.readline().split()[1]) for _ in range(3)]
    job.kill()
    job.wait()
    toy.wait_until(lambda: not any(map(toy.is_running, pids)))


def test_four_jobs_at_once_do_not_meet():
    jobs = [
        subprocess.Popen(command(3, "one_job"), env=environment(), stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    assert [job.communicate(timeout=LIMIT_S)[0] for job in jobs] == ["3 ranks of one job\n"] * 4
    assert [job.returncode for job in jobs] == [0] * 4


def test_mpirun_with_a_users_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        result = mpirun(3, "one_job", MASTER_PORT=port)
    assert result.returncode == 2
    assert len(ours(result)) == 1
    assert f"port {port}" in ours(result)[0]
    with held_port() as port:
        assert mpirun(3, "one_job", MASTER_PORT=str(port)).stdout == "3 ranks of one job\n"


@pytest.mark.parametrize(
    "master, told, code",
    [
        ("localhost", "127.0.0.1\n", 0),
        ("127.0.0.2", "127.0.0.2\n", 0),
        ("192.0.2.1", "hkd_hpc: rank 0 cannot listen on any port of 192.0.2.1 (Cannot assign requested address): ", 2),
        ("nowhere.invalid", "hkd_hpc: the host of rank 0, 'nowhere.invalid', has no address here: ", 2),
    ],
)
def test_mpirun_listens_where_master_addr_says(master, told, code):
    result = mpirun(3, "address", MASTER_ADDR=master)
    assert result.returncode == code, result.stderr
    assert result.stdout == told * (code == 0)
    assert [line.startswith(told) for line in ours(result)] == [True] * (code != 0)


def test_mpirun_keeps_apart_what_a_users_own_code_sends():
    result = mpirun(3, "beside_other_traffic")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "[2.0, 2.0, 2.0, 2.0] [7.0, 7.0, 7.0, 7.0] True\n[False, False]\n"


def test_mpirun_with_an_mpi_for_one_thread(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif 'OMPI_COMM_WORLD_RANK' in os.environ:\n"
        "    import mpi4py\n    mpi4py.rc.initialize = False\n"
        "    from mpi4py import MPI\n    MPI.Init_thread(MPI.THREAD_SINGLE)\n"
    )
    result = mpirun(2, "one_job", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert result.returncode == 2
    assert [line.partition(",")[0] for line in ours(result)] == [
        "hkd_hpc: MPI was started for processes of one thread (MPI_THREAD_SINGLE)"
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_signal_to_mpirun_alone_is_told_in_one_line(number):
    """mpirun passes nothing of its ranks on then, and decides the exit code itself."""
    job = subprocess.Popen(
        command(3, "wait"), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert all(job.stdout.readline().startswith("pid ") for _ in range(3))
        job.send_signal(number)
        _, err = job.communicate(timeout=LIMIT_S)
    finally:
        job.kill()
    lines = [line for line in err.splitlines() if line.startswith("hkd_hpc:")]
    assert job.returncode != 0, err
    assert len(lines) == 1, err
    assert "phase start-up was ended by signal 15 (SIGTERM). The whole job ends here" in lines[0]
