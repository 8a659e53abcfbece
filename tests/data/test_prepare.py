"""`python -m hkd_hpc.data prepare`: real archives files, slow and faulty servers, several processes at once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import http.server
import io
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time

import pytest
from idx_files import save_mnist

from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.data import prepare, sources
from hkd_hpc.data.registry import SOURCES, Download

FILES = {"toy-py/train": os.urandom(300_000), "toy-py/test": b"test" * 1000}
CLIENT = """
import sys
from hkd_hpc.data.registry import Download
from hkd_hpc.data.prepare import prepare
url, md5, folder, *members = sys.argv[1:]
download = Download(url, md5, tuple(zip(members[::2], members[1::2])))
prepare("toy", (download,), folder, lambda line: print(line, flush=True))
"""


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def archive_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


ARCHIVE = archive_of(FILES)
MEMBERS = tuple((name, md5(content)) for name, content in FILES.items())


def toy(address: str, content: bytes = ARCHIVE, members=MEMBERS) -> tuple[Download, ...]:
    return (Download(address, md5(content), members),)


def files_below(folder) -> dict[str, bytes]:
    return {
        os.path.relpath(os.path.join(top, name), folder): open(os.path.join(top, name), "rb").read()
        for top, _, names in os.walk(folder)
        for name in names
    }


def content_of(folder) -> dict[str, bytes]:
    """All files but the lock, which is empty and stays."""
    found = files_below(folder)
    assert found.pop(".toy.lock", b"") == b""
    return found


@contextlib.contextmanager
def serve(content: bytes, chunk_wait_s: float = 0.0, stop_after: int | None = None):
    """An HTTP server of one file; yields (its address, the list of how many bytes each request was sent)."""
    sent: list[int] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            allowed = content[:stop_after]
            request = len(sent)
            sent.append(0)
            for start in range(0, len(allowed), 32_768):
                piece = allowed[start : start + 32_768]
                sent[request] += len(piece)
                self.wfile.write(piece)
                time.sleep(chunk_wait_s)

        def log_message(self, *words):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/toy.tar.gz", sent
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "mirror" / "toy.tar.gz"
    path.parent.mkdir()
    path.write_bytes(ARCHIVE)
    return path


def test_downloads_unpacks_and_is_done_the_second_time(tmp_path, archive):
    lines: list[str] = []
    prepare.prepare("toy", toy(archive.as_uri()), tmp_path / "new" / "data", lines.append)
    assert content_of(tmp_path / "new" / "data") == FILES
    assert lines[-1] == f"toy is ready in {tmp_path / 'new' / 'data'}"
    archive.unlink()
    lines.clear()
    prepare.prepare("toy", toy(archive.as_uri()), tmp_path / "new" / "data", lines.append)
    assert lines == [f"toy is already prepared in {tmp_path / 'new' / 'data'}"]


def test_a_plain_file_and_a_damaged_one_is_repaired(tmp_path, archive):
    data = tmp_path / "data"
    plain = toy(archive.as_uri(), members=())
    prepare.prepare("toy", plain, data, print)
    assert content_of(data) == {"toy.tar.gz": ARCHIVE}
    (data / "toy.tar.gz").write_bytes(ARCHIVE[:1000])
    prepare.prepare("toy", plain, data, print)
    assert content_of(data) == {"toy.tar.gz": ARCHIVE}


def test_a_truncated_member_is_repaired(tmp_path, archive):
    data = tmp_path / "data"
    prepare.prepare("toy", toy(archive.as_uri()), data, print)
    (data / "toy-py/train").write_bytes(b"half")
    prepare.prepare("toy", toy(archive.as_uri()), data, print)
    assert content_of(data) == FILES


def test_an_archive_that_somebody_put_there_is_used(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "toy.tar.gz").write_bytes(ARCHIVE)
    prepare.prepare("toy", toy("http://127.0.0.1:9/toy.tar.gz"), data, print)
    assert content_of(data) == FILES | {"toy.tar.gz": ARCHIVE}


def test_a_truncated_archive_that_somebody_put_there_is_replaced(tmp_path, archive):
    data, lines = tmp_path / "data", []
    data.mkdir()
    (data / "toy.tar.gz").write_bytes(ARCHIVE[:1000])
    prepare.prepare("toy", toy(archive.as_uri()), data, lines.append)
    assert content_of(data) == FILES
    assert md5(ARCHIVE[:1000]) in lines[0]
    assert md5(ARCHIVE) in lines[0]


def test_leftovers_of_a_killed_prepare_are_removed(tmp_path, archive):
    leftover = tmp_path / "data" / ".toy-abc"
    leftover.mkdir(parents=True)
    (leftover / "toy.tar.gz").write_bytes(ARCHIVE[:1000])
    prepare.prepare("toy", toy(archive.as_uri()), tmp_path / "data", print)
    assert content_of(tmp_path / "data") == FILES


def test_a_wrong_checksum_is_tried_twice_and_both_sums_are_named(tmp_path):
    wrong = ARCHIVE[:-10] + b"0123456789"
    with serve(wrong) as (address, sent), pytest.raises(RunError) as caught:
        prepare.prepare("toy", toy(address), tmp_path / "data", print)
    assert md5(wrong) in str(caught.value)
    assert md5(ARCHIVE) in str(caught.value)
    assert sent == [len(wrong)] * 2
    assert content_of(tmp_path / "data") == {}


def test_a_server_that_closes_half_way_leaves_nothing(tmp_path):
    half = len(ARCHIVE) // 2
    with serve(ARCHIVE, stop_after=half) as (address, sent), pytest.raises(RunError) as caught:
        prepare.prepare("toy", toy(address), tmp_path / "data", print)
    assert f"closed after {half} of {len(ARCHIVE)} bytes" in str(caught.value)
    assert sent == [half, half]
    assert content_of(tmp_path / "data") == {}


@contextlib.contextmanager
def answer(content: bytes):
    """A server that sends this to whatever it is asked, and closes; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reply():
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as link:
                        link.recv(1 << 16)
                        link.sendall(content)

        threading.Thread(target=reply, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/toy.tar.gz"


@pytest.mark.parametrize(
    "head, sent, said",
    [
        ("HTTP/1.0 200 OK\r\nContent-Length: many", ARCHIVE, None),
        ("HTTP/1.0 200 OK", ARCHIVE, None),
        ("HTTP/1.0 200 OK", ARCHIVE[:1000], "md5 is"),
        ("HTTP/1.0 404 None", b"", "cannot be opened (HTTP Error 404"),
        ("HTTP/1.0 302 Go\r\nLocation: /toy.tar.gz", b"", "cannot be opened (HTTP Error 302"),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", b"ffff\r\nabc", "the connection broke"),
        ("\0", b"", "cannot be opened"),
    ],
)
def test_whatever_a_server_says(tmp_path, head, sent, said):
    with answer(head.encode() + b"\r\n\r\n" + sent) as address:
        if said:
            with pytest.raises(RunError) as caught:
                prepare.prepare("toy", toy(address), tmp_path / "data", print)
            assert said in str(caught.value)
            assert "\n" not in str(caught.value)
        else:
            prepare.prepare("toy", toy(address), tmp_path / "data", print)
    assert content_of(tmp_path / "data") == ({} if said else FILES)


def test_ctrl_c_is_one_line_and_leaves_nothing(tmp_path):
    with serve(b"0" * 10**6, chunk_wait_s=0.2) as (address, _):
        words = ["prepare", "svhn", "--dir", str(tmp_path / "data"), "--url", os.path.dirname(address)]
        process = subprocess.Popen(
            [sys.executable, "-m", "hkd_hpc.data", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert "downloading" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=300)[1]
    assert process.returncode == 130
    assert errors == "hkd_hpc: interrupted\n"
    assert files_below(tmp_path / "data") == {".svhn.lock": b""}


def test_no_server(tmp_path):
    with pytest.raises(RunError, match="cannot be opened"):
        prepare.prepare("toy", toy("http://127.0.0.1:9/toy.tar.gz"), tmp_path / "data", print)
    assert content_of(tmp_path / "data") == {}


def test_three_at_once_download_once(tmp_path):
    members = [word for member in MEMBERS for word in member]
    with serve(ARCHIVE, chunk_wait_s=0.15) as (address, sent):
        command = [sys.executable, "-c", CLIENT, address, md5(ARCHIVE), str(tmp_path / "data"), *members]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sent == [len(ARCHIVE)]
    assert sum("downloading" in output for output in outputs) == 1
    assert content_of(tmp_path / "data") == FILES


def test_a_killed_prepare_leaves_nothing_under_the_final_name_and_holds_nobody_up(tmp_path, archive):
    with serve(ARCHIVE, chunk_wait_s=0.3) as (address, _):
        command = [sys.executable, "-c", CLIENT, address, md5(ARCHIVE), str(tmp_path / "data"), *MEMBERS[0]]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert "downloading" in process.stdout.readline()
        process.kill()
        process.communicate()
        assert not (tmp_path / "data/toy-py").exists()
        assert not (tmp_path / "data/toy.tar.gz").exists()
        prepare.prepare("toy", toy(archive.as_uri()), tmp_path / "data", print)
    assert content_of(tmp_path / "data") == FILES


def test_an_archive_cannot_write_elsewhere(tmp_path):
    files = FILES | {"../escaped": b"x", str(tmp_path / "absolute"): b"x", "toy-py/readme.html": b"x"}
    evil = archive_of(files)
    (tmp_path / "toy.tar.gz").write_bytes(evil)
    prepare.prepare("toy", toy((tmp_path / "toy.tar.gz").as_uri(), evil), tmp_path / "data", print)
    assert content_of(tmp_path / "data") == FILES
    assert sorted(os.listdir(tmp_path)) == ["data", "toy.tar.gz"]


def test_an_archive_without_an_expected_member(tmp_path):
    short = archive_of({"toy-py/train": FILES["toy-py/train"]})
    (tmp_path / "toy.tar.gz").write_bytes(short)
    with pytest.raises(RunError, match="toy-py/test is not in the archive"):
        prepare.prepare("toy", toy((tmp_path / "toy.tar.gz").as_uri(), short), tmp_path / "data", print)
    assert content_of(tmp_path / "data") == {}


def test_what_is_no_archive(tmp_path):
    (tmp_path / "toy.tar.gz").write_bytes(b"<html>not found</html>")
    with pytest.raises(RunError, match="cannot be unpacked"):
        address = (tmp_path / "toy.tar.gz").as_uri()
        prepare.prepare("toy", toy(address, b"<html>not found</html>"), tmp_path / "data", print)


def test_a_mirror_keeps_names_and_sums():
    moved = prepare.from_mirror(SOURCES["svhn"].downloads, "https://mirror.example/data/")
    assert [one.url for one in moved] == [
        "https://mirror.example/data/train_32x32.mat",
        "https://mirror.example/data/test_32x32.mat",
    ]
    assert [one.md5 for one in moved] == ["e26dedcc434d2e4c54c9b2d4a06d8373", "eb5a983be6a315427106f1b164d9cef3"]
    with pytest.raises(UsageError, match="allowed are http://"):
        prepare.from_mirror(SOURCES["svhn"].downloads, "/data")


def test_files_of_equal_names_lie_in_folders_of_their_own(tmp_path):
    """MNIST and Fashion-MNIST, got from a server; what was got is what the reader takes."""
    for seed, name in enumerate(("mnist", "fashion_mnist")):
        mirror = save_mnist(tmp_path / f"mirror{seed}", name)
        local = []
        for one in SOURCES[name].downloads:
            content = (mirror / one.path).read_bytes()
            local.append(dataclasses.replace(one, md5=md5(content)))
        with serve_folder(mirror / local[0].folder) as address:
            prepare.prepare(name, prepare.from_mirror(tuple(local), address), tmp_path / "data", print)
        assert sources.load(name, tmp_path / "data", "").classes == 10
    assert sorted(path.name for path in (tmp_path / "data").iterdir() if path.is_dir()) == ["FashionMNIST", "MNIST"]


def test_addresses_and_sums_are_torchvisions():
    datasets = pytest.importorskip("torchvision.datasets")
    for name, theirs in {"mnist": datasets.MNIST, "fashion_mnist": datasets.FashionMNIST}.items():
        own = SOURCES[name].downloads
        assert [(one.file_name, one.md5) for one in own] == theirs.resources
        assert {one.url.removesuffix(one.file_name) for one in own} <= set(theirs.mirrors)
    for split in datasets.EMNIST.splits:
        [one] = SOURCES[f"emnist_{split}"].downloads
        assert (one.url, one.md5) == (datasets.EMNIST.url, datasets.EMNIST.md5)


@contextlib.contextmanager
def serve_folder(folder):
    """An HTTP server of a folder's files; yields its address."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


# ---- the command line


def command(*words: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-m", "hkd_hpc.data", *words], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "are required"),
        (["fetch", "svhn"], "invalid choice: 'fetch'"),
        (["prepare"], "NAME"),
        (["prepare", "imagenet", "--dir", "x"], "invalid choice: 'imagenet'"),
        (["prepare", "svhn"], "--dir is missing"),
        (["prepare", "svhn", "--dir"], "--dir"),
        (["prepare", "svhn", "--dir", "x", "--bogus"], "--bogus"),
        (["prepare", "svhn", "--dir", "/proc/none"], "/proc/none"),
        (["prepare", "svhn", "--dir", "x", "--url", "x"], "--url x"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(words, said):
    code, output, errors = command(*words)
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert said in errors


def test_fmnist_needs_no_preparing():
    assert command("prepare", "fmnist") == (0, "fmnist ships with the package: there is nothing to prepare\n", "")


def test_the_official_checksum_holds_for_a_mirror_too(tmp_path):
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(ARCHIVE)
    code, _, errors = command("prepare", "cifar10", "--dir", str(tmp_path / "data"), "--url", tmp_path.as_uri())
    assert code == 1
    assert errors.count("\n") == 1
    assert md5(ARCHIVE) in errors
    assert "expected c58f30108f718f92721af3b95e74349a" in errors
    assert files_below(tmp_path / "data") == {".cifar10.lock": b""}
