"""The table of optimisations, in the order in which they are put in place; and `optimise`, which chooses
from it: names to a model with those in place, or the reason why not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import torch

from darkroom.errors import InputError
from darkroom.hardware.accelerator import kind_of
from darkroom.models.adapters.bank import ROWS
from darkroom.models.image_attention import ImageAttention
from darkroom.sample.optimisations import attention, compiled, fused_norm, offload, precision, steps
from darkroom.sample.optimisations.applied import (
    LOSSLESS,
    LOSSY,
    OTHER,
    STATED,
    Applied,
    Choice,
    ComputeTarget,
    Optimisation,
    needs_cuda,
)
from darkroom.sample.optimisations.tiny_vae import tiny_vae

if TYPE_CHECKING:
    from darkroom.models.model import Model

ONE_TYPE = "weights have one type"
ONE_OFFLOAD = "weights wait in one way"
OWN_CODE = "it makes one piece of code of the whole U-Net"
FROM_FILES = "weights are called as they lie in the files"
MOVING = "weights move between calls"
HOOKS = "the hooks that move weights cannot take quantised ones apart"
FUSES = "compiled code fuses norms by itself"
NO_PYTHON = "it leaves no Python to spare"
BY_PARTS = "feature_cache calls the U-Net's layers one by one"

OPTIMISATIONS: dict[str, Optimisation] = {
    one.name: one
    for one in (
        Optimisation(
            "lcm", OTHER, "few steps with LCM weights or an LCM adapter", steps.lcm,
            excludes={
                "guidance_interval": "an LCM has its guidance built in",
                "feature_cache": "its few steps have little in common",
            },
            argument="FILE", needs_unet=True,
        ),
        Optimisation(
            "tf32", STATED, "float32 products rounded to 10 bits", precision.tf32, precision.lacks_tf32
        ),
        Optimisation(
            "fp16", STATED, "weights and activations in float16", precision.fp16, precision.lacks_fp16,
            excludes={"tf32": "TF32 is for float32"},
        ),
        Optimisation(
            "bf16", STATED, "weights and activations in bfloat16", precision.bf16, precision.lacks_bf16,
            excludes={"fp16": ONE_TYPE, "tf32": "TF32 is for float32"},
        ),
        Optimisation(
            "channels_last", LOSSLESS, "channels innermost, for tensor cores", precision.channels_last
        ),
        Optimisation(
            "fused_attention", LOSSLESS, "attention in one kernel (SDPA; xformers where asked)",
            attention.fused_attention, argument="sdpa|xformers",
        ),
        Optimisation(
            "fused_qkv", LOSSLESS, "query, key and value in one product", attention.fused_qkv,
            needs_unet=True,
        ),
        Optimisation(
            "attention_slicing", LOSSLESS, "a few heads at a time: less memory, slower",
            attention.attention_slicing,
            excludes={
                "fused_attention": "slices replace the fused kernel, and are slower and larger than it",
                "fused_qkv": "fused projections come with fused attention",
            },
            argument="auto|max|HEADS", needs_unet=True,
        ),
        Optimisation(
            "lean", LOSSLESS, "attention without checks at each call; a text's keys and values made once",
            attention.lean,
            excludes={"attention_slicing": "it is fused attention"}, needs_unet=True,
        ),
        Optimisation(
            "fused_norm", LOSSLESS, "norm with SiLU, biases and sums in Triton kernels; channels innermost",
            fused_norm.fused_norm, fused_norm.lacks_triton,
            excludes={
                "compile": FUSES, "compile_regional": FUSES,
                "offload_sequential": MOVING, "offload_group": MOVING, "offload_mmap": MOVING,
                "autocast": ONE_TYPE,
            },
            needs_unet=True,
        ),
        Optimisation("vae_slicing", LOSSLESS, "one picture at a time through the VAE", precision.vae_slicing),
        Optimisation(
            "vae_tiling", LOSSY, "large pictures through the VAE in blended tiles", precision.vae_tiling,
            argument="PIXELS",
        ),
        Optimisation(
            "tiny_vae", LOSSY, "a small decoder in the VAE's place", tiny_vae,
            excludes={"vae_tiling": "the tiny decoder takes whole pictures in little memory"},
            argument="FOLDER",
        ),
        Optimisation(
            "int8", LOSSY, "large linear layers in 8-bit integers", precision.int8, precision.lacks_int8,
            argument="dynamic|weights; with openvino FILE of prompts",
        ),
        Optimisation(
            "fp8", LOSSY, "large linear layers in 8-bit floating point", precision.fp8, precision.lacks_fp8,
            excludes={"int8": ONE_TYPE}, argument="dynamic|weights",
        ),
        Optimisation(
            "offload_model", LOSSLESS, "text encoders, U-Net, VAE on the card in turn", offload.offload_model,
            needs_cuda("offloading is from a CUDA card to main memory"),
        ),
        Optimisation(
            "offload_sequential", LOSSLESS, "each layer on the card for its own call only: slow",
            offload.offload_sequential, needs_cuda("offloading is from a CUDA card to main memory"),
            excludes={"offload_model": ONE_OFFLOAD, "int8": HOOKS, "fp8": HOOKS},
        ),
        Optimisation(
            "offload_group", LOSSLESS, "layers copied to the card while the one before computes",
            offload.offload_group, needs_cuda("offloading is from a CUDA card to main memory"),
            excludes={
                "offload_model": ONE_OFFLOAD, "offload_sequential": ONE_OFFLOAD, "int8": HOOKS, "fp8": HOOKS,
            },
        ),
        Optimisation(
            "offload_mmap", LOSSLESS, "each layer read from its file for its own call",
            offload.offload_mmap, offload.lacks_mmap,
            excludes={
                "int8": HOOKS, "fp8": HOOKS, "channels_last": FROM_FILES, "fused_qkv": FROM_FILES,
                "lcm": "merged weights lie in no file", "autocast": ONE_TYPE,
            },
        ),
        Optimisation(
            "guidance_interval", LOSSY, "guidance at middling noise levels only; can improve pictures",
            steps.guidance_interval, argument="LOW-HIGH",
        ),
        Optimisation(
            "compile", LOSSLESS, "the U-Net by torch.compile, a graph a size", compiled.compile_whole,
            compiled.lacks_compiler,
            excludes={
                "lean": NO_PYTHON, "offload_sequential": MOVING, "offload_group": MOVING,
                "offload_mmap": MOVING,
            },
            argument="MODE",
        ),
        Optimisation(
            "compile_regional", LOSSLESS, "repeated blocks by torch.compile: short to compile",
            compiled.compile_regional, compiled.lacks_compiler,
            excludes={
                "compile": OWN_CODE, "lean": NO_PYTHON, "offload_sequential": MOVING, "offload_group": MOVING,
                "offload_mmap": MOVING,
            },
            argument="MODE",
        ),
        Optimisation(
            "feature_cache", LOSSY, "deep features reused between steps (DeepCache)", steps.feature_cache,
            excludes={"compile": BY_PARTS}, argument="N", needs_unet=True,
        ),
        Optimisation(
            "cuda_graphs", LOSSLESS, "the U-Net call captured and replayed", compiled.cuda_graphs,
            needs_cuda("CUDA graphs are of CUDA"),
            excludes={
                "offload_model": MOVING, "offload_sequential": MOVING, "offload_group": MOVING,
                "feature_cache": BY_PARTS, "lean": NO_PYTHON,
            },
        ),
        Optimisation(
            "autocast", STATED, "casts at every operation, as in published tables", precision.autocast,
            excludes={
                "tf32": "TF32 is for float32", "cuda_graphs": "autocast's casts cannot be captured",
                "int8": ONE_TYPE, "fp8": ONE_TYPE,
            },
            argument="bf16|fp16",
        ),
    )
}  # fmt: skip


AUTO, NONE = "auto", "none"


def optimise(
    model: Model,
    names: Sequence[str] | str = AUTO,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Applied:
    """Put named optimisations in place; the model itself stays as it is.

    `names` are those of `OPTIMISATIONS`, an argument after a colon (`feature_cache:3`), `auto` for the
    best lossless set for the device, `none` for the model as it is; one text may hold several, with
    commas. `device` is where the work is done, the weights' own device unless said; `dtype` what it is
    done in, the weights' own type unless said. InputError for names that are unknown, do not go together,
    or cannot work on the device.
    """
    place = place_of(model, device)
    choices = parse(names)
    reasons: list[str] = []
    if any(choice.name == AUTO for choice in choices):
        chosen_names = {choice.name for choice in choices}
        choices, reasons = _with_auto(choices, place)
        if (
            hasattr(model.unet, ROWS) or _has_own_attention(model)
        ) and "fused_qkv" not in chosen_names:  # a fused layer would pass adapters by
            choices = [choice for choice in choices if choice.name != "fused_qkv"]
    check(choices, place)
    _check_attention(model, choices)
    ordered = sorted(choices, key=lambda choice: list(OPTIMISATIONS).index(choice.name))
    applied = Applied(model, place.device, tuple(ordered), reasons=reasons)
    if place.device != _lies(model) and not _offloads(choices):
        for module in applied.own_all().values():
            module.to(place.device)
    if dtype is not None:
        applied.cast(dtype)
    for choice in ordered:
        OPTIMISATIONS[choice.name].apply(applied, choice.argument)
    return applied


def set_layout(model: Model, names: Sequence[str] | str, device: torch.device | str) -> None:
    """Lay a model's weights as these optimisations will read them, in place: for a model that nobody else
    uses, so that `optimise` makes no second copy of them.
    """
    place = place_of(model, device)
    choices = parse(names)
    if any(choice.name == AUTO for choice in choices):
        choices, _ = _with_auto(choices, place)
    if {"channels_last", "fused_norm"} & {choice.name for choice in choices}:
        for part in (model.unet, model.vae):
            if part is not None:
                part.to(memory_format=torch.channels_last)


def _has_own_attention(model: Model) -> bool:
    """Whether IP-Adapters or LLLites are installed in the U-Net's attentions."""
    processors = getattr(model.unet, "attn_processors", {})
    return any(isinstance(processor, ImageAttention) for processor in processors.values())


