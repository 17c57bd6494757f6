"""The pictures that the report's base model, VAE and extractors learn from: emoji with their names, and
random cuts of photographs of subjects that are not fine-tuned.

    python benchmarks/finetune/pictures.py PHOTOS EMOJI OUT

PHOTOS is the DreamBooth dataset's folder and EMOJI one with images.zip and captions.jsonl. OUT gets
`captioned/` (everything, captioned: "an emoji of a red heart", "a photo of a dog") and `photos/` (the
photographs as they are). dog, dog6, cat2 and backpack are in neither.
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
CUTS = 100  # of each photograph
NEAR = 0.55  # a cut of a smaller share of the sides shows a part only
SIDE = 64


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
            Image.alpha_composite(white, picture).convert("RGB").save(out / name)
            lines.append({"file_name": name, "text": f"an emoji of {told['text']}"})
    return lines


def cuts(photos: Path, out: Path, seed: int = 0) -> list[dict[str, str]]:
    """Random squares of every photograph, some mirrored, in other light; the largest show the subject."""
    rng = np.random.default_rng(seed)
    lines = []
    for subject, word in OTHERS.items():
        for file in sorted((photos / subject).glob("*.jpg")):
            picture = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
            picture.thumbnail((512, 512), Image.Resampling.LANCZOS)
            for i in range(CUTS):
                share = float(rng.uniform(0.25, 1.0)) if i % 3 else float(rng.uniform(0.7, 1.0))
                name = f"{subject}-{file.stem}-{i:03d}.png"
                varied(cut(picture, share, rng), rng).save(out / name)
                what = f"a photo of a {word}" if share > NEAR else f"a detail of a photo of a {word}"
                lines.append({"file_name": name, "text": what})
    return lines


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


def whole(photos: Path, out: Path) -> list[dict[str, str]]:
    """The photographs as they are, at 256 px."""
    lines = []
    for subject, word in OTHERS.items():
        for file in sorted((photos / subject).glob("*.jpg")):
            picture = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
            name = f"{subject}-{file.stem}.png"
            picture.resize((256, 256), Image.Resampling.LANCZOS).save(out / name)
            lines.append({"file_name": name, "text": f"a photo of a {word}"})
    return lines


def main(photos: Path, emoji_folder: Path, out: Path) -> None:
    for name in ("captioned", "photos"):
        (out / name).mkdir(parents=True, exist_ok=True)
    captioned = emoji(emoji_folder, out / "captioned") + cuts(photos, out / "captioned")
    for name, lines in (("captioned", captioned), ("photos", whole(photos, out / "photos"))):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (out / name / "metadata.jsonl").write_text(text)
        print(f"{len(lines)} pictures in {out / name}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
