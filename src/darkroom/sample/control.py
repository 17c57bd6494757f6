"""Pictures that steer other pictures: ControlNets, LLLites, T2I-Adapters and IP-Adapters by row.

Each row of a batch has nets of its own, with weight, start and end: rows without, with one and with several
nets share the U-Net calls. A net runs for the rows that have it at this step, and for no others.

Shapes: B rows, C H W latents, h w pixels, D channels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageFilter

from darkroom.errors import InputError, MissingExtra, ModelError
from darkroom.hardware.accelerator import new_tensor
from darkroom.hardware.system import split_weight
from darkroom.models.adapters.bank import take_rows
from darkroom.models.control import ControlNet, Net, read_control
from darkroom.models.image_prompt import STRENGTH, TOKENS, ImagePrompt
from darkroom.models.lllite import LITE, LITE_STRENGTH, ControlNetLite
from darkroom.sample.denoise import NEGATIVE, Owner, Row, Unet

if TYPE_CHECKING:
    from darkroom.models.model import Model
    from darkroom.sample.backends.backend import Backend

MAX_CONTROLS = 8
MAX_WEIGHT = 10.0
SAME_SHAPE = 0.05
"""How far a control picture's sides may be from the shape that is drawn before that is said."""
CANNY_LOW, CANNY_HIGH = 100, 200
SOFT_FEATURES = (0.25, 0.62, 0.825, 1.0)
"""Of a T2I-Adapter's levels, as A1111's ControlNet extension has them; of a ControlNet's they rise evenly
from a tenth, as there and in diffusers."""
BLUR_RADIUS, COLOUR_TILE = 4, 64
SCRIBBLE_THRESHOLD = 32


def _canny(image: Image.Image, low: float = CANNY_LOW, high: float = CANNY_HIGH) -> Image.Image:
    try:
        import cv2
    except ModuleNotFoundError as error:
        raise MissingExtra("opencv-python-headless", "control") from error
    edges = cv2.Canny(np.asarray(image.convert("L")), low, high)
    return Image.fromarray(np.asarray(edges, np.uint8)).convert("RGB")


def _blur(image: Image.Image, sigma: float = BLUR_RADIUS) -> Image.Image:
    return image.convert("RGB").filter(ImageFilter.GaussianBlur(sigma))


def _scribble(image: Image.Image, threshold: float = SCRIBBLE_THRESHOLD) -> Image.Image:
    """Lines as a felt pen draws them: differences of two Gaussians, A1111's 'scribble_xdog'."""
    values_CHW = torch.from_numpy(np.array(image.convert("RGB"), np.float32)).permute(2, 0, 1)
    fine, coarse = (_blurred(values_CHW, sigma) for sigma in (0.5, 5.0))
    lines = 2 * (coarse - fine).amin(dim=0) > threshold
    return Image.fromarray(lines.numpy().astype(np.uint8) * 255).convert("RGB")


def _blurred(values_CHW: torch.Tensor, sigma: float) -> torch.Tensor:
    """A Gaussian four sigma wide, mirrored at the border as OpenCV does; Pillow's is of bytes alone."""
    reach = round(4 * sigma)
    away = torch.arange(-reach, reach + 1, dtype=torch.float32)
    weights = torch.exp(-(away**2) / (2 * sigma**2))
    weights /= weights.sum()
    padding = [(0, 0), (reach, reach), (reach, reach)]
    x_CHW = torch.from_numpy(np.pad(values_CHW.numpy(), padding, mode="reflect"))
    x_CHW = torch.nn.functional.conv2d(x_CHW[:, None], weights.view(1, 1, -1, 1))[:, 0]
    return torch.nn.functional.conv2d(x_CHW[:, None], weights.view(1, 1, 1, -1))[:, 0]


