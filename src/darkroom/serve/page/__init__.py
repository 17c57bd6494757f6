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

from darkroom import options
from darkroom.serve.jobs.core import Core

PAGES = {"/": "index.html", "/server": "server.html", "/docs": "docs.html"}
FILES = (
    "style.css",
    "icon.svg",
    "app.js",
    "also.js",
    "common.js",
    "controls.js",
    "docs.js",
    "grid.js",
    "history.js",
    "keep.js",
    "mask.js",
    "pictures.js",
    "png.js",
    "queue.js",
    "view.js",
    "server.js",
    "theme.js",
    "form.js",
)
PATHS = {**PAGES, "/favicon.ico": "icon.svg", **{f"/page/{name}": name for name in FILES}}
SOLVERS_PATH = "/page/solvers.js"
PAGE_PATHS = (*PATHS, SOLVERS_PATH)
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
        content = files(__name__).joinpath(name).read_bytes()
        router.add_api_route(path, _sender(name, content), methods=["GET", "HEAD"])
    router.add_api_route(SOLVERS_PATH, _sender("solvers.js", _solvers()), methods=["GET", "HEAD"])
    return router


def _solvers() -> bytes:
    """The solvers' names, as `options` has them, for the page's own code."""
    solvers = {name.lower(): solver for solver, name in options.A1111_NAMES.items()}
    schedules = {name.lower(): sigmas for name, sigmas in options.A1111_SCHEDULES.items()}
    lines = [
        "// Made by the server. A1111's names in small letters: darkroom's, and the other way round.",
        f"export const SOLVERS = {json.dumps(solvers)};",
        f"export const SOLVER_NAMES = {json.dumps(options.A1111_NAMES)};",
        f"export const AUTOMATIC = {json.dumps(options.A1111_AUTOMATIC)};",
        f"export const SCHEDULES = {json.dumps(schedules)};",
    ]
    return "\n".join(lines).encode()


def _sender(name: str, content: bytes) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """A handler that sends a file, or says that the reader has it already."""
    tag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=TYPES[name.rpartition(".")[2]], headers=headers)

    return send
