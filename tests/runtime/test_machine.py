"""What a job may use of a machine, as its cgroups say."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from hkd_hpc.runtime import machine


def test_cgroups_of_a_process_from_the_innermost_to_the_root():
    root = Path("/sys/fs/cgroup")
    assert machine.cgroup_folders("0::/job_7/step_0\n") == [root / "job_7/step_0", root / "job_7", root]
    assert machine.cgroup_folders("4:memory:/job_7\n") == [root]
    assert machine.cgroup_folders("") == [root]


@pytest.fixture
def in_cgroup(tmp_path, monkeypatch):
    """This process is in the cgroup `job` of a tree of files below tmp_path."""
    (tmp_path / "job").mkdir()
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "cgroup_folders", lambda text: [tmp_path / "job", tmp_path])
    return tmp_path


def test_the_smallest_limit_counts(in_cgroup):
    assert machine.quota_cores() is None
    (in_cgroup / "job/cpu.max").write_text("max 100000\n")
    assert machine.quota_cores() is None
    (in_cgroup / "cpu.max").write_text("150000 100000\n")
    (in_cgroup / "job/memory.max").write_text("max\n")
    (in_cgroup / "memory.max").write_text("1000000\n")
    assert machine.quota_cores() == 1.5
    assert machine.memory_bytes() == 1_000_000


CPUINFO = "processor : 0\nmodel name : Some CPU\nflags : fpu sse4_1 avx avx2\n\nprocessor : 1\nflags : fpu\n"


def test_the_kind_of_a_cpu_is_its_model_its_vectors_and_what_the_environment_takes_from_them(tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    assert machine.cpu_kind({"HOME": "/"}) == {"model": "Some CPU", "vectors": "avx2"}
    assert machine.cpu_kind({"MKL_CBWR": "COMPATIBLE"})["MKL_CBWR"] == "COMPATIBLE"
    (tmp_path / "cpuinfo").write_text("processor : 0\nFeatures : fp asimd\n")
    assert machine.cpu_kind({}) == {"model": platform.machine(), "vectors": ""}
