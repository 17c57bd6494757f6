"""The nodes. Pictures are ComfyUI's: float tensors [B, H, W, C] of 0 to 1; masks [B, H, W]."""

from __future__ import annotations

import base64
import io
import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

CATEGORY = "darkroom"
POLL_S, TIMEOUT_S = 2, 60
MAPS = ["none", "canny", "blur", "scribble", "colour", "invert", "inpaint"]


@dataclass(frozen=True)
class Server:
    """Where a server is, and the key that it is asked with."""

    url: str
    key: str | None

    def ask(self, method: str, path: str, body: Any = None) -> bytes:
        """A request's answer. RuntimeError with what the server says where it refuses."""
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(f"{self.url}{path}", content, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"darkroom: {_message(error.read())} ({error.code})") from None
        except urllib.error.URLError as error:
            raise RuntimeError(f"darkroom: no server at {self.url}: {error.reason}") from None

    def drawn(self, body: dict[str, Any]) -> dict[str, Any]:
        """A job that is done; cancelled where ComfyUI is interrupted meanwhile."""
        job = json.loads(self.ask("POST", "/jobs", body))
        try:
            while job["state"] in ("queued", "running"):
                _raise_if_interrupted()
                job = json.loads(self.ask("GET", f"/jobs/{job['id']}?wait_s={POLL_S}"))
        except BaseException:
            self.ask("DELETE", f"/jobs/{job['id']}")
            raise
        if job["state"] != "done":
            message = (job["error"] or {}).get("message", f"the job was {job['state']}")
            raise RuntimeError(f"darkroom: {message}")
        return dict(job)


def _message(content: bytes) -> str:
    """What a refusal says."""
    try:
        body = json.loads(content)
    except ValueError:
        return content[:200].decode("utf-8", "replace")
    error = body.get("error", body)
    return str(error.get("message", body.get("detail", error)) if isinstance(error, dict) else body["detail"])


def _raise_if_interrupted() -> None:
    try:
        from comfy import model_management
    except ImportError:  # outside ComfyUI
        return
    model_management.throw_exception_if_processing_interrupted()


