"""What is put right before MPI and torch are loaded; and nothing is written to HOME."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import toy

from hkd_hpc.models import networks
from hkd_hpc.models.settings import ModelSettings
from hkd_hpc.runtime.environment import doubled_masks, gpu_vendor, kept, prepare

ALL = {"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "3", "GPU_DEVICE_ORDINAL": "3"}


@pytest.mark.parametrize(
    "env, vendor, left",
    [
        ({"ROCR_VISIBLE_DEVICES": "3", **ALL}, "amd", ["ROCR_VISIBLE_DEVICES"]),
        ({"ROCR_VISIBLE_DEVICES": "0,3", "CUDA_VISIBLE_DEVICES": "0,3"}, "amd", ["ROCR_VISIBLE_DEVICES"]),
        ({"ROCR_VISIBLE_DEVICES": "", **ALL}, "amd", ["ROCR_VISIBLE_DEVICES", *ALL]),
        ({"HIP_VISIBLE_DEVICES": "3"}, "amd", ["HIP_VISIBLE_DEVICES"]),
        ({"ROCR_VISIBLE_DEVICES": "3", **ALL}, "nvidia", ["ROCR_VISIBLE_DEVICES", *ALL]),
    ],
)
def test_on_amd_one_mask_is_left(env, vendor, left):
    dropped = doubled_masks(env, vendor)
    assert [name for name in env if name not in dropped] == left


def test_what_the_user_says_about_the_vendor_counts():
    assert gpu_vendor({"GPU": "amd"}) == "amd"


def test_caches_lie_in_the_jobs_folder_unless_the_user_has_named_one(tmp_path):
    given = {
        "GPU": "amd",
        "ROCR_VISIBLE_DEVICES": "1",
        "HKD_SCRATCH": f"{tmp_path}/my job",
        "TRITON_CACHE_DIR": "/mine",
    }
    env = {**given, **ALL}
    prepare(env)
    assert env == {
        **given,
        "MIOPEN_USER_DB_PATH": f"{tmp_path}/my job/miopen_user_db_path",
        "MIOPEN_CUSTOM_CACHE_DIR": f"{tmp_path}/my job/miopen_custom_cache_dir",
        "AMD_COMGR_CACHE_DIR": f"{tmp_path}/my job/amd_comgr_cache_dir",
    }
    assert (tmp_path / "my job").stat().st_mode & 0o777 == 0o700
    assert os.path.isdir(env["MIOPEN_USER_DB_PATH"])


def test_jobs_of_one_user_have_different_folders(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = []
    for more in ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8"}, {}):
        env = {"GPU": "nvidia", **more}
        prepare(env)
        found.append(os.path.relpath(env["CUDA_CACHE_PATH"], tmp_path).split("/")[0])
    assert found == [f"hkd-{os.getuid()}-7", f"hkd-{os.getuid()}-8", f"hkd-{os.getuid()}"]


def test_where_no_disk_takes_a_folder_there_are_no_caches(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/proc")  # takes no files, whoever asks
    env = {"GPU": "amd", "ROCR_VISIBLE_DEVICES": "3", **ALL}
    prepare(env)
    assert env == {"GPU": "amd", "ROCR_VISIBLE_DEVICES": "3"}


def test_without_a_gpu_nothing_is_made(tmp_path):
    env = {"GPU": "none", "HKD_SCRATCH": f"{tmp_path}/x"}
    before = dict(env)
    prepare(env)
    assert env == before
    assert not os.listdir(tmp_path)


@pytest.fixture
def two_gpus(monkeypatch):
    """(random state of each, calls of set_device): a process that computes on the second of two."""
    states, chosen = {0: "state 0", 1: "state 1"}, []
    for name, stand_in in {
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 1,
        "set_device": chosen.append,
        "get_rng_state": states.get,
        "set_rng_state": lambda state, device: states.update({device: state}),
        "manual_seed_all": lambda seed: states.update({0: "seeded", 1: "seeded"}),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return states, chosen


def test_after_a_run_gpus_have_their_random_numbers_and_the_present_one_is_it_again(two_gpus):
    states, chosen = two_gpus
    with kept():
        torch.manual_seed(3)
        assert states == {0: "seeded", 1: "seeded"}
    assert states == {0: "state 0", 1: "state 1"}
    assert chosen == [1]


def test_after_a_network_is_made_gpus_have_their_random_numbers(two_gpus):
    networks.build(ModelSettings(name="small"), 10, (3, 32, 32), seed=0)
    assert two_gpus == ({0: "state 0", 1: "state 1"}, [])


def test_nothing_is_written_to_home(tmp_path):
    """By a sweep, in a fresh process."""
    home, spec = tmp_path / "home", tmp_path / "spec.toml"
    home.mkdir()
    spec.write_text('[axes]\nscheme = ["fedavg"]\n')
    data = toy.save_data(tmp_path / "data.npz")
    settings = toy.settings(data, "model.name=shufflenet_v2")
    arguments = ["--executor", "debug", "--root", str(tmp_path / "root"), *settings]
    env = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    sweep = subprocess.run(
        [sys.executable, "-m", "jobs", "launch", str(spec), *arguments],
        cwd=tmp_path,
        text=True,
        env={**env, "HOME": str(home), "PYTHONPATH": str(toy.PROJECT)},
        capture_output=True,
    )
    assert sweep.returncode == 0, sweep
    assert not os.listdir(home)
    assert sorted(os.listdir(tmp_path)) == ["data.npz", "home", "root", "spec.toml"]


def test_a_run_imports_no_compiler(tmp_path):
    """torch._dynamo and what it needs take a second of each rank's start, and nothing here uses them."""
    script = (
        "import runpy, sys\ntry:\n    runpy.run_module('hkd_hpc.train', run_name='__main__')\nexcept SystemExit as "
        "end:\n    print(end.code)\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            script,
            "--out",
            str(tmp_path / "run"),
            "fed.rounds=1",
            "train.epochs=1",
            "data.fraction=.02",
        ],
        capture_output=True,
        text=True,
        cwd=toy.PROJECT,
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-500:]
    assert done.stdout.splitlines()[-1] == "[]", done.stdout[-500:] + done.stderr[-500:]


OWN = """
import torch
from hkd_hpc.schemes.base import Scheme
class Telling(Scheme):
    def begin(self, client):
        print("kernels", torch.backends.cpu.get_cpu_capability())
"""


@pytest.mark.mpi
def test_kernels_of_another_cpu_are_those_of_every_rank(tmp_path):
    """`make test-old-cpu` hangs on it: variables reach the ranks of mpirun. Forked ranks have their parent's torch."""
    env = toy.write_module(tmp_path, "telling", OWN) | {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    data = toy.save_data(tmp_path / "data.npz")
    code, out, err = toy.mpirun(
        2, *toy.settings(data, "scheme.name=telling:Telling", "fed.rounds=1"), "--out", tmp_path / "run", env=env
    )
    assert code == 0, err
    assert [line for line in out.splitlines() if line.startswith("kernels")] == ["kernels DEFAULT"] * 3
