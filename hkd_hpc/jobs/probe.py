"""What a kind of cell needs, found by trying it: bytes of the real objects, seconds of a few real FedAvg steps.

`ask` starts a process of its own for it, which reads a request and writes the answer, both JSON: only there torch is
imported. A timed step is `LocalTrainer.run` on random images at the cell's batch size.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from hkd_hpc.errors import RunError, UsageError
from hkd_hpc.lazy import torch_environment

LIMIT_S = 300.0  # of the whole probe: importing torch from a slow file system may take a minute
STEPS_S = 1.5  # of the timed steps of a model, about
EVAL_IMAGES = 250


def ask(request: dict) -> dict:
    """The answer. UsageError with the line that a model or scheme cannot be built; RunError where none came in time."""
    environment = {**os.environ, **torch_environment(request["threads"])}
    project = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), project])
    try:
        done = subprocess.run(
            [sys.executable, "-c", "from hkd_hpc.jobs.probe import main; main()"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=environment,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"the probe did not end within {LIMIT_S:.0f} s") from None
    if done.returncode:
        words = done.stderr.strip().splitlines() or ["no reason"]
        raise UsageError(f"the probe of model and scheme failed: {words[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def answer(request: dict) -> dict:
    """{kinds: {name: bytes}, models: {name: seconds}, start_s, rss_bytes} for request's kinds, threads, device and
    timed.

    A kind: arguments (section.key=value), classes, shape, images (training split), model (the name of its model, which
    others may share). device: "cpu", or "auto" for a GPU where there is one.
    """
    start_s = time.perf_counter()
    import torch

    from hkd_hpc import config as config_module
    from hkd_hpc.models import networks
    from hkd_hpc.models.flat import FlatModel

    torch.set_num_threads(request["threads"])
    on_gpu = request["device"] != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    kinds, timed, flats, started_s = {}, {}, {}, None
    for name, kind in request["kinds"].items():
        config, model = config_module.resolve(overrides=kind["arguments"]), kind["model"]
        if model not in flats:
            flats = {model: FlatModel(networks.build(config.model, kind["classes"], tuple(kind["shape"]), 0), device)}
            started_s = started_s or time.perf_counter() - start_s
        if model not in timed and request["timed"]:
            timed[model] = seconds(flats[model], config, kind)
        kinds[name] = sizes(flats[model], config, kind)
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    return {
        "kinds": kinds,
        "models": timed,
        "start_s": started_s,
        "device": name,
        "rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def sizes(flat, config, kind: dict) -> dict[str, int]:
    """Bytes and counts of the real objects; *_bytes of one client, of one record, or of the model as it is stored."""
    from hkd_hpc import schemes
    from hkd_hpc.data import public
    from hkd_hpc.data.partition import floor
    from hkd_hpc.schemes.base import RunInfo
    from hkd_hpc.server import message_type
    from hkd_hpc.training import LocalTrainer
    from hkd_hpc.worker import counter_size, report_type

    facts = RunInfo(
        kind["classes"],
        config.model.latent,
        config.fed.clients,
        len(flat.parameters_P),
        len(flat.values_V),
        floor(public.fraction(config.data, config.fed.clients, kind["images"]) * kind["images"]),
    )
    scheme = schemes.get(config.scheme.name)(config.scheme, facts)
    counters = counter_size(flat.counters)
    kept = scheme.client_state_shapes() | LocalTrainer(flat, scheme, config).own_shapes()
    return {
        "parameters": flat.parameter_count,
        "held": scheme.about.parameters_held(flat.parameter_count),
        "weights_bytes": 4 * flat.payload_floats + 8 * counters,
        "flat_bytes": 4 * len(flat.values_V),
        "state_bytes": 4 * sum(product(shape) for shape in kept.values()),
        "report_bytes": report_type(scheme, counters).itemsize,
        "message_bytes": message_type(scheme, counters).itemsize,
    }


def product(shape) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def seconds(flat, config, kind: dict) -> dict[str, float]:
    """{train_s, eval_s}: of one image in local training by FedAvg, and in a test."""
    from hkd_hpc import schemes
    from hkd_hpc.models import evaluate
    from hkd_hpc.schemes.base import RunInfo, SchemeSettings
    from hkd_hpc.training import LocalTrainer

    facts = RunInfo(kind["classes"], config.model.latent, 1, len(flat.parameters_P), len(flat.values_V), 0)
    scheme = schemes.get(schemes.REFERENCE)(SchemeSettings(), facts)
    once = replace(config, train=replace(config.train, epochs=1))
    trainer, batch = LocalTrainer(flat, scheme, once), max(2, min(config.train.batch_size, kind["own"]))
    train = lambda steps: (
        trainer.run(
            make_client(flat, kind, steps * batch),
            flat.values_V.clone(),
            [counter.clone() for counter in flat.counters],
            {},
            1,
        ).train_s
    )
    train(1)  # the first step pays for the library's own preparations
    steps = max(1, min(20, int(STEPS_S / train(1))))
    images = make_client(flat, kind, EVAL_IMAGES)
    evaluate.test(flat.net, images.x_train, images.y_train)
    start_s = time.perf_counter()
    evaluate.test(flat.net, images.x_train, images.y_train)
    return {"eval_s": (time.perf_counter() - start_s) / EVAL_IMAGES, "train_s": train(steps) / (steps * batch)}


def make_client(flat, kind: dict, images: int):
    """A client with random images."""
    import torch

    from hkd_hpc.client import Client

    device = flat.values_V.device
    x = torch.randint(0, 256, (images, *kind["shape"]), dtype=torch.uint8).to(device)
    y = torch.randint(0, kind["classes"], (images,)).to(device)
    return Client(0, x, y, x[:0], y[:0], kind["classes"], seed=0)


def main() -> None:
    """The process that `ask` starts."""
    try:
        print(json.dumps(answer(json.load(sys.stdin))))
    except (UsageError, RunError) as error:
        sys.exit(str(error))
