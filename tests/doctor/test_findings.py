"""When a finding is one: each section's rules on literal facts, each kind of finding with one that has it."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from hkd_hpc.comm.control.rendezvous import Member
from hkd_hpc.comm.launchers import SplitWorld
from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.config import resolve
from hkd_hpc.doctor import batch, clocks, collectives, examine, files, launch, output, packages, placement, transport
from hkd_hpc.doctor.findings import Kind, Section, exit_code, worst
from hkd_hpc.models import networks
from hkd_hpc.models.flat import FlatModel


def names(section_or_findings) -> list[str]:
    findings = getattr(section_or_findings, "findings", section_or_findings)
    return [finding.kind.name for finding in findings]


# ---- levels, words, JSON


def test_the_worst_level_decides_and_warnings_count_when_strict():
    assert [worst(levels) for levels in ([], ["note"], ["note", "error", "warning"])] == ["ok", "note", "error"]
    codes = [(level, exit_code(level, False), exit_code(level, True)) for level in ("ok", "note", "warning", "error")]
    assert codes == [("ok", 0, 0), ("note", 0, 0), ("warning", 0, 1), ("error", 1, 1)]


def test_every_kind_is_named_after_its_section_and_says_what_it_means_and_what_mends_it():
    kinds = examine.kinds()
    assert len({kind.name for kind in kinds}) == len(kinds)
    assert {kind.name.split(".")[0] for kind in kinds} == {module.NAME for module in examine.SECTIONS}
    assert {kind.level for kind in kinds} == {"note", "warning", "error"}
    assert all(len(kind.means) > 20 and kind.mend for kind in kinds)


SHORT = Kind("files.short", "warning", "space is short", "mpirun -n {ranks} clean")


def test_words_and_document_say_the_same():
    sections = [
        Section("launch", ["one line"], {"ranks": 2}),
        Section("files", ["a", "b"], {}, [SHORT.found("seen", ranks=3)]),
    ]
    assert "\n".join(map(output.section_text, sections)).splitlines() == [
        "launch      ok       one line",
        "files       warning  a",
        "                     b",
        "      WARNING files.short: seen",
        "        means: space is short",
        "        mend:  mpirun -n 3 clean",
    ]
    assert output.summary_text(sections, strict=True) == "doctor: 0 errors, 1 warning, 0 notes; exit code 1"
    document = json.loads(output.document(sections, strict=False))
    assert sorted(document) == ["exit_code", "format", "level", "sections", "time_unix_s"]
    assert (document["format"], document["level"], document["exit_code"]) == (1, "warning", 0)
    assert document["sections"]["launch"] == {
        "level": "ok",
        "lines": ["one line"],
        "facts": {"ranks": 2},
        "findings": [],
    }
    assert document["sections"]["files"]["findings"] == [
        {
            "name": "files.short",
            "level": "warning",
            "found": "seen",
            "means": "space is short",
            "mend": "mpirun -n 3 clean",
        }
    ]


# ---- launch


def test_a_world_that_cannot_be_opened_is_a_finding():
    assert names(launch.without_world(SplitWorld("4 worlds of 1"))) == ["launch.singletons"]
    assert names(launch.without_world(UsageError("MPI cannot be loaded"))) == ["launch.no_world"]
    assert names(launch.without_world(RunError("rank 2 ended before it joined"))) == ["launch.no_world"]


def test_one_process_in_a_job_of_many_tasks_is_told():
    alone = {"launcher": "none", "tasks": 11, "mpi4py": "4.1.0"}
    assert names(launch.section_of(alone)) == ["launch.one_process"]
    assert names(launch.section_of({**alone, "tasks": 1})) == []


# ---- placement


def place(rank: int, cores: list[int], **other) -> placement.RankPlacement:
    """On a host with four cores and 8 GB."""
    facts = dict(host="n1", machine="n1/boot", allowed=[0, 1, 2, 3], numa=str(cores), threads=1, device=None)
    return placement.RankPlacement(
        **{
            **facts,
            "quota_cores": None,
            "memory_bytes": 8 * 10**9,
            "held_bytes": 4 * 10**8,
            "rank": rank,
            "cores": cores,
            **other,
        }
    )


def ranks(*cores: list[int], **other) -> list[placement.RankPlacement]:
    return [place(rank, own, **other) for rank, own in enumerate(cores)]


FREE = [0, 1, 2, 3]


@pytest.mark.parametrize(
    "places, expected",
    [
        (ranks(FREE, FREE, FREE), []),
        (ranks([0], [1], [2], [3]), []),
        (ranks([0]), []),
        (ranks([2], [2], [2]), ["placement.one_core"]),
        (ranks([0], [1], [1]), ["placement.shared_cores"]),
        (ranks([0, 1], [0, 1], [0, 1]), ["placement.shared_cores"]),
        (ranks([0, 1], [0, 1], [2]), []),
        (ranks([0, 1], [0, 1], threads=2), ["placement.shared_cores"]),
        (ranks(FREE, FREE, FREE, FREE, FREE), ["placement.few_cores"]),
        (ranks([0], [0], allowed=[0]), ["placement.few_cores"]),
        (ranks(FREE, threads=5), ["placement.threads"]),
        (ranks([0], [1], threads=2), ["placement.threads"]),
        (ranks(FREE, FREE, quota_cores=1.5), ["placement.quota"]),
        (ranks(FREE, FREE, quota_cores=2.0), []),
        (ranks(FREE, FREE, held_bytes=2 * 10**9), []),
        (ranks(FREE, FREE, held_bytes=21 * 10**8), ["placement.memory"]),
    ],
)
def test_binding_threads_and_limits(places, expected):
    assert names(placement.section_of(places)) == expected


def test_hosts_are_judged_one_by_one_and_have_a_line_each():
    places = [
        *ranks([2], [2]),
        place(2, [0], host="n2", machine="n2/boot"),
        place(3, [1], host="n2", machine="n2/boot"),
    ]
    section = placement.section_of(places)
    assert [finding.text for finding in section.findings] == [
        "all 2 ranks of n1 are bound to core 2; 3 other core(s) idle"
    ]
    assert section.lines == [
        "n1: ranks 0-1 on cores [2] of 0-3, 1 thread(s) a rank; 8.0 GB memory; ranks 0-1 cpu",
        "n2: rank 2 on cores [0]; rank 3 on cores [1] of 0-3, 1 thread(s) a rank; 8.0 GB memory; ranks 2-3 cpu",
    ]


def test_many_bindings_are_told_in_short():
    places = [place(rank, [rank]) for rank in range(5)]
    assert placement.binding_text(places) == "ranks 0-4 on 1 core(s) each, 0-4"


@pytest.mark.parametrize(
    "devices, expected",
    [
        (["GPU-a", "GPU-a", "GPU-b"], []),  # the server shares one
        ([None, "GPU-a", "GPU-b"], []),
        (["GPU-a", "GPU-b", "GPU-b"], ["ranks 1-2 of n1 compute on GPU-b"]),
        ([None, None, None], []),
    ],
)
def test_two_client_ranks_on_one_device(devices, expected):
    places = [place(rank, FREE, device=device) for rank, device in enumerate(devices)]
    findings = placement.section_of(places).findings
    assert [finding.text for finding in findings] == expected
    assert [finding.mend.partition(",")[0] for finding in findings] == [
        "one client rank a GPU and one rank for the server: -n 2 here"
    ] * len(expected)


# ---- packages


def rank_facts(**other) -> dict:
    facts = {"host": "n1", "versions": {"torch": "2.9.0", "numpy": "2.1"}, "mpi_libraries": None, "drivers": []}
    return {**facts, "built": {}, "on_gpu": False, "device": "auto", **other}


def test_a_version_that_differs_is_told_with_ranks_and_hosts():
    other = rank_facts(host="n2", versions={"torch": "2.8.0", "numpy": "2.1", "mpi4py": "4.0"})
    section = packages.section_of([rank_facts(), rank_facts(), other])
    assert names(section) == ["packages.different"] * 2
    assert [finding.text for finding in section.findings] == [
        "torch: 2.9.0 on ranks 0-1 (n1), 2.8.0 on rank 2 (n2)",
        "mpi4py: absent on ranks 0-1 (n1), 4.0 on rank 2 (n2)",
    ]


@pytest.mark.parametrize(
    "built, loaded, fits",
    [
        ("Open MPI 5.0.6", "Open MPI v5.0.11", True),
        ("MPICH 4.2.3", "MPICH Version:      4.3.0", True),
        ("MPICH 4.2.3", "MPI VERSION    : CRAY MPICH version 8.1.27.26", True),
        ("MPICH 4.2.3", "Intel(R) MPI Library 2021.13 for Linux* OS", True),
        ("MPICH 4.2.3", "Open MPI v4.1.6", False),
    ],
)
def test_the_mpi_that_mpi4py_was_built_for(built, loaded, fits):
    section = packages.section_of([rank_facts(mpi_libraries=[built, loaded])])
    assert names(section) == ([] if fits else ["packages.other_mpi"])


def test_an_hdf5_that_h5py_was_not_built_for():
    """Of three ranks the last, whose LD_LIBRARY_PATH is another."""
    fits = rank_facts(built={"HDF5": "1.14.6"}, versions={"HDF5": "1.14.6"})
    other = rank_facts(host="n2", built={"HDF5": "1.14.6"}, versions={"HDF5": "1.10.8"})
    assert names(packages.section_of([fits, fits])) == []
    section = packages.section_of([fits, fits, other])
    assert names(section) == ["packages.different", "packages.other_hdf5"]
    assert section.findings[1].text == "rank 2 (n2): h5py was built for HDF5 1.14.6, and loads 1.10.8"


@pytest.mark.parametrize(
    "built, loaded, fits",
    [
        ("2.27.5", "2.27.5", True),
        ("2.27.5", "2.28.3", True),
        ("2.27.5", "2.27.3", False),
        ("2.27.5", "2.9.6", False),
        ("2.27.5", "3.0.1", False),
    ],
)
def test_the_nccl_that_torch_was_built_for(built, loaded, fits):
    section = packages.section_of([rank_facts(built={"NCCL": built}, versions={"NCCL": loaded})])
    text = f"rank 0 (n1): torch was built for NCCL {built}, and loads {loaded}"
    assert [finding.text for finding in section.findings] == ([] if fits else [text])


def test_versions_of_what_is_loaded_here():
    """This machine's own: h5py's HDF5 is the one of its wheel, and the NCCL of a torch that has one is torch's."""
    assert packages.nccl_text(23007) == "2.30.7"
    assert packages.built()["HDF5"] == h5py.version.hdf5_version
    assert packages.loaded_nccl() in (None, packages.built_nccl())


