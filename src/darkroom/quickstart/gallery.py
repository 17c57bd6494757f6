"""The sheet of results: every picture large enough to look at, with its caption and what the scorer saw."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from darkroom.quickstart.score import Scores
from darkroom.quickstart.shapes import Triple

COLUMNS, PICTURE, GAP, TEXT, HEAD = 8, 128, 18, 40, 84  # columns, then pixels
PAPER, INK, FAINT, RIGHT, WRONG = "#f7f5f0", "#22201c", "#77726a", "#2f8f57", "#c8372d"


def gallery(pictures: Sequence[Image.Image], wanted: Sequence[Triple], scores: Scores) -> Image.Image:
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


def _summary(count: int, scores: Scores) -> str:
    return (
        f"{count} pictures: colour and background right in {scores.color_fidelity:.1%}, "
        f"shape in {scores.shape_fidelity:.1%}, all three in {scores.all_fidelity:.1%}"
    )


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
