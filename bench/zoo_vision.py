"""Image and diffusion models of `bench.zoo`: from timm, torchvision and diffusers, at their widths, with few blocks.

Example:
    >>> work = MAKERS["resnet"](Build(device="cpu", scale="tiny", train=False))
    >>> work.module(*work.inputs).shape
    torch.Size([4, 1000])

Convolution nets keep one block per stage and all of their kinds of blocks. Before they are measured, their batch
normalizations take the statistics of random images (`bench.models.calibrated`). Images are contiguous, as users pass them.
"""
from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.models import Build, Skip, VisionLogits, VisionLoss, Workload, calibrated

Maker = Callable[[Build], Workload]
Options = Mapping[str, Any]

BATCH, IMAGE = 32, 224
TINY_BATCH, TINY_IMAGE = 4, 64
CLASSES = 1000


def classify(model: nn.Module, how: Build, image: int) -> Workload:
    """Return a classifier with random images and classes."""
    model = calibrated(model, image).to(how.dtype)
    batch = TINY_BATCH if how.scale == "tiny" else BATCH
    images, labels = torch.randn(batch, 3, image, image, dtype=how.dtype), torch.randint(CLASSES, (batch,))
    return Workload(VisionLoss(model) if how.train else VisionLogits(model), (images, labels))


def image_size(how: Build) -> int:
    """Return the width and height of images."""
    return TINY_IMAGE if how.scale == "tiny" else IMAGE


def _module(name: str) -> Any:
    # Packages that were built for another torch fail in ways of their own.
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        raise Skip(f"needs {name}: {error}") from None


# ------ timm
def make_timm(name: str, full: Options, tiny: Options, how: Build) -> Workload:
    """Return a model of timm with few blocks."""
    timm = _module("timm")
    if not timm.is_model(name):
        raise Skip(f"timm {timm.__version__} has no {name}")
    options = {**full, **(tiny if how.scale == "tiny" else {})}
    return classify(timm.create_model(name, pretrained=False, **options), how, image_size(how))


NARROW_VIT: Options = {"img_size": TINY_IMAGE, "embed_dim": 64, "num_heads": 4}
TIMM: Mapping[str, tuple[str, Options, Options]] = {
    "deit": ("deit_base_patch16_224", {"depth": 2}, NARROW_VIT),
    "swin": ("swin_tiny_patch4_window7_224", {"depths": (2, 1, 2, 1)},
             {"img_size": TINY_IMAGE, "embed_dim": 32, "num_heads": (1, 2, 4, 8), "window_size": 4}),
    "convnext": ("convnext_tiny", {"depths": (1, 1, 2, 1)}, {"dims": (16, 32, 48, 64)}),
    "beit": ("beit_base_patch16_224", {"depth": 2}, NARROW_VIT),
    "coat": ("coat_lite_tiny", {"serial_depths": (1, 1, 1, 1)}, {"img_size": TINY_IMAGE}),
}

UNTUNED = ("cspresnet50", "dla34", "ese_vovnet19b_dw", "gernet_s", "dpn68", "fbnetc_100", "ghostnet_100", "mixnet_s",
           "fastvit_t8", "mobilevitv2_050", "edgenext_xx_small")
"""Small models of timm as they are, which nothing was tuned for."""


def make_mixer(how: Build) -> Workload:
    """Return mixer_b16_224 with two blocks: timm's own function for it takes no other number."""
    net = _module("timm.models.mlp_mixer").MlpMixer(
        img_size=image_size(how), patch_size=16, num_blocks=2, embed_dim=64 if how.scale == "tiny" else 768)
    net.head.reset_parameters()  # it begins as zero, under which all else has no gradient
    return classify(net, how, image_size(how))


# ------ torchvision
def make_torchvision(make: Callable[[Any], nn.Module], how: Build) -> Workload:
    """Return a model of torchvision."""
    return classify(make(_module("torchvision.models")), how, image_size(how))


def _resnet(models: Any) -> nn.Module:
    net: nn.Module = models.ResNet(models.resnet.Bottleneck, [2, 1, 1, 1])
    return net


def _densenet(models: Any) -> nn.Module:
    net: nn.Module = models.DenseNet(32, (2, 2, 2, 2), 64)
    return net


def _regnet(models: Any) -> nn.Module:
    """regnet_y_400mf's widths, with squeeze and excitation."""
    stages = models.regnet.BlockParams([1, 1, 1, 1], [48, 104, 208, 440], [8] * 4, [1.0] * 4, [2] * 4, 0.25)
    net: nn.Module = models.RegNet(stages)
    return net