CUDA = {"torch": "2.9.0", "CUDA": "13.0"}
NVIDIA = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Oct 19 18:56:32 UTC 2023"
OPEN_NVIDIA = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22)"


@pytest.mark.parametrize(
    "cuda, driver, needed",
    [
        ("13.0", NVIDIA.format("535.129.03"), "580.65.06"),
        ("13.0", OPEN_NVIDIA.format("580.65.05"), "580.65.06"),
        ("13.0", OPEN_NVIDIA.format("580.65.06"), ""),
        ("12.8", NVIDIA.format("525.60.13"), ""),
        ("12.8", NVIDIA.format("470.256.02"), "525.60.13"),
        ("11.8", NVIDIA.format("450.80.02"), ""),
        ("14.0", NVIDIA.format("580.65.06"), ""),  # nobody knows
        ("13.0", "", ""),
    ],
)
def test_the_driver_that_a_cuda_needs(cuda, driver, needed):
    assert packages.needed_driver({"CUDA": cuda, "driver nvidia": driver}) == needed


def test_a_driver_that_is_too_old_is_the_reason_why_torch_sees_no_gpu():
    old = {**CUDA, "driver nvidia": NVIDIA.format("535.129.03")}
    facts = rank_facts(versions=old, drivers=["nvidia"])
    [finding] = packages.section_of([facts, facts]).findings
    assert finding.text == "ranks 0-1 (n1): NVIDIA's driver 535.129.03, CUDA 13.0 needs 580.65.06"
    assert finding.mend.startswith("a torch that was built for an older CUDA, or NVIDIA's driver 580.65.06 or newer")
    served = rank_facts(versions=old, drivers=["nvidia"], on_gpu=True)  # by NVIDIA's package for newer CUDAs
    assert names(packages.section_of([served])) == []


