"""A rank that dies, fails or stops ends the whole job: quickly, non-zero, with one message that says who and where."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import time

import pytest
import torch
import toy
from comm_contract import sum_

from hkd_hpc.assembly import federation
from hkd_hpc.comm import World
from hkd_hpc.comm.control import rendezvous
from hkd_hpc.comm.control.diagnostics import RankState, summary
from hkd_hpc.comm.control.watch import write_stderr
from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.config import resolve
from hkd_hpc.data import share
from tools.forked_ranks import end_when_last, run_ranks


def messages(results):
    """All of our lines, from whichever rank."""
    return [line for result in results for line in result.output.splitlines() if line.startswith("hkd_hpc:")]


def _die(rank, way, victim, others):
    with World.open(timeout_s=60) as world:
        comm = world.connect(device="cpu")
        comm.at(2, "training", 5)
        if rank == victim:
            way()
        if others == "compute":
            time.sleep(600)
        sum_(comm, torch.zeros(4, dtype=torch.float64))


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


def _raise():
    raise ArithmeticError("a bad number")


@pytest.mark.parametrize("others", ["wait", "compute"])
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("way", [_kill, lambda: os._exit(0)], ids=["kill -9", "os._exit"])
def test_rank_that_ends_without_a_word_is_named_with_its_last_place(way, victim, others):
    results = run_ranks(3, _die, way, victim, others)
    assert [result.exit_code for rank, result in enumerate(results) if rank != victim] == [1, 1]
    assert len(messages(results)) == 1
    assert f"rank {victim} (" in messages(results)[0]
    assert "ended without an error message; last seen in round 2, phase training, client 5" in messages(results)[0]


def _wait_while_nothing_is_saved(rank):
    """As between the message of a round and its save."""
    with World.open(timeout_s=60) as world:
        world.control.give_back_after_failure(lambda: write_stderr("the lock was given back"))
        if rank == 1:
            _kill()
        with world.control.uninterrupted():
            world.control.barrier(["message"])


def test_a_rank_that_waits_for_a_dead_one_gives_its_lock_back_though_it_was_about_to_save():
    waiting, _ = run_ranks(2, _wait_while_nothing_is_saved)
    assert waiting.exit_code == 1
    assert "the lock was given back" in waiting.output


def _share_with_one_that_fails(rank, folder):
    """Rank 0 has made the node's copy of the data; rank 1 fails before all have it."""
    share._folders_with_space = lambda nbytes: [str(folder)]

    def attach(path):
        if rank == 1:
            raise RunError("a rank that cannot map it")
        time.sleep(600)

    share.attach = attach
    with World.open(timeout_s=60) as world:
        federation.node_copy(resolve(overrides=["data.fraction=0.01"]), world.connect(device="cpu"))


def test_a_failure_of_another_rank_leaves_no_copy_of_the_data_behind(tmp_path):
    results = run_ranks(3, _share_with_one_that_fails, tmp_path)
    assert [result.exit_code for result in results] == [1, 1, 1]
    assert len(messages(results)) == 1
    assert "a rank that cannot map it" in messages(results)[0]
    assert list(tmp_path.iterdir()) == []