def _check_attention(model: Model, choices: Iterable[Choice]) -> None:
    """InputError for optimisations that would put another attention in the place of that of nets."""
    others = ("fused_qkv", "attention_slicing", "fused_attention:xformers")
    found = next((choice for choice in map(str, choices) if choice.startswith(others)), None)
    if found is not None and _has_own_attention(model):
        raise InputError(f"IP-Adapters or LLLites with {found}", mend=f"leave {found} out")


def _offloads(choices: Iterable[Choice]) -> bool:
    """Whether weights wait in main memory."""
    return any(choice.name.startswith("offload_") for choice in choices)


def loading(
    names: Sequence[str] | str, device: torch.device, *, limited: bool = False
) -> tuple[torch.dtype | None, torch.device]:
    """How to load a model for these optimisations: the type that they cast to, None for any other, and the
    device. What will be offloaded, or may be because memory is `limited`, is loaded into main memory.
    """
    choices = parse(names)
    types = {"fp16": torch.float16, "bf16": torch.bfloat16}
    dtype = next((types[choice.name] for choice in choices if choice.name in types), None)
    waits = kind_of(device).own_memory and (limited or _offloads(choices))
    return dtype, torch.device("cpu") if waits else device


def _lies(model: Model) -> torch.device:
    device: torch.device = next(model.unet.parameters()).device  # type: ignore[union-attr]
    return device


