"""The pictures that the report's base model and extractors learn from: emoji with their names, and
random cuts of photographs.

    python benchmarks/finetune/pictures.py PHOTOS EMOJI OUT

PHOTOS is the DreamBooth dataset's folder and EMOJI one with images.zip and captions.jsonl. OUT gets
`captioned/`: emoji and photographs of three subjects that are not fine-tuned, with captions ("an emoji of
red heart", "a photo of a dog"); dog, dog6, cat2 and backpack are not in it. And `subjects/`: cuts of every
subject with its name as a column, for the extractor of likeness, which is trained on all but the one to be
judged: `data.filter="subject <> 'dog6'"`.
"""

from __future__ import annotations

import io
import json
import sys
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

OTHERS = {"dog2": "dog", "duck_toy": "toy", "teapot": "teapot"}
CUTS = 150  # of each photograph
SUBJECTS = ("dog", "dog2", "dog6", "cat2", "backpack", "duck_toy", "teapot")
SUBJECT_CUTS = 48
NEAR = 0.55  # a cut of a smaller share of the sides shows a part only
SIDE = 128


def emoji(folder: Path, out: Path) -> list[dict[str, str]]:
    """Emoji without skin tones on white, as PNG; their names as captions."""
    lines = []
    with zipfile.ZipFile(folder / "images.zip") as pictures:
        for told in map(json.loads, (folder / "captions.jsonl").read_text().splitlines()):
            if told["skin_tone"]:
                continue
            picture = Image.open(io.BytesIO(pictures.read(told["file_name"]))).convert("RGBA")
            white = Image.new("RGBA", picture.size, "white")
            name = Path(told["file_name"]).with_suffix(".png").name
            whole = Image.alpha_composite(white, picture).convert("RGB")
            whole.resize((SIDE, SIDE), Image.Resampling.LANCZOS).save(out / name)
            lines.append({"file_name": name, "text": f"an emoji of {told['text']}"})
    return lines


def cuts(photos: Path, out: Path, seed: int = 0) -> list[dict[str, str]]:
    """Random squares of every photograph, some mirrored, in other light; two of three show the subject whole.

    Half of the captions have no article, as those of fine-tuning ("a photo of sks dog").
    """
    rng = np.random.default_rng(seed)
    lines = []
    for subject, word in OTHERS.items():
        for file in sorted((photos / subject).glob("*.jpg")):
            picture = opened(file)
            for i in range(CUTS):
                share = float(rng.uniform(0.8, 1.0) if i % 3 else rng.uniform(0.3, NEAR))
                name = f"{subject}-{file.stem}-{i:03d}.png"
                varied(cut(picture, share, rng), rng).save(out / name)
                what = "a photo of" if i % 3 else "a detail of a photo of"
                article = "a " if rng.random() < 0.5 else ""
                lines.append({"file_name": name, "text": f"{what} {article}{word}"})
    return lines


def opened(file: Path) -> Image.Image:
    """A photograph, upright, at most 512 px."""
    picture = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
    picture.thumbnail((512, 512), Image.Resampling.LANCZOS)
    return picture


def cut(picture: Image.Image, share: float, rng: np.random.Generator) -> Image.Image:
    """A square of a share of the shorter side, anywhere."""
    side = share * min(picture.size)
    left, top = (float(rng.uniform(0, length - side)) for length in picture.size)
    box = (left, top, left + side, top + side)
    return picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS, box=box)


def varied(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Mirrored half of the time; brightness, contrast and colour moved by up to a fifth."""
    if rng.random() < 0.5:
        picture = ImageOps.mirror(picture)
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        picture = enhance(picture).enhance(float(rng.uniform(0.8, 1.2)))
    return picture


def subjects(photos: Path, out: Path, seed: int = 1) -> list[dict[str, str]]:
    """Large cuts of every subject's photographs, with its name."""
    rng = np.random.default_rng(seed)
    lines = []
    for subject in SUBJECTS:
        for file in sorted((photos / subject).glob("*.jpg")):
            picture = opened(file)
            for i in range(SUBJECT_CUTS):
                name = f"{subject}-{file.stem}-{i:03d}.png"
                varied(cut(picture, float(rng.uniform(NEAR, 1.0)), rng), rng).save(out / name)
                lines.append({"file_name": name, "text": f"a photo of {subject}", "subject": subject})
    return lines


def main(photos: Path, emoji_folder: Path, out: Path) -> None:
    for name in ("captioned", "subjects"):
        (out / name).mkdir(parents=True, exist_ok=True)
    made = {
        "captioned": emoji(emoji_folder, out / "captioned") + cuts(photos, out / "captioned"),
        "subjects": subjects(photos, out / "subjects"),
    }
    for name, lines in made.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (out / name / "metadata.jsonl").write_text(text)
        print(f"{len(lines)} pictures in {out / name}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
