"""Verbs for new pictures: generate."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from darkroom import options
from darkroom.cli.door import PRECISION_HELP, SIZE_HELP, SOLVER_HELP, Json, app, progress_bar, show, size_of
from darkroom.hardware import cpu


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="a model folder, a .safetensors file, a hub id, or a family")],
    prompts: Annotated[list[str], typer.Argument(help="one or more prompts")],
    negative: Annotated[str | None, typer.Option(help="what to steer away from")] = None,
    seed: Annotated[int, typer.Option(min=0, help="picture i has seed + i")] = 0,
    num: Annotated[int, typer.Option(min=1, help="pictures of each prompt")] = 1,
    size: Annotated[str | None, typer.Option(help=SIZE_HELP)] = None,
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
    solver: Annotated[str | None, typer.Option(help=SOLVER_HELP)] = None,
    guidance_rescale: Annotated[float, typer.Option(help="0 to 1, against burnt contrast")] = 0.0,
    eta: Annotated[float, typer.Option(help="noise of ddim, 0 to 1")] = 0.0,
    karras: Annotated[bool | None, typer.Option(help="Karras sigmas")] = None,
    spacing: Annotated[str | None, typer.Option(help="leading, trailing or linspace")] = None,
    precision: Annotated[str, typer.Option(help=PRECISION_HELP)] = "float32",
    backend: Annotated[str, typer.Option(help="torch, compile, onnx or openvino")] = "torch",
    optimise: Annotated[
        str, typer.Option(help="auto, none, or NAME[:ARGUMENT],...: docs/optimisations.md lists them")
    ] = "auto",
    memory: Annotated[str | None, typer.Option(help="stay under this, such as 3GB")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps, ...")] = "auto",
    variant: Annotated[str | None, typer.Option(help="weight files of a variant, such as fp16")] = None,
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit on the hub")] = None,
    out: Annotated[Path, typer.Option(help="the folder for the pictures")] = Path("out"),
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="say why what was chosen")] = False,
    as_json: Json = False,
) -> None:
    """Prompts -> pictures, each with its parameters inside, and a grid of them.

    Example: darkroom generate model/ "a red circle" --num 4 --solver dpmpp_2m --steps 20
    """
    asked: dict[str, Any] = {
        "negative": negative,
        "seed": seed,
        "num": num,
        "size": size_of(size),
        "strength": strength,
        "paste": paste,
        "weighting": weighting,
        "clip_skip": clip_skip,
        "steps": steps,
        "guidance": guidance,
        "solver": solver,
        "guidance_rescale": guidance_rescale,
        "eta": eta,
        "karras": karras,
        "spacing": spacing,
    }
    precision, optimise = options.eight_bits(backend, precision, optimise)
    options.check_names(backend, precision)
    if solver is not None:
        options.parse_solver(solver)
    limit = None if memory is None else options.parse_bytes(memory)
    # From here on torch is needed.
    from darkroom import models, sample

    place = models.device(device)
    name = _precision(precision, place, backend)
    cast, lies_on = sample.ladder.loading(optimise, place, limited=limit is not None)
    dtype = cast or models.precision(name)
    options.check_pair(backend, models.NAMES[dtype], place.type)
    asked["hires"] = None if hires is None else sample.Hires.parsed(hires, hires_upscaler)
    named = [sample.Named.parsed(one) for one in adapter or []]
    in_files = limit is not None and place.type == "cpu" and not named
    settings = sample.GenerateSettings.of(**asked)
    _check_before(model, settings, prompts, optimise, place, dtype, limit, in_files, image, revision)
    opened = models.load(
        model,
        dtype=None if in_files and model not in models.FAMILIES else dtype,
        device=lies_on,
        variant=variant,
        revision=revision,
    )
    opened.digest = models.file_digest(opened)
    with progress_bar("denoise", as_json) as progress:
        pictures = sample.generate(
            opened,
            prompts,
            image=image,
            mask=mask,
            adapters=named,
            backend=backend,
            optimise=optimise,
            memory=memory,
            device=place,
            dtype=dtype,
            progress=progress,
            notice=_note,
            explain=_note if verbose else _short,
            **asked,
        )
    files = sample.save_pictures(pictures, out)
    show({"pictures": files}, as_json, lambda: files)


def _note(note: str) -> None:
    print(f"note: {note}", file=sys.stderr)


def _short(reasons: str) -> None:
    """What `auto` picked, without the reasons."""
    if picked := re.findall(r"auto picks (\w+)", reasons):
        _note(f"auto: {', '.join(picked)} (-v says why)")


def _precision(asked: str, place: Any, backend: str) -> str:
    """The precision's name; what `auto` takes is said. ONNX Runtime computes in float32 on a CPU."""
    from darkroom import models

    if asked != options.AUTO:
        return asked
    if backend == "onnx" and place.type == "cpu":
        name, why = "float32", "ONNX Runtime has no bfloat16 on a CPU"
    else:
        name, why = models.choose_precision(asked, place)
        if backend == "openvino" and name == "float32" and (found := cpu.int8_instructions()) is not None:
            why += f"; it has {found}: --precision int8 is quicker, after minutes of calibration, and lossy"
    _note(f"precision {name}: {why}")
    return name


def _check_before(
    ref: str,
    settings: Any,
    prompts: list[str],
    optimise: str,
    place: Any,
    dtype: Any,
    limit: int | None,
    in_files: bool,
    image: str | None,
    revision: str | None,
) -> None:
    """InputError for what the model cannot make, before its weights are made, fetched or read.

    A limit on memory is checked here where weights take minutes to come; else when they are there.
    """
    from darkroom import models
    from darkroom.sample.estimate import check_at_once, check_before

    at_hand = Path(ref).exists()
    scale = settings.hires.scale if settings.hires is not None else 1
    check_at_once(
        ref,
        None if settings.size is None else (round(settings.size[0] * scale), round(settings.size[1] * scale)),
        tiled="vae_tiling" in optimise or "tiny_vae" in optimise,
        device=place,
        dtype=dtype,
        limit_bytes=limit,
    )
    outline = models.outlined(ref, ("unet", "vae", "text_encoder", "tokenizer"), revision=revision)
    if image is not None or not {"unet", "vae"} <= set(outline.modules):
        return  # of a picture's size and shape, or refused with what is missing
    check_before(
        outline,
        settings,
        len(prompts),
        optimise=optimise,
        device=place,
        dtype=dtype,
        limit_bytes=None if at_hand else limit,
        in_files=in_files and ref not in models.FAMILIES,
        notice=_note,
    )
