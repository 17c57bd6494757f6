"""`ServeSettings`: what a server is started with."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from darkroom.serve.limits import Limits


class VertexRoutes(BaseModel):
    """Where Vertex AI looks for a custom container's health and predictions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    health: str
    predict: str
    port: int


class ServeSettings(BaseModel):
    """One server. Its limits stand beside, in `Limits`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="a model folder, a hub id, or a family")
    adapters: Path | None = Field(None, description="the folder of adapters; new files appear by themselves")
    slots: int = Field(16, ge=1, le=1024, description="adapters that lie ready on the device at once")
    max_rank: int = Field(64, ge=1, le=1024, description="the largest rank of an adapter")
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535, description="0 takes a free one")
    key_file: Path | None = Field(None, description="names and hashes of the keys that may come in")
    origins: tuple[str, ...] = Field((), description="further web origins that may ask, as https://host")
    hosts: tuple[str, ...] = Field((), description="further names that the server is called by, without keys")
    public_url: str | None = Field(
        None, description="the server's address as clients have it; None: the one that a request was sent to"
    )
    state: Path = Field(Path("darkroom-serve"), description="the folder of jobs and pictures")
    jobs: str | None = Field(None, description="the jobs' database; None: SQLite in the state folder")
    name: str = Field(
        "darkroom", min_length=1, max_length=64, description="of this server, unique in its database"
    )
    shared: bool = Field(
        False, description="jobs and pictures are those of every server of this name in the jobs' database"
    )
    lease_s: float = Field(
        10.0, ge=1, le=3600, description="where shared: a server silent for so long loses its jobs to others"
    )
    patience_s: float = Field(
        0.5, ge=0, le=3600, description="where shared: a job waits so long for a server that has its adapters"
    )
    capacity: int | None = Field(
        None, ge=1, le=4096, description="U-Net evaluations a step, at the model's own size; None: by memory"
    )
    lanes: int | None = Field(
        None, ge=1, le=256, description="on a CPU, sizes stepped at once; None: 2 for a small model, else 1"
    )
    pad: bool = Field(False, description="only batches of 1, 2, 4, 8, 12, 16, 24, ... rows")
    device: str = "auto"
    precision: str = "float32"
    backend: str = "torch"
    optimise: str | None = Field(None, description="of `sample.ladder`; None: auto, as far as adapters allow")
    variant: str | None = None
    revision: str | None = None
    drain_s: float = Field(30.0, ge=0, description="time to finish what is on its way when told to stop")
    hooks: tuple[str, ...] = Field(
        (), description="MODULE:FUNCTION: each sees every picture before it is kept"
    )
    usd_per_hour: float | None = Field(None, ge=0, description="price of the device, for the cost of a job")
    min_free_bytes: int = Field(64 * 2**20, ge=0, description="of disk; below it no job is accepted")
    vertex: VertexRoutes | None = Field(None, description="on Vertex AI, which lets in only who may")
    limits: Limits = Limits()

    @property
    def limits_in_force(self) -> Limits:
        """A picture's adapters lie in slots all at once."""
        return self.limits.model_copy(update={"adapters": min(self.limits.adapters, self.slots)})
