"""A score with all that is needed to read it again later, and the table of scores."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from darkroom.errors import InputError


class Score(BaseModel):
    """One row: a metric of one set of pictures. What does not apply is empty."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str = Field(description="fid, kid, cmmd, clip, dino, clip-i, clip-t, pres, div, drift, ...")
    value: float = Field(description="the score")
    low: float | None = Field(default=None, description="lower end of the 95 % bootstrap interval")
    high: float | None = Field(default=None, description="upper end of it")
    n: int = Field(ge=1, description="pictures scored")
    compared_n: int | None = Field(default=None, description="pictures of what they were compared with")
    better: str = Field(default="", description="higher or lower")
    extractor: str = Field(default="", description="folder or hub id")
    extractor_kind: str = Field(default="", description="what network it is")
    extractor_sha256: str = Field(default="", description="of its weights")
    compared: str = Field(default="", description="reference store or folder, subject's folder, base model")
    compared_sha256: str = Field(default="", description="of those pictures, or that model's weights")
    model: str = Field(default="", description="the model, or the folder of pictures")
    model_sha256: str = Field(default="", description="of its weights, adapters merged, or of the pictures")
    prompts: str = Field(default="", description="where the prompts came from")
    prompts_sha256: str = Field(default="", description="of the prompts as drawn")
    settings: dict[str, Any] = Field(default={}, description="how pictures were drawn and scores taken")
    note: str = Field(default="", description="what must be known to read the value")
    date: str = Field(default="", description="when, UTC")
    version: str = Field(default="", description="of darkroom")

    @property
    def interval(self) -> str:
        """'0.71 to 0.78', or nothing."""
        return "" if self.low is None or self.high is None else f"{self.low:.4g} to {self.high:.4g}"


COLUMNS = tuple(Score.model_fields)


def finite(value: float) -> float | None:
    """A number, or None where there is none."""
    return value if math.isfinite(value) else None


def append_scores(path: Path | str, scores: Iterable[Score]) -> Path:
    """Add rows to a CSV, which is replaced whole; InputError where the file has other columns."""
    target = Path(path)
    before = check_scores_file(target)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if not before:
        writer.writerow(COLUMNS)
    writer.writerows([_cell(getattr(score, name)) for name in COLUMNS] for score in scores)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    beside.write_text(
        before + ("" if before.endswith("\n") or not before else "\n") + text.getvalue(), "utf-8"
    )
    beside.replace(target)
    return target


def check_scores_file(path: Path) -> str:
    """What stands in the file, empty where there is none; InputError unless scores can be added to it."""
    if path.is_dir():
        raise InputError(f"'{path}' is a folder", mend="give the name of a CSV file")
    place = next(parent for parent in path.absolute().parents if parent.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise InputError(f"'{path}' cannot be written: '{place}' takes no files", mend="choose another --out")
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
    except UnicodeDecodeError as error:
        raise InputError(f"'{path}' is no table of scores", mend="write to a new file") from error
    header = tuple(next(csv.reader(io.StringIO(before)), ()))
    if before and header != COLUMNS:
        raise InputError(
            f"'{path}' is no table of scores: it has the columns {', '.join(header)[:80]}",
            mend="write to a new file",
        )
    return before


def read_scores(path: Path | str) -> list[Score]:
    """The rows of a table of scores."""
    if not Path(path).is_file():
        raise InputError(f"no file '{path}'")
    rows = csv.DictReader(io.StringIO(check_scores_file(Path(path))))
    return [_row(cells) for cells in rows]


def _row(cells: dict[str, str]) -> Score:
    told: dict[str, Any] = {name: text for name, text in cells.items() if text}
    return Score.model_validate(told | {"settings": json.loads(cells["settings"] or "{}")})


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True)
    return f"{value:.9g}" if isinstance(value, float) else str(value)
