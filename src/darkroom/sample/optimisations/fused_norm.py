"""The optimisation `fused_norm`: residual blocks and transformers that keep channels innermost.

Between two convolutions a residual block reads and writes its features five times: a bias is added, the
time's vector, then norm, SiLU and the sum with what came in. PyTorch's group norm moreover turns features
back that lie as tensor cores read them. With the kernels of `triton_kernels` bias and time go into the norm,
SiLU comes with it, and features stay as they lie.

Shapes: B rows, C H W features, L places.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from darkroom.models.parts import GEGLU, ResnetBlock2D, Transformer2DModel
from darkroom.sample.optimisations.applied import Applied, ComputeTarget
from darkroom.sample.optimisations.attention import LeanResnet, is_plain_resnet

FIRST_CAPABILITY = (7, 5)
"""Of NVIDIA: Turing, the first that Triton compiles for."""


def fused_norm(applied: Applied, argument: str) -> None:
    """Group norm with SiLU, biases and sums in kernels that read channels innermost; the layout besides."""
    for part in ("unet", "vae"):
        module = applied.own(part)
        fuse_norms(module)
        module.to(memory_format=torch.channels_last)


def fuse_norms(module: nn.Module) -> None:
    """Change the class of every block of the plain kind within a U-Net or VAE; others stay."""
    module.eval()
    for part in list(module.modules()):
        if type(part) in (ResnetBlock2D, LeanResnet) and is_plain_resnet(part):
            part.__class__ = FusedResnet
        elif type(part) is Transformer2DModel and part.is_input_continuous:
            part.__class__ = FusedTransformer
        elif type(part) is GEGLU:
            part.__class__ = FusedGEGLU
        last = getattr(part, "conv_norm_out", None)
        if type(last) is nn.GroupNorm and type(getattr(part, "conv_act", None)) is nn.SiLU:
            last.__class__ = NormWithSiLU
            part.conv_act = nn.Identity()


def lacks_triton(place: ComputeTarget) -> str | None:
    """Triton writes the kernels when they are first called."""
    if place.capability < FIRST_CAPABILITY:
        return "its kernels are for NVIDIA cards since Turing (2018)"
    return lacks_c_compiler("fused_norm")


def lacks_c_compiler(name: str) -> str | None:
    """Why Triton could not make kernels for the optimisation `name`; None where it can."""
    if importlib.util.find_spec("triton") is None:
        return f"{name} needs Triton, which is not installed (on Windows: pip install triton-windows)"
    compilers = (os.environ.get("CC", "gcc"), "clang")
    if os.name != "posix":
        return None
    if not any(map(shutil.which, compilers)):
        return f"{name}: Triton needs a C compiler, and there is no gcc or clang"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return f"{name}: Triton compiles with Python.h, which is not there (Debian, Ubuntu: python3-dev)"
    return None


class FusedResnet(ResnetBlock2D):  # type: ignore[misc]
    """Two convolutions behind their norms, the time between them, added to what came in."""

    def forward(
        self, input_tensor: torch.Tensor, temb: torch.Tensor | None = None, *more: Any, **also: Any
    ) -> torch.Tensor:
        """[B, C, H, W] and the time's vector [B, T] to [B, O, H, W]"""
        x, bias_C = _without_bias(self.conv1, _normed(self.norm1, input_tensor, silu=True))
        shift_BC = None if bias_C is None else bias_C.expand(len(x), -1)
        if temb is not None and self.time_emb_proj is not None:
            time_BC = self.time_emb_proj(F.silu(temb))
            shift_BC = time_BC if shift_BC is None else time_BC + shift_BC
        x, bias_C = _without_bias(self.conv2, _normed(self.norm2, x, silu=True, shift_BC=shift_BC))
        stays = input_tensor if self.conv_shortcut is None else _pointwise(self.conv_shortcut, input_tensor)
        return stays + x if bias_C is None else _sum(x, stays, bias_C)


