"""Verbs for new pictures: generate."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from darkroom import options
from darkroom.cli.door import (
    CREDENTIALS_HELP,
    PRECISION_HELP,
    PROVENANCE_HELP,
    SIGN_HELP,
    SIZE_HELP,
    SOLVER_HELP,
    Json,
    app,
    progress_bar,
    show,
    size_of,
)
from darkroom.errors import InputError, install_extra
from darkroom.hardware import cpu

ONLY_MASKED_HELP = "with a mask: draw only its part and so many pixels around, at --size, and put it back"


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="a model folder, a .safetensors file, a hub id, or a family")],
    prompts: Annotated[list[str] | None, typer.Argument(help="one or more prompts")] = None,
    prompts_file: Annotated[
        Path | None, typer.Option("--prompts", help='a file: a prompt a line, or --prompt "..." --steps 20')
    ] = None,
    wildcards: Annotated[
        Path | None, typer.Option(help="a folder: __name__ is a line of name.txt, {a|b} one of both, by seed")
    ] = None,
    axes: Annotated[
        list[str] | None, typer.Option("--grid", help="NAME=A,B,C, given once or twice: a sheet of all pairs")
    ] = None,
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
    control: Annotated[
        list[str] | None,
        typer.Option(
            help="a ControlNet, T2I-Adapter or IP-Adapter and the picture it reads, may be given again: "
            "NET=PICTURE[:WEIGHT][,start=S][,end=E][,map=canny][,mask=FILE][,guess]"
        ),
    ] = None,
    image_encoder: Annotated[
        Path | None, typer.Option(help="CLIP's image encoder of IP-Adapters, where it is not beside them")
    ] = None,
    embeddings: Annotated[
        Path | None,
        typer.Option(help="a folder of textual inversions, used by their files' names in prompts"),
    ] = None,
    strength: Annotated[
        float | None, typer.Option(help="how much of the steps; default: 0.75, with a mask 1")
    ] = None,
    only_masked: Annotated[int | None, typer.Option(min=0, help=ONLY_MASKED_HELP)] = None,
    paste: Annotated[bool, typer.Option(help="keep the picture outside the mask to the pixel")] = True,
    hires: Annotated[
        str | None, typer.Option(help="a second, larger pass: SCALE[:STRENGTH[:STEPS]], such as 1.5:0.6")
    ] = None,
    hires_upscaler: Annotated[str, typer.Option(help="latent or lanczos")] = "latent",
    weighting: Annotated[str, typer.Option(help="weights in prompts: none, a1111 or compel")] = "none",
    clip_skip: Annotated[
        int, typer.Option(min=0, help="last text layers left out; A1111's 'Clip skip: 2' is 1")
    ] = 0,
    steps: Annotated[int | None, typer.Option(help="solver steps; default: 30")] = None,
    guidance: Annotated[
        float | None, typer.Option(help="above 1 is on; default: the model's own or 7.5")
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
    kind: Annotated[str, typer.Option("--format", help="png, jpeg or webp")] = "png",
    provenance: Annotated[bool, typer.Option(envvar="DARKROOM_PROVENANCE", help=PROVENANCE_HELP)] = True,
    sign: Annotated[Path | None, typer.Option(help=SIGN_HELP)] = None,
    credentials: Annotated[str, typer.Option(help=CREDENTIALS_HELP)] = "settings",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="say why what was chosen")] = False,
    as_json: Json = False,
) -> None:
    """Generate pictures from prompts.

    Each PNG holds its parameters; several also make a grid.

    Example: darkroom generate model/ "a red circle" --num 4 --solver dpmpp_2m --steps 20
    """
    asked: dict[str, Any] = {
        "negative": negative,
        "seed": seed,
        "num": num,
        "size": size_of(size),
        "strength": strength,
        "only_masked": only_masked,
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
    options.check_credentials(credentials)
    if sign is not None and not provenance:
        raise InputError("--sign with --no-provenance", mend="leave one of them out")
    if solver is not None:
        options.parse_solver(solver)
    limit = None if memory is None else options.parse_bytes(memory)
    # From here on torch is needed.
    from darkroom import models, sample
    from darkroom.sample import provenance as proving

    marks = None
    if provenance:
        marks = proving.Provenance.opened(sign, proving.local_certificate(), say=credentials)
        if not marks.signs:
            mend = "" if proving.installed() else f": {install_extra(proving.EXTRA)}, or --no-provenance"
            _note(f"the pictures are marked, not signed{mend}")

    place = models.device(device)
    name = _precision(precision, place, backend)
    cast, lies_on = sample.ladder.loading(optimise, place, limited=limit is not None)
    dtype = cast or models.precision(name)
    options.check_pair(backend, models.NAMES[dtype], place.type)
    asked["hires"] = None if hires is None else sample.Hires.parsed(hires, hires_upscaler)
    named = [sample.Named.parsed(one) for one in adapter or []]
    in_files = limit is not None and place.type == "cpu" and not named
    sample.pictures.check_kind(kind)
    calls = _calls(prompts or [], prompts_file, axes or [], asked)
    if wildcards is not None:
        calls = [_with_wildcards(call, wildcards) for call in calls]
    texts = [text for call in calls for text in (*call.prompts, call.settings["negative"] or "")]
    words = [] if embeddings is None else models.find_embeddings(embeddings, texts)
    controls = [sample.Control.parsed(one, image_encoder) for one in control or []]
    for call in calls:
        settings = sample.GenerateSettings.of(**call.settings)
        _check_before(model, settings, call.prompts, optimise, place, dtype, limit, in_files, image, revision)
    opened = models.load(
        model,
        dtype=None if in_files and model not in models.FAMILIES else dtype,
        device=lies_on,
        variant=variant,
        revision=revision,
    )
    opened.digest = models.file_digest(opened)
    if embeddings is not None:
        models.add_embeddings(opened, words)
        used = ", ".join(one.name for one in words) or "none is named in the prompts"
        _note(f"embeddings: {used}")
    pictures = []
    for number, call in enumerate(calls, start=1):
        title = "denoise" if len(calls) == 1 else f"denoise {number} of {len(calls)}"
        with progress_bar(title, as_json) as progress:
            pictures += sample.generate(
                opened,
                call.prompts,
                image=image,
                mask=mask,
                adapters=named,
                controls=controls,
                backend=backend,
                optimise=optimise,
                memory=memory,
                device=place,
                dtype=dtype,
                progress=progress,
                notice=_note if number == 1 else _silent,
                explain=_silent if number > 1 else _note if verbose else _short,
                **call.settings,
            )
    shown = [Path(one.image) for one in controls if isinstance(one.image, (str, Path))]
    inputs = [Path(one).read_bytes() for one in (image, mask, *shown) if one is not None]
    files = proving.save_pictures(pictures, out, marks, inputs, kind=kind, grid=not axes)
    if axes:
        files.append(sample.save_sheet([picture.image for picture in pictures], axes, out))
    show({"pictures": files}, as_json, lambda: files)


class _GenerateCall(NamedTuple):
    """One call of `sample.generate`."""

    prompts: list[str]
    settings: dict[str, Any]


def _calls(
    prompts: list[str], file: Path | None, axes: list[str], asked: dict[str, Any]
) -> list[_GenerateCall]:
    """What is asked for: all prompts in one call, a call a line of a file, or a call a cell of a grid."""
    from darkroom import sample

    if (file is None) == (not prompts):
        given = "prompts and --prompts" if prompts else "no prompt"
        raise InputError(
            given, mend='give prompts, as in darkroom generate MODEL "a red circle", or --prompts'
        )
    calls = [_GenerateCall(list(prompts), asked)]
    if file is not None:
        lines = sample.read_prompts(file)
        calls = [
            _GenerateCall([line["prompt"]], {**asked, **{k: v for k, v in line.items() if k != "prompt"}})
            for line in lines
        ]
    if not axes:
        return calls
    if len(calls) != 1 or len(prompts) != 1 or asked["num"] != 1:
        raise InputError(
            "--grid with several prompts or --num", mend="give one prompt, and prompts as an axis"
        )
    cells = sample.cells(sample.read_axes(axes))
    return [_GenerateCall([str(cell.pop("prompt", prompts[0]))], {**asked, **cell}) for cell in cells]


def _with_wildcards(call: _GenerateCall, folder: Path) -> _GenerateCall:
    """Each picture with a prompt of its own, drawn by the picture's seed."""
    from darkroom import sample

    first, num = call.settings["seed"], call.settings["num"]
    seeds = [first + i for i in range(num * len(call.prompts))]
    told = [prompt for prompt in call.prompts for _ in range(num)]
    expanded = [sample.expand(prompt, seed, folder) for prompt, seed in zip(told, seeds, strict=True)]
    return _GenerateCall(expanded, {**call.settings, "num": 1})


def _silent(_: str) -> None:
    pass


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
