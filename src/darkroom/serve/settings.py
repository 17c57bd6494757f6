"""`ServeSettings`: what a server is started with.

The options of `serve` are made from it, so nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from darkroom.certificates import Certificate
from darkroom.errors import InputError, MissingExtra
from darkroom.options import PRECISION_TEXT, provenance_wanted

MODEL_PARTS = ("model_index.json", "unet", "transformer", "vae", "text_encoder")
"""Any of these makes a folder a model, or what is left of one."""


def models_in(refs: Sequence[str]) -> list[str]:
    """The models that were named, with those of folders of models in their place, by name.

    InputError for a model named twice.
    """
    found: list[str] = []
    for ref in refs:
        folder = Path(ref)
        if not folder.is_dir() or any((folder / part).exists() for part in MODEL_PARTS):
            found.append(ref)
            continue
        inside = [str(one) for one in sorted(folder.iterdir()) if _is_model(one)]
        found += inside or [ref]  # the error of a folder that is no model is raised where models are read
    twice = next((ref for ref in found if found.count(ref) > 1), None)
    if twice is not None:
        raise InputError(f"'{twice}' is given twice", mend="name it once")
    return found


def _is_model(path: Path) -> bool:
    if path.name.startswith("."):
        return False
    if path.is_dir():
        return any((path / part).exists() for part in MODEL_PARTS)
    return path.suffix == ".safetensors" and path.is_file()


class VertexRoutes(BaseModel):
    """Where Vertex AI looks for a custom container's health and predictions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    health: str
    predict: str
    port: int


class KeyLimits(BaseModel):
    """The bounds of one key; None: as `Limits` has it for every key."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    rate_per_minute: float | None = Field(None, gt=0, description="new jobs")
    queue: int | None = Field(None, ge=1, description="pictures waiting")
    pictures_per_day: int | None = Field(None, ge=0, description="accepted from 0:00 to 24:00 UTC")
    share: int = Field(1, ge=1, le=100, description="of the work, while others wait: so many times another's")


NO_LIMITS = KeyLimits()


@lru_cache(maxsize=1024)
def _filled(own: KeyLimits, rate_per_minute: float, queue: int, pictures_per_day: int | None) -> KeyLimits:
    """The bounds of one key, the usual ones where it has none. Kept: each refusal asks for them."""
    usual = {"rate_per_minute": rate_per_minute, "queue": queue, "pictures_per_day": pictures_per_day}
    missing = {name: value for name, value in usual.items() if getattr(own, name) is None}
    return own.model_copy(update=missing)


class Limits(BaseModel):
    """The bounds of a server. What is over one is refused at once, with the field's name."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    body_bytes: int = Field(16 * 2**20, ge=1024, description="of one request's body")
    bodies_bytes: int = Field(512 * 2**20, ge=1024, description="of the bodies of all requests under way")
    uploads_bytes: int = Field(
        2**30,
        ge=1024,
        description="of pictures that came with jobs which are not over; one may always",
    )
    requests: int = Field(960, ge=1, description="under way at once; health comes on top")
    connections: int = Field(1024, ge=1, description="open at once; the longest idle is closed for a new one")
    head_s: float = Field(10.0, gt=0, description="for a request to have begun; then a connection is closed")
    idle_s: int = Field(30, ge=1, description="between the requests of a connection")
    prompt_chars: int = Field(4000, ge=1, description="of a prompt, and of what to steer away from")
    steps: int = Field(150, ge=1, le=1000, description="solver steps of a pass, whatever calls each takes")
    guidance: float = Field(50.0, ge=1, le=1000, description="guidance scale")
    side_pixels: int = Field(2048, ge=8, description="width or height")
    pictures: int = Field(16, ge=1, description="of one job")
    work: int = Field(
        64 * 2**20 * 50, ge=1, description="pixels x U-Net calls x pictures of one job; guidance counts twice"
    )
    adapters: int = Field(4, ge=0, le=16, description="blended in one picture")
    adapter_weight: float = Field(4.0, gt=0, description="to either side of zero")
    controls: int = Field(3, ge=0, le=8, description="nets that steer one picture")
    upload_pixels: int = Field(4096 * 4096, ge=1, description="of an uploaded picture, before decoding")
    previews: int = Field(10, ge=0, description="intermediate pictures of one job")
    queue: int = Field(256, ge=1, description="pictures waiting, of all keys")
    queue_per_key: int = Field(128, ge=1, description="pictures waiting, of one key")
    queue_s: float = Field(
        3600.0,
        gt=0,
        description="seconds of work waiting, by the speed measured; one job may always wait",
    )
    rate_per_minute: float = Field(1200.0, gt=0, description="new jobs of one key")
    watchers: int = Field(512, ge=1, description="open event streams")
    deadline_s: float = Field(86_400.0, gt=0, description="the longest that a job may ask to be waited for")
    keep_s: float = Field(86_400.0, gt=0, description="how long a finished job and its pictures are kept")
    keep_bytes: int = Field(10 * 2**30, ge=1, description="of pictures kept; the oldest go first")
    attempts: int = Field(20, ge=1, description="times a job is begun again after the server was killed")
    pictures_per_day: int | None = Field(
        None, ge=0, description="of one key, accepted from 0:00 to 24:00 UTC; None: as many as it asks for"
    )
    keys: dict[str, KeyLimits] = Field({}, description="by a key's name, what is different for it")

    def of_key(self, key: str) -> KeyLimits:
        """The bounds of one key, all of them said."""
        own = self.keys.get(key, NO_LIMITS)
        return _filled(own, self.rate_per_minute, self.queue_per_key, self.pictures_per_day)

    @property
    def shares(self) -> dict[str, int]:
        """Of the keys that have another than the usual one."""
        return {name: own.share for name, own in self.keys.items() if own.share != 1}

    def queue_share_of(self, key: str) -> float:
        """The part of what may wait that may be a key's."""
        return min(1.0, (self.of_key(key).queue or self.queue_per_key) / self.queue)


