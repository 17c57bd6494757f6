"""Requests and answers: `PictureRequest`, `Job`, `Event`, `StoredPicture`; and `Refused`: a request that is
not served, in a form that every API can give in its own shape.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from darkroom.errors import DarkroomError, InputError
from darkroom.options import Sigmas

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    410: "not_found_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    507: "unavailable_error",
}
OPERATORS = re.compile(r"(^|\s)--[a-z]|\bdarkroom [a-z]|\bpip install\b")
"""Options and commands."""
FOLDERS = re.compile(r"'(?:/|[A-Za-z]:\\)[^']*[/\\]([^'/\\]+)'")
"""What stands before the last name of a quoted path."""
RETRIED = (408, 409, 429, 500, 502, 503, 504, 507)
"""After these OpenAI's clients, and others like them, try again by themselves unless a header forbids it."""


class Refused(DarkroomError):
    """`status` is HTTP's; `code` one word for programs; `param` the field at fault; `message` for people.

    `retry_after_s` says when it is worth asking again, where waiting helps. Without it clients that ask again
    by themselves after some statuses get a header against it: it would only be drawn, or refused, once more.
    `logged` is the message without what a log must not hold: a prompt.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        logged: str | None = None,
    ) -> None:
        self.logged = message if logged is None else logged
        self.status, self.code, self.message = status, code, message
        self.param, self.retry_after_s = param, retry_after_s
        super().__init__(message)

    @property
    def kind(self) -> str:
        """The class of error, as OpenAI's error object has it."""
        return KINDS.get(self.status, "server_error")

    @property
    def headers(self) -> dict[str, str]:
        """What goes along with the answer."""
        found = {}
        if self.retry_after_s is not None:
            found["Retry-After"] = str(max(1, -int(-self.retry_after_s // 1)))
        elif self.status in RETRIED:
            found["x-should-retry"] = "false"
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        return found


def say(error: DarkroomError) -> str:
    """An error in a client's words: what only who runs the server could type is left out, and where its
    files lie."""
    if not isinstance(error, InputError):
        return FOLDERS.sub(r"'\1'", str(error))
    allowed = f"allowed: {error.allowed}" if error.allowed else ""
    message = "; ".join(
        part for part in (error.given, allowed, error.mend) if part and not OPERATORS.search(part)
    )
    return FOLDERS.sub(r"'\1'", message)


MAX_SEED = 2**63 - 1
MOST_ADAPTERS, MOST_CONTROLS = 16, 8
MAX_BLOCKS = 64
JOB_ID = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
"""What a client may call a job."""

State = Literal["queued", "running", "done", "failed", "cancelled"]
FINAL: tuple[State, ...] = ("done", "failed", "cancelled")
PRIORITIES = {"low": 0, "normal": 1, "high": 2}
EventKind = Literal["queued", "step", "preview", "done", "failed", "cancelled"]


class _Strict(BaseModel):
    # Strict: "20", true and 20.5 are no step count. Fields that are not known are refused by name.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class AdapterChoice(_Strict):
    """One adapter of the server's folder, by name."""

    name: str = Field(min_length=1, max_length=200)
    weight: float = Field(1.0, allow_inf_nan=False, ge=-100, le=100)
    text_weight: float | None = Field(
        None, allow_inf_nan=False, ge=-100, le=100, description="of the text encoders; None: as the U-Net's"
    )
    blocks: tuple[Annotated[float, Field(allow_inf_nan=False, ge=-100, le=100)], ...] = Field(
        (), max_length=MAX_BLOCKS, description="how much each block takes, in A1111's order; none: all, whole"
    )

    @field_validator("blocks", mode="before")
    @classmethod
    def _blocks_from_list(cls, given: Any) -> Any:
        return tuple(given[: MAX_BLOCKS + 1]) if isinstance(given, list) else given

    @property
    def text(self) -> float:
        """The weight of the text encoders."""
        return self.weight if self.text_weight is None else self.text_weight


class ControlChoice(_Strict):
    """One net of the server's folder, by name, and how much its picture counts."""

    net: str = Field(
        min_length=1, max_length=200, description="a ControlNet, LLLite, T2I-Adapter or IP-Adapter"
    )
    weight: float = Field(1.0, allow_inf_nan=False, ge=-10, le=10)
    start: float = Field(
        0.0, ge=0, lt=1, allow_inf_nan=False, description="share of the steps where it begins"
    )
    end: float = Field(1.0, gt=0, le=1, allow_inf_nan=False, description="share of the steps where it stops")
    guess: bool = Field(False, description="only the prompted half, deep layers more than shallow ones")
    soft: bool = Field(False, description="deep layers more than shallow ones, in both halves")
    map: str = Field("none", max_length=40, description="what is made of the picture: none, canny, ...")

    @model_validator(mode="after")
    def _starts_before_it_ends(self) -> ControlChoice:
        if self.start >= self.end:
            raise ValueError("start is before end")
        return self


class ControlGiven(ControlChoice):
    """The same with its picture."""

    image: str = Field(description="PNG, JPEG or WebP in base64")
    mask: str | None = Field(
        None, description="of an IP-Adapter: white where it counts; of map inpaint: white where unknown"
    )

    @property
    def choice(self) -> ControlChoice:
        """Without the pictures."""
        return ControlChoice(**self.model_dump(exclude={"image", "mask"}))


class HiresChoice(_Strict):
    """A second pass at a larger size, from the first pass's picture."""

    scale: float = Field(ge=1, le=8, allow_inf_nan=False, description="how much larger each side becomes")
    strength: float = Field(
        0.7, gt=0, le=1, allow_inf_nan=False, description="share of the steps taken at the large size"
    )
    steps: int | None = Field(None, ge=1, le=1000, description="of which it is a share; None: as the first")
    upscaler: str = Field(
        "latent",
        max_length=200,
        description="latent: between the latents; lanczos or a network's name: decoded, enlarged, encoded",
    )


class OwnSettings(BaseModel):
    """darkroom's own settings, by the same names in every dialect that has none for them."""

    variation_seed: int | None = Field(
        None,
        ge=0,
        le=MAX_SEED,
        description="with variation_strength: the i-th picture has this + i, and one seed; None: drawn",
    )
    variation_strength: float = Field(
        0.0, ge=0, le=1, allow_inf_nan=False, description="how far the noise goes to the other seed's"
    )
    seed_width: int | None = Field(
        None, ge=8, le=8192, description="of the picture whose noise is kept in the middle; with seed_height"
    )
    seed_height: int | None = Field(None, ge=8, le=8192)
    guidance_rescale: float = Field(0.0, ge=0, le=1, allow_inf_nan=False, description="less contrast")
    eta: float = Field(0.0, ge=0, le=1, allow_inf_nan=False, description="noise of ddim")
    karras: bool | None = Field(None, description="Karras sigmas; None: as the scheduler says")
    exponential: bool | None = Field(None, description="exponential sigmas; None: as the scheduler says")
    sigmas: Sigmas | None = Field(None, description="how sigmas are spaced; None: as the scheduler says")
    spacing: str | None = Field(None, max_length=40, description="timesteps leading, trailing or linspace")
    weighting: Literal["none", "a1111", "compel"] = Field(
        "none", description="syntax of weights in the prompts; none: brackets mean what they say"
    )
    clip_skip: int = Field(0, ge=0, le=100, description="last layers of the text encoder left out")
    only_masked: int | None = Field(
        None,
        ge=0,
        le=8192,
        description="with a mask: draw only its part and so many pixels around, at the size",
    )
    masked_content: Literal["original", "fill", "noise", "nothing"] | None = Field(
        None,
        description="what the masked part starts from, as A1111 has it: the picture, the colours around the "
        "mask, noise or nothing; None: original",
    )
    hires: HiresChoice | None = Field(None, description="a second pass at a larger size; not with an upload")
    adapters: tuple[AdapterChoice, ...] = Field(
        (), max_length=MOST_ADAPTERS, description="of the server's folder"
    )
    priority: Literal["low", "normal", "high"] = Field(
        "normal", description="among the jobs of one's own key; it takes nothing from others"
    )
    deadline_s: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="given up when it is not done so long after acceptance"
    )

    @field_validator("adapters", mode="before")
    @classmethod
    def _from_list(cls, given: Any) -> Any:
        # Here, for a tuple's length is looked at only after all that is in it.
        if isinstance(given, (list, tuple)) and len(given) > MOST_ADAPTERS:
            raise ValueError(f"at most {MOST_ADAPTERS}")
        return tuple(given) if isinstance(given, list) else given

    @model_validator(mode="after")
    def _whole_seed_size(self) -> Self:
        if (self.seed_width is None) != (self.seed_height is None):
            raise ValueError("seed_width and seed_height go together")
        return self

    def own(self) -> dict[str, Any]:
        """These settings by name."""
        return {name: getattr(self, name) for name in OwnSettings.model_fields}


class PictureRequest(OwnSettings):
    """Pictures of one prompt. None leaves a choice to the model. The server's `Limits` bound it further."""

    model_config = _Strict.model_config

    prompt: str = Field(max_length=100_000, description="what to draw")
    model: str | None = Field(None, max_length=500, description="of the server's; None: its first")
    negative: str | None = Field(None, max_length=100_000, description="what to steer away from")
    num: int = Field(1, ge=1, le=1000, description="pictures; the i-th has seed + i")
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description="None: drawn when the job is accepted")
    width: int | None = Field(None, ge=8, le=8192, description="pixels; None: the model's own")
    height: int | None = Field(None, ge=8, le=8192, description="pixels; None: the model's own")
    steps: int | None = Field(None, ge=1, le=1000, description="None: 30, with lcm 4")
    guidance: float | None = Field(
        None,
        ge=0,
        le=1000,
        allow_inf_nan=False,
        description="above 1 is on; None: the model's own, else 7.5, with lcm 1",
    )
    solver: str | None = Field(None, max_length=40, description="None: the scheduler in the model's folder")
    strength: float | None = Field(
        None, gt=0, le=1, allow_inf_nan=False, description="with an uploaded picture: how much of it to redo"
    )
    controls: tuple[ControlChoice, ...] = Field(
        (), max_length=MOST_CONTROLS, description="nets of the server's folder, each with a picture"
    )
    previews: int = Field(0, ge=0, le=100, description="intermediate pictures, evenly spread over the steps")

    @field_validator("prompt", "negative")
    @classmethod
    def _plain_text(cls, text: str | None) -> str | None:
        if text is not None and "\0" in text:
            raise ValueError("must not hold a NUL character")
        return text

    @field_validator("controls", mode="before")
    @classmethod
    def _controls_from_list(cls, given: Any) -> Any:
        if isinstance(given, (list, tuple)) and len(given) > MOST_CONTROLS:
            raise ValueError(f"at most {MOST_CONTROLS}")
        return tuple(given) if isinstance(given, list) else given

    @property
    def seed_size(self) -> tuple[int, int] | None:
        """Of the picture whose noise is kept in the middle."""
        if self.seed_width is None or self.seed_height is None:
            return None
        return self.seed_width, self.seed_height

    @property
    def size(self) -> tuple[int, int] | None:
        """Width and height; one of them alone means a square."""
        if self.width is None and self.height is None:
            return None
        return self.width or self.height or 0, self.height or self.width or 0


class ControlUpload(NamedTuple):
    """The picture of a control, and where it counts."""

    image: bytes
    mask: bytes | None = None


@dataclass(frozen=True)
class Uploads:
    """Pictures that came with a request, as bytes of PNG, JPEG or WebP; checked by `Core.submit`."""

    image: bytes | None = None
    mask: bytes | None = None
    controls: tuple[ControlUpload, ...] = ()
    """One for each of the request's."""

    @property
    def num_bytes(self) -> int:
        """Of all pictures."""
        return sum(map(len, self.files().values()))

    def files(self) -> dict[str, bytes]:
        """What is there, by the names under which it is kept."""
        parts = {"image": self.image, "mask": self.mask}
        for i, (image, mask) in enumerate(self.controls):
            parts |= {f"control{i}": image, f"control{i}-mask": mask}
        return {f"{name}.upload": content for name, content in parts.items() if content is not None}

    @classmethod
    def read(cls, read: Callable[[str], bytes | None]) -> Uploads | None:
        """From where they are kept; None where nothing is."""
        controls: list[ControlUpload] = []
        while (image := read(f"control{len(controls)}.upload")) is not None:
            controls.append(ControlUpload(image, read(f"control{len(controls)}-mask.upload")))
        found = cls(read("image.upload"), read("mask.upload"), tuple(controls))
        return None if found == cls() else found


def too_late(within_s: float) -> dict[str, str]:
    """The error of a job whose deadline has passed."""
    return {"code": "deadline", "message": f"not done within {within_s:g} s"}


@dataclass(frozen=True)
class Job:
    """A job as it is now. Times are seconds since 1970."""

    id: str
    uid: str
    """Unique in the whole store, where `id` is unique only among the jobs of one key."""
    key: str
    state: State
    request: PictureRequest
    """With its seed drawn."""
    created_s: float
    started_s: float | None = None
    finished_s: float | None = None
    place: int | None = None
    """Pictures to be drawn before its first one, while queued."""
    steps_done: int = 0
    """Of all its pictures together."""
    steps_total: int = 0
    pictures: tuple[dict[str, Any], ...] = ()
    """The parameters of each picture of a done job."""
    error: dict[str, Any] | None = None
    """`code` and `message` of a failed job."""
    notes: tuple[str, ...] = ()
    """What was substituted or cut."""
    cost: dict[str, float] = field(default_factory=dict)
    """Of a done job: `device_s`, and `usd` where the server knows its price."""

    @property
    def over(self) -> bool:
        """Whether nothing will change any more."""
        return self.state in FINAL


@dataclass(frozen=True)
class Event:
    """Something that happened to a job. `id` grows within a job.

    queued: place, of. step: picture, step, of, done, total. preview: picture, step, of, index, png (bytes).
    done: pictures (their parameters), cost. failed: code, message. cancelled: nothing more.
    """

    id: int
    kind: EventKind
    data: dict[str, Any]


@dataclass(frozen=True)
class StoredPicture:
    """A finished picture: its PNG file's bytes, which hold its parameters too."""

    png: bytes
    parameters: dict[str, Any]