def place_of(model: Model, device: torch.device | str | None = None) -> ComputeTarget:
    """Where a model's work is done, and the type of its U-Net."""
    weight = next(model.unet.parameters())  # type: ignore[union-attr]
    where = torch.device(device) if device is not None else weight.device
    return ComputeTarget(where, weight.dtype, model.is_dit)


def parse(names: Sequence[str] | str) -> list[Choice]:
    """Names as they were given, to choices. InputError for one that is unknown or said twice."""
    texts = [names] if isinstance(names, str) else list(names)
    parts = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    choices = [Choice(*map(str, part.partition(":")[::2])) for part in parts if part != NONE]
    for choice in choices:
        if choice.name == AUTO and not choice.argument:
            continue
        if choice.name not in OPTIMISATIONS:
            raise InputError(f"optimise '{choice.name}'", allowed=", ".join((AUTO, NONE, *OPTIMISATIONS)))
        if choice.argument and not OPTIMISATIONS[choice.name].argument:
            raise InputError(f"optimise '{choice}'", allowed=f"{choice.name}, without an argument")
    chosen_names = [choice.name for choice in choices]
    if doubled := next((name for name in chosen_names if chosen_names.count(name) > 1), None):
        raise InputError(f"optimise names '{doubled}' twice", mend="say it once")
    return choices


