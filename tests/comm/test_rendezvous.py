"""How ranks find each other without MPI: derived ports, tokens, and strangers on the same port."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import threading
from dataclasses import asdict

import pytest

from hkd_hpc.comm import World
from hkd_hpc.comm.control.handshake import NEWCOMER, RANK_0, is_proof, proof, receive
from hkd_hpc.comm.control.rendezvous import Address, Member, accept_all, derived_address, first_host, join, listen
from hkd_hpc.comm.control.wire import LIMIT_BYTES, Unpacker, pack
from hkd_hpc.comm.interfaces import check_interfaces
from hkd_hpc.comm.launchers import MOST_RANKS, Hint
from hkd_hpc.common.errors import UsageError
from tools.forked_ranks import held_port, run_rank_values, run_ranks

STEP = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}
SLURM = Hint("slurm", 0, 4, 0, 4)


def nothing_wrong():
    """A guard that is content."""
    return


def test_messages_survive_any_cut_of_the_stream():
    data = pack({"kind": "status", "place": [2, "träning", None]}) + pack({"kind": "release"})
    unpacker = Unpacker()
    messages = [message for byte in data for message in unpacker.feed(bytes([byte]))]
    assert messages == [{"kind": "status", "place": [2, "träning", None]}, {"kind": "release"}]


NESTED = b"[" * 4000
NOT_MESSAGES = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\0\0\0\2[]",
    b"\0\0\0\3{a}",
    b"\xff\xff\xff\xff",
    len(NESTED).to_bytes(4, "big") + NESTED,
]


@pytest.mark.parametrize("data", NOT_MESSAGES)
def test_what_is_not_a_message_is_rejected(data):
    with pytest.raises(ValueError):
        Unpacker().feed(data)


def test_messages_are_bounded():
    with pytest.raises(ValueError, match="at most"):
        pack({"text": "x" * LIMIT_BYTES})


def test_ports_are_derived_from_the_names_of_job_and_step():
    address = derived_address(SLURM, STEP)
    assert address == derived_address(Hint("slurm", 3, 4, 3, 4), STEP)  # the same in every rank
    assert address.host == "127.0.0.1"
    assert len(set(address.ports)) > 20
    assert all(20000 <= port < 32000 for port in address.ports)
    for other in (
        {**STEP, "SLURM_STEP_ID": "1"},
        {**STEP, "SLURM_JOB_ID": "78"},
        {**STEP, "SLURM_RESTART_COUNT": "1"},
        {**STEP, "HKD_TOKEN": "a secret"},
    ):
        assert derived_address(SLURM, other).token != address.token
        assert derived_address(SLURM, other).ports != address.ports


def test_users_port_is_taken_unless_the_agent_of_torchrun_holds_it():
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}
    hint = Hint("torchrun", 0, 2)
    assert derived_address(hint, env).ports == (29501,)
    agent = {**env, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "a"}
    assert 29501 not in derived_address(hint, agent).ports
    restarted = {**agent, "TORCHELASTIC_RESTART_COUNT": "1"}
    assert derived_address(hint, agent).token != derived_address(hint, restarted).token
    for wrong in ("0", "65536", "http"):
        with pytest.raises(UsageError, match=f"MASTER_PORT='{wrong}' is not a port"):
            derived_address(hint, {**env, "MASTER_PORT": wrong})


def test_host_without_an_address_is_named():
    with pytest.raises(UsageError, match="'nowhere.invalid', has no address here: set MASTER_ADDR"):
        derived_address(Hint("slurm", 0, 4, 0, 2), {**STEP, "SLURM_STEP_NODELIST": "nowhere.invalid,n2"})


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("n1", "n1"),
        ("n[1-4]", "n1"),
        ("gpu[007,009-11]", "gpu007"),
        ("a,b", "a"),
        ("rack[2-3]-ib", "rack2-ib"),
        ("login,n[1-2]", "login"),
        ("", ""),
    ],
)
def test_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


def test_listener_is_bound_to_one_address_only():
    with listen(Address("127.0.0.1", (0,), "token")) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_port_in_use_is_skipped_and_a_single_one_is_named():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()[1]
        with listen(Address("127.0.0.1", (taken, 0), "token")) as listener:
            assert listener.getsockname()[1] != taken
        with pytest.raises(UsageError, match=f"port {taken} of 127.0.0.1"):
            listen(Address("127.0.0.1", (taken,), "token"))


MEMBER = {"rank": 1, "host": "h", "machine": "m", "pid": 2}
STRANGERS = [
    *NOT_MESSAGES,
    pack({"ready": True}),
    pack({"proof": "theirs", "challenge": "c", "size": 2, "member": MEMBER}),
    pack({"proof": proof("theirs", NEWCOMER, "c", "c"), "challenge": "c", "size": 2, "member": MEMBER}),
    pack({"proof": "\ud800", "challenge": "\ud800", "size": 2, "member": MEMBER}),
    pack({"proof": ["x"], "challenge": {"x": 1}}),
    b"",  # hangs up
]


def test_strangers_are_rejected_and_the_job_starts_all_the_same():
    """They come first, some without a word; then the right one."""
    listener = listen(Address("127.0.0.1", (0,), "ours"))
    port = listener.getsockname()[1]
    rank_0 = Starter(lambda: accept_all(listener, "ours", Member(0, "h", "m", 1), 2, nothing_wrong))
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    for said in STRANGERS:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(said)
            if not said:
                stranger.shutdown(socket.SHUT_WR)
            heard = all_that_comes(stranger)
            assert [list(message) for message in Unpacker().feed(heard)] in ([["challenge"]], []), said
    link, members = join(Address("127.0.0.1", (port,), "ours"), Member(1, "h", "m", 3), 2, nothing_wrong)
    assert [member.pid for member in members] == [1, 3]
    assert list(rank_0.result()[0]) == [1]
    for connection in (link, *silent, *rank_0.result()[0].values(), listener):
        connection.close()


@pytest.mark.parametrize(
    "answers",
    [
        [{"challenge": "c"}, {"proof": "x"}],
        [{"challenge": "\ud800"}, {"proof": "\ud800"}],
        [{"challenge": "c"}, {"error": "go away"}],
        [{"error": "go away"}],
        [{"members": [MEMBER]}],
        [{"challenge": [1]}],
    ],
)
def test_nobody_plays_rank_0_or_learns_the_token_without_it(answers):
    """A stranger has the first port; the rank goes on to the second."""
    with socket.create_server(("127.0.0.1", 0)) as theirs:
        ours = listen(Address("127.0.0.1", (0,), "ours"))
        ports = (theirs.getsockname()[1], ours.getsockname()[1])
        heard = bytearray()

        def stranger():
            connection, _ = theirs.accept()
            for answer in answers:
                connection.sendall(pack(answer))
            heard.extend(all_that_comes(connection))
            connection.close()

        playing = Starter(stranger)
        rank_0 = Starter(lambda: accept_all(ours, "ours", Member(0, "h", "m", 1), 2, nothing_wrong))
        link, members = join(Address("127.0.0.1", ports, "ours"), Member(1, "h", "m", 3), 2, nothing_wrong)
        assert [member.pid for member in members] == [1, 3]
        playing.result()
        assert b"ours" not in bytes(heard)
        for connection in (link, *rank_0.result()[0].values(), ours):
            connection.close()


def test_a_rank_that_gave_up_while_rank_0_was_suspended_is_taken_in_when_it_comes_again():
    """It has said who it is, on a connection that it has closed since."""
    listener = listen(Address("127.0.0.1", (0,), "ours"))
    address = Address("127.0.0.1", (listener.getsockname()[1],), "ours")
    rank_0 = Starter(lambda: accept_all(listener, "ours", Member(0, "h", "m", 1), 2, nothing_wrong))
    with socket.create_connection((address.host, address.ports[0])) as given_up:
        asked = receive(given_up, nothing_wrong)["challenge"]
        given_up.sendall(
            pack({"challenge": "c", "proof": proof("ours", NEWCOMER, "c", asked), "size": 2, "member": MEMBER})
        )
        assert is_proof(receive(given_up, nothing_wrong)["proof"], "ours", RANK_0, asked, "c")
    link, members = join(address, Member(**MEMBER), 2, nothing_wrong)
    assert [member.pid for member in members] == [1, 2]
    for connection in (link, *rank_0.result()[0].values(), listener):
        connection.close()


def test_rank_0_takes_in_ranks_beyond_the_1024th_open_file():
    """As in a job of more than a thousand ranks."""
    listener = listen(Address("127.0.0.1", (0,), "ours"))
    address = Address("127.0.0.1", (listener.getsockname()[1],), "ours")
    with contextlib.ExitStack() as held:
        for _ in range(1100):
            held.enter_context(open(os.devnull))
        rank_0 = Starter(lambda: accept_all(listener, "ours", Member(0, "h", "m", 1), 3, nothing_wrong))
        peers = [
            Starter(lambda rank=rank: join(address, Member(rank, "h", "m", 2), 3, nothing_wrong)) for rank in (1, 2)
        ]
        links = [peer.result()[0] for peer in peers]
        assert sorted(rank_0.result()[0]) == [1, 2]
        for connection in (*links, *rank_0.result()[0].values(), listener):
            connection.close()


def _with_few_files(rank):
    """Rank 0 may open eight."""
    if rank == 0:
        highest = max(map(int, os.listdir("/proc/self/fd")))
        while os.open(os.devnull, os.O_RDONLY) < highest:  # no gaps below it
            pass
        most = len(os.listdir("/proc/self/fd")) + 8
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    World.open()


def test_too_few_open_files_are_told_in_one_line():
    results = run_ranks(9, _with_few_files)
    told = [line for result in results for line in result.output.splitlines() if "open files" in line]
    assert results[0].exit_code == 2
    assert len(told) == 1, results
    assert re.match(r"hkd_hpc: rank 0 cannot take in more than \d of 9 ranks \(Too many open files\): raise ", told[0])


def test_what_the_most_ranks_say_of_themselves_fits_one_message():
    """A host's name has at most 64 characters, a boot id 36."""
    members = [Member(rank, "h" * 64, f"{'h' * 64}/{'b' * 36}", 4194304) for rank in range(MOST_RANKS)]
    pack({"members": [asdict(member) for member in members]})
    cores = ",".join(str(core) for core in range(0, 256, 2)) + " (NUMA 0,2,4,6)"
    pack({"kind": "release", "values": [["GPU-" + "0" * 36, True, cores]] * MOST_RANKS})


