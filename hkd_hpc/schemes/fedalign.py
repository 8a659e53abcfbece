"""FedAlign: Mendieta et al., Local Learning Matters: Rethinking Data Heterogeneity in Federated Learning, CVPR 2022.

L = CE + mu * stopgrad(CE / A) * A: the correction's value is always mu * CE; only its direction comes from

    A = mean_B (s_student - s_teacher)^2

s is the largest singular value of the transmitting matrix F_in F_out^T / (H W) of the last stage (power iterations).
The teacher is the full stage; the student is the same stage at `width`: its first channels, fed with the first channels
of the teacher's input, BatchNorm on batch statistics. All teacher maps are constants, so only that slice of the last
stage gets this gradient. At 32 x 32 images and the ImageNet stem the last maps are 1 x 1 and s is |f_in| |f_out|.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass

from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.lazy import F, torch
from hkd_hpc.common.settings import setting
from hkd_hpc.models.precision import real
from hkd_hpc.schemes.base import About, Scheme, SchemeSettings

EPS = 1e-12


@dataclass(frozen=True)
class FedAlignSettings(SchemeSettings):
    """Defaults: the FedHKD paper's appendix. mu = 0 is FedAvg."""

    name: str = setting("fedalign", "the scheme")
    mu: float = setting(0.45, "value of the correction as a share of the cross-entropy", low=0, high=1e6)
    width: float = setting(0.25, "share of the channels of the student", above=0, high=1)
    iterations: int = setting(10, "power iterations", low=1, high=1000)


class FedAlign(Scheme):
    """Second-order alignment of the last stage with a slim copy of itself. The model must have a `last_stage`."""

    Settings = FedAlignSettings
    terms = ("cross_entropy", "alignment")
    # .45: its paper and the FedHKD paper; the rest of the grid is ours
    about = About(tunes={"mu": (0.05, 0.15, 0.45, 1.0, 2.0)}, slowdown=(1.60, 4.16))
    cuda_graph_safe = True

    def check_net(self, net):
        if not hasattr(net, "last_stage"):
            raise UsageError("scheme.name=fedalign: model.name has no `last_stage`, the module of its last maps")

    def loss(self, client, batch):
        with captured(client.net.last_stage) as maps:
            _, logits_BC = client.net(batch.x_BCHW)
        entropy = self.cross_entropy(logits_BC, batch.y_B)
        nothing = torch.zeros((), device=logits_BC.device)
        return {
            "cross_entropy": entropy,
            "alignment": self._alignment(client, maps, entropy.detach()) if self.settings.mu else nothing,
        }

    def _alignment(self, client, maps, entropy):
        input_BCHW, output_BCHW = (real(each.detach()) for each in maps)  # train.precision=bf16
        slim_BCHW = input_BCHW[:, : share(input_BCHW.shape[1], self.settings.width)]
        student_B = largest_singular_value(
            slim_BCHW, slim(client.net.last_stage, slim_BCHW, self.settings.width), self.settings.iterations
        )
        teacher_B = largest_singular_value(input_BCHW, output_BCHW, self.settings.iterations)
        gap = (student_B - teacher_B).square().mean()
        return self.settings.mu * (entropy / gap.detach().clamp(min=EPS)) * gap


@contextmanager
def captured(module):
    """The (input, output) of the module's next forward pass, as a list that is filled by it."""
    maps: list[torch.Tensor] = []
    hook = module.register_forward_hook(lambda _, inputs, output: maps.extend((inputs[0], output)))
    try:
        yield maps
    finally:
        hook.remove()


def largest_singular_value(input_BCHW, output_BCHW, iterations):
    """(B,): of F_in F_out^T / (H W), F_in pooled to the size of F_out; power iterations on G G^T from the all-ones
    vector.
    """
    size = output_BCHW.shape[2:]
    in_BIX = F.adaptive_avg_pool2d(input_BCHW, size).flatten(2)
    out_BOX = output_BCHW.flatten(2) / (size[0] * size[1])
    vector_BI1 = torch.ones_like(in_BIX[:, :, :1])
    for _ in range(iterations):  # without forming the matrix: through its two factors, by way of the few positions X
        image_BO1 = out_BOX @ (in_BIX.transpose(1, 2) @ vector_BI1)
        vector_BI1 = F.normalize(in_BIX @ (out_BOX.transpose(1, 2) @ image_BO1), dim=1, eps=EPS)
    return torch.linalg.vector_norm(out_BOX @ (in_BIX.transpose(1, 2) @ vector_BI1), dim=(1, 2))


def share(channels, width):
    return max(1, int(channels * width))


def slim(module, x_BCHW, width):
    """The module's function with the first `width` of its output channels, on however many input channels x has."""
    if isinstance(module, torch.nn.Conv2d):
        return slim_convolution(module, x_BCHW, width)
    if isinstance(module, (torch.nn.BatchNorm2d, torch.nn.GroupNorm)):
        return slim_norm(module, x_BCHW)
    if isinstance(module, torch.nn.Sequential):
        for child in module:
            x_BCHW = slim(child, x_BCHW, width)
        return x_BCHW
    if hasattr(module, "conv2") and hasattr(module, "bn2"):  # torchvision's BasicBlock
        return slim_basic_block(module, x_BCHW, width)
    return module(x_BCHW)


def slim_convolution(conv, x_BCHW, width):
    weight = conv.weight[: share(conv.out_channels, width), : x_BCHW.shape[1]]
    bias = None if conv.bias is None else conv.bias[: len(weight)]
    return F.conv2d(x_BCHW, weight, bias, conv.stride, conv.padding, conv.dilation)


def slim_norm(norm, x_BCHW):
    """BatchNorm on the statistics of this batch, running ones untouched; GroupNorm with groups that divide the
    channels.
    """
    channels = x_BCHW.shape[1]
    weight, bias = norm.weight[:channels], norm.bias[:channels]
    if isinstance(norm, torch.nn.GroupNorm):
        return F.group_norm(x_BCHW, math.gcd(norm.num_groups, channels), weight, bias, norm.eps)
    return F.batch_norm(x_BCHW, None, None, weight, bias, training=True, eps=norm.eps)


def slim_basic_block(block, x_BCHW, width):
    identity = x_BCHW if block.downsample is None else slim(block.downsample, x_BCHW, width)
    out = F.relu(slim(block.bn1, slim(block.conv1, x_BCHW, width), width))
    return F.relu(slim(block.bn2, slim(block.conv2, out, width), width) + identity)