def check(choices: Iterable[Choice], place: ComputeTarget) -> None:
    """InputError where a choice cannot work on the device, or two exclude each other."""
    for choice in choices:
        if place.is_dit and OPTIMISATIONS[choice.name].needs_unet:
            raise InputError(f"optimise '{choice}' with a diffusion transformer", mend="leave it out")
        if lack := OPTIMISATIONS[choice.name].lacks(place):
            raise InputError(f"optimise '{choice}': {lack}")
    for one, other in combinations(choices, 2):
        if reason := conflict(one.name, other.name):
            raise InputError(f"optimise '{one}' with '{other}': {reason}", mend="leave one of them out")


def conflict(one: str, other: str) -> str | None:
    """Why two optimisations do not go together; None where they do."""
    return OPTIMISATIONS[one].excludes.get(other) or OPTIMISATIONS[other].excludes.get(one)


def best(place: ComputeTarget, *, compiled: bool = False, captured: bool = False) -> dict[str, str]:
    """What `auto` takes on a device, each with its reason: with a compiler (`compiled`), with CUDA graphs
    (`captured`) or with neither asked for. All of it is lossless.
    """
    picked = {
        "fused_attention": "never slower, and holds no scores",
        "lean": "the same operations with less Python around them",
    }
    if place.on_cuda:
        picked["fused_qkv"] = "fewer and larger products"
        if place.dtype != torch.float32:
            if compiled:
                picked["channels_last"] = "tensor cores read channels innermost"
            elif captured:
                picked["fused_norm"] = "features are read and written less often"
    return picked


def left_out(place: ComputeTarget, taken: Collection[str]) -> dict[str, str]:
    """Lossless ones that `auto` leaves to the user next to those `taken`, each with its reason."""
    slow_start = "compiling takes longer than a few pictures"
    if not place.on_cuda:
        return {
            "channels_last": "gains nothing here",
            "fused_qkv": "gains nothing here",
            "compile": slow_start,
        }
    found = {
        "compile": slow_start,
        "cuda_graphs": "holds the memory of every size it meets; many times as fast at batch 1, and brings "
        "fused_norm",
    }
    if place.dtype == torch.float32:
        return found | {"channels_last": "gains nothing in float32"}
    if not {"compile", "compile_regional"} & set(taken):
        found["fused_norm"] = "without cuda_graphs it takes longer to launch"
    turns = "PyTorch's group norm turns every tensor back where nothing is compiled"
    return found | {"channels_last": "is part of fused_norm" if "fused_norm" in taken else turns}


def _with_auto(choices: list[Choice], place: ComputeTarget) -> tuple[list[Choice], list[str]]:
    """The choices with `auto` replaced by what it takes besides the others."""
    named = [choice for choice in choices if choice.name != AUTO]
    names = {choice.name for choice in named}
    compiled = bool({"compile", "compile_regional"} & names)
    captured = "cuda_graphs" in names and place.on_cuda
    taken, picked, out = list(named), [], {}
    for name, reason in best(place, compiled=compiled, captured=captured).items():
        if name in names:
            continue
        against = next((one for one in names if conflict(name, one)), None)
        if place.is_dit and OPTIMISATIONS[name].needs_unet:
            out[name] = "it is of U-Nets"
        elif lack := f"not with {against}" if against else OPTIMISATIONS[name].lacks(place):
            out[name] = lack
        else:
            taken.append(Choice(name))
            picked.append(f"auto picks {name}: {reason}")
    have = {choice.name for choice in taken}
    left = {name: why for name, why in left_out(place, have).items() if name not in have}
    return taken, [*picked, *(f"auto leaves out {name}: {why}" for name, why in (left | out).items())]