@pytest.mark.parametrize(
    "facts, expected",
    [
        ({"versions": CUDA}, ["packages.no_driver"]),
        ({"versions": CUDA, "drivers": ["nvidia"], "on_gpu": True}, []),
        ({"versions": CUDA, "drivers": ["nvidia"]}, ["packages.unused_gpu"]),
        ({"drivers": ["amd"]}, ["packages.unused_gpu"]),
        ({"drivers": ["amd"], "device": "cpu"}, []),
        ({}, []),
    ],
)
def test_torch_and_driver(facts, expected):
    assert names(packages.section_of([rank_facts(**facts)])) == expected


def test_what_training_would_reject_is_a_finding():
    assert names(packages.section_of([rank_facts()], "torch 2.3.0 is too old")) == ["packages.unfit"]


# ---- transport


def way(**other) -> dict:
    facts = {"host": "n1", "address": "10.0.0.1", "interface": "eth0", "gloo": "eth0", "nccl": "", "device": None}
    return {**facts, "speeds_mb_s": {"eth0": 125.0, "ib0": 25000.0}, **other}


@pytest.mark.parametrize(
    "backend, facts, several_hosts, expected",
    [
        ("gloo", {}, True, ["transport.slow_interface"]),
        ("gloo", {"gloo": "ib0"}, True, []),
        ("gloo", {}, False, []),
        ("mpi", {}, True, []),
        ("gloo", {"speeds_mb_s": {}}, True, []),
    ],
)
def test_a_faster_interface(backend, facts, several_hosts, expected):
    section = transport.section_of("2 ranks", backend, [way(**facts), way(**facts)], [], several_hosts)
    assert names(section) == expected
    assert all("GLOO_SOCKET_IFNAME=ib0" in finding.mend for finding in section.findings)


