"""What the published systems ran: a U-Net's training step under autocast, and pictures with 2022's attention.

Used only to predict their tables; a recipe's plan runs darkroom's own step. CUDA's autocast computes norms
and softmax in float32, a CPU's does not, so that is put in here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from darkroom.counting import Counter, Trace
from darkroom.models.model import Model
from darkroom.models.outline import outlined
from darkroom.plan import settings
from darkroom.plan.counts import Kernels, Line, Moment, Profile, cached_profile
from darkroom.plan.tracing import as_on_gpu, fakes, profile_of, tag_weights
from darkroom.prepare.columns import text_states
from darkroom.recipe.sections import AdapterSettings
from darkroom.train.tasks.lora import add_adapters

HALF = torch.bfloat16  # fp16 moves and holds the same bytes


def _count_others(step: OthersStep) -> Profile:
    """The counts of such a step, kept."""
    return cached_profile({"job": "others", **asdict(step)}, lambda: _profile_others(step))


def _profile_others(step: OthersStep) -> Profile:
    """Count such a step."""
    parts = ("unet", "vae", "text_encoder") if step.encodes else ("unet",)
    model = outlined(step.family, parts)
    unet: Any = model.unet
    for module in model.modules.values():
        module.requires_grad_(False)
    with fakes(*model.modules.values()) as counter:
        if step.rank is None:
            unet.requires_grad_(True)
        else:
            add_adapters(model, AdapterSettings(targets="qv", rank=step.rank))
        unet.train()
        if step.checkpointing:
            unet.enable_gradient_checkpointing()
        if step.encoders == "half":
            for name, module in model.modules.items():
                if name != "unet":
                    nn.Module.to(module, HALF)
        if step.pure_half:
            nn.Module.to(unet, HALF)
        as_on_gpu(model.modules.values())
        tag_weights(counter, model.modules.values())
        traces = _traces(counter, model, step)
        trained = sum(p.numel() for p in unet.parameters() if p.requires_grad)
        return profile_of(traces, (2, 3), parameters=model.num_parameters, trained=trained)


def _traces(counter: Counter, model: Model, step: OthersStep) -> tuple[Trace, Trace]:
    unet: Any = model.unet
    params = [param for param in unet.parameters() if param.requires_grad]
    optimiser = torch.optim.AdamW(params, foreach=True)
    average = [torch.empty_like(param) for param in params] if step.ema else []
    counter.tag(average, "ema")
    for param in params:
        param.grad = torch.zeros_like(param)
    optimiser.step()
    optimiser.zero_grad()
    for state in optimiser.state.values():
        counter.tag([value for value in state.values() if isinstance(value, Tensor)], "optimiser")
    for param in params:
        param.register_post_accumulate_grad_hook(lambda p: counter.tag([p.grad], "gradients"))

    def update() -> None:
        _adamw_of_torch_2_0(optimiser, params)
        optimiser.zero_grad()
        if average:
            torch._foreach_lerp_(average, [param.detach() for param in params], 0.001)

    first, second = (_trace(counter, model, step, rows, update) for rows in (2, 3))
    return first, second


@torch.no_grad()
def _adamw_of_torch_2_0(optimiser: torch.optim.Optimizer, params: list[Tensor]) -> None:
    """The foreach step as torch 2.0 took it: two temporaries of the size of all parameters."""
    grads = [param.grad for param in params if param.grad is not None]
    states = [optimiser.state[param] for param in params]
    means, squares = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
    torch._foreach_mul_(params, 0.99)
    torch._foreach_mul_(means, 0.9)
    torch._foreach_add_(means, grads, alpha=0.1)
    torch._foreach_mul_(squares, 0.999)
    torch._foreach_addcmul_(squares, grads, grads, 0.001)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, 1.0)
    denominators = torch._foreach_add(roots, 1e-8)
    torch._foreach_addcdiv_(params, means, denominators, -1e-4)


def _trace(counter: Counter, model: Model, step: OthersStep, rows: int, update: Callable[[], None]) -> Trace:
    unet: Any = model.unet
    counter.stage = "inputs"
    side = step.resolution
    pixels = counter.fake_tensor(torch.empty(rows, 3, side, side, device="meta"))
    width = int(unet.config.cross_attention_dim)
    stored = counter.fake_tensor(torch.empty(rows, 77, width, dtype=HALF, device="meta"))
    trace = counter.start_trace()
    latents, text = _encoded(model, step, pixels, stored, rows)
    counter.stage = "forward"
    with nullcontext() if step.pure_half else autocast():
        noise = torch.randn_like(latents)
        noisy = latents * 0.7 + noise * 0.7
        if step.pure_half:
            noisy, text = noisy.to(HALF), text.to(HALF)
        out = unet(noisy, torch.zeros(rows), encoder_hidden_states=text, return_dict=False)[0]
        loss = F.mse_loss(out.float(), noise.float())
    counter.stage = "backward"
    with _norms_of_cuda():
        loss.backward()  # type: ignore[no-untyped-call]
    del out
    counter.stage = "update"
    update()
    counter.stage, counter.trace = "", None
    return trace


def _encoded(
    model: Model, step: OthersStep, pixels: Tensor, stored: Tensor, rows: int
) -> tuple[Tensor, Tensor]:
    if not step.encodes:
        side = step.resolution // 8
        return torch.zeros(rows, 4, side, side), stored
    vae: Any = model.vae
    with torch.no_grad():
        given = vae.encode(pixels.to(vae.dtype)).latent_dist
        latents = given.mean + given.std * torch.randn_like(given.mean)
        del given
        ids = [torch.zeros(rows, t.model_max_length, dtype=torch.long) for t in model.tokenizers]
        text, _ = text_states(model.text_encoders, ids)
    return latents.float(), text


def _count_pictures_of_2022(precision: str, *, autocast: bool = True, softmax: str = "copied") -> Profile:
    """The counts of making pictures with the attention of diffusers in 2022, kept.

    Half precision is under autocast or pure. Its softmax takes half and gives float32 in one kernel
    ('fused'), while the allocator holds as much as if it were given a float32 copy ('copied', what Lambda's
    reserved bytes show).
    """
    key = {"job": "pictures of 2022", "precision": precision, "autocast": autocast, "softmax": softmax}
    return cached_profile(key, lambda: _run_pictures_of_2022(precision, autocast, softmax))


def _run_pictures_of_2022(precision: str, mixed: bool, softmax: str) -> Profile:
    from darkroom.plan.tracing import GenerateSpec, profile_generation

    half = precision != "float32"
    wide = half and mixed and softmax == "fused"
    spec = GenerateSpec(
        "sd15", 512, 512, precision="fp16" if wide else "bf16" if half else "float32", decode_pixels=None
    )
    with autocast(torch.float16 if wide else HALF) if half and mixed else nullcontext():
        return profile_generation(spec, prepare=partial(_attend_as_in_2022, wide=wide))


def _attend_as_in_2022(model: Model, wide: bool) -> None:
    """Unscaled scores, scaled scores and softmax are all in memory at once."""
    from diffusers.models.attention_processor import Attention, AttnProcessor

    class Processor(AttnProcessor):  # type: ignore[misc]
        def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            attn.get_attention_scores = lambda q, k, mask=None: _scores(q, k, attn.scale, wide)
            out: Tensor = super().__call__(attn, hidden_states, *args, **kwargs)
            return out

    for part in (part for module in model.modules.values() for part in module.modules()):
        if isinstance(part, Attention):
            part.set_processor(Processor())


def _scores(query: Tensor, key: Tensor, scale: float, wide: bool) -> Tensor:
    scores = torch.bmm(query, key.transpose(-1, -2))
    scaled = scores * scale
    if wide and scaled.dtype == torch.float16:
        wide_probs: Tensor = torch.ops.aten._softmax(scaled, -1, True)
        return wide_probs.to(query.dtype)
    return F.softmax(scaled, dim=-1).to(query.dtype)


@contextmanager
def autocast(dtype: torch.dtype = HALF) -> Iterator[None]:
    """Half precision as CUDA's autocast has it."""
    with _norms_of_cuda(), torch.autocast("cpu", dtype=dtype):
        yield


