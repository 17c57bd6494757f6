"""Verbs for new pictures: generate."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from darkroom import options
from darkroom.cli.application import (
    CREDENTIALS_HELP,
    PRECISION_HELP,
    PROVENANCE_HELP,
    SIGN_HELP,
    Json,
    app,
    progress_bar,
    show,
)
from darkroom.cli.groups import Drawing, grouped, read_sampling
from darkroom.errors import InputError
from darkroom.hardware import system

if TYPE_CHECKING:
    from darkroom.models.model import Model
    from darkroom.models.upscaler import Upscaler
    from darkroom.sample import Control, Hires, Picture
    from darkroom.sample.provenance import Provenance


@dataclass(frozen=True)
class PromptOptions:
    """Prompts from elsewhere than the command line."""

    prompts_file: Annotated[
        Path | None, typer.Option("--prompts", help='a file: a prompt a line, or --prompt "..." --steps 20')
    ] = None
    wildcards: Annotated[
        Path | None, typer.Option(help="a folder: __name__ is a line of name.txt, {a|b} one of both, by seed")
    ] = None
    axes: Annotated[
        list[str] | None, typer.Option("--grid", help="NAME=A,B,C, given once or twice: a sheet of all pairs")
    ] = None

    def check(self, asked: Mapping[str, Any]) -> None:
        """InputError for a variation's seed alone, where neither lines nor axes can say how far it goes."""
        alone = asked["variation_seed"] is not None and not asked["variation_strength"]
        if alone and not self.prompts_file and not self.axes:
            mend = "say how far, such as 0.3"
            raise InputError("--variation-seed without --variation-strength", mend=mend)


@dataclass(frozen=True)
class LargerOptions:
    """What makes pictures larger: a second pass, a network between both passes, a network at the end."""

    hires: Annotated[
        str | None, typer.Option(help="a second, larger pass: SCALE[:STRENGTH[:STEPS]], such as 1.5:0.6")
    ] = None
    hires_upscaler: Annotated[str, typer.Option(help="latent, lanczos, or an ESRGAN file")] = "latent"
    upscale: Annotated[
        Path | None, typer.Option(help="an ESRGAN file (.safetensors) that makes finished pictures larger")
    ] = None

    def opened(self) -> tuple[Hires | None, Upscaler | None, Upscaler | None]:
        """The second pass, the network between both, and the one at the end. InputError for an upscaler of a
        second pass that is not asked for.
        """
        from darkroom import models, sample

        if self.hires is None and self.hires_upscaler != "latent":
            raise InputError("--hires-upscaler without --hires", mend="say --hires 2, or --upscale FILE")
        last = models.read_upscaler(self.upscale) if self.upscale is not None else None
        is_file = self.hires_upscaler.endswith(".safetensors")
        between = models.read_upscaler(self.hires_upscaler) if is_file else None
        name = self.hires_upscaler if between is None else between.name
        return None if self.hires is None else sample.Hires.parsed(self.hires, name), between, last


@dataclass(frozen=True)
class InputOptions:
    """What is read besides the model and the prompts."""

    image: Annotated[str | None, typer.Option(help="a PNG, JPEG or WebP to start from")] = None
    mask: Annotated[str | None, typer.Option(help="white where the picture is painted anew")] = None
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="NAME=FILE[:WEIGHT], may be given again; by prompt with <lora:NAME:WEIGHT>"),
    ] = None
    control: Annotated[
        list[str] | None,
        typer.Option(
            help="a ControlNet, T2I-Adapter or IP-Adapter and the picture it reads, may be given again: "
            "NET=PICTURE[:WEIGHT][,start=S][,end=E][,map=canny][,mask=FILE][,guess][,soft]"
        ),
    ] = None
    image_encoder: Annotated[
        Path | None, typer.Option(help="CLIP's image encoder of IP-Adapters, where it is not in their folder")
    ] = None
    embeddings: Annotated[
        Path | None,
        typer.Option(help="a folder of textual inversions, used by their files' names in prompts"),
    ] = None

    def check(self) -> None:
        """InputError for what belongs to something that is not given."""
        if self.image_encoder is not None and not self.control:
            mend = "give the IP-Adapter: --control NET=PICTURE"
            raise InputError("--image-encoder without --control", mend=mend)

    def ingredients(self, controls: Iterable[Control]) -> tuple[list[bytes], list[bytes]]:
        """The pictures that are drawn from, and those that controls read."""
        from darkroom.sample.provenance import as_ingredient

        shown = [Path(one.image) for one in controls if isinstance(one.image, (str, Path))]
        inputs = [as_ingredient(Path(one)) for one in (self.image, self.mask) if one is not None]
        return inputs, [as_ingredient(one) for one in shown]


