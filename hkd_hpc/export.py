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
from hkd_hpc.runtime.paths import expanded
from hkd_hpc.settings import first_paragraph
from hkd_hpc.store.atomic import replace_file


def main(arguments: list[str] | None = None) -> int:
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


def read_model(run: Path, client: int | None) -> dict[str, np.ndarray]:
    """The state dict of the global model, or of one client. UsageError when the run does not hold it."""
    from hkd_hpc.store.folder import RunFolder
    from hkd_hpc.store.tree import load_tree

    newest = RunFolder(run).newest_good_path()  # its weights need no rows
    if newest is None:
        raise UsageError(f"{run}: holds no good checkpoint; is it a run's folder, and has a round been completed?")
    round, tree = newest[0], load_tree(newest[1])
    return (
        client_model(run, round, tree, client)
        if client is not None
        else {str(name): np.asarray(tree["global"][name]) for name in tree["global_names"]}
    )


def client_model(run: Path, round: int, tree: dict, client: int) -> dict[str, np.ndarray]:
    """A client's flat vector laid out like the global state dict; its integer buffers are the global ones."""
    import torch

    from hkd_hpc import config as config_module
    from hkd_hpc.client import OWN_MODEL
    from hkd_hpc.models import networks
    from hkd_hpc.models.flat import FlatModel

    held = {int(c): state[OWN_MODEL] for c, state in tree.get("client_states", {}).items() if OWN_MODEL in state}
    if client not in held:
        raise UsageError(
            f"{run}: round {round} holds the own models of clients {sorted(held) or 'none'}; they are kept "
            "after the last round of a run with run.client_models=true, for the clients that count in it; in a study "
            "only with --keep-state"
        )
    config = config_module.from_json(tree["config_json"])
    classes = tree["partition"]["train_count"].shape[1]
    flat = FlatModel(networks.build(config.model, classes, tuple(tree["image_shape"].tolist()), config.run.seed))
    return flat.arrays(
        torch.from_numpy(held[client]), flat.load_arrays(tree["global"], torch.zeros_like(flat.values_V))
    )


def write_model(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """The whole file or none, as `replace_file` makes it. UsageError for another suffix, RunError where it is
    rejected.
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
    try:
        from safetensors.torch import save
    except ImportError:
        raise UsageError(
            "safetensors is not installed; pip install safetensors, or choose a name ending in .pt"
        ) from None
    return save(tensors)


if __name__ == "__main__":
    sys.exit(main())
