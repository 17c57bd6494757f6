"""Settings of darkroom's own extractor, read with a recipe and from its folder. Imports pydantic alone."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class SmallSettings(BaseModel):
    """The shape of darkroom's own extractor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    width: int = Field(default=32, ge=8, le=1024, multiple_of=8, description="channels of the first level")
    levels: int = Field(default=4, ge=1, le=6, description="each halves the sides and doubles the channels")
    embedding: int = Field(default=128, ge=8, le=4096, description="numbers of an embedding")
    buckets: int = Field(default=8192, ge=64, le=2**20, description="words are hashed into so many")
    most_words: int = Field(default=32, ge=1, le=256, description="words of a caption that are read")
