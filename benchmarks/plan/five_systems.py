"""The five systems' tables and plots, for reading without a run: five_systems/five.csv and one PNG a system.

    python benchmarks/plan/five_systems.py [CSV of measurements ...]

The whole page is `darkroom report --five-systems --out five.html [CSV ...]`. The PNGs are its plots, drawn by
a headless Chromium (`chromium`, or $CHROMIUM).
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops

from darkroom.proof.drawings import KEY, five_plots
from darkroom.proof.page import SYSTEMS, write_five_systems
from darkroom.report import html

FOLDER = Path(__file__).parent / "five_systems"
WIDTH, HEIGHT = 1180, 4000
COLOURS = 64


def main(sources: list[str]) -> None:
    """Write the table, and each system's plots."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        page, table = write_five_systems(Path(scratch) / "five.html", sources)
        print(f"{page.stat().st_size / 1e6:.1f} MB page")
        (FOLDER / "five.csv").write_bytes(table.read_bytes())
        cells = list(csv.DictReader(table.open()))
        for name, title in SYSTEMS.items():
            own = [_numbers(cell) for cell in cells if cell["system"] == name]
            body = html.section(title, KEY, html.grid(five_plots(name, own)))
            shot = Path(scratch) / f"{name}.html"
            shot.write_text(
                html.page(title, "published, retold, and darkroom today", body, ""), encoding="utf-8"
            )
            draw(shot, FOLDER / f"{name.lower()}.png")


def _numbers(cell: dict[str, str]) -> dict[str, Any]:
    figures = ("published", "retold", "today", "today_low", "today_high")
    return cell | {key: float(cell[key]) if cell[key] else None for key in figures}


def draw(page: Path, file: Path) -> None:
    """A page as a picture without its empty end."""
    subprocess.run(
        [os.environ.get("CHROMIUM", "chromium"), "--headless", "--no-sandbox", "--disable-gpu",
         "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={file}", page.as_uri()],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    picture = Image.open(file).convert("RGB")
    background = Image.new("RGB", picture.size, picture.getpixel((0, picture.height - 1)))
    box = ImageChops.difference(picture, background).getbbox() or (0, 0, *picture.size)
    picture = picture.crop((0, 0, picture.width, min(picture.height, box[3] + 24)))
    picture.quantize(COLOURS).save(file, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
