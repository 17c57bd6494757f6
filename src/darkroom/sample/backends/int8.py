"""U-Net, text encoders and the VAE's decoder in 8 bits for OpenVINO, weights and activations, by NNCF's
post-training quantisation.

Calibrated on what the U-Net is given while it draws prompts, at all timesteps. Layers that lose most by
8 bits, each measured for itself, stay in float; NNCF keeps attention's softmax there and smooths activations
(SmoothQuant, Xiao et al. 2022). Then the same pictures are drawn with both: what is broken is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from darkroom.errors import DarkroomError, MissingExtra
from darkroom.hardware.system import int8_instructions, write_atomically
from darkroom.models.model import LatentScaling
from darkroom.options import LCM_SOLVERS
from darkroom.sample.backends.shells import look_alike, text_layers
from darkroom.sample.choice import make_table
from darkroom.sample.denoise import Row, Unet, denoise
from darkroom.sample.likeness import levels, psnr, ssim
from darkroom.sample.pictures import decode
from darkroom.sample.prompt_files import read_prompts
from darkroom.sample.prompts import encode_prompts, part_tokens

if TYPE_CHECKING:
    from darkroom.models.model import Model

PROMPTS = (
    "a photo of an astronaut riding a horse",
    "a red circle on a blue background",
    "a portrait of an old man with a beard, oil painting",
    "a house by the sea at night",
)
TEXTS = (
    "",
    "a",
    "photograph of a busy market street in the rain, umbrellas, neon signs, 35 mm",
    "logo, flat design, white background",
    "portrait of a young woman with freckles, soft light, highly detailed, sharp focus, 8k",
    "an isometric drawing of a small island with a lighthouse",
    "blurry, low quality, watermark, text",
    "three bowls of noodles on a wooden table, seen from above",
    "mountains at dawn, mist, in the style of a Japanese woodblock print",
    "a yellow square on a green background",
    "the word OPEN on a sign above a shop",
    "a robot plays chess with an elephant; both wear hats, 1920s film, black and white",
)
"""What text encoders are calibrated with besides the prompts: few would leave ranges unseen."""
REPORT = "quality.json"
LEAST_PSNR_DB, LEAST_STD = 12.0, 2.0
"""Below these final pictures have little in common with float32's, or are of one colour."""
LEAST_DECODER_DB = 28.0
"""A decoder whose picture of the same latents is further from float32's stays in float."""
LEAST_TEXT_DB = 20.0
"""A text encoder whose last layers' states are changed by more than a hundredth stays in float."""
UNSEEN_PROMPT = "two cats asleep on a green sofa, seen from above"
"""What text encoders are compared on: calibration has other prompts."""
SAMPLES = 16
"""Rows of U-Net calls that calibration computes: NNCF runs each several times, most of its time."""
LATENTS = 2
"""Of a calibration picture's last steps, whose predicted pictures the decoder is calibrated with."""
MOST_FLOAT = 0.1
"""The largest share of layers that may stay in float."""
SENSITIVE = 4.0
"""A layer stays in float where 8 bits change its output by so many times the median layer's change."""


@dataclass(frozen=True)
class Calibration:
    """What an 8-bit export is made of, besides the float32 one."""

    prompts: tuple[str, ...] = PROMPTS
    steps: int = 8
    guidance: float = 7.5
    seed: int = 0
    smooth: float = 0.95

    @classmethod
    def of(cls, file: str) -> Calibration:
        """With the prompts of a file, as `--prompts` reads it; with the shipped ones where none is named."""
        if not file:
            return cls()
        return cls(prompts=tuple(str(line["prompt"]) for line in read_prompts(file)))

    @property
    def digest(self) -> str:
        """For the name of the export."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


def nncf() -> Any:
    """The package, which reports nothing of its use and prints no progress of its own."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        import nncf as package
    except ImportError as error:
        raise MissingExtra("nncf", "openvino") from error
    import logging

    package.set_log_level(logging.ERROR)
    return package


Inputs = dict[str, torch.Tensor]