def _efficientnet(models: Any) -> nn.Module:
    """efficientnet_b0's stages of one block each."""
    def stage(ratio: int, kernel: int, stride: int, inputs: int, outputs: int) -> Any:
        return models.efficientnet.MBConvConfig(ratio, kernel, stride, inputs, outputs, 1)

    stages = [stage(1, 3, 1, 32, 16), stage(6, 3, 2, 16, 24), stage(6, 5, 2, 24, 40), stage(6, 3, 2, 40, 80),
              stage(6, 5, 1, 80, 112), stage(6, 5, 2, 112, 192), stage(6, 3, 1, 192, 320)]
    net: nn.Module = models.EfficientNet(stages, dropout=0.2)
    return net


def _mobilenet(models: Any) -> nn.Module:
    """mobilenet_v3_large with one block of each width."""
    settings, last = models.mobilenetv3._mobilenet_v3_conf("mobilenet_v3_large")
    net: nn.Module = models.MobileNetV3(_once_a_width(settings), last)
    return net


def _once_a_width(settings: Iterable[Any]) -> list[Any]:
    """Return the blocks that change the width or the resolution."""
    return [block for block in settings if block.input_channels != block.out_channels or block.stride != 1]


def _shufflenet(models: Any) -> nn.Module:
    net: nn.Module = models.ShuffleNetV2([2, 2, 2], [24, 116, 232, 464, 1024])
    return net


TORCHVISION: Mapping[str, Callable[[Any], nn.Module]] = {
    "resnet": _resnet,
    "efficientnet": _efficientnet,
    "densenet": _densenet,
    "mobilenet_v3": _mobilenet,
    "vgg": lambda models: models.vgg11_bn(),
    "regnet": _regnet,
    "shufflenet": _shufflenet,
    "squeezenet": lambda models: models.squeezenet1_1(),
}


# ------ diffusers
def _diffusion(name: str) -> Any:
    package = _module("diffusers")
    # It loads its parts when they are asked for, and some want other versions of what is installed.
    try:
        return getattr(package, name)
    except (AttributeError, ImportError, RuntimeError) as error:
        raise Skip(f"diffusers {package.__version__} cannot give {name}: {error}") from None


class Denoise(nn.Module):
    """A diffusion model's prediction of noise, or the mean square of what is left of it."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], train: bool) -> None:
        super().__init__()
        self.model, self.names, self.is_loss = model, names, train

    def forward(self, noise: Tensor, *inputs: Tensor) -> Tensor:
        sample: Tensor = self.model(**dict(zip(self.names, inputs, strict=True))).sample
        return nn.functional.mse_loss(sample.float(), noise.float()) if self.is_loss else sample


def make_unet(how: Build) -> Workload:
    """Return Stable Diffusion's U-Net with one block a stage, conditioned on text."""
    tiny = how.scale == "tiny"
    channels, size, context = ((32, 64, 64, 64), 16, 32) if tiny else ((320, 640, 1280, 1280), 64, 768)
    model = _diffusion("UNet2DConditionModel")(
        sample_size=size, block_out_channels=channels, layers_per_block=1, cross_attention_dim=context).to(how.dtype)
    batch = 2 if tiny else 4
    sample, noise = (torch.randn(batch, 4, size, size, dtype=how.dtype) for _ in range(2))
    text = torch.randn(batch, 77, context, dtype=how.dtype)
    names = ("sample", "timestep", "encoder_hidden_states")
    return Workload(Denoise(model, names, how.train), (noise, sample, torch.randint(1000, (batch,)), text))


def make_dit(how: Build) -> Workload:
    """Return two layers of DiT-XL/2, conditioned on classes."""
    tiny = how.scale == "tiny"
    heads, width, size, batch = (4, 16, 8, 2) if tiny else (16, 72, 32, 16)
    model = _diffusion("DiTTransformer2DModel")(
        num_attention_heads=heads, attention_head_dim=width, in_channels=4, out_channels=4, num_layers=2, sample_size=size,
    ).to(how.dtype)
    sample, noise = (torch.randn(batch, 4, size, size, dtype=how.dtype) for _ in range(2))
    names = ("hidden_states", "timestep", "class_labels")
    steps, classes = torch.randint(1000, (batch,)), torch.randint(1000, (batch,))
    return Workload(Denoise(model, names, how.train), (noise, sample, steps, classes))


def _mixed() -> dict[str, Maker]:
    rows = {**TIMM, **{name: (name, {}, {}) for name in UNTUNED}}
    timm = {name: partial(make_timm, *row) for name, row in rows.items()} | {"mixer": make_mixer}
    torchvision = {name: partial(make_torchvision, make) for name, make in TORCHVISION.items()}
    rest: dict[str, Maker] = {"dit": make_dit, "unet": make_unet}
    named: list[Mapping[str, Maker]] = [timm, torchvision, rest]
    placed = sorted((place / len(kind), order, name) for order, kind in enumerate(named) for place, name in enumerate(kind))
    return {name: named[order][name] for _, order, name in placed}


MAKERS: dict[str, Maker] = _mixed()