def test_two_jobs_on_the_same_candidates_find_their_own():
    """Job B's first port is held by job A's rank 0, which rejects B's ranks; they go on to the next one."""
    with held_port() as first, held_port() as second:
        addresses = {name: Address("127.0.0.1", (first, second), name) for name in "AB"}
        listeners = {name: listen(address) for name, address in addresses.items()}
        assert [listener.getsockname()[1] for listener in listeners.values()] == [first, second]
        jobs = {name: Starter(lambda name=name: _rank_0(listeners[name], name)) for name in "AB"}
        for name in "BA":
            link, members = join(addresses[name], Member(1, name, "m", 2), 2, nothing_wrong)
            assert [member.host for member in members] == [name, name]
            link.close()
            for connection in jobs[name].result()[0].values():
                connection.close()


def all_that_comes(connection) -> bytes:
    """Until the other side closes, politely or not."""
    heard = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(4096):
            heard += data
    return heard


def _rank_0(listener, name):
    with listener:
        return accept_all(listener, name, Member(0, name, "m", 1), 2, nothing_wrong)


class Starter(threading.Thread):
    """A function in a thread, and its result."""

    def __init__(self, function):
        super().__init__(daemon=True)
        self.function, self.value = function, None
        self.start()

    def run(self):
        self.value = self.function()

    def result(self):
        self.join(300)
        return self.value


