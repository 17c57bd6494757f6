"""What one request may ask for, and how much the server takes on. Every number has a bound."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Limits(BaseModel):
    """The bounds of a server. What is over one is refused at once, with the field's name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    body_bytes: int = Field(16 * 2**20, ge=1024, description="of one request's body")
    bodies_bytes: int = Field(512 * 2**20, ge=1024, description="of the bodies of all requests under way")
    requests: int = Field(960, ge=1, description="under way at once; health comes on top")
    connections: int = Field(1024, ge=1, description="open at once; the longest idle makes room")
    head_s: float = Field(10.0, gt=0, description="for a request to have begun; then a connection is closed")
    idle_s: int = Field(30, ge=1, description="between the requests of a connection")
    prompt_chars: int = Field(4000, ge=1, description="of a prompt, and of what to steer away from")
    steps: int = Field(150, ge=1, le=1000, description="solver steps")
    guidance: float = Field(50.0, ge=1, le=1000, description="guidance scale")
    side_pixels: int = Field(2048, ge=8, description="width or height")
    pictures: int = Field(16, ge=1, description="of one job")
    work: int = Field(
        64 * 2**20 * 50, ge=1, description="pixels x steps x pictures of one job; guidance counts twice"
    )
    adapters: int = Field(4, ge=0, le=16, description="blended in one picture")
    adapter_weight: float = Field(4.0, gt=0, description="to either side of zero")
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

    @property
    def share_of_a_key(self) -> float:
        """Of what may wait."""
        return min(1.0, self.queue_per_key / self.queue)