def to_base64(image: torch.Tensor) -> str:
    """The first picture of a tensor, or a mask, as PNG in base64."""
    array = (image[0].clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def to_tensor(png: bytes) -> torch.Tensor:
    """A PNG file as [1, H, W, 3]."""
    with Image.open(io.BytesIO(png)) as image:
        return torch.from_numpy(np.asarray(image.convert("RGB"), np.float32) / 255)[None]


class DarkroomServer:
    """Where a server is."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("DARKROOM_SERVER",), "named", CATEGORY

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "url": ("STRING", {"default": "http://127.0.0.1:8000"}),
                "key_variable": ("STRING", {"default": "DARKROOM_API_KEY"}),
            }
        }

    def named(self, url: str, key_variable: str) -> tuple[Server]:
        """The key comes from the environment: workflows are saved in pictures, and shared."""
        return (Server(url.rstrip("/"), os.environ.get(key_variable.strip() or "DARKROOM_API_KEY")),)


class DarkroomAdapter:
    """An adapter of the server's, after others."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("DARKROOM_ADAPTERS",), "added", CATEGORY

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        weight = {"default": 1.0, "min": -4.0, "max": 4.0, "step": 0.05}
        return {
            "required": {
                "name": ("STRING", {"default": ""}),
                "weight": ("FLOAT", weight),
                "text_weight": ("FLOAT", weight),
            },
            "optional": {"adapters": ("DARKROOM_ADAPTERS",)},
        }

    def added(
        self, name: str, weight: float, text_weight: float, adapters: list[Any] | None = None
    ) -> tuple[list[Any]]:
        """The adapters so far and this one."""
        return ([*(adapters or []), {"name": name, "weight": weight, "text_weight": text_weight}],)


class DarkroomControl:
    """A net of the server's with its picture, after others."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("DARKROOM_CONTROLS",), "added", CATEGORY

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        share = {"min": 0.0, "max": 1.0, "step": 0.01}
        return {
            "required": {
                "net": ("STRING", {"default": ""}),
                "image": ("IMAGE",),
                "weight": ("FLOAT", {"default": 1.0, "min": -10.0, "max": 10.0, "step": 0.05}),
                "start": ("FLOAT", {"default": 0.0, **share}),
                "end": ("FLOAT", {"default": 1.0, **share}),
                "map": (MAPS,),
            },
            "optional": {"mask": ("MASK",), "controls": ("DARKROOM_CONTROLS",)},
        }

    def added(
        self,
        net: str,
        image: torch.Tensor,
        weight: float,
        start: float,
        end: float,
        map: str,
        mask: torch.Tensor | None = None,
        controls: list[Any] | None = None,
    ) -> tuple[list[Any]]:
        """The nets so far and this one."""
        control = {
            "net": net,
            "image": to_base64(image),
            "weight": weight,
            "start": start,
            "end": end,
            "map": map,
        }
        if mask is not None:
            control["mask"] = to_base64(mask)
        return ([*(controls or []), control],)


class DarkroomDraw:
    """Pictures from a prompt, drawn by the server."""

    RETURN_TYPES, RETURN_NAMES = ("IMAGE", "STRING"), ("images", "parameters")
    FUNCTION, CATEGORY = "draw", CATEGORY

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        side = {"default": 512, "min": 8, "max": 8192, "step": 8}
        return {
            "required": {
                "server": ("DARKROOM_SERVER",),
                "prompt": ("STRING", {"multiline": True}),
                "negative": ("STRING", {"multiline": True}),
                "width": ("INT", side),
                "height": ("INT", side),
                "steps": ("INT", {"default": 30, "min": 1, "max": 1000}),
                "guidance": ("FLOAT", {"default": 7.5, "min": 0.0, "max": 50.0, "step": 0.1}),
                "seed": ("INT", {"default": 0, "min": 0, "max": 2**63 - 1}),
                "num": ("INT", {"default": 1, "min": 1, "max": 16}),
                "solver": ("STRING", {"default": ""}),
                "weighting": (["none", "a1111", "compel"],),
            },
            "optional": {
                "image": ("IMAGE",),
                "mask": ("MASK",),
                "strength": ("FLOAT", {"default": 0.75, "min": 0.01, "max": 1.0, "step": 0.01}),
                "adapters": ("DARKROOM_ADAPTERS",),
                "controls": ("DARKROOM_CONTROLS",),
                "model": ("STRING", {"default": ""}),
            },
        }

    def draw(
        self,
        server: Server,
        prompt: str,
        negative: str,
        image: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        strength: float = 0.75,
        adapters: list[Any] | None = None,
        controls: list[Any] | None = None,
        model: str = "",
        **settings: Any,
    ) -> tuple[torch.Tensor, str]:
        """All pictures in one tensor, and what they were made with."""
        body = {"prompt": prompt, "negative": negative or None, **settings}
        body |= {"solver": settings["solver"].strip() or None, "model": model.strip() or None}
        body |= {"adapters": adapters or [], "controls": controls or []}
        if image is not None:
            body |= {"image": to_base64(image), "strength": strength}
        if mask is not None:
            body |= {"mask": to_base64(mask)}
        job = server.drawn(body)
        pngs = [server.ask("GET", f"/jobs/{job['id']}/pictures/{i}") for i in range(len(job["pictures"]))]
        return torch.cat([to_tensor(png) for png in pngs]), json.dumps(job["pictures"])


class DarkroomUpscale:
    """A picture upscaled by the server."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("IMAGE",), "enlarged", CATEGORY

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "server": ("DARKROOM_SERVER",),
                "image": ("IMAGE",),
                "upscaler": ("STRING", {"default": "Lanczos"}),
                "scale": ("FLOAT", {"default": 2.0, "min": 1.0, "max": 8.0, "step": 0.25}),
            }
        }

    def enlarged(
        self, server: Server, image: torch.Tensor, upscaler: str, scale: float
    ) -> tuple[torch.Tensor]:
        """Each picture of the tensor, larger."""
        made = []
        for one in image:
            body = {"image": to_base64(one[None]), "upscaler_1": upscaler, "upscaling_resize": scale}
            answer = json.loads(server.ask("POST", "/sdapi/v1/extra-single-image", body))
            made.append(to_tensor(base64.b64decode(answer["image"])))
        return (torch.cat(made),)


NODE_CLASS_MAPPINGS = {
    cls.__name__: cls
    for cls in (DarkroomServer, DarkroomAdapter, DarkroomControl, DarkroomDraw, DarkroomUpscale)
}
NODE_DISPLAY_NAME_MAPPINGS = {name: f"Darkroom {name[8:].lower()}" for name in NODE_CLASS_MAPPINGS}