def _as_a_step(rank):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.environ.update(SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
    with World.open() as world:
        assert (world.hint.launcher, world.rank, world.size) == ("slurm", rank, 3)
        print(len(set(world.control.barrier(["parent"], os.getppid()))))


def test_step_of_srun_needs_neither_mpi_nor_a_port():
    env = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "3", "SLURM_NNODES": "1"}
    assert run_rank_values(3, _as_a_step, env=env) == ["1\n"] * 3


def _barriers(rank):
    with World.open() as world:
        seen = [
            world.control.barrier(["none"]),
            world.control.barrier(["one"], "b" if rank == 1 else None),
            world.control.barrier(["all"], rank),
            world.share(None),
            world.share([1] if rank == 0 else None),
        ]
        print(seen)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_barrier_gives_one_value_a_rank(size):
    """Also where no rank has one: what rank 0 shares may be None (a complete run)."""
    one = [None, "b", None][:size]
    expected = f"{[[None] * size, one, list(range(size)), None, [1]]}\n"
    assert run_rank_values(size, _barriers) == [expected] * size


def _under_an_agent(rank):
    with World.open() as world:
        print(sum(world.control.barrier(["numbers"], rank)))


def test_agent_of_torchrun_keeps_its_port():
    with socket.create_server(("127.0.0.1", 0)) as agent:
        env = {
            "MASTER_PORT": str(agent.getsockname()[1]),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": str(os.getpid()),
            "GROUP_WORLD_SIZE": "1",
        }
        assert run_rank_values(3, _under_an_agent, env=env) == ["3\n"] * 3


