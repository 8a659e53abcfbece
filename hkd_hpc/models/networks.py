"""Networks. Each gives (feature_BD, logits_BC) in one pass and has a `classifier` that maps a feature to logits.

The paper's models are torchvision's ResNet18 and ShuffleNetV2 x1.0 whose last layer is a plain Linear to the latent
vector (64 or 32), followed by one Linear classifier: 11,209,994 (CIFAR10), 11,215,844 (CIFAR100), 1,286,734 (SVHN)
parameters. The paper says that BatchNorm ends its extractor; these counts say that none does (`model.latent_norm`).
torchvision is imported only for its own models: it costs seconds a rank.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from hkd_hpc.common import rng
from hkd_hpc.common.errors import UsageError
from hkd_hpc.models.convolution import prefer_channels_last, reformulate
from hkd_hpc.models.family import Family
from hkd_hpc.models.images import Inputs
from hkd_hpc.models.registry import MODELS, require_images
from hkd_hpc.models.settings import ModelSettings
from hkd_hpc.runtime.environment import gpus_in_use
from hkd_hpc.runtime.frames import place_of
from hkd_hpc.runtime.own_code import load_object


class Net(nn.Module):
    """An extractor that ends in the latent vector, and a linear classifier on it (also used on hyper-knowledge)."""

    cuda_graph_safe = True  # as schemes/base.py says of a scheme

    def __init__(
        self, extractor: nn.Module, latent: int, classes: int, latent_norm: str = "none", last_stage: str = "last_stage"
    ):
        """`last_stage`: the name of the extractor's module that makes the last maps."""
        super().__init__()
        self._last_stage = last_stage
        self.channels_last = False  # in memory; see convolution.py
        self.extractor = extractor
        self.latent_norm = nn.BatchNorm1d(latent, affine=False) if latent_norm == "batch" else nn.Identity()
        self.classifier = nn.Linear(latent, classes)

    def forward(self, x_BCHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.channels_last:
            x_BCHW = x_BCHW.contiguous(memory_format=torch.channels_last)
        feature_BD = self.latent_norm(self.extractor(x_BCHW))
        return feature_BD, self.classifier(feature_BD)

    @property
    def last_stage(self) -> nn.Module:
        """The module that makes the last maps."""
        return getattr(self.extractor, self._last_stage)


def build(
    settings: ModelSettings,
    classes: int,
    input_shape: tuple[int, ...],
    seed: int,
    device: torch.device | str = "cpu",
    dtype: str = "uint8",
) -> nn.Module:
    """The network with the initial weights of a seed; torch's global generators are left as they were.

    The order of the weights in memory, and so in a flat buffer, is the same for every device.

    Args:
        settings: section `model`.
        classes: C.
        input_shape: of an image (channels, height, width) in px, a row (columns,) or a sequence (length,).
        seed: run.seed.
        device: where it will run; the layout in memory follows.
        dtype: of the inputs as they lie in the data: uint8 or float32 of images, float32 of rows, int64 of sequences.

    Returns:
        A module that maps inputs (B, *input_shape) to (feature_BD, logits_BC), on the CPU; with model.names a Family of
        them, each with the initial weights that it has alone.

    Raises:
        UsageError: a user's own model (module:Class, called with (classes, latent)) does not give these, or a built-in
            one is to take what is no image.
    """
    inputs = Inputs(input_shape, dtype)
    if not settings.names:
        return build_one(settings, classes, inputs, seed, device)
    alone = (replace(settings, name=name, names="") for name in settings.architectures)
    return Family({one.name: build_one(one, classes, inputs, seed, device) for one in alone})


def build_one(
    settings: ModelSettings, classes: int, inputs: Inputs, seed: int, device: torch.device | str
) -> nn.Module:
    """The network model.name."""
    with torch.random.fork_rng(devices=gpus_in_use()), rng.globals_kept():
        torch.manual_seed(rng.torch_seed(seed, "initial weights"))  # of GPUs too
        rng.seed_globals(rng.torch_seed(seed, "initial weights"))
        net = build_own(settings, classes, inputs) if ":" in settings.name else build_known(settings, classes, inputs)
    if settings.norm == "group":
        replace_batch_norm(net)
    if settings.convolution == "taps" and isinstance(net, Net):
        reformulate(net, inputs.shape)
        if torch.device(device).type == "cpu":
            prefer_channels_last(net)
            net.channels_last = True
    return net


def build_known(settings: ModelSettings, classes: int, inputs: Inputs) -> Net:
    """A built-in model."""
    require_images(settings.name, inputs.kind)
    model = MODELS[settings.name]
    channels, *sides = inputs.shape
    if min(sides) < model.least_side:
        raise UsageError(
            f"model.name={settings.name}: needs images of {model.least_side} x {model.least_side} pixels or more; "
            f"these have {' x '.join(map(str, sides))}"
        )
    extractor = load_object(model.extractor, f"model.name={settings.name}")(settings, channels)
    return Net(extractor, settings.latent, classes, settings.latent_norm, model.last_stage)


def train_in_bf16(net: nn.Module) -> None:
    """Make the passes in train mode of any network compute products and convolutions in bfloat16; weights, what comes
    out, and all passes in eval mode stay float32."""
    forward = net.forward

    def mixed(x_BCHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(x_BCHW.device.type, torch.bfloat16, enabled=net.training):
            feature_BD, logits_BC = forward(x_BCHW)
        return feature_BD.float(), logits_BC.float()

    net.forward = mixed


def small(settings: ModelSettings, channels: int) -> nn.Module:
    """Three strided convolutions with BatchNorm: about 100,000 parameters, for runs of minutes on a laptop."""

    def stage(inputs: int, outputs: int) -> nn.Module:
        convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())

    return nn.Sequential(
        OrderedDict(
            stage1=stage(channels, 32),
            stage2=stage(32, 64),
            stage3=stage(64, 128),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(128, settings.latent),
        )
    )


def moon_cnn(settings: ModelSettings, channels: int) -> nn.Module:
    """MOON's network for CIFAR-10 (section 4.1; layer sizes as in its code): two convolutions, two layers of 120 and 84
    units, and the projection head, whose output is the latent vector; the paper's has 256 numbers.
    """

    def stage(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 5), nn.ReLU(), nn.MaxPool2d(2))

    return nn.Sequential(
        OrderedDict(
            stage1=stage(channels, 6),
            stage2=stage(6, 16),
            pool=PoolTo(5),
            flatten=nn.Flatten(),
            base=nn.Sequential(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()),
            head=nn.Sequential(nn.Linear(84, 84), nn.ReLU(), nn.Linear(84, settings.latent)),
        )
    )


