"""Whether a request may become a job at all: limits, and what the model, its adapters and nets can do."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import re
import time
import warnings
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from PIL import Image
from pydantic import ValidationError

from darkroom.errors import DarkroomError, InputError
from darkroom.models.adapters.adapter import by_layer
from darkroom.models.upscaler import Upscalers
from darkroom.picture_settings import DEFAULT_STEPS, PLAIN_UPSCALERS
from darkroom.sample.adapters import Tag, read_tags
from darkroom.sample.control import MAPS, check_mask_of, find_map
from darkroom.sample.generate import check_parts
from darkroom.sample.inputs import check_mask, masked_box, read_mask, upright
from darkroom.sample.prompt_schedule import readings
from darkroom.sample.prompts import read_parts
from darkroom.serve.api.guard import ANONYMOUS
from darkroom.serve.engine.runner import shape_of
from darkroom.serve.engine.shelf import MOST_LISTED
from darkroom.serve.engine.tickets import FORMATS, Shape
from darkroom.serve.jobs.store import Record
from darkroom.serve.request import (
    JOB_ID,
    MAX_SEED,
    PRIORITIES,
    AdapterChoice,
    ControlChoice,
    ControlUpload,
    PictureRequest,
    Refused,
    Uploads,
    say,
)
from darkroom.serve.settings import Limits

if TYPE_CHECKING:
    from darkroom.models.model import Model
    from darkroom.serve.engine.adapters import Library
    from darkroom.serve.engine.nets import Nets


OF_PROMPT = "the prompt cannot be read (the answer quotes it)"
MOST_PARTS = 256
"""Of all texts that a prompt is at one step or another (AND, [a|b]): encoding them is in no job's work."""


LATER = (
    *("hires", "controls", "only_masked", "exponential", "model"),
    *("sigmas", "variation_seed", "variation_strength", "seed_width", "seed_height", "masked_content"),
)
"""Fields that came after the first ones."""


def digest_of(
    request: PictureRequest, uploads: Uploads | None, together: Sequence[PictureRequest] = ()
) -> str:
    """The same for the same body, of which several requests are `together`: what makes sending a job twice
    harmless."""
    # What is not said is left out where it came later: the digests of jobs kept before stay theirs.
    later = {name for name in LATER if getattr(request, name) == PictureRequest.model_fields[name].default}
    values = request.model_dump(mode="json", exclude=later)
    for adapter in values["adapters"]:
        for name in ("text_weight", "blocks"):
            if adapter[name] in (None, []):
                del adapter[name]
    for control in values.get("controls", ()):
        if not control["soft"]:
            del control["soft"]
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for part in (uploads.image, uploads.mask) if uploads is not None else ():
        digest.update(hashlib.sha256(part or b"").digest())
    for part in itertools.chain.from_iterable(uploads.controls if uploads is not None else ()):
        digest.update(hashlib.sha256(part or b"").digest())
    for one in together if len(together) > 1 else ():
        digest.update(bytes.fromhex(digest_of(one, None)))
    return digest.hexdigest()


def check_job_id(job_id: str) -> None:
    """422 unless a client may call a job so."""
    if not re.fullmatch(JOB_ID, job_id):
        raise Refused(422, "invalid_id", "a job's id is 1 to 64 letters, digits, '-' or '_'", param="job_id")


def check_limits(request: PictureRequest, limits: Limits, key: str = ANONYMOUS) -> None:
    """422 naming the field that is over a bound, and the bound."""
    of_key = limits.of_key(key)
    at_once = min(limits.pictures, most_at_once(limits, key))
    bounds = (
        ("prompt", len(request.prompt), limits.prompt_chars, "characters"),
        ("negative", len(request.negative or ""), limits.prompt_chars, "characters"),
        ("num", request.num, min(at_once, of_key.pictures_per_day or at_once), "pictures"),
        ("steps", request.steps or 0, limits.steps, "steps"),
        ("guidance", request.guidance or 0, limits.guidance, ""),
        ("width", request.width or 0, limits.side_pixels, "pixels"),
        ("height", request.height or 0, limits.side_pixels, "pixels"),
        ("adapters", len(request.adapters), limits.adapters, "adapters"),
        ("controls", len(request.controls), limits.controls, "controls"),
        ("previews", request.previews, limits.previews, "previews"),
        ("deadline_s", request.deadline_s or 0, limits.deadline_s, "seconds"),
    )
    for name, given, most, unit in bounds:
        if given > most:
            raise Refused(422, "over_limit", f"{name}: at most {most:g} {unit}".rstrip(), param=name)
    for choice in request.adapters:
        if max(map(abs, (choice.weight, choice.text, *choice.blocks))) > limits.adapter_weight:
            raise Refused(
                422,
                "over_limit",
                f"adapters: weights of -{limits.adapter_weight:g} to {limits.adapter_weight:g}",
                param="adapters",
            )


