"""The process that `probe.ask` starts: it tries kinds of trials, and alone imports torch for it.

A timed step is `LocalTrainer.run` on random images at the trial's batch size.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from statistics import mean

import torch

from hkd_hpc import schemes
from hkd_hpc.client import Client
from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.config import Config, resolve
from hkd_hpc.data import public
from hkd_hpc.data.partition import floor
from hkd_hpc.jobs.probe import Kind, ProbeResult, Request, SchemeSizes, Times
from hkd_hpc.models import evaluate, networks
from hkd_hpc.models.family import members
from hkd_hpc.models.flat import FlatModel
from hkd_hpc.models.images import Inputs
from hkd_hpc.models.precision import allow_tf32
from hkd_hpc.payload import numbers_in
from hkd_hpc.runtime.machine import peak_memory_bytes
from hkd_hpc.schemes.base import RunInfo, SchemeSettings
from hkd_hpc.server import message_type
from hkd_hpc.state import client_state
from hkd_hpc.training import ClientRound, LocalTrainer
from hkd_hpc.worker import counter_size, report_type

STEPS_S = 1.5  # of the timed steps of a model, about
MOST_STEPS = 20
EVAL_IMAGES = 250


def answer(request: Request) -> ProbeResult:
    """Try every kind, one model after the other. UsageError for a model or scheme that cannot be built."""
    torch.set_num_threads(request["threads"])
    on_gpu = request["device"] != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    sizes: dict[str, SchemeSizes] = {}
    times: dict[str, Times] = {}
    start_s, built, flat = 0.0, "", None
    for name, kind in request["kinds"].items():
        config = resolve(overrides=kind["arguments"])
        if flat is None or kind["model"] != built:
            flat = FlatModel(make_net(config, kind, device), device)
            start_s, built = start_s or time.time() - request["begun"], kind["model"]
        if request["timed"] and built not in times:
            times[built] = times_of(flat, config, kind)
        sizes[name] = sizes_of(flat, config, kind)
    return {
        "kinds": sizes,
        "models": times,
        "start_s": start_s,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "rss_bytes": peak_memory_bytes(),
    }


def make_net(config: Config, kind: Kind, device: torch.device) -> torch.nn.Module:
    """As a run has it on this device, and in the precision of its training."""
    allow_tf32(config.train.precision == "tf32" and device.type == "cuda")
    net = networks.build(config.model, kind["classes"], tuple(kind["shape"]), 0, device, kind["dtype"])
    for one in members(net) if config.train.precision == "bf16" else ():
        networks.train_in_bf16(one)
    return net


def sizes_of(flat: FlatModel, config: Config, kind: Kind) -> SchemeSizes:
    """Of the real objects."""
    public_images = floor(public.fraction(config.data, config.fed.clients, kind["images"]) * kind["images"])
    scheme = schemes.get(config.scheme.name)(
        config.scheme, run_info(flat, config, kind, config.fed.clients, public_images)
    )
    for net in members(flat.net):
        scheme.check_net(net)
    counters = counter_size(flat.counters)
    trainer = LocalTrainer(flat, scheme, config)
    return {
        "parameters": flat.parameter_count,
        "held": scheme.about.parameters_held(flat.parameter_count),
        "weights_bytes": 4 * flat.payload_floats + 8 * counters,
        "flat_bytes": 4 * len(flat.values_V),
        "state_bytes": 4 * numbers_in(client_state.shapes_of(trainer, is_last=False)),
        "last_state_bytes": 4 * numbers_in(client_state.shapes_of(trainer, is_last=True)),
        "initial_bytes": 4 * numbers_in(trainer.own_shapes()),
        "report_bytes": report_type(scheme, counters).itemsize,
        "message_bytes": message_type(scheme, counters).itemsize,
    }


def times_of(flat: FlatModel, config: Config, kind: Kind) -> Times:
    """Of a few steps of the reference scheme, and of a test; of unequal models the mean over the clients."""
    scheme = schemes.get(schemes.REFERENCE)(SchemeSettings(), run_info(flat, config, kind, clients=1, public_images=0))
    once = replace(config, train=replace(config.train, epochs=1))
    trainer, batch = LocalTrainer(flat, scheme, once), max(2, min(config.train.batch_size, kind["own"]))

    def train_s(member: str, steps: int) -> float:
        counters = [counter.clone() for counter in flat.counters]
        client = make_client(flat, kind, steps * batch, member)
        return trainer.run(ClientRound(client, flat.values_V.clone(), counters, {}, 1)).train_s

    def step_s(member: str) -> float:
        train_s(member, 1)  # the first step pays for the library's own preparations
        steps = max(1, min(MOST_STEPS, int(STEPS_S / train_s(member, 1))))
        return train_s(member, steps) / steps

    model = config.model
    each = {
        member: (step_s(member), test_s(flat, make_client(flat, kind, EVAL_IMAGES, member))) for member in model.members
    }
    by_client = [each[model.member_of(client)] for client in range(len(model.assigned))]
    return {"eval_s": mean(test for _, test in by_client), "train_s": mean(step for step, _ in by_client) / batch}


def test_s(flat: FlatModel, client: Client) -> float:
    """Of one image; the second of two tests counts."""
    net = flat.net_of(client.member)
    evaluate.test(net, client.x_train, client.y_train)
    start_s = time.perf_counter()
    evaluate.test(net, client.x_train, client.y_train)
    return (time.perf_counter() - start_s) / len(client.y_train)


def run_info(flat: FlatModel, config: Config, kind: Kind, clients: int, public_images: int) -> RunInfo:
    return RunInfo(
        kind["classes"],
        config.model.latent,
        clients,
        len(flat.parameters_P),
        len(flat.values_V),
        public_images,
        label_smoothing=config.train.label_smoothing,
        augments=config.train.augments,
    )


def make_client(flat: FlatModel, kind: Kind, images: int, member: str) -> Client:
    """A client with random images, or with zeros in place of rows and sequences."""
    device, inputs = flat.values_V.device, Inputs(tuple(kind["shape"]), kind["dtype"])
    is_bytes = inputs.dtype == "uint8"
    x = torch.randint(0, 256, (images, *inputs.shape), dtype=torch.uint8) if is_bytes else inputs.zeros(images)
    x = x.to(device)
    y = torch.randint(0, kind["classes"], (images,)).to(device)
    return Client(0, x, y, x[:0], y[:0], kind["classes"], seed=0, member=member)


def main() -> None:
    """Read a request, write its answer."""
    try:
        print(json.dumps(answer(json.load(sys.stdin))))
    except (UsageError, RunError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
