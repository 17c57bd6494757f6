"""What a likeness is worth: the same number of controls, beside that of every method's pictures.

    python benchmarks/finetune/controls.py PHOTOS SUBJECT REPORT EXTRACTOR... --out controls.csv

REPORT is the folder of `darkroom bench finetune`. Only pictures of the prompts "a photo of ..." are compared
with the photographs. The other subject is the one whose photographs are nearest by the extractor, the hardest
to tell apart. `holds` says whether the extractor ranks photographs > another subject > blurred photographs,
and photographs above all controls. Where it does not, its numbers are no likeness, and it has rows of the
controls alone.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from darkroom.evaluate.controls import ControlScores, likeness, likeness_controls
from darkroom.evaluate.extractors import open_extractor
from darkroom.evaluate.pictures import images, open_pictures

SIDE = 128
"""Of drawn pictures, in pixels: photographs are also compared at this size."""


def cosines(extractor: str, photos: Path) -> dict[str, dict[str, float]]:
    """Mean cosine of each subject's photographs with each subject's."""
    network = open_extractor(extractor)
    found = {}
    for folder in sorted(folder for folder in photos.iterdir() if folder.is_dir()):
        features = network.pictures(images(open_pictures(folder)))
        found[folder.name] = features / np.linalg.norm(features, axis=1, keepdims=True)
    table: dict[str, dict[str, float]] = {}
    for one, a in found.items():
        table[one] = {}
        for other, b in found.items():
            values = a @ b.T
            off = ~np.eye(len(a), dtype=bool) if one == other else np.ones(values.shape, bool)
            table[one][other] = float(values[off].mean())
    return table


def drawn(report: Path) -> Iterator[tuple[str, list[Image.Image]]]:
    """Of each method and step the pictures of "a photo of ..."."""
    for run in sorted((report / "work" / "runs").glob("finetune-fidelity-*")):
        for step in sorted((run / "judged").glob("step-*")):
            name = f"{run.name.removeprefix('finetune-fidelity-')}, step {int(step.name[5:])}"
            yield name, photo_prompts(step / "pictures")


def photo_prompts(folder: Path) -> list[Image.Image]:
    """Pictures whose prompt, a part of the file's name, begins with "a photo of"."""
    files = sorted(file for file in folder.glob("*.png") if "a-photo-of" in file.stem)
    return [Image.open(file).convert("RGB") for file in files]


def scores(
    where: str, photos: Path, subject: str, report: Path
) -> tuple[ControlScores, dict[str, float], str]:
    """Controls, likeness of each method and step, and the nearest other subject."""
    own = cosines(where, photos)[subject]
    other = max((name for name in own if name != subject), key=lambda name: own[name])
    extractor = open_extractor(where)
    photographs = list(images(open_pictures(photos / subject)))
    base = photo_prompts(report / "work" / "judged" / "base" / "pictures")
    found = likeness_controls(extractor, photographs, list(images(open_pictures(photos / other))), base=base)
    wanted = extractor.pictures(photographs)
    small = [one.resize((SIDE, SIDE), Image.Resampling.LANCZOS) for one in photographs]
    methods = {f"photographs at {SIDE} px": likeness_without_own(extractor.pictures(small), wanted)}
    methods |= {name: likeness(extractor.pictures(some), wanted) for name, some in drawn(report)}
    return found, methods, other


def likeness_without_own(features, wanted) -> float:
    """Mean cosine with all photographs but the one that each was made of."""
    count = len(wanted)
    total = likeness(features, wanted) * count
    own = sum(likeness(features[i : i + 1], wanted[i : i + 1]) for i in range(count)) / count
    return float((total - own) / (count - 1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", type=Path)
    parser.add_argument("subject")
    parser.add_argument("report", type=Path)
    parser.add_argument("extractors", nargs="+", help="a folder, or efficientnet-lite0")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    with given.out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["extractor", "pictures", "kind", "likeness", "other_subject", "holds"])
        for where in given.extractors:
            found, methods, other = scores(where, given.photos, given.subject, given.report)
            told = [(name, "control", value) for name, value in found.values.items()]
            if found.holds:
                told += [(name, "drawn", value) for name, value in methods.items()]
            for name, kind, value in sorted(told, key=lambda one: -one[2]):
                writer.writerow([found.extractor, name, kind, f"{value:.3f}", other, found.holds])
                print(f"{value:.3f}  {name}")
            print(f"{found.extractor}, nearest other subject {other}: holds {found.holds}")


if __name__ == "__main__":
    main()
