"""fused_norm: which blocks it changes, and its kernels, by Triton's interpreter where Triton is there."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

from darkroom import models
from darkroom.sample.memory import count_needs
from darkroom.sample.optimisations.applied import look_alike
from darkroom.sample.optimisations.attention import make_lean
from darkroom.sample.optimisations.fused_norm import (
    FusedGEGLU,
    FusedResnet,
    FusedTransformer,
    NormWithSiLU,
    _pointwise,
    _without_bias,
    fuse_norms,
)
from darkroom.sample.optimisations.table import optimise

triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

BEGIN = """
import torch
import torch.nn.functional as F
from torch import nn
from darkroom import models
from darkroom.sample.optimisations import fused_norm
from darkroom.sample.optimisations import triton_kernels as kernels
from darkroom.sample.optimisations.applied import look_alike
from darkroom.sample.optimisations.attention import make_lean

torch.manual_seed(0)
torch.set_grad_enabled(False)
"""


def interpreted(code: str) -> None:
    """Triton's interpreter is chosen when it is imported: in a process of its own."""
    told = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(code)], env=told, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def model():
    return models.create("tiny", seed=1)


@pytest.mark.parametrize("lean", [False, True])
def test_every_block_is_replaced_and_the_model_stays(model, lean):
    before = [type(module) for module in model.unet.modules()]
    unet = look_alike(model.unet)
    if lean:
        make_lean(unet)
    fuse_norms(unet)
    kinds = [type(module) for module in unet.modules()]
    assert {FusedResnet, FusedTransformer, FusedGEGLU, NormWithSiLU} <= set(kinds)
    assert ResnetBlock2D not in kinds
    assert isinstance(unet.conv_act, nn.Identity), "its SiLU is the norm's now"
    assert unet.state_dict().keys() == model.unet.state_dict().keys()
    assert [type(module) for module in model.unet.modules()] == before


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_all_residual_blocks_of_a_vae_are_replaced(part):
    """A VAE's know no time, and call their norm by another name."""
    vae = look_alike(models.create("sd15", parts=("vae",), device="meta").vae)
    fuse_norms(vae)
    kinds = [type(module) for module in getattr(vae, part).modules()]
    assert kinds.count(FusedResnet) == {"encoder": 10, "decoder": 14}[part]
    assert ResnetBlock2D not in kinds
    assert NormWithSiLU in kinds


def test_a_block_of_another_kind_stays():
    """Its time scales the norm's output: no bias could say so."""
    other = ResnetBlock2D(in_channels=32, temb_channels=16, time_embedding_norm="scale_shift")
    fuse_norms(other)
    assert type(other) is ResnetBlock2D


def test_products_in_place_of_convolutions_are_the_same():
    torch.manual_seed(0)
    x = torch.randn(2, 8, 5, 7)
    for one in (nn.Conv2d(8, 6, 1), nn.Conv2d(8, 6, 1, bias=False), nn.Conv2d(8, 6, 3, padding=1)):
        torch.testing.assert_close(_pointwise(one, x), one(x))


def test_a_bias_is_left_to_the_norm_only_where_the_layer_has_a_plain_one():
    torch.manual_seed(0)
    x, plain = torch.randn(2, 8, 5, 7), nn.Conv2d(8, 6, 3, padding=1, stride=2)

    class Other(nn.Conv2d):
        """An adapter's, for example."""

    out, bias = _without_bias(plain, x)
    torch.testing.assert_close(out + bias[:, None, None], plain(x))
    other = Other(8, 6, 3)
    for layer in (other, nn.Conv2d(8, 6, 3, bias=False)):
        out, bias = _without_bias(layer, x)
        assert bias is None
        assert torch.equal(out, layer(x))


def test_a_model_in_float16_that_decodes_in_float32_goes_back():
    """SDXL's VAE overflows in float16."""
    model = models.create("tiny", seed=1, overrides={"vae": {"force_upcast": True}})
    model.to("cpu", torch.float16)
    applied = optimise(model, "vae_slicing")
    [picture] = applied.decode(torch.randn(1, 4, 8, 8, dtype=torch.float16))
    assert picture.size == (32, 32)
    assert {p.dtype for p in applied.model.vae.parameters()} == {torch.float16}