def _colour(image: Image.Image) -> Image.Image:
    """Squares of 64 pixels in their mean colour, as A1111's 't2ia_color_grid'."""
    small = (max(1, image.width // COLOUR_TILE), max(1, image.height // COLOUR_TILE))
    return (
        image.convert("RGB")
        .resize(small, Image.Resampling.BICUBIC)
        .resize(image.size, Image.Resampling.NEAREST)
    )


MAPS: dict[str, Callable[..., Image.Image]] = {
    "none": lambda image: image,
    "canny": _canny,
    "blur": _blur,
    "invert": lambda image: Image.eval(image.convert("RGB"), lambda value: 255 - value),
    "scribble": _scribble,
    "colour": _colour,
    "inpaint": lambda image: image,
}
"""What makes the map that a net reads of a picture; `none`: it is the map (depth, pose, tile); `inpaint`: the
picture with what its mask has white unknown."""
INPAINT, UNKNOWN = "inpaint", -1.0
"""What an inpainting ControlNet reads where the picture is unknown; pixels are 0 to 1."""


MAP_NUMBERS = {"canny": ("low", "high"), "blur": ("sigma",), "scribble": ("threshold",)}
"""Numbers that may follow a map's name: `canny:LOW:HIGH`, `blur:SIGMA`, `scribble:THRESHOLD`."""


def find_map(text: str) -> Callable[[Image.Image], Image.Image]:
    """A map by its name, with its numbers. InputError for what is not known."""
    name, *given = text.split(":")
    numbers = [float(one) for one in given if re.fullmatch(r"\d{1,4}(\.\d{1,6})?", one, re.ASCII)]
    names = MAP_NUMBERS.get(name, ())
    if name not in MAPS or len(numbers) < len(given) or len(given) > len(names):
        allowed = ", ".join(MAPS)
        raise InputError(
            f"control map '{text}'", allowed=f"{allowed}; canny:LOW:HIGH, blur:SIGMA, scribble:THRESHOLD"
        )
    return partial(MAPS[name], **dict(zip(names, numbers, strict=False)))


@dataclass(frozen=True, repr=False)
class Control:
    """One net with the picture it reads and how much it counts."""

    net: str | Path | Net
    """A folder, a .safetensors file, or one read before (`models.read_control`)."""
    image: Image.Image | str | Path
    """PNG, JPEG, WebP; brought to the size of the pictures that are made."""
    weight: float = 1.0
    start: float = 0.0
    """Share of the steps after which it begins."""
    end: float = 1.0
    """Share of the steps after which it stops."""
    guess: bool = False
    """Guess mode: only the prompted half of a guided row, and deep residuals count more than shallow ones."""
    map: str | Callable[[Image.Image], Image.Image] = "none"
    """One of `MAPS`, with its numbers (`canny:64:128`), or a function of one's own from picture to map."""
    mask: Image.Image | str | Path | None = None
    """Of an IP-Adapter: white where it is at work. Of map inpaint: white where the picture is unknown."""
    image_encoder: str | Path | None = None
    """Of an IP-Adapter: the folder of its CLIP image encoder, where it does not lie next to it."""
    soft: bool = False
    """Deep residuals count more than shallow ones in both halves (A1111: 'My prompt is more important')."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and abs(self.weight) <= MAX_WEIGHT):
            raise InputError(f"control weight {self.weight}", allowed=f"-{MAX_WEIGHT:g} to {MAX_WEIGHT:g}")
        if not 0 <= self.start < self.end <= 1:
            raise InputError(f"control from {self.start:g} to {self.end:g}", allowed="0 <= start < end <= 1")
        if isinstance(self.map, str):
            find_map(self.map)
        if self.map == INPAINT and self.mask is None:
            raise InputError("control map inpaint without a mask", mend="give one, white what is unknown")

    @property
    def name(self) -> str:
        """Of its net."""
        return Path(self.net).stem if isinstance(self.net, (str, Path)) else self.net.name

    @classmethod
    def parsed(cls, text: str, image_encoder: Path | None = None) -> Control:
        """From the command line: `NET=PICTURE[:WEIGHT][,start=S][,end=E][,map=MAP][,mask=FILE][,guess]`, or
        `soft`."""
        form = (
            "NET=PICTURE[:WEIGHT][,start=0.1][,end=0.8][,map=canny][,mask=FILE][,guess][,soft], "
            "NET a folder or file"
        )
        first, *more = text.split(",")
        net, equals, rest = first.partition("=")
        if not (equals and net and rest):
            raise InputError(f"--control {text}", allowed=form)
        image, weight = rest, 1.0
        head, tail = split_weight(rest)
        if head != rest and not Path(rest).exists():
            try:
                image, weight = head, float(tail)
            except ValueError as error:
                raise InputError(f"--control {text}", allowed=form) from error
        given: dict[str, Any] = {}
        for part in more:
            key, equals, value = part.partition("=")
            try:
                if key in ("guess", "soft") and not equals:
                    given[key] = True
                elif key in ("start", "end"):
                    given[key] = float(value)
                elif key in ("map", "mask") and value:
                    given[key] = value
                else:
                    raise ValueError
            except ValueError as error:
                raise InputError(f"--control {text}: '{part}'", allowed=form) from error
        return cls(net, image, weight, image_encoder=image_encoder, **given)


@dataclass(frozen=True, eq=False, repr=False)
class RowControl:
    """A net on one row: what it made of the picture at the row's size, and when it is at work."""

    net: Net
    encoded: tuple[torch.Tensor, ...]
    """Of one picture: a ControlNet's hint [D, H, W]; a T2I-Adapter's features by level, each [D, H, W]; an
    LLLite's picture by resolution, each [L, D]; an IP-Adapter's tokens and those of no picture, each
    [N, D]."""
    weight: float
    start: float
    end: float
    guess: bool
    mask_hw: torch.Tensor | None = None
    """Of an IP-Adapter: where it is at work, in the picture's pixels."""
    soft: bool = False

    def active(self, row: Row, unguided: bool) -> bool:
        """Whether it works at a row's next step; `unguided` is the half with the negative prompt."""
        steps = len(row.table)
        begun, over = row.step / steps >= self.start, (row.step + 1) / steps > self.end
        only_prompted = not isinstance(self.net, ImagePrompt) and (self.guess or self.net.pools)
        return begun and not over and not (unguided and only_prompted)

    def scales(self, levels: int) -> list[float]:
        """How much the residual of each level counts; in guess and soft mode from a part to all of the
        weight."""
        softened = isinstance(self.net, ControlNet) and not self.net.pools
        if not softened or not (self.guess or self.soft):
            return [self.weight] * levels
        if self.net.kind == "t2i-adapter" and levels == len(SOFT_FEATURES):
            return [self.weight * share for share in SOFT_FEATURES]
        return [self.weight * 10 ** (i / (levels - 1) - 1) for i in range(levels)]


@dataclass(repr=False)
class Controls:
    """The controls of one call, read and matched to the model, and what rows get of them."""

    controls: list[Control] = field(default_factory=list)
    nets: list[Net] = field(default_factory=list)
    images: list[Image.Image] = field(default_factory=list)
    """What maps are made of at the size that is drawn, or maps that a user's own function made."""
    masks: list[Image.Image | None] = field(default_factory=list)
    _rows: dict[tuple[int, int], tuple[RowControl, ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, controls: Sequence[Control], model: Model) -> Controls:
        """InputError for too many or an unreadable picture; ModelError for a net of another model."""
        from darkroom.sample.inputs import read_image, read_mask

        if len(controls) > MAX_CONTROLS:
            raise InputError(f"{len(controls)} controls", allowed=f"at most {MAX_CONTROLS}")
        images = [read_image(one.image) for one in controls]
        masks = [None if one.mask is None else read_mask(one.mask) for one in controls]
        nets: dict[str, Net] = {}
        found = []
        for one in controls:
            if not isinstance(one.net, (str, Path)):
                one.net.fit(model)
                found.append(one.net)
                continue
            key = str(Path(one.net).resolve())
            if key not in nets:
                nets[key] = read_control(one.net, model, image_encoder=one.image_encoder)
            found.append(nets[key])
        for one, net in zip(controls, found, strict=True):
            check_mask_of(one.map, net.kind, net.name, has_mask=one.mask is not None)
        images = [
            image if _made_at_size(one, net) else _map_of(one)(image)
            for one, net, image in zip(controls, found, images, strict=True)
        ]
        return cls(list(controls), found, images, masks)

    @property
    def in_attention(self) -> list[ImagePrompt | ControlNetLite]:
        """The IP-Adapters and LLLites, each once, in the order in which the U-Net has them installed."""
        found = [net for net in self.nets if isinstance(net, (ImagePrompt, ControlNetLite))]
        return list(dict.fromkeys(found))

    def cropped(self, box: tuple[int, int, int, int], whole: tuple[int, int]) -> Controls:
        """For a part of a picture of a size (width, height): maps and masks are of the whole, as it is.

        The picture that an IP-Adapter reads is no map: it stays.
        """

        def part(image: Image.Image) -> Image.Image:
            return image.resize(whole, Image.Resampling.LANCZOS).crop(box)

        images = [
            image if isinstance(net, ImagePrompt) else part(image)
            for image, net in zip(self.images, self.nets, strict=True)
        ]
        masks = [None if mask is None else part(mask) for mask in self.masks]
        return Controls(self.controls, self.nets, images, masks)

    def notes(self, size: tuple[int, int]) -> list[str]:
        """That pictures of another shape than those drawn (width, height) are stretched, as in diffusers."""
        return [
            f"the picture of {net.kind} '{net.name}' is {image.width}x{image.height}: stretched to the shape "
            f"of {size[0]}x{size[1]}"
            for net, image in zip(self.nets, self.images, strict=True)
            if not isinstance(net, ImagePrompt)
            and not math.isclose(image.width * size[1], image.height * size[0], rel_tol=SAME_SHAPE)
        ]

    def to(self, backend: Backend) -> None:
        """Bring the nets to where the backend computes. InputError where it cannot add residuals."""
        if not self.nets:
            return
        check_backend(backend)
        for net in self.nets:
            net.to(backend.device, backend.dtype)
            make_alike(net, backend.optimised)

    def at(self, size: tuple[int, int], latent_shape: tuple[int, int, int]) -> tuple[RowControl, ...]:
        """For rows of pictures of a size (width, height); encoded once, however many rows there are."""
        if size not in self._rows:
            self._rows[size] = tuple(
                RowControl(
                    net,
                    self._encoded(one, net, image, mask, size, latent_shape),
                    one.weight,
                    one.start,
                    one.end,
                    one.guess,
                    _mask(mask, size, net) if mask is not None and isinstance(net, ImagePrompt) else None,
                    one.soft,
                )
                for one, net, image, mask in zip(
                    self.controls, self.nets, self.images, self.masks, strict=True
                )
            )
        return self._rows[size]

    def _encoded(
        self,
        one: Control,
        net: Net,
        image: Image.Image,
        mask: Image.Image | None,
        size: tuple[int, int],
        latent_shape: tuple[int, int, int],
    ) -> tuple[torch.Tensor, ...]:
        if isinstance(net, ImagePrompt):
            return net.encode(image)
        if any(side % net.size_unit for side in size):
            raise InputError(
                f"size {size[0]}x{size[1]} with {net.kind} '{net.name}'",
                allowed=f"sides that are multiples of {net.size_unit}",
            )
        if _made_at_size(one, net):
            image = _map_of(one)(image.convert("RGB").resize(size, Image.Resampling.LANCZOS))
        encoded = net.encode(_with_unknown(_to_map(image, size, net.picture_channels), mask, size))
        if net.kind == "controlnet" and encoded[0].shape[2:] != latent_shape[1:]:
            height, width = encoded[0].shape[2:]
            raise ModelError(
                f"ControlNet '{net.name}' makes {width}x{height} of {size[0]}x{size[1]} pixels, "
                f"the latents have {latent_shape[2]}x{latent_shape[1]}",
                mend="it is for a VAE of another factor",
            )
        return tuple(one[0] for one in encoded)

    def parameters(self) -> list[dict[str, Any]]:
        """What pictures say of them."""
        return [
            {
                "name": net.name,
                "kind": net.kind,
                "sha256": net.sha256,
                "weight": one.weight,
                "start": one.start,
                "end": one.end,
                **({"guess": True} if one.guess else {}),
                **({"soft": True} if one.soft else {}),
                "map": one.map if isinstance(one.map, str) else getattr(one.map, "__name__", "own"),
            }
            for one, net in zip(self.controls, self.nets, strict=True)
        ]


def _map_of(control: Control) -> Callable[[Image.Image], Image.Image]:
    return find_map(control.map) if isinstance(control.map, str) else control.map


def _made_at_size(control: Control, net: Net) -> bool:
    """Whether a map is made once the picture has the size that is drawn: lines, squares and radii are of that
    many pixels, and made of a large photograph they would vanish with its resizing."""
    return isinstance(control.map, str) and not isinstance(net, ImagePrompt)


def make_alike(net: Net, optimised: Sequence[str]) -> None:
    """Give a ControlNet the lean blocks that the U-Net has: of a small model's they are half the time."""
    from darkroom.sample.optimisations.attention import make_lean

    if isinstance(net, ControlNet) and "lean" in optimised:
        make_lean(net.module)


def check_backend(backend: Backend) -> None:
    """InputError where a backend cannot add residuals."""
    if backend.name not in ("torch", "compile"):
        raise InputError(f"controls with backend {backend.name}", allowed="torch, compile")
    if any(name.partition(":")[0] in ("feature_cache", "cuda_graphs") for name in backend.optimised):
        raise InputError(
            f"controls with {', '.join(backend.optimised)}",
            mend="leave feature_cache and cuda_graphs out",
        )


def _to_map(image: Image.Image, size: tuple[int, int], channels: int) -> torch.Tensor:
    """A map at a size (width, height) as nets read it: [1, channels, h, w] of 0 to 1."""
    mode = {1: "L", 3: "RGB"}.get(channels)
    if mode is None:
        raise ModelError(f"a net that reads pictures of {channels} channels", allowed="1, 3")
    array = np.asarray(image.convert(mode).resize(size, Image.Resampling.LANCZOS), np.float32) / 255
    return torch.from_numpy(array.reshape(size[1], size[0], channels).transpose(2, 0, 1)[None].copy())


def _with_unknown(map_1Chw: torch.Tensor, mask: Image.Image | None, size: tuple[int, int]) -> torch.Tensor:
    """A map that is unknown where a mask is white."""
    from darkroom.sample.inputs import to_mask

    return map_1Chw if mask is None else map_1Chw.masked_fill(to_mask(mask, size) > 0, UNKNOWN)


def check_mask_of(map_name: object, kind: str, name: str, *, has_mask: bool) -> None:
    """InputError unless a net has a mask where it takes one."""
    inpaints = map_name == INPAINT
    if inpaints and kind != "controlnet":
        raise InputError(f"control map inpaint for {kind} '{name}'", allowed="ControlNets")
    if inpaints and not has_mask:
        raise InputError(f"control map inpaint for '{name}' without a mask", mend="give the mask")
    if has_mask and not inpaints and kind != "ip-adapter":
        raise InputError(f"a mask for {kind} '{name}'", allowed="masks of IP-Adapters and of map inpaint")


def _mask(mask: Image.Image, size: tuple[int, int], net: ImagePrompt) -> torch.Tensor:
    from darkroom.sample.inputs import to_mask

    return to_mask(mask, size)[0, 0].to(net.layers[0][0].device)


class ControlledUnet:
    """A U-Net with what each row's nets add; rows without any cost nothing.

    `in_attention` are the IP-Adapters and LLLites that are installed in it, by place; others may come
    between calls.
    """

    def __init__(
        self, unet: Unet, in_attention: Mapping[int, ImagePrompt | ControlNetLite] | None = None
    ) -> None:
        self.unet = unet
        self.in_attention: Mapping[int, ImagePrompt | ControlNetLite] = (
            {} if in_attention is None else in_attention
        )

    def __call__(
        self, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, added: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Without knowing whose rows these are: no nets."""
        return self.unet(x, t, text, added)

    def of_rows(self, owners: Sequence[Owner]) -> Unet:
        """The call for rows of which is known whose they are."""
        inner: Callable[[Sequence[Owner]], Unet] | None = getattr(self.unet, "of_rows", None)
        unet = self.unet if inner is None else inner(owners)
        at_work = [
            (place, control, text == NEGATIVE)
            for place, (row, text) in enumerate(owners)
            for control in row.controls
            if control.weight and control.active(row, text == NEGATIVE)
        ]
        if not at_work:
            return unet
        places = {net: place for place, net in tuple(self.in_attention.items())}
        return partial(_controlled, unet, at_work, places)


AtWork = Sequence[tuple[int, RowControl, bool]]
"""Of each net at work: its row's place in the call, the control, whether the row is the unguided half."""


def _controlled(
    unet: Unet,
    at_work: AtWork,
    places_of: Mapping[ImagePrompt | ControlNetLite, int],
    x: torch.Tensor,
    t: torch.Tensor,
    text: torch.Tensor,
    added: dict[str, torch.Tensor],
) -> torch.Tensor:
    """One U-Net call: each net runs once for all the rows that have it, its residuals are added up by row."""
    more: dict[str, torch.Tensor] = {}
    for net in dict.fromkeys(control.net for _, control, _ in at_work):
        mine = [one for one in at_work if one[1].net is net]
        if isinstance(net, ImagePrompt):
            place = places_of[net]
            tokens, strength = _image_tokens(net, mine, text)
            more |= {f"{TOKENS}_{place:02}": tokens, f"{STRENGTH}_{place:02}": strength}
        elif not isinstance(net, ControlNetLite):
            _add_residuals(more, net, mine, (x, t, text), added)
    for i, (lite, controls) in enumerate(_lite_turns(at_work)):
        which = f"{i:02}_{places_of[lite]:02}"
        more[f"{LITE_STRENGTH}_{which}"] = new_tensor(
            [0.0 if one is None else one.weight for one in (controls.get(place) for place in range(len(x)))],
            x.device,
        )
        for j, level in enumerate(next(iter(controls.values())).encoded):
            rows = level.new_zeros(len(x), *level.shape)
            for place, control in controls.items():
                rows[place] = control.encoded[j]
            more[f"{LITE}_{which}_{j:02}"] = rows
    return unet(x, t, text, {**added, **more})


def _add_residuals(
    sums: dict[str, torch.Tensor],
    net: ControlNet,
    mine: AtWork,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    added: dict[str, torch.Tensor],
) -> None:
    """Add what a ControlNet or T2I-Adapter gives the rows that have it to what others gave them."""
    x, t, text = inputs
    # A row that has the same net twice takes two places of the net's batch.
    places = new_tensor([place for place, _, _ in mine], x.device)
    levels = [
        torch.stack([control.encoded[i] for _, control, _ in mine]) for i in range(len(mine[0][1].encoded))
    ]
    if net.kind == "controlnet":
        more = take_rows(added, places, [place for place, _, _ in mine])
        levels = net.residuals(x[places], t[places], text[places], levels[0], more)
    names = net.names(len(levels))
    scales = new_tensor([control.scales(len(levels)) for _, control, _ in mine], x.device)
    for i, (name, level) in enumerate(zip(names, levels, strict=True)):
        weighted = level * scales[:, i, None, None, None].to(level.dtype)
        if name not in sums:
            sums[name] = level.new_zeros(len(x), *level.shape[1:])
        sums[name].index_add_(0, places, weighted)


def _lite_turns(at_work: AtWork) -> Iterator[tuple[ControlNetLite, dict[int, RowControl]]]:
    """LLLites with the rows that have them, so that each row's come in the order in which it names them."""
    waiting: dict[int, list[RowControl]] = {}
    for place, control, _ in at_work:
        if isinstance(control.net, ControlNetLite):
            waiting.setdefault(place, []).append(control)
    while waiting:
        net = next(iter(waiting.values()))[0].net
        assert isinstance(net, ControlNetLite)
        mine = {place: row.pop(0) for place, row in waiting.items() if row[0].net is net}
        waiting = {place: row for place, row in waiting.items() if row}
        yield net, mine


def _image_tokens(prompt: ImagePrompt, mine: AtWork, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An IP-Adapter's tokens [B, N, D] and strengths [B, h, w], of all rows of a call; 0 where it is not."""
    masks = [control.mask_hw for _, control, _ in mine]
    shape = next((mask.shape for mask in masks if mask is not None), torch.Size((1, 1)))
    tokens = text.new_zeros(len(text), prompt.num_tokens, prompt.layers[0][0].shape[1])
    strength = torch.zeros(len(text), *shape, device=text.device)
    for (place, control, unguided), mask in zip(mine, masks, strict=True):
        tokens[place] = control.encoded[1 if unguided else 0]
        strength[place] = control.weight * (1.0 if mask is None else mask)
    return tokens, strength