def test_a_faster_interface_that_a_host_lacks_is_not_advised():
    """GLOO_SOCKET_IFNAME is one name for all ranks."""
    other = way(host="n2", speeds_mb_s={"eth0": 125.0})
    assert transport.section_of("2 ranks", "gloo", [way(), other], [], True).findings == []


@pytest.mark.parametrize(
    "name, files, address, expected",
    [
        ("eth0", ["device"], "10.0.0.1", 1250.0),
        ("bond0", ["bonding"], "10.0.0.1", 1250.0),
        ("ib1", ["device"], None, 0.0),
        ("docker0", ["bridge"], "172.17.0.1", 0.0),
        ("veth1", [], "10.0.0.1", 0.0),
    ],
)
def test_an_interface_counts_by_which_other_hosts_are_reached(tmp_path, monkeypatch, name, files, address, expected):
    monkeypatch.setattr(transport, "INTERFACES", tmp_path)
    monkeypatch.setattr(transport, "address_of", {name: address}.get)
    for file, text in {"operstate": "up\n", "speed": "10000\n", **dict.fromkeys(files, "")}.items():
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / file).write_text(text)
    assert transport.speed_of(name) == expected


@pytest.mark.parametrize("backend, expected", [("mpi", ["transport.host_memory"]), ("nccl", [])])
def test_gpus_whose_weights_go_by_the_host(backend, expected):
    facts = [way(device=device) for device in ("GPU-a", "GPU-a", "GPU-b")]
    section = transport.section_of("3 ranks; devices: x", backend, facts, ["UCX_TLS=rc"], False)
    assert names(section) == expected
    assert section.lines[0] == "3 ranks"