PRESENT = ["lo", "eth0", "eth1", "hsn0"]


@pytest.mark.parametrize(
    "variable, text, is_good",
    [
        ("GLOO", "eth0", True),
        ("GLOO", "lo,hsn0", True),
        ("GLOO", "", True),
        ("GLOO", "^lo", False),
        ("GLOO", "eth", False),
        ("GLOO", "eth0,ib0", False),
        ("NCCL", "eth", True),
        ("NCCL", "ib,hsn", True),
        ("NCCL", "^lo", True),
        ("NCCL", "=eth0", True),
        ("NCCL", "^=eth0,lo", True),
        ("NCCL", "ib", False),
        ("NCCL", "=eth", False),
        ("NCCL", "^lo,eth,hsn", False),
    ],
)
def test_an_interface_that_is_not_there_is_told_with_those_that_are(variable, text, is_good):
    env = {f"{variable}_SOCKET_IFNAME": text}
    if is_good:
        return check_interfaces(env, True, PRESENT)
    told = (
        f"{variable}_SOCKET_IFNAME={text}: does not name network interfaces of host {socket.gethostname()}, "
        "which has lo, eth0, eth1, hsn0; "
    )
    with pytest.raises(UsageError, match=re.escape(told)):
        check_interfaces(env, True, PRESENT)


def test_what_nccl_would_not_find_is_no_fault_of_a_job_without_it():
    check_interfaces({"NCCL_SOCKET_IFNAME": "ib0"}, False, PRESENT)


def test_ranks_with_an_unknown_interface_end_with_one_line():
    for text in ("^lo", "nope0"):
        results = run_ranks(2, _connect, env={"GLOO_SOCKET_IFNAME": text})
        assert [result.exit_code for result in results] == [2, 2]
        lines = "".join(result.output for result in results).splitlines()
        assert len(lines) == 1
        assert "lo" in lines[0]
        assert lines[0].startswith(f"hkd_hpc: GLOO_SOCKET_IFNAME={text}: does not name")


def _connect(rank):
    with World.open() as world:
        world.connect(device="cpu")