def draw(model: Model, unet: Unet, calibration: Calibration, prompt: str) -> list[torch.Tensor]:
    """The predicted latents after each step of one prompt's picture."""
    size = (model.sample_size, model.sample_size)
    (positive, silent), _ = encode_prompts(model, [prompt, ""], size)
    solver = None if model.scheduler else "ddim"
    table = make_table(solver, model.scheduler, calibration.steps)
    generator = torch.Generator().manual_seed(calibration.seed)
    shape = (model.latent_channels, size[1] // model.vae_factor, size[0] // model.vae_factor)
    noise = torch.randn(shape, generator=generator) * table.initial_scale
    distilled = table.solver in LCM_SOLVERS
    row = Row(
        table,
        noise,
        positive,
        None if distilled else silent,
        1.0 if distilled else calibration.guidance,
        generator=generator,
    )
    return [state.x0_BCHW[0] for state in denoise(unet, [row])]


class CalibrationPictures:
    """What a U-Net is given while it draws the calibration's prompts, and what they come to.

    Drawn once, when first asked for. The float32 U-Net is opened for that alone: held while its successor is
    made, it would cost as much memory again.
    """

    def __init__(
        self,
        model: Model,
        open_unet: Callable[[], Unet],
        calibration: Calibration,
        notice: Callable[[str], None],
    ) -> None:
        self._model, self._open_unet = model, open_unet
        self._calibration, self._notice = calibration, notice

    @cached_property
    def _drawn(self) -> tuple[list[Inputs], list[torch.Tensor], list[torch.Tensor]]:
        unet = self._open_unet()
        inputs: list[Inputs] = []
        latents: list[torch.Tensor] = []

        def call(x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, added: Inputs) -> torch.Tensor:
            given = {"x": x, "t": t, "text": text, **added}
            inputs.append({name: value.detach().float().clone() for name, value in given.items()})
            return unet(x, t, text, added)

        prompts, steps = self._calibration.prompts, self._calibration.steps
        for i, prompt in enumerate(prompts, start=1):
            self._notice(f"int8: calibration picture {i} of {len(prompts)}, {steps} steps")
            latents += draw(self._model, call, self._calibration, prompt)[-LATENTS:]
        self._notice("int8: a picture to compare with")
        return inputs, latents, self.draw_unseen(unet)

    @property
    def inputs(self) -> list[Inputs]:
        """The U-Net's, one row each: `SAMPLES` over all timesteps, with and without the prompt in turn."""
        calls = sorted(self._drawn[0], key=lambda one: float(one["t"][0]))
        count = min(SAMPLES, len(calls))
        chosen = [calls[round(i * (len(calls) - 1) / max(1, count - 1))] for i in range(count)]
        rows = [i % len(one["x"]) for i, one in enumerate(chosen)]
        return [
            {name: value[row : row + 1] for name, value in one.items()}
            for row, one in zip(rows, chosen, strict=True)
        ]

    @property
    def latents(self) -> list[torch.Tensor]:
        """Predicted [C, h, w] of each prompt's last steps."""
        return self._drawn[1]

    @property
    def unseen(self) -> list[torch.Tensor]:
        """Latents predicted at each step of a picture that is not among the others."""
        return self._drawn[2]

    def draw_unseen(self, unet: Unet) -> list[torch.Tensor]:
        """That picture with a U-Net: the last prompt's with another seed."""
        other = replace(self._calibration, seed=self._calibration.seed + 1)
        return draw(self._model, unet, other, self._calibration.prompts[-1])


# ---- what stays in float


@torch.no_grad()
def sensitive_layers(unet: nn.Module, samples: Sequence[Inputs], call: Callable[[Inputs], Any]) -> list[str]:
    """Names of the layers whose own output 8 bits change most, each measured by itself, worst first.

    Activations are rounded with one scale a tensor and weights with one a channel, as OpenVINO computes.
    """
    errors: dict[str, list[float]] = {}
    layers = {n: m for n, m in unet.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}

    def hook(name: str) -> Callable[[Any, Any, torch.Tensor], None]:
        """A forward hook that notes the relative error of rounding layer `name` to 8 bits."""

        def measure(layer: Any, given: Any, out: torch.Tensor) -> None:
            rounded = _same(layer, _rounded(given[0]), _rounded(layer.weight, by_channel=True))
            change = (rounded - out).square().mean() / out.square().mean().clamp(min=1e-12)
            errors.setdefault(name, []).append(float(change))

        return measure

    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]
    try:
        for sample in samples:
            call(sample)
    finally:
        for handle in handles:
            handle.remove()
    mean = {name: float(np.mean(values)) for name, values in errors.items()}
    limit = SENSITIVE * float(np.median(list(mean.values())))
    worst = sorted((name for name in mean if mean[name] > limit), key=lambda name: -mean[name])
    return worst[: math.ceil(MOST_FLOAT * len(mean))]