# ---- clocks


def test_skew_is_what_all_turns_allow():
    turns = [clocks.Turn(10.0, (10.1, 14.9), 10.2), clocks.Turn(20.0, (20.0, 25.0), 20.4)]
    own, other = clocks.skews(turns)
    assert other == pytest.approx((4.7, 4.9))
    assert own == pytest.approx((-0.1, 0.0))
    assert own.certain_s == 0
    assert other.certain_s == pytest.approx(4.7)
    assert clocks.Skew(-3.0, -2.0).certain_s == 2.0


@pytest.mark.parametrize("off_s, expected", [(0.9, []), (1.5, ["clocks.skew"]), (-31.0, ["clocks.far"])])
def test_a_clock_that_is_off(off_s, expected):
    found = [clocks.Skew(-0.1, 0.1), clocks.Skew(off_s, off_s)]
    assert names(clocks.section_of(["n1", "n2"], found)) == expected


# ---- batch

FIELDS = {"TimeLimit": "02:00:00", "RunTime": "00:30:00", "Requeue": "1", "BatchFlag": "1", "NumTasks": "3"}
PARTITION = {"Partition": "gpu", "PartitionMaxTime": "1-00:00:00"}


def limits(**other) -> dict:
    return {"blocked": [], "locked_bytes": None, "open_files": None, "rdma": [], **other}


def test_slurms_durations():
    texts = ["1-02:03:04", "02:03:04", "03:04", "UNLIMITED", ""]
    assert [batch.duration_s(text) for text in texts] == [93784.0, 7384.0, 184.0, None, None]


@pytest.mark.parametrize(
    "fields, ranks, is_step, expected",
    [
        (FIELDS, 3, False, []),
        ({**FIELDS, "RunTime": "01:51:00"}, 3, False, ["batch.short"]),
        ({**FIELDS, "TimeLimit": "UNLIMITED"}, 3, False, []),
        ({**FIELDS, **PARTITION}, 3, False, []),
        ({**FIELDS, **PARTITION, "PartitionMaxTime": "UNLIMITED"}, 3, False, []),
        ({**FIELDS, **PARTITION, "PartitionMaxTime": "01:00:00"}, 3, False, ["batch.beyond_partition"]),
        ({**FIELDS, "Requeue": "0"}, 3, False, ["batch.no_requeue"]),
        ({**FIELDS, "Requeue": "0", "BatchFlag": "0"}, 3, False, []),
        (FIELDS, 2, False, ["batch.other_size"]),
        (FIELDS, 2, True, []),
        (None, 3, False, ["batch.no_answer"]),
    ],
)
def test_limits_of_a_job(fields, ranks, is_step, expected):
    assert names(batch.section_of("7", fields, [limits()] * ranks, is_step)) == expected


@pytest.mark.parametrize(
    "most, advised", [("00:20:00", "00:20:00"), ("1-00:00:00", "04:00:00"), ("UNLIMITED", "04:00:00")]
)
def test_the_time_that_is_advised_is_one_that_the_partition_allows(most, advised):
    fields = {**FIELDS, **PARTITION, "TimeLimit": "00:10:00", "RunTime": "00:01:00", "PartitionMaxTime": most}
    section = batch.section_of("7", fields, [limits()] * 3, False)
    assert section.lines[0].startswith(f"job 7: 9 min 00 s left of 00:10:00 (partition gpu: {most}), ")
    [finding] = section.findings
    assert finding.mend.startswith(f"sbatch --time={advised}, ")


