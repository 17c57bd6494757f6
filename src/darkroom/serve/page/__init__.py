"""The page: plain files of HTML, CSS and JavaScript, served as they are.

They know nothing of jobs, so they need no key; what they ask the server for does. No build step, nothing from
elsewhere, and nothing inline: the content security policy of `guard` forbids it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Coroutine
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from darkroom.options import A1111_NAMES, SAMPLERS
from darkroom.serve.jobs.core import Core

PAGES = {"/": "index.html", "/server": "server.html"}
FILES = (
    "style.css",
    "icon.svg",
    "app.js",
    "also.js",
    "common.js",
    "keep.js",
    "mask.js",
    "png.js",
    "view.js",
    "server.js",
    "theme.js",
    "form.js",
    "solvers.js",
)
PATHS = {**PAGES, "/favicon.ico": "icon.svg", **{f"/page/{name}": name for name in FILES}}
PAGE_PATHS = tuple(PATHS)
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


def page_router(_: Core) -> APIRouter:
    """The page's files, each at its path."""
    router = APIRouter(include_in_schema=False)
    for path, name in PATHS.items():
        router.add_api_route(path, _sender(name), methods=["GET", "HEAD"])
    return router


def _solvers() -> bytes:
    """The table of solvers as a module: each by A1111's name in small letters, and the name of each."""
    solver_of = {name.lower(): solver for name, (solver, karras) in SAMPLERS.items() if not karras}
    tables = {"SOLVER_OF": solver_of, "SAMPLER_OF": A1111_NAMES}
    return "".join(f"export const {name} = {json.dumps(table)};\n" for name, table in tables.items()).encode()


def _sender(name: str) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """A handler that sends a file, or says that the reader has it already."""
    content = _solvers() if name == "solvers.js" else files(__name__).joinpath(name).read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=TYPES[name.rpartition(".")[2]], headers=headers)

    return send
