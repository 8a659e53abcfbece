"""A process's environment, put right before MPI and torch read it: one mask of GPUs, caches on no shared disk."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping

from hkd_hpc.common import rng

DEVICE_FILES = {"amd": "/dev/kfd", "nvidia": "/dev/nvidiactl"}
UPPER_MASKS = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
CACHES = {  # variables that name a folder; without them the libraries write into HOME
    "amd": ("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR", "AMD_COMGR_CACHE_DIR", "TRITON_CACHE_DIR"),
    "nvidia": ("CUDA_CACHE_PATH", "TRITON_CACHE_DIR"),
}


def prepare(env: MutableMapping[str, str] = os.environ) -> None:
    """Drop doubled masks, name folders for the caches of GPU libraries unless the user has. Nothing without a GPU."""
    vendor = gpu_vendor(env)
    if vendor not in CACHES:
        return
    for name in doubled_masks(env, vendor):
        del env[name]
    try:
        folder = scratch_folder(env)
    except OSError:  # no disk of this node takes anything: the libraries do without, or find a place themselves
        return
    for name in CACHES[vendor]:
        if not env.get(name):
            env[name] = os.path.join(folder, name.lower())
            with contextlib.suppress(OSError):  # a full disk: then nothing is kept
                os.makedirs(env[name], exist_ok=True)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """After it the environment is what it was before, and so are the global random generators and, if that was loaded,
    the switches of torch."""
    before = dict(os.environ)
    try:
        with rng.globals_kept(), torch_kept() if "torch" in sys.modules else contextlib.nullcontext():
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def torch_kept() -> Iterator[None]:
    """Its threads, random numbers, also of the GPUs that are in use, the present one of them, and what it may choose
    for speed."""
    import torch

    gpus = gpus_in_use()
    present = torch.cuda.current_device() if gpus else None
    threads, is_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        if present is not None:
            torch.cuda.set_device(present)
        torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
        if is_deterministic != torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(is_deterministic)


def gpus_in_use() -> list[int]:
    """All that this process sees, once it has begun to use one: torch.manual_seed seeds the generators of all."""
    import torch

    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


def gpu_vendor(env: Mapping[str, str]) -> str:
    """amd, nvidia or none: what $GPU says, else whose driver is there."""
    if env.get("GPU") in (*CACHES, "none"):
        return env["GPU"]
    return next((vendor for vendor, file in DEVICE_FILES.items() if os.path.exists(file)), "none")


def doubled_masks(env: Mapping[str, str], vendor: str) -> list[str]:
    """Variables to drop. SLURM may set ROCR_VISIBLE_DEVICES and the others to the same numbers, but on AMD those count
    among what ROCR's has left: GPU 1 of 1 does not exist."""
    return [name for name in UPPER_MASKS if name in env] if vendor == "amd" and env.get("ROCR_VISIBLE_DEVICES") else []


def scratch_folder(env: Mapping[str, str]) -> str:
    """This user's and job's folder on the node's own disk, made if need be; jobs of SLURM name it and remove it.
    Raises OSError."""
    job = f"-{env['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in env else ""
    folder = env.get("HKD_SCRATCH") or os.path.join(tempfile.gettempdir(), f"hkd-{os.getuid()}{job}")
    with contextlib.suppress(OSError):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if os.stat(folder).st_uid == os.getuid():
            return folder
    return tempfile.mkdtemp(prefix="hkd-")  # somebody else has that name