def test_a_message_that_nobody_reads_holds_nothing_up():
    """The pipe is full, and its reader is suspended."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    write_stderr("hkd_hpc: rank 1 has ended", writer)
    heard = b""
    while not heard.endswith(b"\n"):
        heard += os.read(reader, 1 << 16)
    assert heard.lstrip(b"x") == b"hkd_hpc: rank 1 has ended\n"
    os.close(reader)
    os.close(writer)


def _lose_two(rank, machines):
    """Ranks 0 and 1 are killed at one moment."""
    rendezvous.machine_name = lambda: machines[rank]
    with World.open(timeout_s=60) as world:
        world.control.set_status(2, "training", 5)
        world.control.barrier(["all here"])
        if rank == 0:
            os.kill(world.topology.members[1].pid, signal.SIGKILL)
            _kill()
        time.sleep(600)


@pytest.mark.parametrize("machines", ["aaaaa", "aabbb"], ids=["one machine", "all ranks of a machine"])
def test_of_several_ranks_lost_with_rank_0_the_lowest_that_is_left_tells(machines):
    results = run_ranks(5, _lose_two, machines)
    assert [result.exit_code for result in results] == [None, None, 1, 1, 1]
    assert len(messages(results)) == 1, results
    assert messages(results[2:3])[0].startswith("hkd_hpc: rank 0 (")
    assert "ended without an error message; last seen in round 2, phase training, client 5" in messages(results)[0]


@pytest.mark.parametrize("victim", [0, 2])
def test_exception_is_told_once_with_its_traceback(victim):
    results = run_ranks(3, _die, _raise, victim, "compute")
    output = "".join(result.output for result in results)
    assert [result.exit_code for result in results] == [1, 1, 1]
    assert output.count("ArithmeticError: a bad number\n") == 2  # the headline and the traceback's last line
    assert output.count("Traceback") == 1
    assert f"rank {victim} (" in messages(results)[0]
    assert "round 2, phase training, client 5" in messages(results)[0]


class Mute(Exception):
    """An error whose own text fails."""

    def __str__(self):
        raise ValueError("no words")


@pytest.mark.parametrize(
    "error, said",
    [
        (Mute(), "failed with Mute: (its text cannot be had)"),
        (ValueError("x" * 10**6), f"ValueError: {'x' * 2000}... (1000000 "),
        (ValueError("bad \udcff"), "failed with ValueError: bad ?"),
        (GeneratorExit(), "failed with GeneratorExit"),
    ],
    ids=["no text", "long text", "no UTF-8", "no Exception"],
)
def test_error_of_a_users_own_kind_is_told_too(error, said):
    def throw():
        raise error

    results = run_ranks(2, _die, throw, 1, "wait")
    assert [result.exit_code for result in results] == [1, 1]
    assert len(messages(results)) == 1
    assert "rank 1 (" in messages(results)[0]
    assert said in messages(results)[0]
    assert "in throw" in "".join(result.output for result in results)


def _fail_together(rank, error):
    with World.open(timeout_s=60) as world:
        world.control.barrier(["all here"])
        raise error


@pytest.mark.parametrize(
    "error, code, text",
    [
        (UsageError("data.beta=nan is not a number > 0"), 2, "hkd_hpc: data.beta=nan is not a number > 0"),
        (RunError("the disk is full"), 1, "the disk is full"),
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 9 GiB."
            ),
            1,
            "CUDA out of memory. Tried to allocate 2.00 GiB; fewer ranks a GPU, run.lanes=1, or a smaller "
            "train.batch_size",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
        (SystemExit(0), 1, "left the job with sys.exit(0) before its end"),
        (SystemExit(7), 7, "left the job with sys.exit(7) before its end"),
        (SystemExit(256), 1, "left the job with sys.exit(256) before its end"),  # the system would make a 0 of it
        (SystemExit("bye"), 1, "left the job with sys.exit('bye') before its end"),
    ],
    ids=repr,
)
def test_failure_of_all_ranks_is_one_line_and_one_exit_code(error, code, text):
    results = run_ranks(4, _fail_together, error)
    assert [result.exit_code for result in results] == [code] * 4
    assert len(messages(results)) == 1
    assert messages(results)[0].endswith(text)
    assert "Traceback" not in "".join(result.output for result in results)


def test_one_process_ends_in_the_same_ways():
    for error, code in (
        (UsageError("bad"), 2),
        (RunError("gone"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(0), 1),
        (SystemExit(7), 7),
    ):
        with pytest.raises(SystemExit) as caught, World.open(env={}):
            raise error
        assert caught.value.code == code


def _broken_transfer(rank):
    """Rank 2 dies inside the all-reduce: the errors of its neighbours come at the same moment as its end."""
    with World.open(timeout_s=60) as world:
        comm = world.connect(device="cpu")
        comm.at(3, "weights")
        if rank == 2:
            comm._sum = lambda buffer: _kill()
        sum_(comm, torch.zeros(1000, dtype=torch.float64))


def test_rank_that_dies_inside_a_transfer_is_named_not_its_echo():
    results = run_ranks(4, _broken_transfer)
    assert len(messages(results)) == 1, results
    assert "rank 2 (" in messages(results)[0]
    assert "ended without an error message; last seen in round 3" in messages(results)[0]


def _stuck_transfer(rank, where):
    with World.open(timeout_s=1) as world:
        comm = world.connect(device="cpu")
        comm.at(3, "weights")
        if rank == 1:
            setattr(comm, f"_{where}", lambda buffer: os.kill(os.getpid(), signal.SIGSTOP))
        sum_(comm, torch.zeros(1000, dtype=torch.float64))


@pytest.mark.parametrize(
    "where, text",
    [
        ("relay", r"the transfer of weights \(relay\) did not end within 1 s"),
        (
            "sum",
            r"(the transfer of weights \(sum\) did not end|rank 1 \(.*did not reach relay of weights \(round 3.*) "
            r"within 1 s",
        ),
    ],
)
def test_transfer_that_hangs_is_ended(where, text):
    """Rank 0 is outside the sum."""
    results = run_ranks(3, _stuck_transfer, where, watch=end_when_last(1))
    assert re.search(text, "".join(result.output for result in results)), results


def _report_of(results):
    """The lines of the one report: the headline and what follows it."""
    output = "".join(result.output for result in results)
    assert len(messages(results)) == 1, output
    return output[output.index("hkd_hpc:") :]


def _stuck_in_user_code(rank, stopped):
    def a_users_own_function():
        if stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)

    with World.open(timeout_s=1) as world:
        comm = world.connect(device="cpu")
        if rank == 2:
            comm.watch_steps(lambda: 17)
            comm.at(3, "training", 5)
            time.sleep(0.9)  # until the steps were told
            a_users_own_function()
        comm.at(3, "weights")
        comm.agree()


def test_report_of_a_hang_says_where_all_are_and_what_the_stuck_rank_does():
    text = _report_of(run_ranks(4, _stuck_in_user_code, False))
    assert "rank 2 (" in text.splitlines()[0]
    assert "did not reach agreement of status (round 3" in text.splitlines()[0]
    assert text.count("round 3, phase weights, for") == 3
    assert text.count("waits for the others") == 3
    assert "round 3, phase training, client 5, step 17, for" in text
    assert "What rank 2 does:" in text
    assert "in a_users_own_function" in text
    assert "time.sleep(600)" in text
    assert "What rank 1 does:" not in text
    assert "a larger comm.timeout_s" in text


def test_report_of_a_hang_says_that_a_rank_is_stopped():
    results = run_ranks(4, _stuck_in_user_code, True, watch=end_when_last(2))
    text = "".join(result.output for result in results)
    assert re.search(r"(?s)it is stopped \(SIGSTOP.*it does not answer", text), text


def _stopped_coordinator(rank):
    with World.open(timeout_s=1) as world:
        comm = world.connect(device="cpu")
        comm.at(3, "weights")
        comm.agree()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        comm.agree()


def test_of_all_ranks_that_miss_rank_0_one_says_so():
    results = run_ranks(4, _stopped_coordinator, watch=end_when_last(0))
    assert [result.exit_code for result in results[1:]] == [1, 1, 1]
    assert len(messages(results)) == 1, results
    assert "rank 0 (" in messages(results)[0], results
    assert "sent no heartbeat for 1 s" in messages(results)[0]
    assert "it is stopped (SIGSTOP, or a debugger). What to do:" in messages(results)[0]


def test_report_of_a_death_says_where_the_others_are():
    text = _report_of(run_ranks(3, _die, _kill, 2, "compute"))
    assert text.count("round 2, phase training, client 5, for") == 3
    assert "the machine or the launcher lost it" in text
    assert text.endswith("for a failed node. The whole job ends here.\n")


def _slow_but_alive(rank):
    """Twice as long as it may be silent; steps need seconds to get through on a loaded machine."""
    with World.open(timeout_s=8.0) as world:
        comm = world.connect(device="cpu")
        if rank == 1:
            started_s = time.monotonic()
            comm.watch_steps(lambda: int((time.monotonic() - started_s) * 10))
            comm.at(1, "training", 0)
            time.sleep(16)
        comm.at(1, "weights")
        comm.agree()


def test_rank_that_takes_steps_is_not_late():
    assert [result.exit_code for result in run_ranks(2, _slow_but_alive)] == [0, 0]


def test_report_groups_the_ranks_of_a_large_job():
    """Worked out by hand: 14 ranks, of which 12 wait, one trains and one is gone from there."""
    waiting = [RankState(rank, f"rank {rank}", "round 3, phase weights", 10.0 + rank, waits=True) for rank in range(12)]
    others = [
        RankState(12, "rank 12", "round 3, phase training, client 9", 99.0, stack="  File x\n"),
        RankState(13, "rank 13", "start-up", 5.0, condition="its process is gone"),
    ]
    assert (
        summary([*waiting, *others], "Advice.")
        == """\