def test_a_limit_beyond_that_of_the_partition_has_the_line_that_mends_it():
    fields = {**FIELDS, **PARTITION, "PartitionMaxTime": "01:00:00"}
    [finding] = batch.section_of("7", fields, [limits()] * 3, False).findings
    assert finding.text == "TimeLimit=02:00:00, but partition gpu has MaxTime=01:00:00"
    assert finding.mend.startswith("scontrol update jobid=7 timelimit=01:00:00; ")


MELLANOX = {"rdma": ["mlx5_0", "mlx5_1"]}


@pytest.mark.parametrize(
    "facts, expected",
    [
        (
            {**MELLANOX, "locked_bytes": 65536},
            ["65.5 kB of memory may be locked beside mlx5_0, mlx5_1; 1.1 GB are enough"],
        ),
        ({**MELLANOX, "locked_bytes": 1 << 30}, []),
        (MELLANOX, []),
        ({"locked_bytes": 65536}, []),
        ({"open_files": 105}, ["105 open files, rank 0 of 2 may need 106"]),
        ({"open_files": 106}, []),
    ],
)
def test_limits_that_the_ranks_inherit(facts, expected):
    section = batch.section_of("", {}, [limits(), limits(**facts)], False)
    assert [finding.text for finding in section.findings] == expected


def test_limits_of_the_ranks_in_words():
    ranks = [limits(open_files=1024, locked_bytes=65536), limits(open_files=4096)]
    assert batch.section_of("", {}, ranks, False).lines == [
        "no SLURM job",
        "a rank may open 1,024 files and lock 65.5 kB memory",
    ]
    assert batch.limits_of([limits()]) == "a rank may open unlimited files and lock unlimited memory"


def test_signals_that_are_blocked():
    status = "Name:\tpython\nSigBlk:\t0000000000004200\nSigIgn:\t0000000000000000\n"
    assert batch.blocked(status) == [10, 15]
    section = batch.section_of("", {}, [limits(), limits(blocked=[10, 15])], False)
    assert [finding.text for finding in section.findings] == ["rank 1: SIGTERM, SIGUSR1 blocked"]


# ---- files

GOOD = files.Measured("/data", "lustre", "server:/data", 10**10, 10**6, 10**8, False, 500.0, 0.01, 0.02, True)


def test_the_room_that_is_needed_has_what_clients_keep_in_each_checkpoint():
    """Of 102,378 weights: MOON's clients keep their last ones; with client_models the last checkpoint has more."""
    needed = lambda *words: files.needed_bytes(SimpleNamespace(config=resolve(overrides=["fed.clients=20", *words])))
    model = needed("scheme.name=fedavg", "run.client_models=false") // 3
    assert 4 * 102_378 <= model < 4 * 102_378 * 1.01  # gaps between tensors
    assert needed("scheme.name=fedavg") == (3 + 20) * model
    assert needed("scheme.name=moon", "run.client_models=false") == 3 * (1 + 20) * model
    # local's clients keep all of their models anyhow, and each checkpoint has what they all began with
    assert needed("scheme.name=local") == needed("scheme.name=local", "run.client_models=false") == 3 * (2 + 20) * model


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, []),
        ({"is_read_only": True}, ["files.read_only"]),
        ({"free_bytes": 10**8 - 1}, ["files.little_room"]),
        ({"free_inodes": 99}, ["files.few_inodes"]),
        ({"free_inodes": None}, []),
        ({"type": "tmpfs"}, ["files.in_memory"]),
        ({"type": "ext4"}, ["files.one_host"]),
        ({"has_flock": False}, ["files.no_flock"]),
        ({"has_flock": None}, []),
        ({"write_mb_s": 19.0}, ["files.slow"]),
        ({"save_s": 0.6}, ["files.slow"]),
        ({"clock_off_s": 2.0}, ["files.clock"]),
    ],
)
def test_what_was_measured_in_the_folder(tmp_path, changes, expected):
    assert names(files.section_of(tmp_path, replace(GOOD, **changes), may_move=True)) == expected


