"""The whole way on one machine: draw, import, VAE, prepare, U-Net and text encoder, pictures, scores, report.

Each stage is one of darkroom's public functions and leaves its result in the folder. A stage that is
done is found done, so the same call goes on after it was stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from darkroom import __version__
from darkroom.bill import Bill, Meter, format_seconds
from darkroom.errors import DarkroomError, InputError
from darkroom.hardware.system import atomic_replace, remove_tree, write_atomically
from darkroom.quickstart.shapes import (
    COLORS,
    NUM_HELD_OUT,
    PICTURE_SIZE,
    SHAPES,
    FloatArray,
    Triple,
    coverage,
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
    whole_process: bool = False,
) -> QuickstartResult:
    """Go from pictures to pictures in the folder `out`; the same call goes on where it was stopped.

    With `whole_process` this process is there for it alone: the bill counts it from its start.
    Raises InputError where `out` holds something else or a quickstart with other settings, Stopped on Ctrl-C
    with the state saved, DarkroomError if a held-out triple is found in the store.
    """
    journey = Journey(Path(out), seed, scale, _silent if quiet else console)
    return journey.go(whole_process=whole_process)


class Journey:
    """The stages in their order, on one folder."""

    def __init__(self, out: Path, seed: int, scale: Scale, say: Say) -> None:
        self.out, self.seed, self.scale, self.say = out, seed, scale, say
        self.hidden = held_out(seed=seed)
        self.wanted = self.hidden[: scale.num_prompts]
        self.store = out / "pictures.lance"
        self.vae_run, self.run = out / "runs" / "autoencoder", out / "runs" / "pretrain"
        self.pictures, self.sheet, self.report = out / "pictures", out / "gallery.png", out / "report.html"

    def go(self, *, whole_process: bool = False) -> QuickstartResult:
        """All stages; a finished journey's result is read back."""
        self._claim()
        if (self.out / RESULT).is_file():
            self.say(f"'{self.out}' is finished: remove it or choose another --out to run again")
            return self._read_back()
        self.meter = Meter("cpu", Bill.load(self.out / BILL), whole_process=whole_process)
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
            write_atomically(path, _as_json(state))
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

    def _log(self, line: str) -> None:
        self.say(f"   {line}")

    # ---- the stages

    def _import(self) -> None:
        from darkroom.data.importers.job import import_pictures

        folder = self.out / "drawn"
        captions = write_set(folder, self.scale.num_pictures, seed=self.seed)
        self._log(
            f"{len(captions):,} pictures of {PICTURE_SIZE} px: {len(SHAPES)} shapes, {len(COLORS)} colours, "
            f"such as '{captions[0]}'"
        )
        for line in import_pictures(folder, self.store).lines():
            self._log(line)
        check_unseen(self.store, self.hidden)
        self._log(
            f"none of the {len(self.hidden)} held-out triples is in the store, from which all is learned"
        )

    def _train_vae(self) -> None:
        self._train("autoencoder", self.vae_run, self.scale.autoencoder)

    def _prepare(self) -> None:
        from darkroom.prepare.job import prepare

        report = prepare(self.store, self.vae_run / "model", resolution=PICTURE_SIZE, batch_rows=64)
        for line in report.lines():
            self._log(line)

    def _train_unet(self) -> Path:
        prompts = [triple.caption for triple in varied(self.wanted, _SAMPLE_PROMPTS)]
        named = (f"model.vae={self.vae_run / 'model'}", f"sample.prompts={json.dumps(prompts)}")
        check_unseen(self.store, self.hidden)
        return self._train("pretrain", self.run, (*named, *self.scale.pretrain))

    def _train(self, recipe: str, run: Path, overrides: tuple[str, ...]) -> Path:
        from darkroom.recipe.recipe import read_recipe
        from darkroom.train.run import train

        seeds = (f"train.seed={self.seed}", f"model.seed={self.seed}")
        read = read_recipe(RECIPES / f"{recipe}.yaml", [f"data.store={self.store}", *seeds, *overrides])
        result = train(read, out=run, console=self._log)
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
            notice=self._log,
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
        write_atomically(self.out / RESULT, _as_json(result.to_dict()))
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


def _as_json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"


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


# ---- the score of a picture
#
# Every pixel of a clean picture is a blend of two palette colours. The background is the colour of the rim,
# the front that of the pixels farthest from it; each pixel's blend gives the part of it that is covered, and
# the covered part is compared with every shape drawn at the same centre and area. Whatever is not clear is
# unknown, and unknown is wrong.

UNKNOWN = "unknown"
COLOR_TOLERANCE = 45.0  # RGB distance to a palette colour; the nearest two of the palette are 86 apart
BLEND_TOLERANCE = 60.0  # RGB distance of a pixel to the line between front and background
MIN_EXPLAINED = 0.95  # part of all pixels that must lie on that line
MIN_OVERLAP = 0.80  # soft intersection over union with the best shape
MIN_LEAD = 0.03  # by how much the best shape must lead the second


@dataclass(frozen=True)
class ShapeReading:
    """What a picture shows; `unknown` where it is not clear. `overlap` is that of the best shape."""

    color: str
    shape: str
    background: str
    overlap: float


@dataclass(frozen=True)
class ShapeScores:
    """Parts (0..1) of the pictures that are right: colour and background together, shape, all three."""

    color_fidelity: float
    shape_fidelity: float
    all_fidelity: float
    seen: tuple[ShapeReading, ...]