def test_what_is_counted_has_no_values_for_a_kernel(model):
    """A fused model is counted as any other: its calls see shapes alone."""
    plain = count_needs(model, (64, 64))
    unet, vae = look_alike(model.unet), look_alike(model.vae)
    for part in (unet, vae):
        fuse_norms(part)
    fused = count_needs(replace(model, unet=unet, vae=vae), (64, 64))
    assert fused.weights == plain.weights
    assert {type(module) for module in unet.modules()} & {FusedResnet, FusedTransformer}


@triton
def test_the_norm_is_that_of_float64_in_one_program_and_in_many():
    interpreted(
        """
        for rows, channels, height, width, groups in (
            (2, 64, 8, 8, 32), (1, 96, 40, 33, 32), (2, 320, 16, 16, 32), (3, 20, 24, 24, 4),
            (1, 128, 70, 65, 32), (2, 32, 1, 1, 8),
        ):
            for dtype, near in ((torch.float32, 2e-5), (torch.float16, 1e-2), (torch.bfloat16, 8e-2)):
                norm = nn.GroupNorm(groups, channels)
                norm.weight.data.normal_()
                norm.bias.data.normal_()
                norm = norm.to(dtype)
                x = (torch.randn(rows, channels, height, width) * 2 + 30).to(dtype)
                shift = torch.randn(rows, channels).to(dtype)
                for silu in (True, False):
                    for moved in (None, shift):
                        given = x.double() if moved is None else x.double() + moved.double()[:, :, None, None]
                        wanted = F.group_norm(
                            given, groups, norm.weight.double(), norm.bias.double(), norm.eps
                        )
                        wanted = F.silu(wanted) if silu else wanted
                        for layout in (torch.contiguous_format, torch.channels_last):
                            found = kernels.group_norm(
                                x.to(memory_format=layout), norm, silu=silu, shift_BC=moved
                            )
                            assert found.dtype == dtype and found.shape == x.shape
                            assert found.is_contiguous(memory_format=torch.channels_last)
                            far = (found.double() - wanted).abs().max().item()
                            assert far <= near, (channels, height, dtype, silu, moved is None, far)
                        other = F.group_norm(given + 0.5 * given.roll(1, 1), groups)
                        assert height == 1 or (other - wanted).abs().max() > 0.5, "the control"
        """
    )


@triton
def test_a_row_is_the_same_whoever_shares_its_batch():
    interpreted(
        """
        for side in (8, 48):
            x = torch.randn(5, 64, side, side).to(memory_format=torch.channels_last)
            norm = nn.GroupNorm(32, 64)
            alone = torch.cat([kernels.group_norm(row[None], norm, silu=True) for row in x])
            assert torch.equal(alone, kernels.group_norm(x, norm, silu=True))
        """
    )


@triton
def test_sums_and_geglu_are_pytorchs():
    interpreted(
        """
        x = torch.randn(2, 24, 9, 7).to(memory_format=torch.channels_last)
        other, bias = torch.randn(2, 24, 9, 7), torch.randn(24)
        wanted = x + other + bias[:, None, None]
        found = kernels.add_(x, other, bias)
        assert found is x and torch.allclose(found, wanted, atol=1e-6)
        halves = torch.randn(3, 5, 2 * 1300)
        value, gate = halves.chunk(2, -1)
        assert torch.allclose(kernels.geglu(halves), value * F.gelu(gate), atol=1e-5)
        """
    )


@triton
@pytest.mark.parametrize("change", [{}, {"unet": {"use_linear_projection": True}}])
def test_a_unet_and_a_vae_give_what_pytorch_gives(change):
    interpreted(
        f"""
        model = models.create("tiny", seed=1, overrides={change!r})
        for weight in model.unet.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
        text = torch.randn(2, 77, model.unet.config.cross_attention_dim)
        given = torch.randn(2, 4, 8, 8), torch.tensor([300, 10]), text
        plain = model.unet(*given).sample
        for lean in (False, True):
            unet = look_alike(model.unet)
            if lean:
                make_lean(unet)
            fused_norm.fuse_norms(unet)
            unet.to(memory_format=torch.channels_last)
            assert torch.allclose(unet(*given).sample, plain, atol=2e-5)
        assert (model.unet(given[0] + 0.1, *given[1:]).sample - plain).abs().max() > 0.01, "the control"
        vae, latents = look_alike(model.vae), torch.randn(1, 4, 8, 8)
        fused_norm.fuse_norms(vae)
        assert torch.allclose(vae.decode(latents).sample, model.vae.decode(latents).sample, atol=2e-5)
        """
    )
