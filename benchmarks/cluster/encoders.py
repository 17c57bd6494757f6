"""Throughput of online encoding by the number of encoders, by the plan, for the two phases of SD 2 base.

    python benchmarks/cluster/encoders.py --out benchmarks/cluster/encoders.csv

No cluster is needed: each encoder adds the rate that `darkroom plan prepare` gives its device, until training
runs at the rate that `darkroom plan recipes/sd2-two-phases.yaml` gives it. That the curve has this form is
measured at small size by `data.py`. CPUs, network and storage are taken as enough.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parents[2] / "recipes" / "sd2-two-phases.yaml"
Point = dict[str, Any]
ENCODERS = (8, 16, 32, 64, 128, 256)


def curve(encoder_rate: float, training_rate: float, counts: Sequence[int] = ENCODERS) -> list[Point]:
    """Pictures a second by the number of encoders, also of the least with which training is the limit."""
    enough = math.ceil(training_rate / encoder_rate)
    return [
        {
            "encoders": count,
            "images_per_s": round(min(count * encoder_rate, training_rate), 1),
            "limit": "training" if count >= enough else "encoders",
        }
        for count in sorted({*counts, enough})
    ]


def planned(*arguments: str) -> list[Point]:
    """What `darkroom plan` says."""
    command = [sys.executable, "-m", "darkroom", "plan", *arguments, "--json"]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    plans: list[Point] = json.loads(told.stdout)["plans"]
    return plans


def rows(trainer: str, count: int, encoder: str) -> list[Point]:
    """The curve of each phase."""
    found = []
    training = planned(str(RECIPE), "model.base=sd2", "--gpu", trainer, "--count", str(count))
    for side, plan in zip((256, 512), training, strict=True):
        [one] = planned("prepare", "--model", "sd2", "--resolution", str(side), "--text", "--gpu", encoder)
        known = {
            "resolution": side,
            "training": f"{count} x {trainer}",
            "training_images_per_s": round(plan["images_per_s"], 1),
            "encoder": encoder,
            "encoder_images_per_s": round(one["images_per_s"], 1),
            "text": "encoded too",
        }
        found += [known | point for point in curve(one["images_per_s"], plan["images_per_s"])]
    return found


def main() -> None:
    """Write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trainer", default="H100-SXM")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--encoder", default="L4")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    made = rows(given.trainer, given.count, given.encoder)
    with given.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(made[0]))
        writer.writeheader()
        writer.writerows(made)


if __name__ == "__main__":
    main()
