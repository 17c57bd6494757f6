"""The whole way on one machine: draw, import, VAE, prepare, U-Net and text encoder, pictures, scores, report.

Each stage is one of darkroom's public functions and leaves its result in the folder. A stage that is
done is found done, so the same call goes on after it was stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from darkroom import __version__
from darkroom.bill import Bill, Meter, format_seconds
from darkroom.errors import DarkroomError, InputError
from darkroom.hardware.system import atomic_replace, remove_tree
from darkroom.quickstart.score import ShapeScores, score
from darkroom.quickstart.shapes import (
    COLORS,
    NUM_HELD_OUT,
    PICTURE_SIZE,
    SHAPES,
    Triple,
    held_out,
    varied,
    write_set,
)

RECIPES = Path(__file__).parent
STATE, RESULT, BILL = "quickstart.json", "result.json", "bill.json"
_SAMPLE_PROMPTS = 8

Say = Callable[[str], None]


@dataclass(frozen=True)
class Scale:
    """How much is drawn and trained: the journey's length. Steps and batches else are the recipes'."""

    num_pictures: int = 6528
    num_prompts: int = NUM_HELD_OUT
    sample_steps: int = 15
    guidance: float = 1.5
    autoencoder: tuple[str, ...] = ()  # overrides of the recipes
    pretrain: tuple[str, ...] = ()


FULL = Scale()
TOY = Scale(
    num_pictures=400,
    num_prompts=8,
    sample_steps=4,
    autoencoder=("train.steps=6", "train.log_every=3", "checkpoint.every=3", "optim.warmup_steps=2"),
    pretrain=(
        "train.steps=6",
        "train.log_every=3",
        "checkpoint.every=3",
        "evaluate.every=0",
        "sample.every=6",
        "sample.steps=2",
        "optim.warmup_steps=2",
    ),
)
"""The same journey in seconds, for tests: the pictures come out as fog."""


@dataclass(frozen=True)
class QuickstartResult:
    """What came of it: parts (0..1) that are right, seconds over all sessions, and where everything is."""

    color_fidelity: float
    shape_fidelity: float
    run_wall_s: float
    pictures: Path
    report: Path
    model: Path
    bill: Bill

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        paths = {name: str(getattr(self, name)) for name in ("pictures", "report", "model")}
        scores = {name: getattr(self, name) for name in ("color_fidelity", "shape_fidelity", "run_wall_s")}
        return {**scores, **paths, "bill": self.bill.model_dump(mode="json")}

    def lines(self) -> list[str]:
        """The end of the story, for people."""
        return [
            f"pictures  {self.pictures}",
            f"report    {self.report}",
            f"model     {self.model}",
            f"scores    colour and background right in {self.color_fidelity:.1%}, "
            f"shape in {self.shape_fidelity:.1%} of {NUM_HELD_OUT} prompts never seen in training",
            f"bill      {self.bill.line()}",
        ]


def quickstart(
    out: Path | str,
    *,
    seed: int = 0,
    quiet: bool = False,
    scale: Scale = FULL,
    console: Say = print,
) -> QuickstartResult:
    """Go from pictures to pictures in the folder `out`; the same call goes on where it was stopped.

    Raises InputError where `out` holds something else or a quickstart with other settings, Stopped on Ctrl-C
    with the state saved, DarkroomError if a held-out triple is found in the store.
    """
    journey = Journey(Path(out), seed, scale, _silent if quiet else console)
    return journey.go()


class Journey:
    """The stages in their order, on one folder."""

    def __init__(self, out: Path, seed: int, scale: Scale, say: Say) -> None:
        self.out, self.seed, self.scale, self.say = out, seed, scale, say
        self.hidden = held_out(seed=seed)
        self.wanted = self.hidden[: scale.num_prompts]
        self.store = out / "pictures.lance"
        self.vae_run, self.run = out / "runs" / "autoencoder", out / "runs" / "pretrain"
        self.pictures, self.sheet, self.report = out / "pictures", out / "gallery.png", out / "report.html"

    def go(self) -> QuickstartResult:
        """All stages; a finished journey's result is read back."""
        self._claim()
        if (self.out / RESULT).is_file():
            self.say(f"'{self.out}' is finished: remove it or choose another --out to run again")
            return self._read_back()
        self.meter = Meter("cpu", Bill.load(self.out / BILL))
        try:
            return self._stages()
        finally:
            self.meter.bill().save(self.out / BILL)

    def _stages(self) -> QuickstartResult:
        with self._stage("import", "drawing and importing pictures of shapes"):
            self._import()
        with self._stage("train", "training a VAE: pictures to latents and back"):
            self._train_vae()
        with self._stage("encode", "preparing: every picture through the VAE once"):
            self._prepare()
        with self._stage("train", "training a U-Net with its text encoder and tokenizer"):
            model = self._train_unet()
        with self._stage("sample", f"generating {len(self.wanted)} prompts that were never seen"):
            scores = self._generate(model)
        with self._stage("report", "writing the report"):
            return self._conclude(model, scores)

    # ---- the folder

    def _claim(self) -> None:
        """Take the folder for this journey, or see that it is the same one's."""
        state = {"seed": self.seed, "scale": asdict(self.scale), "version": __version__}
        state = json.loads(json.dumps(state))
        path = self.out / STATE
        if not path.is_file():
            if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
                raise InputError(f"'{self.out}' holds something else", mend="choose another --out")
            self.out.mkdir(parents=True, exist_ok=True)
            _write(path, state)
        elif (there := json.loads(path.read_text(encoding="utf-8"))) != state:
            key = next(key for key in state if there.get(key) != state[key])
            raise InputError(
                f"'{self.out}' holds a quickstart with another {key} ({there.get(key)})",
                mend="choose another --out, or remove it",
            )

    @contextmanager
    def _stage(self, part: str, title: str) -> Iterator[None]:
        self.say(f"== {title}")
        before = self.meter.bill().wall_s
        with self.meter.part(part):
            yield
        now = self.meter.bill()
        now.save(self.out / BILL)
        self.say(f"   {format_seconds(now.wall_s - before)}")

    def _tell(self, line: str) -> None:
        self.say(f"   {line}")

    # ---- the stages

    def _import(self) -> None:
        from darkroom.data.importers.job import import_pictures

        folder = self.out / "drawn"
        captions = write_set(folder, self.scale.num_pictures, seed=self.seed)
        self._tell(
            f"{len(captions):,} pictures of {PICTURE_SIZE} px: {len(SHAPES)} shapes, {len(COLORS)} colours, "
            f"such as '{captions[0]}'"
        )
        for line in import_pictures(folder, self.store).lines():
            self._tell(line)
        check_unseen(self.store, self.hidden)
        self._tell(
            f"none of the {len(self.hidden)} held-out triples is in the store, from which all is learned"
        )

    def _train_vae(self) -> None:
        self._train("autoencoder", self.vae_run, self.scale.autoencoder)

    def _prepare(self) -> None:
        from darkroom.prepare.job import prepare

        report = prepare(self.store, self.vae_run / "model", resolution=PICTURE_SIZE, batch_rows=64)
        for line in report.lines():
            self._tell(line)

    def _train_unet(self) -> Path:
        prompts = [triple.caption for triple in varied(self.wanted, _SAMPLE_PROMPTS)]
        named = (f"model.vae={self.vae_run / 'model'}", f"sample.prompts={json.dumps(prompts)}")
        check_unseen(self.store, self.hidden)
        return self._train("pretrain", self.run, (*named, *self.scale.pretrain))

    def _train(self, recipe: str, run: Path, overrides: tuple[str, ...]) -> Path:
        from darkroom.recipe.read import read_recipe
        from darkroom.train.run import train

        seeds = (f"train.seed={self.seed}", f"model.seed={self.seed}")
        read = read_recipe(RECIPES / f"{recipe}.yaml", [f"data.store={self.store}", *seeds, *overrides])
        result = train(read, out=run, console=self._tell)
        self.meter.images += result.bill.images
        return result.model

    def _generate(self, model_folder: Path) -> ShapeScores:
        from darkroom import models, sample

        pictures = sample.generate(
            models.load(model_folder, device=models.device("auto")),
            [triple.caption for triple in self.wanted],
            seed=self.seed,
            steps=self.scale.sample_steps,
            guidance=self.scale.guidance,
            solver="dpmpp_2m",
            notice=self._tell,
        )
        self.meter.images += len(pictures)
        temporary = self.out / ".pictures"
        remove_tree(temporary)
        sample.save_pictures(pictures, temporary, grid=False)
        remove_tree(self.pictures)
        atomic_replace(temporary, self.pictures)
        images = [picture.image for picture in pictures]
        scores = score(images, self.wanted)
        gallery(images, self.wanted, scores).save(self.sheet)
        return scores

    def _conclude(self, model: Path, scores: ShapeScores) -> QuickstartResult:
        from darkroom.report.runs import write_report

        highlights = {
            "Colour and background right": f"{scores.color_fidelity:.1%}",
            "Shape right": f"{scores.shape_fidelity:.1%}",
        }
        write_report([self.run, self.sheet], self.report, title="darkroom quickstart", highlights=highlights)
        bill = self.meter.bill()
        result = QuickstartResult(
            scores.color_fidelity, scores.shape_fidelity, bill.wall_s, self.pictures, self.report, model, bill
        )
        _write(self.out / RESULT, result.to_dict())
        return result

    def _read_back(self) -> QuickstartResult:
        there = json.loads((self.out / RESULT).read_text(encoding="utf-8"))
        paths = {name: Path(there.pop(name)) for name in ("pictures", "report", "model")}
        return QuickstartResult(**(there | paths | {"bill": Bill.model_validate(there["bill"])}))


