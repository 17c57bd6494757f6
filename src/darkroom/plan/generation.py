"""The profiles of making pictures and of preparing them: `sample.denoise`, the VAE, the text encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from darkroom import models
from darkroom.counting import Counter, Trace
from darkroom.errors import InputError
from darkroom.models.model import Model, is_flow
from darkroom.models.outline import outlined, text_configs
from darkroom.plan.counts import Profile
from darkroom.plan.tracing import as_on_gpu, fakes, profile_of, tag_weights
from darkroom.prepare.encoders import encode_moments, text_states
from darkroom.sample.choice import make_table
from darkroom.sample.denoise import Condition, Row, denoise
from darkroom.sample.pictures import DECODE_PIXELS

ATTENTIONS = ("fused", "plain")


@dataclass(frozen=True)
class GenerateSpec:
    """What is counted of making pictures; steps and batch multiply it afterwards."""

    model: str
    width: int
    height: int
    guided: bool = True
    precision: str = "fp16"
    attention: str = "fused"  # or plain: scores in memory
    decode_pixels: int | None = DECODE_PIXELS  # at once; None: the whole batch

    def key(self) -> dict[str, Any]:
        """What a cache knows it by."""
        return {"job": "generate", **asdict(self)}


def profile_generation(spec: GenerateSpec, prepare: Callable[[Model], None] | None = None) -> Profile:
    """Count text encoding, one denoising step and decoding; `prepare` may change the modules first."""
    model = outlined(spec.model, ("unet", "vae", "text_encoder"))
    _check_size(model, spec.width, spec.height)
    dtype = models.precision(spec.precision)
    with fakes(*model.modules.values()) as counter:
        for module in model.modules.values():
            nn.Module.to(module, dtype)  # diffusers' own warns of nothing
        _set_attention(model, spec.attention)
        if prepare is not None:
            prepare(model)
        tag_weights(counter, model.modules.values())
        traces = tuple(_trace_pictures(counter, model, spec, rows) for rows in (2, 3))
    pixels = spec.width * spec.height
    chunk = {"decode": max(1, spec.decode_pixels // pixels)} if spec.decode_pixels else {}
    return profile_of(
        (traces[0], traces[1]),
        (2, 3),
        parameters=model.num_parameters,
        trained=0,
        chunks=chunk,
        facts={"width": spec.width, "height": spec.height},
    )


def _check_size(model: Model, width: int, height: int) -> None:
    """InputError unless the model can make pictures of this size."""
    assert model.unet is not None
    unit = model.size_unit
    if width % unit or height % unit or min(width, height) < unit or max(width, height) > 8192:
        raise InputError(f"size {width}x{height}", allowed=f"sides of {unit} to 8192 that {unit} divides")


def _set_attention(model: Model, kind: str) -> None:
    if kind not in ATTENTIONS:
        raise InputError(f"attention '{kind}'", allowed=", ".join(ATTENTIONS))
    as_on_gpu(model.modules.values())
    if kind == "fused":
        return
    from darkroom.models.parts import Attention, AttnProcessor

    parts: list[Any] = [part for module in model.modules.values() for part in module.modules()]
    for part in parts:
        if isinstance(part, Attention):
            part.set_processor(AttnProcessor())
        if hasattr(part, "set_attn_implementation"):
            part.set_attn_implementation("eager")


def _trace_pictures(counter: Counter, model: Model, spec: GenerateSpec, rows: int) -> Trace:
    trace = counter.start_trace()
    with torch.no_grad():
        counter.stage = "text"
        conditions = _conditions(model, spec, rows)
        counter.stage = "denoise"
        latents = _denoise(counter, model, spec, conditions)
        counter.stage = "decode"
        decoded(model.vae, latents)
    counter.stage, counter.trace = "", None
    return trace


def decoded(vae: Any, latents: Tensor) -> Tensor:
    """Latents to uint8 pixels."""
    pixels = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
    out: Tensor = pixels.float().clamp(0, 1).mul(255).round().to(torch.uint8)
    return out


def _conditions(model: Model, spec: GenerateSpec, rows: int) -> list[Condition]:
    """Each picture's prompt, and one negative for all."""
    number = rows + spec.guided
    ids = [torch.zeros(number, t.model_max_length, dtype=torch.long) for t in model.tokenizers]
    text_BLD, pooled_BD = text_states(model.text_encoders, ids)
    if pooled_BD is None:
        return [Condition(text) for text in text_BLD]
    sizes = torch.zeros(6)
    return [
        Condition(text, {"text_embeds": pooled, "time_ids": sizes})
        for text, pooled in zip(text_BLD, pooled_BD, strict=True)
    ]


