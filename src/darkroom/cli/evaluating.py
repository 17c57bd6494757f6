"""The verb for quality: evaluate."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from darkroom.cli.application import (
    PRECISION_HELP,
    Json,
    Out,
    app,
    bench,
    columns,
    progress_bar,
    show,
)
from darkroom.cli.groups import Sampling, grouped, read_sampling
from darkroom.errors import InputError
from darkroom.hardware.system import split_weight

if TYPE_CHECKING:
    from darkroom.models.model import Model

RECIPE = "recipe.yaml"  # what tells a run's folder from one of pictures
SHOWN = ("metric", "value", "interval", "n", "extractor", "better")


@dataclass(frozen=True)
class PromptTableOptions:
    """Where prompts stand."""

    prompts: Annotated[
        str | None,
        typer.Option(help="a .txt, .jsonl, .csv, .parquet, a store, or dreambooth:live=FILE"),
    ] = None
    column: Annotated[str | None, typer.Option(help="where the prompts stand in a table")] = None
    num_prompts: Annotated[int | None, typer.Option(min=1, help="take the first so many")] = None


@dataclass(frozen=True)
class ReferenceOptions:
    """What is compared with, and by which networks."""

    reference: Annotated[str | None, typer.Option(help="store or folder for fid, kid, cmmd")] = None
    reference_filter: Annotated[str | None, typer.Option(help="its rows, in SQL: 'width >= 512'")] = None
    extractor: Annotated[
        list[str] | None,
        typer.Option(help="dino=, clip=, inception=, coca= or all= FOLDER or hub id; can be repeated"),
    ] = None
    subject: Annotated[str | None, typer.Option(help="folder of the subject's photographs")] = None
    class_word: Annotated[str | None, typer.Option(help="the subject's class, such as dog")] = None
    token: Annotated[str | None, typer.Option(help="the subject's rare word, such as sks")] = None


@app.command()
@grouped
def evaluate(
    model: Annotated[str, typer.Argument(help="a model, or a folder of pictures that are there already")],
    metrics: Annotated[
        str,
        typer.Option(help="fid, fid-infinity, kid, cmmd, clip, clip-t, coca, dino, clip-i, pres, div, drift"),
    ],
    *,
    asked: PromptTableOptions,
    against: ReferenceOptions,
    base: Annotated[str | None, typer.Option(help="the model before tuning, for drift")] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(help="NAME=FILE[:WEIGHT], merged into the model; can be repeated")
    ] = None,
    num: Annotated[int, typer.Option(min=1, help="pictures of each prompt")] = 4,
    class_num: Annotated[int, typer.Option(min=1, help="pictures of the plain class")] = 16,
    drawing: Sampling,
    precision: Annotated[str, typer.Option(help=PRECISION_HELP)] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps, ...")] = "auto",
    keep_pictures: Annotated[
        Path | None, typer.Option(help="keep what is drawn here; a second run draws only what is missing")
    ] = None,
    allow_seen: Annotated[
        bool, typer.Option("--allow-seen", help="score with an extractor that was trained on the subject")
    ] = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Score a model or pictures, with 95 % intervals.

    Each row says what is needed to reproduce it.

    Example: darkroom evaluate model/ --prompts captions.txt --reference pictures.lance --metrics fid,kid
    """
    from darkroom.evaluate.job import append_scores, check_scores_file, draws_prompts, open_extractors

    if out is not None:
        check_scores_file(out)
    names = [name.strip() for name in metrics.split(",") if name.strip()]
    is_pictures = _is_pictures(model)
    needs_none = is_pictures or (asked.prompts is None and not draws_prompts(names))
    prompts = [] if needs_none else _prompts(asked, against.class_word, against.token)
    common: dict[str, Any] = {
        "extractors": open_extractors(names, _extractors(against.extractor or []), device=_device(device)),
        "reference": against.reference,
        "reference_filter": against.reference_filter,
        "subject": against.subject,
        "seed": drawing["seed"],
        "allow_seen": allow_seen,
        "say": lambda note: print(f"note: {note}", file=sys.stderr),
    }
    settings = read_sampling(drawing)
    settings = {name: value for name, value in settings.items() if value is not None and name != "seed"}
    with progress_bar("evaluate", as_json) as progress:
        if is_pictures:
            _refuse({"--prompts": asked.prompts, "--base": base, "--adapter": adapter, **_options(settings)})
            scores = _of_folder(model, names, against.token, progress, common)
        else:
            opened = _opened(model, adapter or [], precision, device)
            scores = _of_model(
                opened,
                names,
                prompts,
                base=None if base is None else _opened(base, [], precision, device),
                class_word=against.class_word,
                num=num,
                class_num=class_num,
                settings=settings,
                keep=keep_pictures,
                progress=progress,
                **common,
            )
    if out is not None:
        append_scores(out, scores)
    show(
        scores,
        as_json,
        lambda: columns([{name: getattr(score, name) for name in SHOWN} for score in scores]),
    )