def look(picture: Image.Image) -> ShapeReading:
    """Reads colour, shape and background off a picture's pixels."""
    pixels_HW3 = np.asarray(picture.convert("RGB"), dtype=np.float32)
    back, background = _background(pixels_HW3)
    distance_HW = np.linalg.norm(pixels_HW3 - back, axis=-1)
    front, color = _front(pixels_HW3, distance_HW)
    if UNKNOWN in (background, color) or color == background:
        return ShapeReading(color, UNKNOWN, background, 0.0)
    blend_HW, off_HW = _blend(pixels_HW3, front, back)
    if np.mean(off_HW < BLEND_TOLERANCE) < MIN_EXPLAINED:
        return ShapeReading(UNKNOWN, UNKNOWN, background, 0.0)
    shape, overlap = _shape(blend_HW)
    return ShapeReading(color, shape, background, overlap)


def score(pictures: Sequence[Image.Image], wanted: Sequence[Triple]) -> ShapeScores:
    """Compares what each picture shows with what its caption asked for."""
    return judge([look(picture) for picture in pictures], wanted)


def judge(seen: Sequence[ShapeReading], wanted: Sequence[Triple]) -> ShapeScores:
    """Scores what has been seen; ValueError where pictures and captions are not as many."""
    pairs = list(zip(seen, wanted, strict=True))
    tone = [s.color == w.color and s.background == w.background for s, w in pairs]
    form = [s.shape == w.shape for s, w in pairs]
    both = [t and f for t, f in zip(tone, form, strict=True)]
    count = max(len(pairs), 1)
    return ShapeScores(sum(tone) / count, sum(form) / count, sum(both) / count, tuple(seen))


def name_of(color_3: FloatArray) -> str:
    """The palette's name for a colour, or unknown."""
    names = list(COLORS)
    far = np.linalg.norm(np.array([COLORS[n] for n in names], dtype=np.float32) - color_3, axis=1)
    return names[int(far.argmin())] if far.min() < COLOR_TOLERANCE else UNKNOWN


def _background(pixels_HW3: FloatArray) -> tuple[FloatArray, str]:
    """The median colour of the picture's rim; unknown where the rim is not of one colour."""
    rim = np.concatenate([pixels_HW3[0], pixels_HW3[-1], pixels_HW3[1:-1, 0], pixels_HW3[1:-1, -1]])
    back = np.median(rim, axis=0).astype(np.float32)
    even = np.mean(np.linalg.norm(rim - back, axis=1) < COLOR_TOLERANCE) >= 0.9
    return back, name_of(back) if even else UNKNOWN


def _front(pixels_HW3: FloatArray, distance_HW: FloatArray) -> tuple[FloatArray, str]:
    """The median colour of the pixels that differ most from the background."""
    limit = max(float(np.quantile(distance_HW, 0.95)) * 0.8, COLOR_TOLERANCE)
    inside_N3 = pixels_HW3[distance_HW > limit]
    if len(inside_N3) < 0.02 * distance_HW.size:
        return np.zeros(3, np.float32), UNKNOWN
    front = np.median(inside_N3, axis=0).astype(np.float32)
    even = np.mean(np.linalg.norm(inside_N3 - front, axis=1) < COLOR_TOLERANCE) >= 0.7
    return front, name_of(front) if even else UNKNOWN


def _blend(pixels_HW3: FloatArray, front: FloatArray, back: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Each pixel's place on the line from background (0) to front (1), and its distance to that line."""
    line = front - back
    place_HW = np.clip((pixels_HW3 - back) @ line / (line @ line), 0, 1)
    nearest_HW3 = back + place_HW[..., None] * line
    return place_HW.astype(np.float32), np.linalg.norm(pixels_HW3 - nearest_HW3, axis=-1)


def _shape(part_HW: FloatArray) -> tuple[str, float]:
    """The shape whose drawing, at the same centre and area, overlaps the covered part best."""
    part_HW = np.clip((part_HW - 0.1) / 0.8, 0, 1)
    size, area = part_HW.shape[0], float(part_HW.sum())
    if not 0.03 < area / part_HW.size < 0.7:
        return UNKNOWN, 0.0
    y, x = (float((part_HW * grid).sum() / area) for grid in np.mgrid[0.5:size, 0.5:size])
    overlaps = {}
    for shape in SHAPES:
        unit_area, dx, dy = _moments(shape)
        radius = (area / unit_area) ** 0.5
        drawn_HW = coverage(shape, x - dx * radius, y - dy * radius, radius, size)
        overlaps[shape] = float(np.minimum(part_HW, drawn_HW).sum() / np.maximum(part_HW, drawn_HW).sum())
    best, second = sorted(SHAPES, key=overlaps.__getitem__, reverse=True)[:2]
    clear = overlaps[best] >= MIN_OVERLAP and overlaps[best] - overlaps[second] >= MIN_LEAD
    return (best if clear else UNKNOWN), overlaps[best]


@lru_cache
def _moments(shape: str) -> tuple[float, float, float]:
    """Area and centroid of a shape of radius 1."""
    part: npt.NDArray[np.float32] = coverage(shape, 128, 128, 96, 256)
    area = float(part.sum())
    y, x = (float((part * grid).sum() / area) - 128 for grid in np.mgrid[0.5:256, 0.5:256])
    return area / 96**2, x / 96, y / 96
