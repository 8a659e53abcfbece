"""Trained models as plain state dicts that load without this package.

    python -m hkd_hpc.export RUN --out global.pt [--client I]

`.pt` loads with torch.load(path, weights_only=True), `.safetensors` with the safetensors package. The global model is
that of the newest good checkpoint; a client's own model is that of the last round, after its local training.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

import numpy as np

from hkd_hpc.errors import RunError, UsageError
from hkd_hpc.results.models import read_model
from hkd_hpc.runtime.paths import expanded
from hkd_hpc.settings import first_paragraph
from hkd_hpc.store.atomic import replace_file


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: its words; None: those of this process.

    Returns:
        0 done; 2 wrong input, or the file cannot be written: one line says which.
    """
    parser = argparse.ArgumentParser(prog="python -m hkd_hpc.export", description=first_paragraph(__doc__))
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.pt|FILE.safetensors")
    parser.add_argument("--client", type=int, metavar="I", help="client I's own model instead of the global one")
    options = parser.parse_args(arguments)
    try:
        out = Path(expanded(options.out, "--out "))
        arrays = read_model(Path(expanded(options.run, "")), options.client)
        write_model(out, arrays)
    except (UsageError, RunError) as error:
        print(f"hkd_hpc: {error}", file=sys.stderr)
        return 2
    print(f"{out}: {len(arrays)} tensors, {sum(a.size for a in arrays.values()):,} numbers")
    return 0


def write_model(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a state dict: the whole file or none.

    Args:
        path: ends in .pt or .safetensors.
        arrays: by name.

    Raises:
        UsageError: another suffix, or safetensors is not installed.
        RunError: the file cannot be written.
    """
    import torch

    tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    if path.suffix == ".pt":
        buffer = io.BytesIO()
        torch.save(tensors, buffer)
        content = buffer.getvalue()
    elif path.suffix == ".safetensors":
        content = safetensors_of(tensors)
    else:
        raise UsageError(f"--out {path}: the name must end in .pt or .safetensors")
    replace_file(path, lambda temporary: temporary.write_bytes(content))


def safetensors_of(tensors: dict) -> bytes:
    """The content of a .safetensors file.

    Args:
        tensors: by name.

    Returns:
        Its bytes.

    Raises:
        UsageError: safetensors is not installed.
    """
    try:
        from safetensors.torch import save
    except ImportError:
        raise UsageError(
            "safetensors is not installed; pip install safetensors, or choose a name ending in .pt"
        ) from None
    return save(tensors)


if __name__ == "__main__":
    sys.exit(main())