@dataclass(frozen=True)
class ComputeOptions:
    """In which precision, by which backend and where."""

    precision: Annotated[str, typer.Option(help=PRECISION_HELP)] = "float32"
    backend: Annotated[str, typer.Option(help="torch, compile, onnx or openvino")] = "torch"
    optimise: Annotated[
        str, typer.Option(help="auto, none, or NAME[:ARGUMENT],...: docs/optimisations.md lists them")
    ] = "auto"
    memory: Annotated[str | None, typer.Option(help="stay under this, such as 3GB")] = None
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps, ...")] = "auto"
    variant: Annotated[str | None, typer.Option(help="weight files of a variant, such as fp16")] = None
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit on the hub")] = None

    def checked(self) -> ComputeOptions:
        """With 8 bits spelled out; InputError for names that there are not, or not together."""
        precision, optimise = options.eight_bits(self.backend, self.precision, self.optimise)
        options.check_names(self.backend, precision)
        return replace(self, precision=precision, optimise=optimise)

    def open(self, model: str, dtype: Any, device: Any) -> Model:
        """Load a model as asked, its files' digest noted."""
        from darkroom import models

        opened = models.load(model, dtype=dtype, device=device, variant=self.variant, revision=self.revision)
        opened.digest = models.file_digest(opened)
        return opened


@dataclass(frozen=True)
class FileOptions:
    """Where pictures are written, and what is said in them of how they came to be."""

    out: Annotated[Path, typer.Option(help="the folder for the pictures")] = Path("out")
    kind: Annotated[str, typer.Option("--format", help="png, jpeg or webp")] = "png"
    provenance: Annotated[bool, typer.Option(envvar="DARKROOM_PROVENANCE", help=PROVENANCE_HELP)] = True
    sign: Annotated[Path | None, typer.Option(help=SIGN_HELP)] = None
    credentials: Annotated[str, typer.Option(help=CREDENTIALS_HELP)] = "settings"

    def check(self) -> None:
        """InputError for what does not go together."""
        options.check_credentials(self.credentials)
        if self.sign is not None and not self.provenance:
            raise InputError("--sign with --no-provenance", mend="leave one of them out")

    def marks(self) -> Provenance | None:
        """What marks and signs pictures; None where that is not wanted. A missing signer is said."""
        if not self.provenance:
            return None
        from darkroom import certificates
        from darkroom.sample.provenance import Provenance

        found = Provenance.opened(self.sign, certificates.local_certificate(), say=self.credentials)
        if not found.signs:
            mend = "" if certificates.installed() else f": {certificates.how_to_sign()}, or --no-provenance"
            _note(f"the pictures are marked, not signed{mend}")
        return found