@contextmanager
def _norms_of_cuda() -> Iterator[None]:
    """Where autocast is on, norms and softmax take and give float32; also where checkpointing runs again."""
    plain = {name: getattr(F, name) for name in ("group_norm", "layer_norm", "softmax")}

    def widened(call: Any) -> Any:
        """The call in float32 while autocast is on, as CUDA's autocast has it."""

        def wide(*args: Any, **kwargs: Any) -> Any:
            """The call with its tensors widened while autocast is on."""
            if not torch.is_autocast_enabled("cpu"):
                return call(*args, **kwargs)
            given = [arg.float() if isinstance(arg, Tensor) else arg for arg in args]
            named = {k: v.float() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
            return call(*given, **named)

        return wide

    for name, call in plain.items():
        setattr(F, name, widened(call))
    try:
        yield
    finally:
        for name, call in plain.items():
            setattr(F, name, call)


FILE = Path(__file__).with_name("published_counts.json")


@dataclass(frozen=True)
class OthersStep:
    """A training step as the diffusers and Composer scripts wrote it."""

    family: str
    resolution: int
    rank: int | None = None  # LoRA on queries and values; None: all weights
    checkpointing: bool = False
    encodes: bool = True  # VAE and text encoder at each step
    encoders: str = "float32"  # or half
    ema: bool = False
    pure_half: bool = False  # half-precision weights and no autocast


@cache
def others_profile(step: OthersStep) -> Profile:
    """A training step as the published scripts wrote it."""
    return _kept({"others": asdict(step)}, lambda: _count_others(step))


@cache
def pictures_of_2022(precision: str, *, autocast: bool = True, softmax: str = "copied") -> Profile:
    """Making pictures with the attention of 2022."""
    return _kept(
        {"pictures of 2022": [precision, autocast, softmax]},
        lambda: _count_pictures_of_2022(precision, autocast=autocast, softmax=softmax),
    )


@cache
def picture_profile(precision: str, attention: str, family: str = "sd15", side: int = 512) -> Profile:
    """Making square pictures, guided; the VAE decodes the whole batch at once."""
    key = {"pictures": [precision, attention, family, side]}
    return _kept(
        key, lambda: settings.picture_profile(family, side, side, True, precision, attention, whole=True)
    )


@cache
def preparing_profile(family: str, side: int, precision: str) -> Profile:
    """Encoding pictures and captions."""
    return _kept(
        {"preparing": [family, side, precision]},
        lambda: settings.preparing_profile(family, side, True, precision),
    )


def _kept(key: dict[str, Any], count: Callable[[], Profile]) -> Profile:
    found = _file().get(json.dumps(key, sort_keys=True))
    return unpacked(found) if found is not None else count()


@cache
def _file() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    return content


def packed(profile: Profile) -> dict[str, Any]:
    """A profile in few characters."""
    return {
        "kernels": [[k.stage, k.kind, k.calls, *_pair(k.flops), *_pair(k.bytes)] for k in profile.kernels],
        "moments": [
            [m.stage, {kind: _pair(line) for kind, line in m.bytes.items()}] for m in profile.moments
        ],
        "parameters": profile.parameters,
        "trained": profile.trained,
        "chunks": profile.chunks,
    }


def _pair(line: Line) -> list[float]:
    return [round(line.fixed), round(line.row)]


def unpacked(content: dict[str, Any]) -> Profile:
    """A profile as `packed` made it."""
    kernels = tuple(
        Kernels(stage, kind, calls, Line(a, b), Line(c, d))
        for stage, kind, calls, a, b, c, d in content["kernels"]
    )
    moments = tuple(
        Moment(stage, {kind: Line(*pair) for kind, pair in held.items()})
        for stage, held in content["moments"]
    )
    plain = {name: content[name] for name in ("parameters", "trained", "chunks")}
    return Profile(kernels, moments, **plain)
