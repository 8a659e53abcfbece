"""Starting jobs of comm_script.py under real launchers, for the tests."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = str(Path(__file__).with_name("comm_script.py"))
ROOT = str(Path(__file__).parents[2])
LIMIT_S = 300


def mpirun_path() -> str:
    """The mpirun beside this Python, whose environment need not be active, else that on the PATH."""
    found = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert found, "no mpirun: install the extra [mpi], or put the site's mpirun on the PATH"
    return found


def command(size: int, *args: object, script: str = SCRIPT) -> list[str]:
    """mpirun of this environment, `size` ranks of the script."""
    return [mpirun_path(), "-n", str(size), sys.executable, script, *map(str, args)]


def environment(**more: str) -> dict[str, str]:
    """For more ranks than cores, as root too, with this source tree."""
    return {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "TMPDIR": session_folder(),
        **more,
    }


def session_folder() -> str:
    """A temporary folder of its own for each mpirun: a killed one leaves ompi.<pid> behind, and a later one that gets
    the same pid would not start beside it."""
    folder = tempfile.mkdtemp(prefix="mpi")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def mpirun(size: int, *args: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run to the end; TimeoutExpired if the job hangs."""
    return subprocess.run(command(size, *args), env=environment(**env), capture_output=True, text=True, timeout=LIMIT_S)


def ours(result: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines that this package wrote to stderr, without those of mpirun."""
    return [line for line in result.stderr.splitlines() if line.startswith("hkd_hpc:")]