@app.command()
@grouped
def generate(
    model: Annotated[str, typer.Argument(help="a model folder, a .safetensors file, a hub id, or a family")],
    prompts: Annotated[list[str] | None, typer.Argument(help="one or more prompts")] = None,
    *,
    elsewhere: PromptOptions,
    drawing: Drawing,
    larger: LargerOptions,
    given: InputOptions,
    compute: ComputeOptions,
    files: FileOptions,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="explain what was chosen automatically")
    ] = False,
    as_json: Json = False,
) -> None:
    """Generate pictures from prompts.

    Each PNG holds its parameters; several also make a grid.

    Example: darkroom generate model/ "a red circle" --num 4 --solver dpmpp_2m --steps 20
    """
    asked, compute = read_sampling(drawing), compute.checked()
    files.check()
    given.check()
    elsewhere.check(asked)
    if asked["solver"] is not None:
        options.parse_solver(asked["solver"])
    limit = None if compute.memory is None else options.parse_bytes(compute.memory)
    # From here on torch is needed.
    from darkroom import models, sample

    marks, place = files.marks(), models.device(compute.device)
    name = _precision(compute.precision, place, compute.backend)
    cast, lies_on = sample.optimisations.loading(compute.optimise, place, limited=limit is not None)
    dtype = cast or models.precision(name)
    options.check_pair(compute.backend, models.NAMES[dtype], place.type)
    asked["hires"], between, last = larger.opened()
    named = [sample.Named.parsed(one) for one in given.adapter or []]
    in_files = limit is not None and place.type == "cpu" and not named and model not in models.FAMILIES
    sample.pictures.check_kind(files.kind)
    calls = _calls(prompts or [], elsewhere, asked)
    texts = [text for call in calls for text in (*call.prompts, call.settings["negative"] or "")]
    words = [] if given.embeddings is None else models.find_embeddings(given.embeddings, texts)
    controls = [sample.Control.parsed(one, given.image_encoder) for one in given.control or []]
    for call in calls:
        _check_before(model, call, compute, place, dtype, limit, in_files, from_image=given.image is not None)
    opened = compute.open(model, None if in_files else dtype, lies_on)
    if limit is None and compute.backend == "torch":
        sample.optimisations.set_layout(opened, compute.optimise, place)
    if given.embeddings is not None:
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
                image=given.image,
                mask=given.mask,
                adapters=named,
                controls=controls,
                upscale=last,
                hires_network=between,
                backend=compute.backend,
                optimise=compute.optimise,
                memory=compute.memory,
                device=place,
                dtype=dtype,
                progress=progress,
                notice=_note if number == 1 else _silent,
                explain=_silent if number > 1 else _note if verbose else _short,
                **call.settings,
            )
    made = _saved(pictures, marks, files, given.ingredients(controls), elsewhere.axes)
    show({"pictures": made}, as_json, lambda: made)


def _saved(
    pictures: list[Picture],
    marks: Provenance | None,
    files: FileOptions,
    ingredients: tuple[list[bytes], list[bytes]],
    axes: list[str] | None,
) -> list[Path]:
    """Write the pictures, and a sheet of them all where they are a grid's."""
    from darkroom.sample import provenance, watermark

    if marks is not None and (line := watermark.too_small(picture.image.size for picture in pictures)):
        _note(line)
    return provenance.save_pictures(pictures, files.out, marks, *ingredients, kind=files.kind, axes=axes)


class _GenerateCall(NamedTuple):
    """One call of `sample.generate`."""

    prompts: list[str]
    settings: dict[str, Any]


def _calls(prompts: list[str], elsewhere: PromptOptions, asked: dict[str, Any]) -> list[_GenerateCall]:
    """What is asked for: all prompts in one call, a call a line of a file, or a call a cell of a grid."""
    calls = _plain_calls(prompts, elsewhere.prompts_file, elsewhere.axes or [], asked)
    folder = elsewhere.wildcards
    return calls if folder is None else [_with_wildcards(call, folder) for call in calls]


def _plain_calls(
    prompts: list[str], file: Path | None, axes: list[str], asked: dict[str, Any]
) -> list[_GenerateCall]:
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
    repeated = [prompt for prompt in call.prompts for _ in range(num)]
    expanded = [sample.expand(prompt, seed, folder) for prompt, seed in zip(repeated, seeds, strict=True)]
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
        if backend == "openvino" and name == "float32" and (found := system.int8_instructions()) is not None:
            why += f"; it has {found}: --precision int8 is quicker, after minutes of calibration, and lossy"
    _note(f"precision {name}: {why}")
    return name


def _check_before(
    ref: str,
    call: _GenerateCall,
    compute: ComputeOptions,
    place: Any,
    dtype: Any,
    limit: int | None,
    in_files: bool,
    *,
    from_image: bool,
) -> None:
    """InputError for what the model cannot make, before its weights are made, fetched or read.

    A limit on memory is checked here where weights take minutes to come; else when they are there.
    """
    from darkroom import models, sample
    from darkroom.sample.memory import check_at_once, check_before

    settings, optimise = sample.GenerateSettings.of(**call.settings), compute.optimise
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
    parts = ("unet", "vae", "text_encoder", "tokenizer")
    outline = models.outlined(ref, parts, revision=compute.revision)
    if from_image or not {"unet", "vae"} <= set(outline.modules):
        return  # of a picture's size and shape, or refused with what is missing
    check_before(
        outline,
        settings,
        len(call.prompts),
        optimise=optimise,
        device=place,
        dtype=dtype,
        limit_bytes=None if at_hand else limit,
        in_files=in_files,
        notice=_note,
    )