class PoolTo(nn.AdaptiveAvgPool2d):
    """Leaves maps of its own size alone, those of images of 32 x 32: on a GPU torch's backward pass adds in any order,
    which run.deterministic rejects."""

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return x_BCHW if x_BCHW.shape[2:] == (self.output_size,) * 2 else super().forward(x_BCHW)


def resnet18(settings: ModelSettings, channels: int) -> nn.Module:
    from torchvision.models import resnet18 as torchvision_resnet18

    net = torchvision_resnet18(weights=None, num_classes=settings.latent)
    if settings.stem == "cifar":
        net.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        net.maxpool = nn.Identity()
    elif channels != net.conv1.in_channels:
        net.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    return net


def shufflenet_v2(settings: ModelSettings, channels: int) -> nn.Module:
    from torchvision.models import shufflenet_v2_x1_0

    net = shufflenet_v2_x1_0(weights=None, num_classes=settings.latent)
    if settings.stem == "cifar":
        net.conv1[0] = nn.Conv2d(channels, 24, 3, padding=1, bias=False)
        net.maxpool = nn.Identity()
    elif channels != net.conv1[0].in_channels:
        net.conv1[0] = nn.Conv2d(channels, 24, 3, stride=2, padding=1, bias=False)
    return net


def replace_batch_norm(module: nn.Module) -> None:
    """Every BatchNorm2d becomes a GroupNorm (as many groups as divide the channels, at most 32)."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, nn.GroupNorm(math.gcd(32, child.num_features), child.num_features))
        else:
            replace_batch_norm(child)


def has_batch_norm(net: nn.Module) -> bool:
    """Whether training needs at least two images."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules())


def build_own(settings: ModelSettings, classes: int, inputs: Inputs) -> nn.Module:
    """A user's own model; one forward pass tells a wrong shape before the first round."""
    what = f"model.name={settings.name}"
    cls = load_object(settings.name, what)
    try:
        net = cls(classes, settings.latent) if isinstance(cls, type) else None
    except Exception as error:
        raise UsageError(
            f"{what}: {place_of(error)}{cls.__name__}({classes}, {settings.latent}) raised "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(net, nn.Module) or not isinstance(getattr(net, "classifier", None), nn.Module):
        raise UsageError(f"{what}: must be an nn.Module class with a `classifier` that maps features to logits")
    out = probe(net, inputs.zeros(2), inputs.kind, what)
    shapes = [tuple(part.shape) for part in out if isinstance(part, torch.Tensor)] if isinstance(out, tuple) else []
    if shapes != [(2, settings.latent), (2, classes)]:
        raise UsageError(
            f"{what}: forward must return (feature_BD, logits_BC) with C = {classes} and D = "
            f"{settings.latent}; for B = 2 it gave {shapes or type(out).__name__}"
        )
    return net


def probe(net: nn.Module, x: torch.Tensor, kind: str, what: str):
    """What the model gives for these inputs in eval mode. UsageError, which begins with `what`, where it raises."""
    net.eval()
    try:
        with torch.no_grad():
            return net(x)
    except Exception as error:
        raise UsageError(
            f"{what}: {place_of(error)}forward on {str(x.dtype)[6:]} {kind} of shape {tuple(x.shape)}"
            f"{f', all {x.max()},' * bool(x.any())} raised {type(error).__name__}: {error}"
        ) from error
    finally:
        net.train()


def moved_outside_state(net: nn.Module, x: torch.Tensor) -> list[str]:
    """Names of the buffers outside of the state dict that another batch in train mode changes; all buffers are as
    before. What a first batch fills, as a cache, is none."""
    stored = net.state_dict().keys()
    if len(x) < 4 or all(name in stored for name, _ in net.named_buffers()):
        return []
    before = [(module, name, buffer, buffer.clone()) for module, name, buffer in own_buffers(net)]
    first, second = x.tensor_split(2)
    net.train()
    filled: dict[str, torch.Tensor] = {}
    with torch.no_grad(), contextlib.suppress(Exception):  # what it raises is told where it trains
        net(first)
        filled = {name: buffer.clone() for name, buffer in net.named_buffers() if name not in stored}
        net(second)
    now = dict(net.named_buffers())
    moved = [name for name, buffer in filled.items() if name not in now or not torch.equal(buffer, now[name])]
    for module, name, buffer, value in before:
        setattr(module, name, buffer)
        buffer.copy_(value)
    return moved


def own_buffers(net: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Each buffer of each module, with its name there."""
    for module in net.modules():
        for name, buffer in module.named_buffers(recurse=False):
            yield module, name, buffer