def test_a_local_disk_is_good_for_a_job_that_stays(tmp_path):
    assert names(files.section_of(tmp_path, replace(GOOD, type="ext4"), may_move=False)) == []


@pytest.mark.parametrize(
    "error, expected",
    [
        (OSError(28, "No space left on device"), "files.full"),
        (OSError(122, "Disk quota exceeded"), "files.full"),
        (PermissionError(13, "Permission denied"), "files.not_writable"),
        (OSError(5, "Input/output error"), "files.broken"),
        (RunError("cannot write"), "files.broken"),
    ],
)
def test_errors_of_the_disk(tmp_path, error, expected):
    assert files.told(error, tmp_path).kind.name == expected


def test_an_error_of_the_system_is_told_without_its_number_and_a_hidden_name(tmp_path):
    error = FileNotFoundError(2, "No such file or directory", f"{tmp_path}/.hkd-doctor-x")
    assert files.told(error, tmp_path).text == f"{tmp_path}: No such file or directory"


def test_the_file_system_of_a_folder_is_that_of_its_longest_mount_point(tmp_path):
    text = (
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"2 1 0:30 / {tmp_path} rw,relatime shared:1 - lustre 10.0.0.1@o2ib:/scratch rw\n"
        f"3 1 0:31 / {tmp_path}/data rw - nfs4 server:/data rw\n"
    )
    assert files.mount_of(tmp_path / "runs", text) == ("lustre", "10.0.0.1@o2ib:/scratch")
    assert files.mount_of(tmp_path / "database", text) == ("lustre", "10.0.0.1@o2ib:/scratch")
    assert files.mount_of(tmp_path / "data/x", text) == ("nfs4", "server:/data")


# ---- collectives


def test_bytes_of_a_transfer():
    moved = {(t.operation, t.what): t.moved_bytes(4) for t in collectives.TRANSFERS}
    assert moved["gather", "reports, 10 classes"] == 3 * 3000
    assert moved["all-reduce", "weights of ResNet18"] == 3 * 8 * collectives.RESNET18_FLOATS
    assert moved["relay", "weights of ResNet18"] == 4 * collectives.RESNET18_FLOATS


def test_the_numbers_that_are_sent():
    sent = collectives.pattern(503, np.uint8)
    assert (sent[0], sent[250], sent[251], sent[502], len(sent), sent.dtype) == (0, 250, 0, 0, 503, np.uint8)


@pytest.mark.parametrize(
    "seconds, wrong, expected",
    [
        ([9.0, 1.04, 1.0], [0, 0], []),  # 0.05 s + 100 x 10 MB / 1000 MB/s = 1.05 s
        ([9.0, 1.06, 1.0], [0, 0], ["collectives.slow"]),
        ([1.0], [0, 7], ["collectives.wrong"]),
    ],
)
def test_a_slow_or_wrong_collective(seconds, wrong, expected):
    measured = collectives.Measured("gather", "reports", 10**7, 10**7, seconds, wrong)
    assert names(collectives.section_of([measured], copy_mb_s=1000.0)) == expected


def test_sizes_are_those_of_the_networks():
    flat = FlatModel(networks.build(resolve().model, 10, (3, 32, 32), 0))
    assert len(flat.values_V) == collectives.SMALL_FLOATS
    torchvisions = 11_689_512 - (512 * 1000 + 1000)  # ResNet18 without its last layer
    statistics, latent, classifier, padding = 2 * 4800, 512 * 512 + 512, 512 * 10 + 10, 6
    assert torchvisions + statistics + latent + classifier + padding == collectives.RESNET18_FLOATS


def test_members_of_one_host_name_on_two_machines_are_two_hosts():
    members = [Member(0, "node", "node/a", 1), Member(1, "node", "node/b", 1)]
    places = [place(m.rank, FREE, host=m.host, machine=m.machine) for m in members]
    assert [len(host) for host in placement.by_host(places)] == [1, 1]
