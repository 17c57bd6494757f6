"""Pictures: decoded from latents, saved as PNG with how they were made, and read back.

A saved PNG carries its parameters twice: as A1111's `parameters` text, which other tools read, and as JSON
under `darkroom`, which says everything. Shapes: B C H W latents.
"""

from __future__ import annotations

import codecs
import io
import json
import logging
import math
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image, PngImagePlugin
from torch import nn

from darkroom.errors import DarkroomError, InputError, Stopped, is_system_failure
from darkroom.hardware import accelerator
from darkroom.hardware.system import atomic_replace, remove_file
from darkroom.models.model import LatentScaling
from darkroom.options import A1111_AUTOMATIC, A1111_NAMES, A1111_SCHEDULES, SOLVERS, find_solver
from darkroom.picture_settings import steps_of_share

JSON_KEY, A1111_KEY = "darkroom", "parameters"
# The decoder's widest activations take about 1.2 GB a megapixel in float32.
DECODE_PIXELS = 1024 * 1024
DECODE_PICTURES = 32
KINDS: dict[str, dict[str, Any]] = {"png": {}, "jpeg": {"quality": 92}, "webp": {"quality": 92}}
EXIF_IFD, EXIF_DESCRIPTION, EXIF_COMMENT, EXIF_UNICODE = 0x8769, 0x010E, 0x9286, b"UNICODE\0"
EXIF_ASCII = b"ASCII\0\0\0"
HAS_STEPS = re.compile(r"^Steps: \d", re.MULTILINE)

# What decoding at once may take of a card's free memory, and a pixel of it in float32, kernels' own included.
DECODE_SHARE, DECODER_BYTES_A_PIXEL = 0.25, 1500

XMP = (
    '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?><x:xmpmeta xmlns:x="adobe:ns:meta/">'
    '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description rdf:about="" '
    'xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/" Iptc4xmpExt:DigitalSourceType='
    '"http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"/></rdf:RDF></x:xmpmeta>'
    '<?xpacket end="r"?>'
)
"""What every picture says of itself, in IPTC's words: made by a trained model."""
JPEG_EXIF_BYTES = 65_533
"""A JPEG's EXIF is one segment, whose length has 16 bits."""
PROMPTS = ("prompt", "negative")
LOG = logging.getLogger("darkroom.sample")
A1111_UPSCALERS = {"latent": "Latent", "lanczos": "Lanczos"}
_WANTED: ContextVar[Callable[[], bool] | None] = ContextVar("wanted", default=None)


@contextmanager
def while_wanted(wanted: Callable[[], bool]) -> Iterator[None]:
    """In here decoding and encoding raise `Stopped` at the next slice or tile once `wanted()` is false."""
    token = _WANTED.set(wanted)
    try:
        yield
    finally:
        _WANTED.reset(token)


def check_wanted() -> None:
    """Between two slices or tiles: `Stopped` where nobody wants the rest."""
    wanted = _WANTED.get()
    if wanted is not None and not wanted():
        raise Stopped("the picture is no longer wanted")


def free_on_card(device: torch.device) -> int | None:
    """Memory that a card has free now; None where it does not say, and of other devices, where a limit is for
    the user to say.
    """
    return accelerator.free_bytes(device) if accelerator.kind_of(device).own_memory else None


def decode_pixels(free_bytes: int | None) -> int:
    """How many pixels to decode at a time: a megapixel, on a card more where its memory is free."""
    fitting = int(DECODE_SHARE * (free_bytes or 0) / DECODER_BYTES_A_PIXEL)
    return max(DECODE_PIXELS, min(DECODE_PICTURES * DECODE_PIXELS, fitting))


@dataclass(frozen=True, eq=False, repr=False)
class Picture:
    """A finished picture, what it was made with (plain JSON values), and its latents [C, H, W]."""

    image: Image.Image
    parameters: dict[str, Any]
    latents: torch.Tensor