class FusedTransformer(Transformer2DModel):  # type: ignore[misc]
    """Features become tokens and features again without being turned."""

    def _operate_on_continuous_inputs(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, int]:
        x = _normed(self.norm, hidden_states, silu=False)
        if not self.use_linear_projection:
            x = _pointwise(self.proj_in, x)
        tokens_BLC = x.permute(0, 2, 3, 1).flatten(1, 2)
        width = tokens_BLC.shape[-1]
        return (self.proj_in(tokens_BLC) if self.use_linear_projection else tokens_BLC), width

    def _get_output_for_continuous_inputs(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        batch_size: int,
        height: int,
        width: int,
        inner_dim: int,
    ) -> torch.Tensor:
        x_BLC = self.proj_out(hidden_states) if self.use_linear_projection else hidden_states
        x = x_BLC.unflatten(1, (height, width)).permute(0, 3, 1, 2)
        return (x if self.use_linear_projection else _pointwise(self.proj_out, x)) + residual


class FusedGEGLU(GEGLU):  # type: ignore[misc]
    """The product of both halves in one kernel."""

    def forward(self, hidden_states: torch.Tensor, *more: Any, **also: Any) -> torch.Tensor:
        """[B, L, D] to [B, L, E]"""
        halves = self.proj(hidden_states)
        if not _holds_values(halves):
            value, gate = halves.chunk(2, dim=-1)
            out: torch.Tensor = value * F.gelu(gate)
            return out
        from darkroom.sample.optimisations.triton_kernels import geglu

        return geglu(halves)


class NormWithSiLU(nn.GroupNorm):
    """The last norm with the activation that follows it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] to the same, channels innermost."""
        if not _holds_values(input):
            return F.silu(super().forward(input))
        from darkroom.sample.optimisations.triton_kernels import group_norm

        return group_norm(input, self, silu=True)


def _holds_values(x: torch.Tensor) -> bool:
    """Whether there is anything for a kernel to read: what is counted has shapes alone (`FakeTensor`)."""
    return type(x) is torch.Tensor


def _normed(
    norm: Any, x_BCHW: torch.Tensor, *, silu: bool, shift_BC: torch.Tensor | None = None
) -> torch.Tensor:
    """`norm` of features to whose channels `shift_BC` was added, through SiLU where asked for."""
    if type(norm) is nn.GroupNorm and norm.affine and _holds_values(x_BCHW):
        from darkroom.sample.optimisations.triton_kernels import group_norm

        return group_norm(x_BCHW, norm, silu=silu, shift_BC=shift_BC)
    if shift_BC is not None:
        x_BCHW = x_BCHW + shift_BC[:, :, None, None]
    out: torch.Tensor = norm(x_BCHW)
    return F.silu(out) if silu else out


def _without_bias(layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A convolution's output without its bias, and the bias that is still to be added; None where the layer
    is of another kind, an adapter's for example, and has added its own.
    """
    if type(layer) is not nn.Conv2d or layer.bias is None or layer.padding_mode != "zeros":
        return layer(x), None
    out = F.conv2d(x, layer.weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)
    return out, layer.bias


def _sum(x: torch.Tensor, stays: torch.Tensor, bias_C: torch.Tensor) -> torch.Tensor:
    if not _holds_values(x):
        return x + stays + bias_C[:, None, None]
    from darkroom.sample.optimisations.triton_kernels import add_

    return add_(x.contiguous(memory_format=torch.channels_last), stays, bias_C)


def _pointwise(layer: Any, x_BCHW: torch.Tensor) -> torch.Tensor:
    """A 1 x 1 convolution as a product, which adds the bias by itself."""
    if (
        type(layer) is not nn.Conv2d
        or layer.kernel_size != (1, 1)
        or layer.stride != (1, 1)
        or layer.padding != (0, 0)
        or layer.groups != 1
    ):
        out: torch.Tensor = layer(x_BCHW)
        return out
    x_BHWC = x_BCHW.permute(0, 2, 3, 1)
    return F.linear(x_BHWC, layer.weight.flatten(1), layer.bias).permute(0, 3, 1, 2)