def _rounded(value: torch.Tensor, *, by_channel: bool = False) -> torch.Tensor:
    axes = tuple(range(1, value.ndim)) if by_channel else tuple(range(value.ndim))
    scale = value.abs().amax(axes, keepdim=True).clamp(min=1e-12) / 127
    return (value / scale).round() * scale


def _same(layer: Any, given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if isinstance(layer, nn.Linear):
        return nn.functional.linear(given, weight, layer.bias)
    return nn.functional.conv2d(
        given, weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups
    )


# ---- quantising


def adds_exactly() -> bool:
    """Whether this processor's 8-bit products are added up without overflow.

    Where they take several instructions (AVX2 alone), sums of two saturate at 16 bits; weights of half the
    range keep within it.
    """
    return int8_instructions() is not None


def quantise(float_model: Any, samples: Sequence[Inputs], kept: Sequence[str], smooth: float) -> Any:
    """The 8-bit model of an OpenVINO model. `kept` names modules that stay in float."""
    package = nncf()
    from nncf.quantization.advanced_parameters import (
        AdvancedQuantizationParameters,
        AdvancedSmoothQuantParameters,
        OverflowFix,
    )

    names = [operation.get_friendly_name() for operation in float_model.get_ops()]
    patterns = [rf".*\.{re.escape(name)}/.*" for name in kept]
    patterns = [one for one in patterns if any(re.fullmatch(one, name) for name in names)]
    dataset = package.Dataset([{name: value.numpy() for name, value in one.items()} for one in samples])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return package.quantize(
            float_model,
            dataset,
            subset_size=len(samples),
            model_type=package.ModelType.TRANSFORMER,
            preset=package.QuantizationPreset.MIXED,
            ignored_scope=package.IgnoredScope(patterns=patterns, validate=False),
            advanced_parameters=AdvancedQuantizationParameters(
                overflow_fix=None if adds_exactly() else OverflowFix.ENABLE,
                smooth_quant_alphas=AdvancedSmoothQuantParameters(matmul=smooth),
            ),
        )


# ---- what it costs


def quality(model: Model, pictures: CalibrationPictures, small: Unet) -> dict[str, Any]:
    """PSNR of the predicted picture's latents after each step, and of the final pictures PSNR and SSIM.

    Of a picture that calibration did not see.
    """
    ours, theirs = pictures.draw_unseen(small), pictures.unseen
    by_step = [_psnr(one, reference) for one, reference in zip(ours, theirs, strict=True)]
    assert model.vae is not None
    drawn, reference = (levels(decode(model.vae, torch.stack([one[-1]]))[0]) for one in (ours, theirs))
    return {
        "psnr_db_by_step": [round(value, 2) for value in by_step],
        "psnr_db": round(psnr(drawn, reference), 2),
        "ssim": round(ssim(drawn, reference), 4),
        "std": round(float(drawn.std()), 2),
        "std_float32": round(float(reference.std()), 2),
        "finite": all(bool(torch.isfinite(one).all()) for one in ours),
    }


# ---- the VAE's decoder


def decoder_inputs(vae: Any, latents: Sequence[torch.Tensor]) -> list[Inputs]:
    """What the decoder is given of latents: one row at a time, not scaled."""
    scaling = LatentScaling.of(vae)
    return [{"latents": scaling.undone(one[None].float()).contiguous()} for one in latents]


def decoder_quality(small: torch.Tensor, plain: torch.Tensor) -> dict[str, Any]:
    """PSNR and SSIM of a picture [1, 3, H, W] of -1 to 1 in 8 bits against float32's."""
    drawn, reference = (
        (one[0].clamp(-1, 1) * 127.5 + 127.5).round().permute(1, 2, 0).double().numpy()
        for one in (small.nan_to_num(), plain)
    )
    return {
        "psnr_db": round(psnr(drawn, reference), 2),
        "ssim": round(ssim(drawn, reference), 4),
        "std": round(float(drawn.std()), 2),
        "std_float32": round(float(reference.std()), 2),
        "finite": bool(torch.isfinite(small).all()),
    }


def harms(found: dict[str, Any]) -> bool:
    """Whether 8 bits cost a decoder more than can be unseen: its errors come on top of the U-Net's."""
    black = found["std"] < LEAST_STD <= found["std_float32"]
    return not found["finite"] or black or found["psnr_db"] < LEAST_DECODER_DB


# ---- text encoders


def embedded_prompts(model: Model, part: int, prompts: Sequence[str]) -> list[Inputs]:
    """What the layers of a model's text encoder are given of prompts, [1, L, D] each."""
    encoder = model.text_encoders[part]
    found: list[Inputs] = []

    def note(layer: nn.Module, given: tuple[Any, ...]) -> None:
        found.append({"embedded": given[0].detach().float().contiguous()})

    handle = text_layers(encoder)[0].register_forward_pre_hook(note)
    try:
        for prompt in prompts:
            encoder(part_tokens(model, prompt, "none", 1)[part][0])
    finally:
        handle.remove()
    return found


def with_layers(encoder: nn.Module, run: Callable[[Inputs], torch.Tensor]) -> Any:
    """A look-alike of a text encoder whose layers' work is done by `run`: the first one calls it for all."""
    same = look_alike(encoder)
    call = threading.local()  # a server may encode in several threads

    def first(embedded_BLD: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        call.states = run({"embedded": embedded_BLD.detach().float().contiguous()}).unbind(1)
        first_state: torch.Tensor = call.states[0]
        return first_state

    def later(number: int) -> Callable[..., torch.Tensor]:
        return lambda *_, **__: call.states[number]

    for i, layer in enumerate(text_layers(same)):
        vars(layer)["forward"] = later(i) if i else first
    return same


def text_quality(small: torch.Tensor, plain: torch.Tensor) -> dict[str, Any]:
    """How far states [1, N, L, D] in 8 bits are from float32's after each layer, in dB below their size."""
    errors, sizes = ((small - plain)[0].square().mean((1, 2)), plain[0].square().mean((1, 2)))
    by_layer = (10 * torch.log10(sizes / errors.clamp(min=1e-20))).tolist()
    return {
        "db_by_layer": [round(value, 2) for value in by_layer],
        "db": round(min(by_layer[-2:]), 2),
        "finite": bool(torch.isfinite(small).all()),
    }


def harms_text(found: dict[str, Any]) -> bool:
    """Whether 8 bits change a text encoder's last layers, the ones that are listened to, too much."""
    return not found["finite"] or found["db"] < LEAST_TEXT_DB


def _psnr(one: torch.Tensor, reference: torch.Tensor) -> float:
    error = float((one - reference).square().mean())
    span = float(reference.max() - reference.min())
    return 99.0 if error == 0 else 10 * math.log10(max(span, 1e-6) ** 2 / error)


def refuse_broken(found: dict[str, Any]) -> None:
    """DarkroomError for 8 bits that make other pictures, black ones or none."""
    black = found["std"] < LEAST_STD <= found["std_float32"]
    if not found["finite"] or black or found["psnr_db"] < LEAST_PSNR_DB:
        what = "no numbers" if not found["finite"] else "one colour" if black else f"{found['psnr_db']} dB"
        raise DarkroomError(
            f"int8 breaks this model's pictures ({what} against float32): use --precision float32 or bf16"
        )


def summary(found: dict[str, Any], kept: Sequence[str]) -> str:
    """The quality in a line."""
    steps = ", ".join(f"{value:.0f}" for value in found["psnr_db_by_step"])
    return (
        f"int8 against float32: PSNR {found['psnr_db']:.1f} dB, SSIM {found['ssim']:.3f}; "
        f"by step {steps} dB; {len(kept)} layers stay in float"
    )


def write_report(folder: Path, found: dict[str, Any], kept: Sequence[str], calibration: Calibration) -> None:
    """Keep the quality next to the export."""
    about = {"quality": found, "float_layers": list(kept), "calibration": asdict(calibration)}
    write_atomically(folder / REPORT, json.dumps(about, indent=2) + "\n")


def read_report(folder: Path) -> dict[str, Any]:
    """What `write_report` kept."""
    content: dict[str, Any] = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    return content
