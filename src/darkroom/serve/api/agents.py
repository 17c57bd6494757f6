"""An MCP server at `/mcp` (`serve --mcp`): agents draw, edit and list, by the official SDK.

It stands behind the guard as every API does: keys, bounds on bodies, foreign origins. Each call is a job of
the caller's key, cancelled when the agent gives up. No session is kept, so any of several servers may answer.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Annotated, Any

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.transport_security import TransportSecuritySettings
from pydantic import Field, ValidationError
from starlette.routing import BaseRoute

import darkroom
from darkroom.serve.api.shared import all_finished, caller, decoded, of_validation, pngs_of
from darkroom.serve.jobs.core import Core
from darkroom.serve.request import AdapterChoice, Job, PictureRequest, Refused, Uploads

PATH = "/mcp"
Prompt = Annotated[str, Field(max_length=100_000, description="what to draw")]
Negative = Annotated[str | None, Field(max_length=100_000, description="what to steer away from")]
Side = Annotated[int | None, Field(ge=8, le=8192, description="pixels; none: the model's own")]
Steps = Annotated[int | None, Field(ge=1, le=1000, description="solver steps; none: the server's usual")]
Guidance = Annotated[float | None, Field(ge=0, le=1000, description="how closely to follow the prompt")]
Seed = Annotated[int | None, Field(ge=0, description="the same seed draws the same picture; none: a new one")]
ModelName = Annotated[str | None, Field(max_length=500, description="of list_models; none: the first")]
Num = Annotated[int, Field(ge=1, le=16, description="pictures; the i-th has seed + i")]
Adapters = Annotated[
    dict[str, float] | None, Field(description="adapters of the server by name, each with its weight")
]
Base64 = Annotated[str, Field(description="PNG, JPEG or WebP in base64")]
Strength = Annotated[
    float | None, Field(gt=0, le=1, description="how much of the picture to redo; none: 0.75")
]
Mask = Annotated[str | None, Field(description="a picture in base64, white where to redo; none: everywhere")]


class Agents:
    """The tools of a core, and the routes by which agents reach them."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.server: MCPServer[Any] = MCPServer("darkroom", version=darkroom.__version__)
        for tool in (self.draw, self.edit, self.list_models):
            self.server.add_tool(tool, structured_output=False)
        app = self.server.streamable_http_app(
            streamable_http_path=PATH,
            json_response=True,
            stateless_http=True,
            max_request_body_size=core.limits.body_bytes,
            # The guard has looked at names and origins already.
            transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        )
        self.routes: list[BaseRoute] = list(app.routes)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answers while in here."""
        async with self.server.session_manager.run():
            yield

    async def draw(
        self,
        ctx: Context[Any, Any],
        prompt: Prompt,
        negative: Negative = None,
        width: Side = None,
        height: Side = None,
        steps: Steps = None,
        guidance: Guidance = None,
        seed: Seed = None,
        num: Num = 1,
        adapters: Adapters = None,
        model: ModelName = None,
    ) -> list[Any]:
        """Draw pictures from a prompt. Returns them as PNG, and what each was made with as JSON."""
        asked = {"prompt": prompt, "model": model, "negative": negative, "steps": steps}
        asked |= {"width": width, "height": height}
        return await self._made(ctx, {**asked, "guidance": guidance, "seed": seed, "num": num}, adapters)

    async def edit(
        self,
        ctx: Context[Any, Any],
        prompt: Prompt,
        image: Base64,
        mask: Mask = None,
        strength: Strength = None,
        negative: Negative = None,
        steps: Steps = None,
        guidance: Guidance = None,
        seed: Seed = None,
        adapters: Adapters = None,
        model: ModelName = None,
    ) -> list[Any]:
        """Redraw a picture, all of it or what is white in a mask. Returns it as PNG, with its settings."""
        asked = {"prompt": prompt, "model": model, "negative": negative, "strength": strength, "steps": steps}
        pictures = {"image": image, "mask": mask}
        return await self._made(ctx, {**asked, "guidance": guidance, "seed": seed}, adapters, pictures)

    async def list_models(self, ctx: Context[Any, Any]) -> list[Any]:
        """The models, and the adapters, nets, embeddings and upscalers that may be named, as JSON."""
        core = self.core
        models = {
            "model": asdict(core.catalogue.model),
            "models": [card.name for card in core.catalogue.models()],
            "adapters": [one.name for one in core.catalogue.adapters()],
            "controls": [one.name for one in core.catalogue.nets()],
            "embeddings": [one.name for one in core.catalogue.embeddings().loaded],
            "upscalers": core.catalogue.upscalers.names(),
        }
        return [json.dumps(models, default=str)]

    async def _made(
        self,
        ctx: Context[Any, Any],
        asked: dict[str, Any],
        adapters: dict[str, float] | None,
        pictures: dict[str, str | None] | None = None,
    ) -> list[Any]:
        """A job of the caller's to its end: its pictures, and what they were made with."""
        try:
            chosen = tuple(
                AdapterChoice(name=name, weight=weight) for name, weight in (adapters or {}).items()
            )
            values = {name: value for name, value in asked.items() if value is not None}
            wanted = PictureRequest(**values, adapters=chosen)
            given = {name: decoded(text, name) for name, text in (pictures or {}).items() if text is not None}
            uploads = Uploads(given.get("image"), given.get("mask")) if given else None
            job = await self._finished(wanted, uploads, ctx.request_context.request)
            pngs = await pngs_of(self.core, [job])
        except ValidationError as error:
            raise ToolError(of_validation(error.errors()).message) from error
        except Refused as error:
            raise ToolError(error.message) from error
        return [*(Image(data=png, format="png") for png in pngs), json.dumps(list(job.pictures), default=str)]

    async def _finished(self, wanted: PictureRequest, uploads: Uploads | None, request: Any) -> Job:
        """The caller's job once it is done; cancelled where the agent gives up, or its connection ends."""
        key = caller(request)
        job = await self.core.submit(wanted, key=key, uploads=uploads)
        try:
            [done] = await all_finished(self.core, request, [job])
            return done
        except BaseException:
            await self.core.cancel(job.id, key=key)  # of no effect on a job that is over
            raise
