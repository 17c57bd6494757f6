"""Verbs for new pictures: generate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from darkroom.cli.door import Json, app, progress_bar, show
from darkroom.errors import InputError


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="a model folder, a .safetensors file, a hub id, or a family")],
    prompts: Annotated[list[str], typer.Argument(help="one or more prompts")],
    negative: Annotated[str | None, typer.Option(help="what to steer away from")] = None,
    seed: Annotated[int, typer.Option(min=0, help="picture i has seed + i")] = 0,
    num: Annotated[int, typer.Option(min=1, help="pictures of each prompt")] = 1,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT, the model's own if not said")] = None,
    image: Annotated[str | None, typer.Option(help="a PNG, JPEG or WebP to start from")] = None,
    mask: Annotated[str | None, typer.Option(help="white where the picture is painted anew")] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="NAME=FILE[:WEIGHT], may be given again; by prompt with <lora:NAME:WEIGHT>"),
    ] = None,
    strength: Annotated[
        float | None, typer.Option(help="how much of the steps; 0.75 if not said, with a mask 1")
    ] = None,
    paste: Annotated[bool, typer.Option(help="keep the picture outside the mask to the pixel")] = True,
    hires: Annotated[
        str | None, typer.Option(help="a second, larger pass: SCALE[:STRENGTH[:STEPS]], such as 1.5:0.6")
    ] = None,
    hires_upscaler: Annotated[str, typer.Option(help="latent or lanczos")] = "latent",
    weighting: Annotated[str, typer.Option(help="weights in prompts: none, a1111 or compel")] = "none",
    clip_skip: Annotated[
        int, typer.Option(min=0, help="last text layers left out; A1111's 'Clip skip: 2' is 1")
    ] = 0,
    steps: Annotated[int | None, typer.Option(help="solver steps; 30 if not said")] = None,
    guidance: Annotated[
        float | None, typer.Option(help="above 1 is on; the model's own or 7.5 if not said")
    ] = None,
    solver: Annotated[str | None, typer.Option(help="the model's own if not said")] = None,
    guidance_rescale: Annotated[float, typer.Option(help="0 to 1, against burnt contrast")] = 0.0,
    eta: Annotated[float, typer.Option(help="noise of ddim, 0 to 1")] = 0.0,
    karras: Annotated[bool | None, typer.Option(help="Karras sigmas")] = None,
    spacing: Annotated[str | None, typer.Option(help="leading, trailing or linspace")] = None,
    precision: Annotated[str, typer.Option(help="float32, bf16 or fp16")] = "float32",
    backend: Annotated[str, typer.Option(help="torch, compile, onnx or openvino")] = "torch",
    optimise: Annotated[
        str, typer.Option(help="auto, none, or NAME[:ARGUMENT],...: docs/optimisations.md lists them")
    ] = "auto",
    memory: Annotated[str | None, typer.Option(help="stay under this, such as 3GB")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps, ...")] = "auto",
    variant: Annotated[str | None, typer.Option(help="weight files of a variant, such as fp16")] = None,
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit on the hub")] = None,
    out: Annotated[Path, typer.Option(help="the folder for the pictures")] = Path("out"),
    as_json: Json = False,
) -> None:
    """Prompts -> pictures, each with its parameters inside, and a grid of them.

    Example: darkroom generate model/ "a red circle" --num 4 --solver dpmpp_2m --steps 20
    """
    from darkroom import models, sample

    asked = _size(size)
    place = models.device(device)
    dtype, lies_on = sample.ladder.loading(optimise, place, limited=memory is not None)
    opened = models.load(
        model,
        dtype=dtype or models.precision(precision),
        device=lies_on,
        variant=variant,
        revision=revision,
    )
    with progress_bar("denoise", as_json) as progress:
        pictures = sample.generate(
            opened,
            prompts,
            negative=negative,
            seed=seed,
            num=num,
            size=asked,
            image=image,
            mask=mask,
            adapters=[sample.Named.parsed(one) for one in adapter or []],
            strength=strength,
            paste=paste,
            hires=None if hires is None else sample.Hires.parsed(hires, hires_upscaler),
            weighting=weighting,
            clip_skip=clip_skip,
            steps=steps,
            guidance=guidance,
            solver=solver,
            guidance_rescale=guidance_rescale,
            eta=eta,
            karras=karras,
            spacing=spacing,
            backend=backend,
            optimise=optimise,
            memory=memory,
            device=place,
            progress=progress,
            notice=_note,
            explain=_note,
        )
    files = sample.save_pictures(pictures, out)
    show({"pictures": files}, as_json, lambda: files)


def _note(note: str) -> None:
    print(f"note: {note}", file=sys.stderr)


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise InputError(f"--size {text}", allowed="WIDTHxHEIGHT, such as 512x512")
    return int(width), int(height)
