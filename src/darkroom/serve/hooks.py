"""Functions of the operator's own that see each picture before anybody else: `--hook MODULE:FUNCTION`.

A hook is called with a `Picture` (its image, and the parameters that it is made with) before it is stored. It
returns nothing, and the picture stays as it is; an image, which takes its place; or the bytes of a PNG file,
which are stored as they are (a signer's work, so no further hook follows). It raises `Withheld` where nobody
is to get the picture. Hooks run during the steps, one picture at a time in each of two threads.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image

from darkroom import sample
from darkroom.errors import DarkroomError, InputError
from darkroom.sample.pictures import png_text
from darkroom.sample.provenance import Origin, Provenance

Hook = Callable[[sample.Picture], "Image.Image | bytes | None"]


class Withheld(DarkroomError):
    """Raised by a hook: the job fails with the code `withheld` and this message."""


@dataclass(frozen=True)
class Hooks:
    """The operator's functions, in the order in which they were named."""

    functions: tuple[Hook, ...] = ()
    provenance: Provenance | None = None
    """Marks and signs what the functions leave."""

    @classmethod
    def named(cls, names: Sequence[str], provenance: Provenance | None = None) -> Hooks:
        """InputError for what is no function that can be imported."""
        return cls(tuple(_imported(name) for name in names), provenance)

    def png(self, picture: sample.Picture, origin: Origin | None = None) -> bytes:
        """The file of a finished picture. `Withheld` where there is to be none."""
        for hook in self.functions:
            made: Any = hook(picture)
            if isinstance(made, bytes):
                return _checked(made, hook)
            if isinstance(made, Image.Image):
                picture = replace(picture, image=made)
            elif made is not None:
                raise DarkroomError(f"hook {_name(hook)} returned a {type(made).__name__}")
        if self.provenance is None:
            return _png_bytes(picture)
        origin = origin or Origin.of(picture.parameters)
        picture = replace(picture, image=self.provenance.marked(picture.image, origin))
        return self.provenance.png(picture, origin, COMPRESSION)


def _imported(name: str) -> Hook:
    module, colon, function = name.partition(":")
    allowed = "MODULE:FUNCTION, of a module that Python finds (PYTHONPATH)"
    if not colon or not module or not function:
        raise InputError(f"--hook {name}", allowed=allowed)
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InputError(f"--hook {name}: {error}", allowed=allowed) from error
    if not callable(found):
        raise InputError(f"--hook {name}: a {type(found).__name__}", allowed=allowed)
    hook: Hook = found
    return hook


def _checked(content: bytes, hook: Hook) -> bytes:
    """A signer's file, as long as it is a PNG that can be read: clients were promised one."""
    try:
        Image.open(io.BytesIO(content), formats=("PNG",)).verify()
    except Exception as error:
        raise DarkroomError(f"hook {_name(hook)} returned bytes that are no PNG") from error
    return content


def _name(hook: Hook) -> str:
    return str(getattr(hook, "__qualname__", hook))


COMPRESSION = 1
"""A photograph-like picture gains little from more, and the server has other work."""


def _png_bytes(picture: sample.Picture) -> bytes:
    """A picture as a PNG file with its parameters inside."""
    buffer = io.BytesIO()
    picture.image.save(buffer, "PNG", pnginfo=png_text(picture), compress_level=COMPRESSION)
    return buffer.getvalue()