def _denoise(counter: Counter, model: Model, spec: GenerateSpec, conditions: list[Condition]) -> Tensor:
    """The second of three steps is counted; the first makes what stays alive."""
    factor = model.vae_factor
    shape = (model.latent_channels, spec.height // factor, spec.width // factor)
    table = make_table("flow_euler" if is_flow(model.scheduler) else "ddim", model.scheduler, 3)
    negative = conditions[-1] if spec.guided else None
    positives = conditions[: len(conditions) - spec.guided]
    rows = [
        Row(table, noise, condition, negative, guidance=7.5 if spec.guided else 1.0)
        for noise, condition in zip(torch.zeros(len(positives), *shape), positives, strict=True)
    ]
    steps: Any = denoise(unet_call(model.unet), rows)
    counter.stage = "first"
    next(steps)
    counter.stage = "denoise"
    latents: Tensor = next(steps).latents_BCHW
    counter.stage = "first"
    steps.close()
    return latents


def unet_call(unet: Any) -> Callable[..., Tensor]:
    """The U-Net as `sample.denoise` calls it: latents, timestep, text and its further conditions."""
    dtype = next(unet.parameters()).dtype

    def call(x: Tensor, t: Tensor, text: Tensor, added: dict[str, Tensor]) -> Tensor:
        """The U-Net's output for latents [B, C, h, w], as its forward takes them."""
        added_states = {name: added[name] for name in ("text_embeds", "time_ids") if name in added}
        out: Tensor = unet(
            x.to(dtype),
            t,
            encoder_hidden_states=text,
            added_cond_kwargs=added_states or None,
            return_dict=False,
        )[0]
        return out

    return call


@dataclass(frozen=True)
class PrepareSpec:
    """What is counted of preparing a store: pictures to moments, captions to states if asked."""

    model: str
    resolution: int
    text: bool = False
    precision: str = "bf16"
    vae: str | None = None  # another model's

    def key(self) -> dict[str, Any]:
        """What a cache knows it by."""
        return {"job": "prepare", **asdict(self)}


def profile_preparing(spec: PrepareSpec) -> Profile:
    """Count the encoders on a batch of pictures."""
    model = outlined(spec.model, ("vae", "text_encoder") if spec.text else ("vae",))
    if spec.vae is not None:
        model.vae = outlined(spec.vae, ("vae",)).vae
    dtype = models.precision(spec.precision)
    with fakes(*model.modules.values()) as counter:
        for module in model.modules.values():
            nn.Module.to(module, dtype)  # diffusers' own warns of nothing
        as_on_gpu(model.modules.values())
        tag_weights(counter, model.modules.values())
        traces = tuple(_trace_encoders(counter, model, spec, rows) for rows in (2, 3))
    side = spec.resolution // model.vae_factor
    text = [(c.max_position_embeddings, c.hidden_size) for c in text_configs(model)]
    facts = {
        "resolution": spec.resolution,
        "latent_bytes_a_row": 2 * 2 * model.latent_channels * side * side,
        "text_bytes_a_row": sum(2 * length * width for length, width in text),
    }
    return profile_of((traces[0], traces[1]), (2, 3), parameters=model.num_parameters, trained=0, facts=facts)


def _trace_encoders(counter: Counter, model: Model, spec: PrepareSpec, rows: int) -> Trace:
    counter.stage = "encode"
    pixels = counter.fake_tensor(
        torch.empty(rows, 3, spec.resolution, spec.resolution, dtype=torch.uint8, device="meta")
    )
    trace = counter.start_trace()
    with torch.no_grad():
        moments = encode_moments(model.vae, pixels)
        if spec.text:
            counter.stage = "text"
            ids = [torch.zeros(rows, t.model_max_length, dtype=torch.long) for t in model.tokenizers]
            states = text_states(model.text_encoders, ids)
            del states
    del moments
    counter.stage, counter.trace = "", None
    return trace


__all__ = ["GenerateSpec", "PrepareSpec", "profile_generation", "profile_preparing"]