def check_unseen(store: Path | str, hidden: list[Triple]) -> None:
    """DarkroomError if any of these triples' captions is in the store."""
    from darkroom.data.store import Store

    captions = {triple.caption for triple in hidden}
    for batch in Store.open(store).scan(["caption"]):
        if found := captions.intersection(batch.column("caption").to_pylist()):
            raise DarkroomError(f"'{min(found)}' is held out but stands in {store}")


def _write(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    atomic_replace(temporary, path)


def _silent(line: str) -> None:
    pass


COLUMNS, PICTURE, GAP, TEXT, HEAD = 8, 128, 18, 40, 84  # columns, then pixels
PAPER, INK, FAINT, RIGHT, WRONG = "#f7f5f0", "#22201c", "#77726a", "#2f8f57", "#c8372d"


def gallery(pictures: Sequence[Image.Image], wanted: Sequence[Triple], scores: ShapeScores) -> Image.Image:
    """All pictures in rows of eight, with their captions; a dot says whether all three parts are right."""
    rows = -(-len(pictures) // COLUMNS)
    cell_w, cell_h = PICTURE + GAP, PICTURE + TEXT + GAP
    sheet = Image.new("RGB", (COLUMNS * cell_w + GAP, HEAD + rows * cell_h + GAP), PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((GAP, 18), "Prompts never seen in training", INK, _font(22))
    pen.text((GAP, 48), _summary(len(pictures), scores), FAINT, _font(15))
    for i, (picture, triple, seen) in enumerate(zip(pictures, wanted, scores.seen, strict=True)):
        x, y = GAP + i % COLUMNS * cell_w, HEAD + i // COLUMNS * cell_h
        sheet.paste(picture.resize((PICTURE, PICTURE), Image.Resampling.BICUBIC), (x, y))
        right = (seen.color, seen.shape, seen.background) == (triple.color, triple.shape, triple.background)
        dot = (x + PICTURE - 9, y + PICTURE + 9, x + PICTURE - 1, y + PICTURE + 17)
        pen.ellipse(dot, fill=RIGHT if right else WRONG)
        pen.text((x, y + PICTURE + 5), f"{triple.color} {triple.shape}", INK, _font(14))
        pen.text((x, y + PICTURE + 21), f"on {triple.background}", FAINT, _font(14))
    return sheet


def _summary(count: int, scores: ShapeScores) -> str:
    return (
        f"{count} pictures: colour and background right in {scores.color_fidelity:.1%}, "
        f"shape in {scores.shape_fidelity:.1%}, all three in {scores.all_fidelity:.1%}"
    )


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