class ServeSettings(BaseModel):
    """One server. Its limits are in `Limits`."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    model: str = Field(description="a model folder, a hub id, or a family")
    more_models: tuple[str, ...] = Field((), description="further ones, which requests choose by name")
    model_memory: int | None = Field(
        None,
        ge=1,
        description="bytes of several models' weights in memory at once; None: half of what is free",
    )
    adapters: Path | None = Field(None, description="a folder of adapters; new ones appear by themselves")
    slots: int = Field(16, ge=1, le=1024, description="adapters that lie ready on the device at once")
    max_rank: int = Field(64, ge=1, le=1024, description="the largest rank of an adapter")
    adapter_memory: int | None = Field(
        None,
        ge=1,
        description="bytes of adapters that are no LoRAs (LoKr, LoHa, OFT, differences) in memory at once; "
        "None: a quarter of what is free",
    )
    embeddings: Path | None = Field(None, description="a folder of textual inversions, by name in prompts")
    controls: Path | None = Field(
        None,
        description="a folder of ControlNets, T2I-Adapters and IP-Adapters; new ones appear by themselves",
    )
    control_memory: int | None = Field(
        None, ge=1, description="bytes of nets in memory at once; None: a quarter of what is free"
    )
    upscalers: Path | None = Field(None, description="a folder of ESRGAN networks, by name")
    host: str = Field("127.0.0.1", description="the address to listen on; others need --api-key-file")
    port: int = Field(8000, ge=0, le=65535, description="0 takes a free one")
    key_file: Path | None = Field(None, description="names and hashes of the keys that may come in")
    origins: tuple[str, ...] = Field((), description="further web origins that may ask, as https://host")
    hosts: tuple[str, ...] = Field((), description="further names that the server is called by, without keys")
    public_url: str | None = Field(
        None,
        description="the address that clients know the server by, such as https://pictures.example; None: "
        "the one that a request was sent to",
    )
    state: Path = Field(Path("darkroom-serve"), description="the folder of jobs and pictures")
    jobs: str | None = Field(
        None,
        description="the jobs' database: postgresql+psycopg://...; None: SQLite in the state folder",
    )
    name: str = Field(
        "darkroom",
        min_length=1,
        max_length=64,
        description="of this server, where several use a database",
    )
    shared: bool = Field(
        False, description="jobs and pictures are those of every server of this --name in the --jobs database"
    )
    lease_s: float = Field(
        10.0, ge=1, le=3600, description="shared: a server silent for so many seconds has no jobs"
    )
    patience_s: float = Field(
        0.5, ge=0, le=3600, description="shared: seconds that a job waits for a server with its adapters"
    )
    capacity: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="U-Net evaluations a step, at the model's own size; None: by memory, on a CPU also by "
        "how long a step takes",
    )
    lanes: int | None = Field(
        None,
        ge=1,
        le=256,
        description="on a CPU, sizes stepped at once, sharing the cores; None: 2 for a small model, else 1",
    )
    pad: bool = Field(
        False, description="only batches of 1, 2, 4, 8, 12, 16, 24, ... rows, for compiled backends"
    )
    warm_sizes: tuple[str, ...] = Field(
        (),
        description="sizes (512x768) that are compiled or captured before the first job; with `pad` all "
        "of their batches that fit the capacity, else single pictures",
    )
    deterministic: bool = Field(
        False, description="calls of few shapes: a picture has the same bits in any batch"
    )
    device: str = Field("auto", description="auto, cpu, cuda, mps, ...")
    precision: str = Field("float32", description=PRECISION_TEXT)
    backend: str = Field("torch", description="torch, compile, onnx or openvino")
    optimise: str | None = Field(
        None, description="optimisations by name; None: auto, as far as adapters allow"
    )
    variant: str | None = Field(None, description="weight files of a variant, such as fp16")
    revision: str | None = Field(None, description="branch, tag or commit on the hub")
    drain_s: float = Field(30.0, ge=0, description="seconds to finish running jobs at shutdown")
    hooks: tuple[str, ...] = Field(
        (), description="MODULE:FUNCTION: each sees every picture before it is kept"
    )
    provenance: bool = Field(
        default_factory=provenance_wanted, description="mark and sign pictures: watermark and credentials"
    )
    sign: Path | None = Field(
        None,
        description="PEM file of certificates and key that sign the pictures; None: a self-made one",
    )
    credentials: Literal["model", "settings", "all"] = Field(
        "settings", description="what the signed credentials say; all: the prompts too"
    )
    usd_per_hour: float | None = Field(None, ge=0, description="price of the device, for the cost of jobs")
    min_free_bytes: int = Field(64 * 2**20, ge=0, description="of disk; below it no job is accepted")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="metrics alone on a port of their own, without a key; 0 takes a free one",
    )
    metrics_host: str = Field("0.0.0.0", description="the address of --metrics-port")
    traces: str | None = Field(
        None,
        description="an OpenTelemetry collector that gets traces (OTLP), such as http://127.0.0.1:4318",
    )
    prefix: str = Field("", description="the path under which a proxy has the server, such as /pictures")
    mcp: bool = Field(False, description="an MCP server at /mcp, for agents that draw")
    vertex: VertexRoutes | None = Field(None, description="on Vertex AI, which lets in only who may")
    limits: Limits = Limits()

    @property
    def limits_in_force(self) -> Limits:
        """A picture's adapters lie in slots all at once."""
        return self.limits.model_copy(update={"adapters": min(self.limits.adapters, self.slots)})


def check_certificate(settings: ServeSettings) -> None:
    """InputError for a certificate that cannot sign, where pictures are to be signed with one."""
    if settings.sign is not None and settings.provenance:
        Certificate.read(settings.sign)


def check_paths(settings: ServeSettings) -> None:
    """InputError for folders that are not there, and a certificate that cannot sign. Imports nothing heavy:
    called before anything that does.
    """
    for name in ("adapters", "embeddings", "controls", "upscalers"):
        folder: Path | None = getattr(settings, name)
        if folder is not None and not folder.is_dir():
            raise InputError(f"--{name} '{folder}' is no folder", mend="make it, or name another")
    check_certificate(settings)
    if settings.mcp and find_spec("mcp") is None:
        raise MissingExtra("mcp", "mcp")
    for ref in (settings.model, *settings.more_models):
        if ref.startswith((".", "/", "~")) and not Path(ref).exists():
            raise InputError(f"no model at '{ref}'", allowed="a model folder, a hub id, or a family")