def _is_pictures(where: str) -> bool:
    """Whether this is a folder that holds pictures, and no model and no run."""
    from darkroom.models.families import FAMILIES
    from darkroom.models.model import PARTS

    path = Path(where)
    if (path / RECIPE).is_file():
        return False
    return where not in FAMILIES and path.is_dir() and not any((path / part).is_dir() for part in PARTS)


def _options(drawing: dict[str, Any]) -> dict[str, Any]:
    return {f"--{name}": value for name, value in drawing.items()}


def _refuse(given: dict[str, Any]) -> None:
    options_given = [name for name, value in given.items() if value]
    if options_given:
        raise InputError(
            f"{' and '.join(options_given)} with a folder of pictures", mend="they are drawn already"
        )


def _of_folder(folder: str, names: list[str], token: str | None, progress: Any, common: Any) -> Any:
    from darkroom.evaluate.job import evaluate_folder
    from darkroom.sample.pictures import prompt_in

    return evaluate_folder(
        folder,
        names,
        token=token,
        prompt_of=prompt_in,
        progress=progress,
        **common,
    )


def _of_model(model: Model, names: list[str], prompts: Any, **more: Any) -> Any:
    from darkroom import sample
    from darkroom.evaluate.job import evaluate

    return evaluate(model, prompts, names, generate=sample.generate, **more)


def _prompts(asked: PromptTableOptions, class_word: str | None, token: str | None) -> Any:
    from darkroom.evaluate.pictures import read_prompts

    if asked.prompts is None:
        raise InputError("no prompts", mend="add --prompts FILE, or --prompts dreambooth:live=FILE")
    return read_prompts(
        asked.prompts, class_word=class_word, token=token, column=asked.column, most=asked.num_prompts
    )


def _device(name: str) -> Any:
    from darkroom import models

    return models.device(name)


def _extractors(given: list[str]) -> dict[str, str]:
    """`dino=FOLDER`, or a folder alone, which is the extractor for all."""
    found: dict[str, str] = {}
    for one in given:
        role, sign, where = one.partition("=")
        role, where = (role, where) if sign else ("all", one)
        if not where or role in found:
            raise InputError(f"--extractor {one}", allowed="NAME=FOLDER_OR_HUB_ID, each NAME once")
        found[role] = where
    return found


def _opened(where: str, adapters: list[str], precision: str, device: str) -> Model:
    from darkroom import models
    from darkroom.models.adapters.read import merge_all, read_adapter

    place = models.device(device)
    model = models.load(_model_of(where), dtype=models.precision(precision, place), device=place)
    weighted = [_adapter(one) for one in adapters]
    merge_all(model, [(read_adapter(file, name=name), weight) for name, file, weight in weighted])
    for name, _, weight in weighted:
        model.path = f"{model.path or model.family}+{name}" + ("" if weight == 1 else f":{weight:g}")
    return model


def _model_of(where: str) -> str:
    """The model of a run, where this is a run's folder; else what was given."""
    run = Path(where)
    if not (run / RECIPE).is_file():
        return where
    if (run / "model").is_dir():
        return str(run / "model")
    if (file := run / "adapter.safetensors").is_file():
        raise InputError(f"'{where}' is a run that made an adapter", mend=f"BASE --adapter NAME={file}")
    raise InputError(f"the run '{where}' has made no model yet")


def _adapter(text: str) -> tuple[str, str, float]:
    name, sign, rest = text.partition("=")
    file, weight = split_weight(rest)
    if file == rest or Path(rest).is_file():
        file, weight = rest, "1"
    try:
        if not (sign and name and file):
            raise ValueError
        return name, file, float(weight)
    except ValueError:
        raise InputError(f"--adapter {text}", allowed="NAME=FILE or NAME=FILE:WEIGHT") from None


@bench.command()
def likeness(
    subject: Annotated[Path, typer.Argument(help="photographs of the subject")],
    other: Annotated[Path, typer.Argument(help="photographs of another subject, such as of its class")],
    extractor: Annotated[
        str, typer.Option(help="a folder, a hub id, or efficientnet-lite0 (extra: eval)")
    ] = "efficientnet-lite0",
    base: Annotated[Path | None, typer.Option(help="pictures that the base draws without training")] = None,
    drawn: Annotated[Path | None, typer.Option(help="pictures whose likeness is asked about")] = None,
    as_json: Json = False,
) -> None:
    """Measure likeness and its controls.

    Controls: blurred photographs, shuffled tiles, another subject.

    Example: darkroom bench likeness photos/dog photos/dog2 --drawn runs/dog/pictures
    """
    from darkroom.evaluate.controls import likeness_controls
    from darkroom.evaluate.extractors import open_extractor
    from darkroom.evaluate.pictures import FolderPictures, images

    def opened(folder: Path | None) -> list[Any]:
        return [] if folder is None else list(images(FolderPictures.of(folder)))

    photographs, others = opened(subject), opened(other)
    found = likeness_controls(
        open_extractor(extractor), photographs, others, base=opened(base), drawn=opened(drawn)
    )
    show({"values": found.values, "holds": found.holds, "extractor": found.extractor}, as_json, found.lines)
