"""Whether an extractor that never saw a subject can tell it: mean cosines between all subjects' photographs.

    python benchmarks/finetune/margin.py EXTRACTOR PHOTOS SUBJECT --out margin.csv

Photographs are cut to a square around their middle, as fine-tuning reads them. Within a subject no photograph
is compared with itself. The margin is the subject's own cosine less that of the nearest other subject.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np

from darkroom.evaluate.extractors import open_extractor
from darkroom.evaluate.pictures import images, open_pictures


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("extractor")
    parser.add_argument("photos", type=Path)
    parser.add_argument("subject")
    parser.add_argument("--out", type=Path, help="CSV of the whole table")
    given = parser.parse_args()
    table = cosines(given.extractor, given.photos)
    own = table[given.subject]
    others = {name: value for name, value in own.items() if name != given.subject}
    nearest = max(others, key=lambda name: others[name])
    margin = own[given.subject] - others[nearest]
    told = f"{given.subject}: {own[given.subject]:.3f} with itself, {others[nearest]:.3f} with {nearest}"
    print(f"{told}; margin {margin:.3f}")
    if given.out is not None:
        with given.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["subject", "held_out", *table])
            for name, row in table.items():
                writer.writerow([name, name == given.subject, *(f"{value:.4f}" for value in row.values())])


if __name__ == "__main__":
    main()