def most_at_once(limits: Limits, key: str) -> int:
    """Pictures of a key that fit into an empty queue."""
    return min(limits.queue, limits.of_key(key).queue or limits.queue)


def with_tags_read(request: PictureRequest) -> PictureRequest:
    """A request without tags in its prompt (`<lora:NAME:WEIGHT>`), and what they name among its adapters.

    In every dialect; a name met twice adds up. Tags of the negative prompt only go, as in A1111.
    """
    try:
        prompt, tags = read_tags(request.prompt)
        negative, against = read_tags(request.negative or "")
        chosen = {choice.name: choice for choice in request.adapters}
        if not (tags or against) or len(chosen) < len(request.adapters):  # named twice: refused later
            return request
        for tag in tags:
            chosen[tag.name] = _with_tag(chosen.get(tag.name), tag)
        adapters = tuple(chosen.values())
    except InputError as error:
        message = f"prompt: {say(error)}"
        raise Refused(422, "invalid_value", message, param="prompt", logged=OF_PROMPT) from error
    except ValidationError as error:
        message = "prompt: <lora:NAME:WEIGHT> with a name, and a weight of -100 to 100"
        raise Refused(422, "invalid_value", message, param="prompt") from error
    changed = {"prompt": prompt, "adapters": adapters}
    return request.model_copy(update={**changed, "negative": negative or None} if against else changed)


def _with_tag(before: AdapterChoice | None, tag: Tag) -> AdapterChoice:
    """An adapter as a tag has it, besides what was asked of it already."""
    text, unet = (1.0 if weight is None else weight for weight in (tag.text, tag.unet))
    if before is not None:
        if before.blocks != tag.blocks:
            raise InputError(f"<lora:{tag.name}> twice with other blocks", mend="name it once")
        text, unet = before.text + text, before.weight + unet
    other = None if text == unet else text
    return AdapterChoice(name=tag.name, weight=unet, text_weight=other, blocks=tag.blocks)


def check_texts(model: Model, request: PictureRequest) -> None:
    """422 for a text of more parts than are read, or layers to skip that the encoder does not have.

    Tokenizes, so not for the event loop.
    """
    weighting, steps = request.weighting, request.steps or DEFAULT_STEPS
    for name, texts in (("prompt", (request.prompt, "")), ("negative", ("", request.negative or ""))):
        try:
            every = dict.fromkeys(
                text
                for reading in readings(*texts, weighting, steps)
                for text in (*reading.prompts, reading.negative)
            )
            num = 0
            for text in every:
                num += len(read_parts(model, text, weighting)[0])
                if num > MOST_PARTS:
                    raise InputError(
                        f"{len(every)} texts to encode", allowed=f"{MOST_PARTS} parts of the encoder's length"
                    )
        except InputError as error:
            message = f"{name}: {say(error)}"
            raise Refused(422, "over_limit", message, param=name, logged=OF_PROMPT) from error
    encoders: list[Any] = list(model.text_encoders)
    most = min(int(encoder.config.num_hidden_layers) for encoder in encoders)
    most -= 2 if model.is_sdxl else 1
    if request.clip_skip > most:
        raise Refused(422, "over_limit", f"clip_skip: at most {most} with this model", param="clip_skip")


def check_load(model: Model, shape: Shape, largest: float) -> None:
    """422 where a picture's steps would hold up everybody else's."""
    own = model.sample_size
    for param, one in (("width", shape), ("hires", shape.larger)):
        if one is None or one.load(own**2) <= largest:
            continue
        most = int(largest / one.row_cost * own**2)
        side = int(math.sqrt(most) / model.size_unit) * model.size_unit
        guided = " with guidance" if one.evaluations > 1 else ""
        if one.evaluations > 2:
            guided = f" with {one.evaluations - 1} prompts joined by AND"
        message = f"size: {one.width}x{one.height} is too large for this server"
        most_said = f"at most {most} pixels{guided}, such as {side}x{side}"
        raise Refused(422, "over_limit", f"{message}; {most_said}", param=param)