Where the ranks are:
  ranks 0-11: round 3, phase weights, for 21.0 s; waits for the others
  rank 12: round 3, phase training, client 9, for 99.0 s
  rank 13: start-up, for 5.0 s; its process is gone
What rank 12 does:
  File x
Advice."""
    )


def _with_a_child(rank):
    with World.open(timeout_s=60) as world:
        comm = world.connect(device="cpu")
        if rank == 1:
            child = os.fork()
            if child == 0:
                time.sleep(600)  # holds no connection of its parent
            print(child)
            _kill()
        comm.agree()


def test_child_processes_do_not_hide_the_end_of_a_rank():
    results = run_ranks(2, _with_a_child)
    child = int(results[1].output)
    assert toy.is_running(child)
    os.kill(child, signal.SIGKILL)
    assert "rank 1 (" in messages(results)[0]


def measures_coverage() -> bool:
    coverage = sys.modules.get("coverage")
    return coverage is not None and coverage.Coverage.current() is not None


def _terminated_child(rank):
    with World.open(timeout_s=60) as world:
        child = os.fork()
        if child == 0:
            time.sleep(600)
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        time.sleep(1)
        world.control.barrier(["still here"])


@pytest.mark.skipif(measures_coverage(), reason="coverage takes SIGTERM for itself, in the child too")
def test_signal_to_a_child_process_is_none_of_ours():
    assert [result.exit_code for result in run_ranks(2, _terminated_child)] == [0, 0]


def test_rank_ended_by_sigterm_says_so():
    results = run_ranks(3, _sleep_after_sigterm)
    assert [result.exit_code for result in results] == [143] * 3
    assert len(messages(results)) == 1
    assert "rank 1 (" in messages(results)[0]
    assert "round 5, phase evaluation was ended by signal 15" in messages(results)[0]


def _sleep_after_sigterm(rank):
    with World.open(timeout_s=60) as world:
        world.control.set_status(5, "evaluation")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)
        world.control.barrier(["after evaluation"])


def _absent(rank):
    if rank == 2:
        os._exit(0)
    World.open(start_timeout_s=2)


def test_rank_that_never_comes_is_named():
    results = run_ranks(3, _absent)
    assert [result.exit_code for result in results] == [1, 1, 0]
    assert messages(results) == ["hkd_hpc: not all of the 3 ranks joined the job within 2 s (not yet here: rank 2)"]


def _twice(rank):
    os.environ["RANK"] = str(min(rank, 1))
    World.open(start_timeout_s=300)


def test_two_processes_of_one_rank_are_rejected():
    results = run_ranks(3, _twice)
    assert [result.exit_code for result in results] == [2, 1, 1]
    assert len(messages(results)) == 1
    assert "duplicate rank" in messages(results)[0]


def _port_taken(rank, port):
    World.open(start_timeout_s=1)


def test_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        results = run_ranks(2, _port_taken, port, env={"MASTER_PORT": str(port)})
    assert results[0].exit_code == 2
    assert f"port {port}" in messages(results)[0]
    assert results[1].exit_code == 1
    assert len(messages(results)) == 2
