"""A score with all that is needed to read it again later, and the table of scores."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from darkroom.tidy import append_rows, check_table, read_rows


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


def finite(value: float) -> float | None:
    """A number, or None where there is none."""
    return value if math.isfinite(value) else None


def append_scores(path: Path | str, scores: Iterable[Score]) -> Path:
    """Add rows to a CSV, which is replaced whole; InputError where the file has other columns."""
    return append_rows(Path(path), Score, scores, digits=9)


def check_scores_file(path: Path) -> str:
    """What stands in the file, empty where there is none; InputError unless scores can be added to it."""
    return check_table(path, Score)


def read_scores(path: Path | str) -> list[Score]:
    """The rows of a table of scores."""
    return read_rows(Path(path), Score)