def check_shape(
    model: Model,
    request: PictureRequest,
    limits: Limits,
    image: Image.Image | None = None,
    *,
    mask: Image.Image | None = None,
) -> Shape:
    """What the request costs; 422 where the model cannot do it or it is too much work."""
    try:
        check_parts(model, has_mask=mask is not None)
        if mask is not None and image is not None:
            check_mask(mask, image)
            if request.only_masked is not None:
                masked_box(read_mask(mask), image.size, 0, image.size)
        elif request.only_masked is not None:
            raise InputError("only_masked without a mask")
    except InputError as error:
        raise Refused(422, "invalid_value", say(error), param="mask") from error
    for name in ("seed", "variation_seed"):
        if (getattr(request, name) or 0) + request.num - 1 > MAX_SEED:
            raise Refused(422, "over_limit", f"{name}: at most {MAX_SEED} for the last picture", param=name)
    if request.masked_content is not None and mask is None:
        raise Refused(
            422, "invalid_value", "masked_content: only with a picture and its mask", param="masked_content"
        )
    if image is not None and request.hires is not None:
        raise Refused(
            422, "invalid_value", "hires: not with a picture to start from; give a larger size", param="hires"
        )
    try:
        shape = shape_of(model, request, image)
    except InputError as error:
        raise Refused(422, "invalid_value", say(error), param=_param(error)) from error
    last = shape.larger or shape
    if max(last.width, last.height) > limits.side_pixels:
        param = "hires" if shape.larger else "width"
        raise Refused(422, "over_limit", f"size: at most {limits.side_pixels} pixels a side", param=param)
    # PNDM and sigmas of ddim_uniform have one more than was asked for.
    if max(shape.solver_steps, last.solver_steps) > limits.steps + 1:
        raise Refused(422, "over_limit", f"steps: at most {limits.steps}", param="steps")
    if shape.whole_cost * request.num > limits.work:
        raise Refused(
            422,
            "over_limit",
            f"pixels x U-Net calls x pictures (guidance counts twice): {shape.whole_cost * request.num:.4g}, "
            f"at most {limits.work:.4g}",
            param="num" if request.num > 1 else "width",
        )
    return shape


PARAMS = {
    "size": "width",
    "hires": "hires",
    "solver": "solver",
    "eta": "eta",
    "Karras": "karras",
    "exponential": "exponential",
    "sigmas": "sigmas",
    "spacing": "spacing",
    "timestep": "spacing",
    "seed": "seed",
    "adapter": "adapters",
}


def _param(error: InputError) -> str | None:
    """The field that a mistake found by `sample` is about."""
    words = re.findall(r"[A-Za-z]+", error.given)
    if words[1:2] == ["steps"] or words[:1] == ["steps"]:
        return "steps"
    return next((PARAMS[word] for word in words if word in PARAMS), None)


def opened_images(
    request: PictureRequest, uploads: Uploads | None, limits: Limits
) -> tuple[Image.Image | None, Image.Image | None]:
    """The picture to start from, and its mask; 422 unless they are of the formats and sizes allowed."""
    if uploads is None or uploads.image is None:
        lone = "strength" if request.strength is not None else "mask" if uploads and uploads.mask else None
        if lone is not None:
            raise Refused(422, "invalid_value", f"{lone}: only with a picture to start from", param=lone)
        return None, None
    mask = None if uploads.mask is None else checked_picture(uploads.mask, limits, "mask")
    return checked_picture(uploads.image, limits, "image"), mask


