"""The rows of rank 0's control plane in `tools.bench --scaling`.

`python -m tools.bench.coordinator REPEATS RANKS...` prints one JSON object, {"barrier": {ranks: seconds of each
repeat}, "status and barrier": the same}.

Rank 0's end is the real one. One other process plays all other ranks, with a connection for each: it sends what they
would send and is never late. So what is measured is what rank 0 alone takes, which grows with the ranks wherever they
are. A barrier: each rank enters, rank 0 releases each. Status, before every other barrier: each rank sends where it is
to rank 0, and rank 0 to each.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import socket
import sys
import time

from hkd_hpc.comm.control.base import END
from hkd_hpc.comm.control.coordinator import Coordinator
from hkd_hpc.comm.control.rendezvous import Member
from hkd_hpc.comm.control.wire import Unpacker, pack
from hkd_hpc.comm.interfaces import LOCALHOST

TIMEOUT_S = 60.0


def connections(count: int) -> tuple[list[socket.socket], list[socket.socket]]:
    """Both ends of so many, over TCP."""
    with socket.create_server((LOCALHOST, 0)) as listener:
        pairs = [(socket.create_connection(listener.getsockname()), listener.accept()[0]) for _ in range(count)]
    far, near = zip(*pairs)
    return list(near), list(far)


def key_of(barrier: int) -> list[object]:
    return [barrier, "sum", "weights", 1, "weights", 34_182_280]


def play_ranks(links: list[socket.socket], barriers: int) -> None:
    """Every rank but 0: to each of the barriers, with a status before the odd ones, and then to the end."""
    selector, unpackers = selectors.DefaultSelector(), {link: Unpacker() for link in links}
    for link in links:
        selector.register(link, selectors.EVENT_READ, data=link)
    for barrier in range(barriers + 1):
        key = key_of(barrier) if barrier < barriers else END
        status = pack({"kind": "status", "place": [1, "weights", None]}) * (barrier % 2)
        for link in links:
            link.sendall(status + pack({"kind": "enter", "key": key, "value": None}))
        waiting = set(links)
        while waiting:
            for ready, _ in selector.select():
                peer: socket.socket = ready.data
                data = peer.recv(1 << 16)
                if not data:
                    return  # rank 0 has failed, and said so
                if any(message["kind"] == "release" for message in unpackers[peer].feed(data)):
                    waiting.discard(peer)


def seconds(ranks: int, repeats: int) -> tuple[list[float], list[float]]:
    """Of (barriers without a status message, and with one)."""
    near, far = connections(ranks - 1)
    sys.stdout.flush()
    player = os.fork()
    if not player:
        for link in near:
            link.close()
        play_ranks(far, 2 * repeats)
        os._exit(0)
    for link in far:
        link.close()
    me = Member.here(0)
    members = [me, *(Member(rank, me.host, me.machine, player) for rank in range(1, ranks))]
    coordinator = Coordinator(members, dict(enumerate(near, 1)), (), TIMEOUT_S)
    took_s = [pass_barrier(coordinator, barrier) for barrier in range(2 * repeats)]
    coordinator.finish()
    os.waitpid(player, 0)
    return took_s[::2], took_s[1::2]


def pass_barrier(coordinator: Coordinator, barrier: int) -> float:
    """Seconds of a barrier, and before the odd ones of a status message."""
    start_s = time.perf_counter()
    if barrier % 2:
        coordinator.set_status(1, "weights")
    coordinator.barrier(key_of(barrier))
    return time.perf_counter() - start_s


def main(repeats: int, counts: list[int]) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two ends of each connection
    found: dict[str, dict[int, list[float]]] = {"barrier": {}, "status and barrier": {}}
    for ranks in counts:
        found["barrier"][ranks], found["status and barrier"][ranks] = seconds(ranks, repeats)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(text) for text in sys.argv[2:]])