@torch.no_grad()
def decode(
    vae: Any,
    latents_BCHW: torch.Tensor,
    *,
    max_pixels: int = DECODE_PIXELS,
    decoder: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> list[Image.Image]:
    """Latents to RGB pictures, at most `max_pixels` of them (at least one picture) in the decoder at a time.

    `decoder` (unscaled float32 latents to pixels of -1 to 1) computes in the VAE's place where given. Raises
    DarkroomError where latents or pixels are not finite: half precision overflows in some VAEs.
    """
    if not torch.isfinite(latents_BCHW).all():
        raise _not_finite("denoising ended in", vae, exported=decoder is not None)
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    pixels = latents_BCHW.shape[-2] * latents_BCHW.shape[-1] * factor**2
    rows = max(1, min(DECODE_PICTURES, max_pixels // pixels))
    if decoder is not None:
        parts = torch.split(LatentScaling.of(vae).undone(latents_BCHW.float()), rows)
        return [image for some in _each(parts) for image in _to_images(_finite(decoder(some), vae, True))]
    with _decoding_precision(vae):
        weight = next(vae.parameters())
        scaled = LatentScaling.of(vae).undone(latents_BCHW.float()).to(weight.device, weight.dtype)
        parts = torch.split(scaled, rows)
        decoded = (_finite(vae.decode(some).sample, vae, False) for some in _each(parts))
        return [image for pixels_B3HW in decoded for image in _to_images(pixels_B3HW)]


def _finite(pixels_B3HW: torch.Tensor, vae: Any, exported: bool) -> torch.Tensor:
    if not torch.isfinite(pixels_B3HW).all():
        raise _not_finite("the VAE gave", vae, exported=exported)
    return pixels_B3HW


def _not_finite(where: str, vae: Any, *, exported: bool) -> DarkroomError:
    """What to try depends on the precision, which an exported network's own weights do not show."""
    mend = "look at the weights of the model and of its adapters, and at the guidance"
    if exported:
        mend = f"with fp16 try bf16 or float32, else {mend}"
    elif next(vae.parameters()).dtype == torch.float16:
        mend = "try bfloat16 or float32"
    return DarkroomError(f"{where} numbers that are not finite; {mend}")


def _each(parts: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for some in parts:
        check_wanted()
        yield some


@torch.no_grad()
def encode(vae: Any, pixels_B3HW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels of -1 to 1 to the mean and standard deviation [B, C, H/f, W/f] of their latents, in float32.

    Both are in the scale in which the U-Net sees latents.
    """
    with _decoding_precision(vae):
        weight = next(vae.parameters())
        distribution = vae.encode(pixels_B3HW.to(weight.device, weight.dtype)).latent_dist
    scaling = LatentScaling.of(vae)
    return scaling.seen(distribution.mean.float()), scaling.spread(distribution.std.float())


@contextmanager
def _decoding_precision(vae: Any) -> Iterator[None]:
    """SDXL's VAE overflows in float16 and says so (`force_upcast`): decode in float32, then go back. Products
    keep float16's 10 bits, with which a card is many times as fast.
    """
    upcast = next(vae.parameters()).dtype == torch.float16 and bool(vae.config.get("force_upcast"))
    # diffusers' own `to` warns of nothing.
    cast = partial(nn.Module.to, vae) if isinstance(vae, nn.Module) else vae.to
    if upcast:
        cast(torch.float32)
    try:
        with accelerator.RoundedFloat32() if upcast else nullcontext():
            yield
    finally:
        if upcast:
            cast(torch.float16)


def _to_images(pixels_B3HW: torch.Tensor) -> list[Image.Image]:
    scaled = (pixels_B3HW.float() / 2 + 0.5).clamp(0, 1) * 255
    array = scaled.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu().numpy()
    return [Image.fromarray(picture) for picture in array]


Sign = Callable[[bytes, dict[str, Any]], bytes]


def save_pictures(
    pictures: Sequence[Picture],
    out_dir: str | Path,
    *,
    grid: bool = True,
    kind: str = "png",
    sign: Sign | None = None,
) -> list[Path]:
    """Write `00000-<seed>.png` and on, counting up from what is there, and `grid-00000.png` for two or more.

    `kind` is png, jpeg or webp; all carry the pictures' parameters. `sign` gives the bytes of a picture's
    file with credentials, from its bytes and what the picture was made with. Returns the pictures' paths in
    order, then the grid's. No existing file is overwritten, and files are written atomically.
    InputError where the folder cannot be written.
    """
    folder = Path(out_dir)
    check_kind(kind)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        index = _next_index(folder, r"(\d{5,})-")
        paths = []
        for picture in pictures:
            path, index = _place(
                picture.image,
                folder,
                index,
                f"-{int(picture.parameters.get('seed', 0))}",
                picture,
                kind,
                sign,
            )
            paths.append(path)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise InputError(f"pictures cannot be saved in '{folder}': {error.strerror}") from error
    if grid and len(pictures) > 1:
        paths.append(save_grid(make_grid([picture.image for picture in pictures]), folder, kind=kind))
    return paths


def save_grid(
    image: Image.Image,
    out_dir: str | Path,
    *,
    kind: str = "png",
    sign: Callable[[bytes], bytes] | None = None,
) -> Path:
    """Write a sheet of pictures that a model made as `grid-00000.png`, under the first number that is free.
    `sign` gives the bytes of a file with credentials. InputError where the folder cannot be written.
    """
    folder = Path(out_dir)
    signed = None if sign is None else lambda content, _: sign(content)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        index = _next_index(folder, r"grid-(\d{5,})\.")
        return _place(image, folder, index, "", None, kind, signed)[0]
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise InputError(f"pictures cannot be saved in '{folder}': {error.strerror}") from error


def check_kind(kind: str) -> None:
    """InputError unless pictures can be saved so."""
    if kind not in KINDS:
        raise InputError(f"--format {kind}", allowed=", ".join(KINDS))


def _next_index(folder: Path, pattern: str) -> int:
    taken = [int(match[1]) for file in os.listdir(folder) if (match := re.match(pattern, file))]
    return max(taken, default=-1) + 1


def _place(
    image: Image.Image,
    folder: Path,
    index: int,
    suffix: str,
    picture: Picture | None,
    kind: str,
    sign: Sign | None,
) -> tuple[Path, int]:
    """Write a temporary file, link to the first free number: linking fails where another got there first."""
    temporary = folder / f".{uuid.uuid4().hex}.{kind}"
    try:
        with open(temporary, "xb") as file:
            file.write(_file_of(image, picture, kind, sign))
        while True:
            stem = f"{index:05d}{suffix}" if picture is not None else f"grid-{index:05d}"
            path = folder / f"{stem}.{'jpg' if kind == 'jpeg' else kind}"
            index += 1
            with suppress(FileExistsError):
                _link(temporary, path)
                return path, index
    finally:
        remove_file(temporary)


def _file_of(image: Image.Image, picture: Picture | None, kind: str, sign: Sign | None) -> bytes:
    buffer = io.BytesIO()
    if kind == "png":
        image.save(buffer, "PNG", pnginfo=png_text(picture))
    else:
        exif = _exif_of(picture)
        if kind == "jpeg" and picture is not None and len(exif.tobytes()) > JPEG_EXIF_BYTES:
            exif = _short_exif_of(picture)
        image.save(buffer, kind.upper(), exif=exif, xmp=XMP.encode(), **KINDS[kind])
    content = buffer.getvalue()
    return content if sign is None else sign(content, {} if picture is None else picture.parameters)


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: take the name first, then move into it
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        atomic_replace(temporary, path)


def png_text(picture: Picture | None) -> PngImagePlugin.PngInfo:
    """A picture's parameters, which a grid has none of, as the text chunks of a PNG file, and that a model
    made it.
    """
    info = PngImagePlugin.PngInfo()
    if picture is not None:
        info.add_text(A1111_KEY, a1111_text(picture.parameters))
        info.add_text(JSON_KEY, json.dumps(picture.parameters, ensure_ascii=True))
    info.add_itxt("XML:com.adobe.xmp", XMP)
    return info


def _exif_of(picture: Picture | None) -> Image.Exif:
    """A picture's parameters as EXIF, for JPEG and WebP: A1111's text as UserComment, where A1111 looks,
    and the JSON as ImageDescription."""
    exif = Image.Exif()
    if picture is not None:
        exif[EXIF_DESCRIPTION] = json.dumps({JSON_KEY: picture.parameters}, ensure_ascii=True)
        text = a1111_text(picture.parameters).encode("utf-16-be", "surrogatepass")
        exif.get_ifd(EXIF_IFD)[EXIF_COMMENT] = EXIF_UNICODE + text
    return exif


def _short_exif_of(picture: Picture) -> Image.Exif:
    """Of parameters that no JPEG can hold whole: without the JSON, and if need be with shortened prompts."""
    left = {name: str(picture.parameters.get(name) or "") for name in PROMPTS}
    LOG.warning("a JPEG holds 64 KiB of parameters: what is more is left out; --format png or webp holds all")
    while True:
        exif = Image.Exif()
        text = a1111_text({**picture.parameters, **left}).encode("utf-16-be", "surrogatepass")
        exif.get_ifd(EXIF_IFD)[EXIF_COMMENT] = EXIF_UNICODE + text
        if len(exif.tobytes()) <= JPEG_EXIF_BYTES:
            return exif
        left = {name: text[: len(text) // 2] for name, text in left.items()}


def _exif_texts(image: Image.Image) -> dict[str, str]:
    """What `_exif_of` or A1111 wrote, under the keys that a PNG has it."""
    exif = image.getexif()
    comment = exif.get_ifd(EXIF_IFD).get(EXIF_COMMENT)
    texts = {}
    text = _comment_text(comment) if isinstance(comment, bytes) else ""
    if HAS_STEPS.search(text):  # others are a camera's or a phone's, and no prompts
        texts[A1111_KEY] = text
    with suppress(ValueError, TypeError, RecursionError):
        content = json.loads(str(exif.get(EXIF_DESCRIPTION, "")))
        if isinstance(content, dict) and JSON_KEY in content:
            texts[JSON_KEY] = json.dumps(content[JSON_KEY])
    return texts


def _comment_text(comment: bytes) -> str:
    """EXIF's UserComment. A1111 writes UTF-16 with the high byte first, whatever the file's order is; other
    programs keep to the file's, or write ASCII.
    """
    if comment.startswith(EXIF_ASCII):
        return comment[len(EXIF_ASCII) :].decode("utf-8", "replace").rstrip("\0")
    if not comment.startswith(EXIF_UNICODE):
        return ""
    body = comment[len(EXIF_UNICODE) :]
    if body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return body.decode("utf-16", "replace")
    low_first = body[1::2].count(0) > body[0::2].count(0)
    return body.decode("utf-16-le" if low_first else "utf-16-be", "replace")


def make_grid(images: Sequence[Image.Image], columns: int | None = None) -> Image.Image:
    """All pictures on one sheet, in reading order and near to a square; cells of the largest size."""
    columns = columns or math.ceil(math.sqrt(len(images)))
    width, height = max(image.width for image in images), max(image.height for image in images)
    sheet = Image.new("RGB", (columns * width, math.ceil(len(images) / columns) * height), "white")
    for i, image in enumerate(images):
        sheet.paste(image, (i % columns * width, i // columns * height))
    return sheet


MASKED_CONTENT = {"fill": "fill", "noise": "latent noise", "nothing": "latent nothing"}
"""In A1111's words."""
SPACING_OF = {"Uniform": "linspace", "SGM Uniform": "trailing"}
"""Of A1111's schedules, in diffusers' words."""


def a1111_text(parameters: dict[str, Any]) -> str:
    """Parameters as A1111's web UI writes them: prompt, negative prompt, a line of `Key: value` pairs."""
    lines = [parameters["prompt"]]
    if negative := parameters.get("negative"):
        lines.append(f"Negative prompt: {negative}")
    pairs = {
        "Steps": parameters["steps"],
        "Sampler": A1111_NAMES.get(parameters["solver"], parameters["solver"]),
        "Schedule type": _schedule_type(parameters),
        "CFG scale": parameters["guidance"],
        "Seed": parameters["seed"],
        "Size": parameters.get("first_size") or f"{parameters['width']}x{parameters['height']}",
        "Model hash": str(parameters.get("model_sha256", ""))[:10] or None,
        "Model": parameters.get("model"),
        "Eta DDIM": parameters.get("eta") or None,
        **_further_pairs(parameters),
        "CFG Rescale": parameters.get("guidance_rescale") or None,
        "RNG": "CPU",  # where the noise is drawn; A1111 draws on the card by default
        "Version": f"darkroom {parameters['version']}" if "version" in parameters else None,
    }
    lines.append(", ".join(f"{key}: {_quoted(value)}" for key, value in pairs.items() if value is not None))
    return "\n".join(lines)


def _schedule_type(parameters: dict[str, Any]) -> str | None:
    """A1111's name of how sigmas are spaced. It takes silence for Automatic, which is Karras of some."""
    flags = [name for name in ("karras", "exponential") if parameters.get(name)]
    sigmas = flags[0] if flags else parameters.get("sigmas")
    if found := next((name for name, ours in A1111_SCHEDULES.items() if ours == sigmas), None):
        return found
    known = SOLVERS.get(parameters["solver"])
    if known is None or not known.takes_karras or parameters["solver"] == "unipc":
        return None
    return "SGM Uniform" if parameters.get("spacing") == "trailing" else "Uniform"


def _further_pairs(parameters: dict[str, Any]) -> dict[str, Any]:
    """A1111's pairs of what was made in more than one way through the model's own steps."""
    hires = parameters.get("hires") or {}
    skip = parameters.get("clip_skip")
    return {
        "Variation seed": parameters.get("variation_seed"),
        "Variation seed strength": parameters.get("variation_strength"),
        "Seed resize from": _seed_size(parameters),
        "Denoising strength": parameters.get("strength", hires.get("strength")),
        "Masked content": MASKED_CONTENT.get(parameters.get("masked_content", "")),
        "Clip skip": skip + 1 if skip else None,  # A1111 counts the last layer as 1
        "Hires upscale": hires.get("scale"),
        "Hires steps": _steps_taken(hires, parameters["steps"]),
        "Hires upscaler": A1111_UPSCALERS.get(hires.get("upscaler", ""), hires.get("upscaler")),
    }


def _seed_size(parameters: dict[str, Any]) -> str | None:
    sides = parameters.get("seed_width"), parameters.get("seed_height")
    return None if None in sides else "x".join(map(str, sides))


def _steps_taken(hires: dict[str, Any], first: int) -> int | None:
    """A1111 tells the steps that its second pass takes, here they are those of which it is a share."""
    return max(1, int((hires.get("steps") or first) * hires["strength"])) if hires.get("strength") else None


def _quoted(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if re.search(r'[,:"\n]', text) else text


def read_parameters(png: str | Path) -> dict[str, Any]:
    """What a picture was made with: darkroom's JSON, or A1111's text in the same names as far as they go.

    Raises InputError where the file is no picture or says neither.
    """
    parameters = _parameters_in(png)
    if parameters is None:
        raise InputError(
            f"'{png}' does not say how it was made",
            allowed="a PNG, JPEG or WebP with darkroom's or A1111's parameters",
        )
    return parameters


def prompt_in(picture: str | Path) -> str | None:
    """The prompt that a picture's file says it was made with; None where it says nothing."""
    prompt = (_parameters_in(picture) or {}).get("prompt")
    return None if prompt is None else str(prompt)


def _parameters_in(png: str | Path) -> dict[str, Any] | None:
    from darkroom.data.images import PictureError, open_picture

    try:
        return parameters_in(open_picture(Path(png).read_bytes()))
    except FileNotFoundError as error:
        raise InputError(f"no file '{png}'") from error
    except OSError as error:
        if is_system_failure(error):
            raise
        raise InputError(f"'{png}' cannot be read: {error.strerror}") from error
    except PictureError as error:
        raise InputError(f"'{png}' is no picture that can be read: {error}") from error


def parameters_in(image: Image.Image) -> dict[str, Any] | None:
    """What an opened picture's text says that it was made with, None where it says nothing."""
    texts = {key: str(value) for key, value in image.info.items() if key in (JSON_KEY, A1111_KEY)}
    texts = texts or _exif_texts(image)
    if JSON_KEY in texts:
        with suppress(ValueError, RecursionError):
            parameters = json.loads(texts[JSON_KEY])
            if isinstance(parameters, dict):
                return parameters
    if A1111_KEY in texts:
        return parse_a1111(texts[A1111_KEY])
    return None


MOST_SCALE = 100
MOST_LINE = 16_384
"""Characters of A1111's line of pairs; a longer one is part of the prompt."""
PAIR_KEY = re.compile(r"[\w ./-]+")
PAIR_QUOTED = re.compile(r'\s*("(?:\\.|[^\\"])+")\s*(?:,|$)')


def parse_a1111(text: str) -> dict[str, Any]:
    """A1111's `parameters` text to darkroom's names; pairs without one keep their own."""
    *head, last = text.strip().replace("\r\n", "\n").split("\n")
    pairs = dict(_pairs(last)) if len(last) <= MOST_LINE else {}
    if not pairs.get("Steps", "").isdecimal():  # a last line of the prompt, such as "Steps: of stone"
        head, pairs = [*head, last], {}
    split = next((i for i, line in enumerate(head) if line.startswith("Negative prompt:")), len(head))
    negative = "\n".join(head[split:]).removeprefix("Negative prompt:").strip()
    parameters: dict[str, Any] = {"prompt": "\n".join(head[:split]).strip(), "negative": negative}
    return _with_hires(parameters | dict(_named(pairs.items())))


def _pairs(line: str) -> Iterator[tuple[str, str]]:
    """`Key: value` pairs between commas; a value in quotes may hold commas. Reads the line once."""
    at = 0
    while (colon := line.find(":", at)) >= 0:
        key = line[at:colon].rpartition(",")[2].strip()
        if quoted := PAIR_QUOTED.match(line, colon + 1):
            value, at = quoted[1], quoted.end()
        else:
            comma = line.find(",", colon + 1)
            end = comma if comma >= 0 else len(line)
            value, at = line[colon + 1 : end], end + 1
        if PAIR_KEY.fullmatch(key):
            yield key, value.strip()


def _with_hires(parameters: dict[str, Any]) -> dict[str, Any]:
    """A1111's pairs of a second pass put together; the denoising strength is then that pass's."""
    texts = {key: parameters.pop(f"Hires {key}", None) for key in ("steps", "upscaler")}
    scale, sides = parameters.pop("Hires upscale", None), None
    has_size = {"width", "height"} <= set(parameters)  # A1111 says the size of the first pass
    first = (parameters["width"], parameters["height"]) if has_size else None
    if scale is not None and not 0 < scale <= MOST_SCALE:
        scale = None
    if scale is None and first is not None:
        scale, sides = _resized(first, str(parameters.get("Hires resize")))
    if scale is None:
        return parameters
    parameters.pop("Hires resize", None)
    if first is not None:
        parameters["first_size"] = "x".join(map(str, first))
        parameters["width"], parameters["height"] = sides or (int(side * scale) for side in first)
    upscalers = {name: ours for ours, name in A1111_UPSCALERS.items()}
    steps, strength = texts["steps"] or "0", parameters.pop("strength", None)
    taken = int(steps) if re.fullmatch(r"\d{1,6}", steps, re.ASCII) else 0
    share = strength if isinstance(strength, float) and 0 < strength <= 1 else None
    if share and not taken:  # as many as the first pass
        taken = int(parameters.get("steps", 0))
    hires = {
        "scale": scale,
        "strength": strength,
        "steps": steps_of_share(taken, share) if taken > 0 and share else taken or None,
        "upscaler": upscalers.get(texts["upscaler"] or "", texts["upscaler"]),
    }
    return {**parameters, "hires": hires}


def _resized(first: tuple[int, int], text: str) -> tuple[float | None, tuple[int, int] | None]:
    """A1111's `Hires resize`: a side of 0 follows the other; of another ratio, what is over is cut off."""
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text, re.ASCII)
    if match is None or not min(first) or not (wanted := (int(match[1]), int(match[2]))) > (0, 0):
        return None, None
    scale = max(side / before for side, before in zip(wanted, first, strict=True))
    return scale, (wanted[0] or int(first[0] * scale), wanted[1] or int(first[1] * scale))


def _named(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, Any]]:
    numbers: dict[str, tuple[str, type[int] | type[float]]] = {
        "Steps": ("steps", int),
        "Seed": ("seed", int),
        "CFG scale": ("guidance", float),
        "CFG Rescale": ("guidance_rescale", float),
        "Eta DDIM": ("eta", float),
        "Denoising strength": ("strength", float),
        "Variation seed": ("variation_seed", int),
        "Variation seed strength": ("variation_strength", float),
        "Hires upscale": ("Hires upscale", float),
    }
    solver: str | None = None
    for key, raw in pairs:
        value = _unquoted(raw)
        if key == "Eta" and solver == "ddim":  # until 2023; since then that is of ancestral samplers alone
            key = "Eta DDIM"
        if key in numbers:
            name, kind = numbers[key]
            with suppress(ValueError, OverflowError):
                number = kind(value)
                if math.isfinite(number):
                    yield name, number
        elif key == "Sampler":
            solver, sigmas = find_solver(value) or (value, None)
            yield "solver", solver
            if sigmas in ("karras", "exponential"):
                yield sigmas, True
            elif sigmas is not None:
                yield "sigmas", sigmas
        elif key == "Clip skip" and re.fullmatch(r"\d{1,3}", value, re.ASCII):
            yield "clip_skip", max(0, int(value) - 1)
        elif key == "Schedule type":
            sigmas = (A1111_AUTOMATIC if value == "Automatic" else A1111_SCHEDULES).get(
                (solver or "") if value == "Automatic" else value
            )
            yield "karras", sigmas == "karras"
            if sigmas == "exponential":
                yield "exponential", True
            elif sigmas not in (None, "karras"):
                yield "sigmas", sigmas
            if value in SPACING_OF:
                yield "spacing", SPACING_OF[value]
        elif key == "Seed resize from" and (size := re.fullmatch(r"(\d{1,6})x(\d{1,6})", value, re.ASCII)):
            yield from (("seed_width", int(size[1])), ("seed_height", int(size[2])))
        elif key == "Masked content" and value in MASKED_CONTENT.values():
            yield "masked_content", next(ours for ours, theirs in MASKED_CONTENT.items() if theirs == value)
        elif key == "Size" and (size := re.fullmatch(r"(\d{1,6})x(\d{1,6})", value, re.ASCII)):
            yield from (("width", int(size[1])), ("height", int(size[2])))
        else:
            yield {"Model": "model"}.get(key, key), value


def _unquoted(value: str) -> str:
    if value.startswith('"'):
        with suppress(ValueError):  # also where it names half a character, which no file can hold
            text = str(json.loads(value))
            text.encode()
            return text
    return value.strip()