def checked_picture(content: bytes, limits: Limits, param: str) -> Image.Image:
    """An upright picture of PNG, JPEG or WebP, in its own mode; 422 with no more than that otherwise."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            pixels = image.width * image.height
            if pixels > limits.upload_pixels:
                raise Refused(
                    422, "over_limit", f"{param}: at most {limits.upload_pixels} pixels", param=param
                )
            image.load()
            return upright(image)
    except (Refused, MemoryError):  # the latter is no fault of the picture
        raise
    except Exception as error:  # whatever a decoder makes of hostile bytes
        raise Refused(
            422, "invalid_picture", f"{param}: no PNG, JPEG or WebP picture that can be read", param=param
        ) from error


def check_adapters(request: PictureRequest, library: Library | None, known: Collection[str]) -> None:
    """422 for an adapter that is not there, is known to be of no use, or is named twice.

    Without a library, of a model that is not loaded, only the names are looked at.
    """
    names = [choice.name for choice in request.adapters]
    for name in names:
        if name not in known:
            there = sorted(known)
            more = ", ..." if len(there) > MOST_LISTED else ""
            allowed = ", ".join(there[:MOST_LISTED]) + more or "none"
            message = f"adapters: no adapter '{name[:100]}' here; allowed: {allowed}"
            raise Refused(422, "unknown_adapter", message, param="adapters")
    if len(set(names)) < len(names):
        raise Refused(422, "invalid_value", "adapters: each may be named once", param="adapters")
    try:
        if library is not None:
            library.check(names)
            for choice in request.adapters:
                by_layer(library.bank.model, choice.blocks)
    except DarkroomError as error:
        raise Refused(422, "unusable_adapter", f"adapters: {say(error)}", param="adapters") from error


def check_upscaler(request: PictureRequest, upscalers: Upscalers) -> None:
    """422 for a second pass that begins with a network which is not there, or is none."""
    if request.hires is None or request.hires.upscaler in PLAIN_UPSCALERS:
        return
    try:
        network = upscalers.get(request.hires.upscaler)
    except DarkroomError as error:
        plain = ", ".join(PLAIN_UPSCALERS)
        raise Refused(422, "unknown_upscaler", f"hires: {say(error)}; or {plain}", param="hires") from error
    if network.name != request.hires.upscaler:
        raise Refused(422, "unknown_upscaler", f"hires: it is called {network.name}", param="hires")


def check_controls(
    request: PictureRequest, uploads: Uploads | None, limits: Limits, nets: Nets | None, shape: Shape
) -> None:
    """422 for a net that is not there or not for this model, and for pictures that cannot be read.

    Opens pictures and may read a net's configuration, so not for the event loop.
    """
    given = () if uploads is None else uploads.controls
    if len(given) != len(request.controls):
        raise Refused(422, "missing_field", "controls: a picture for each", param="controls")
    if not request.controls:
        return
    if nets is None:
        raise Refused(422, "unknown_net", "controls: this server has no nets (--controls)", param="controls")
    for i, (choice, pictures) in enumerate(zip(request.controls, given, strict=True)):
        try:
            _check_control(nets, choice, pictures, shape)
        except Refused:
            raise
        except DarkroomError as error:
            message = f"controls: {say(error)}"
            raise Refused(422, "unusable_control", message, param=f"controls.{i}") from error
        checked_picture(pictures.image, limits, f"controls.{i}.image")
        if pictures.mask is not None:
            checked_picture(pictures.mask, limits, f"controls.{i}.mask")
    try:
        nets.check_room(choice.net for choice in request.controls)
    except InputError as error:
        raise Refused(422, "over_limit", f"controls: {say(error)}", param="controls") from error


def check_net_names(request: PictureRequest, known: Collection[str]) -> None:
    """422 for a net that is not in the folder; whether it can be used shows when the model is loaded."""
    for choice in request.controls:
        if choice.net not in known:
            message = f"controls: no net '{choice.net[:100]}' here"
            raise Refused(422, "unusable_control", message, param="controls")


def served_maps() -> list[str]:
    """What can be made of a net's picture here: canny needs a package."""
    return [one for one in MAPS if one != "canny" or find_spec("cv2") is not None]


def check_map(name: str) -> None:
    """422 for a map that is not known, or that this server lacks a package for."""
    served = served_maps()
    try:
        find_map(name)
        known = name.partition(":")[0] in served
    except InputError:
        known = False
    if not known:
        shown = name[:40].encode("ascii", "replace").decode()
        message = f"controls: map '{shown}'; allowed here: {', '.join(served)}"
        raise Refused(422, "invalid_value", message, param="controls")


def _check_control(nets: Nets, choice: ControlChoice, pictures: ControlUpload, shape: Shape) -> None:
    check_map(choice.map)
    known = nets.describe(choice.net)
    check_mask_of(choice.map, known.kind, choice.net, has_mask=pictures.mask is not None)
    for one in filter(None, (shape, shape.larger)):
        if one.width % known.size_unit or one.height % known.size_unit:
            raise InputError(
                f"size {one.width}x{one.height} with {known.kind} '{choice.net}'",
                allowed=f"sides that are multiples of {known.size_unit}",
            )


UPLOADS = "uploads"
"""In the result of a row that is not over: SHA-256 of each picture that came with the job, by file name."""


def check_uploads(record: Record, uploads: Uploads | None) -> None:
    """422 where pictures that came with a job are gone or changed: nothing else is drawn in its stead."""
    came = record.result.get(UPLOADS)
    if came is None:  # of a server that did not note them
        return
    there = _hashes(uploads)
    for name, was in came.items():
        if there.get(name) != was:
            state = "changed" if name in there else "gone"
            message = f"{name.removesuffix('.upload')}: the picture that came with the job is {state}"
            raise Refused(422, "upload_lost", message)


def _hashes(uploads: Uploads | None) -> dict[str, str]:
    files = {} if uploads is None else uploads.files()
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def new_record(
    uid: str,
    server: str,
    key: str,
    job_id: str,
    digest: str,
    request: PictureRequest,
    shape: Shape,
    uploads: Uploads | None = None,
) -> Record:
    """The row of a job that is accepted now. Hashes its uploads, so not for the event loop."""
    now_s = time.time()
    return Record(
        uid=uid,
        server=server,
        key=key,
        id=job_id,
        digest=digest,
        state="queued",
        request=request.model_dump_json(),
        created_s=now_s,
        result={} if uploads is None else {UPLOADS: _hashes(uploads)},
        num=request.num,
        priority=PRIORITIES[request.priority],
        work=shape.whole_cost * request.num,
        due_s=None if request.deadline_s is None else now_s + request.deadline_s,
    )
