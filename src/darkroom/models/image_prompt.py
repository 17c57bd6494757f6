"""IP-Adapters: pictures as prompts (Ye et al. 2023, arXiv 2308.06721), plain, plus and full.

A picture becomes some tokens that the U-Net's cross-attentions read after the text, with keys and values of
their own. Here every row has its own tokens, weight and mask; a row without any has weight 0.

Shapes: B rows, N tokens, D text width, L places of a level, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from darkroom.errors import InputError, ModelError, is_system_failure
from darkroom.libraries import quiet
from darkroom.models.folder import read_part

if TYPE_CHECKING:
    from darkroom.models.lllite import ControlNetLite
    from darkroom.models.model import Model

IMAGE_PREFIX, LAYER_PREFIX = "image_proj.", "ip_adapter."
ENCODER_FOLDER = "image_encoder"
TOKENS, STRENGTH = "image_tokens", "image_strength"
"""Names under which the U-Net gets tokens [B, N, D] and strength [B, h, w] of each installed adapter."""


@dataclass(eq=False, repr=False)
class ImagePrompt:
    """An IP-Adapter's weights, and the encoder of pictures that it was trained with."""

    name: str
    projection: Any
    """diffusers' module from the encoder's features to tokens."""
    layers: list[tuple[torch.Tensor, torch.Tensor]]
    """Of each cross-attention in the U-Net's order: weights of keys and of values, [out, D]."""
    encoder: Any
    sha256: str

    kind = "ip-adapter"

    @property
    def is_plain(self) -> bool:
        """Whether it reads the encoder's projection of the whole picture, not its hidden states."""
        from diffusers.models.embeddings import ImageProjection

        return isinstance(self.projection, ImageProjection)

    @property
    def num_tokens(self) -> int:
        """That a picture becomes."""
        projection = self.projection
        for name in ("num_image_text_embeds", "latents"):
            if (found := getattr(projection, name, None)) is not None:
                return int(found) if isinstance(found, int) else int(found.shape[1])
        side: int = self.encoder.config.image_size // self.encoder.config.patch_size
        return side * side + 1

    @property
    def num_bytes(self) -> int:
        """Of its weights and the encoder's."""
        return sum(weight.nbytes for weight in self.weights)

    @property
    def weights(self) -> list[torch.Tensor]:
        """Of all its parts."""
        own = [weight for module in (self.projection, self.encoder) for weight in module.parameters()]
        return own + [weight for layer in self.layers for weight in layer]

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """On a device and in a precision, in place."""
        with quiet():
            self.projection.to(device, dtype)
            self.encoder.to(device, dtype)
        self.layers = [(keys.to(device, dtype), values.to(device, dtype)) for keys, values in self.layers]

    def fit(self, model: Model) -> None:
        """ModelError unless it was made for U-Nets of this shape."""
        model.needs_unet(f"IP-Adapter '{self.name}'")
        attentions = [attention for _, attention in cross_attentions(model.unet)]
        wide = [(a.to_k.out_features, a.to_k.in_features) for a in attentions]
        if [tuple(keys.shape) for keys, _ in self.layers] != wide:
            raise ModelError(
                f"IP-Adapter '{self.name}' is for another model: {len(self.layers)} layers for text of width "
                f"{self.layers[0][0].shape[1]}",
                allowed=f"{len(wide)} layers for text of width {wide[0][1]}, as {model.family} has",
            )

    @torch.no_grad()
    def encode(self, image: Image.Image) -> tuple[torch.Tensor, torch.Tensor]:
        """A picture's tokens [N, D], and those of no picture, which the unguided half reads."""
        weight = next(self.encoder.parameters())
        pixels = _pixels(image, self.encoder.config.image_size).to(weight.device, weight.dtype)
        if self.is_plain:
            features = self.encoder(pixels).image_embeds
            none = torch.zeros_like(features)
        else:
            features, none = (
                self.encoder(one, output_hidden_states=True).hidden_states[-2]
                for one in (pixels, torch.zeros_like(pixels))
            )
        return self.projection(features)[0], self.projection(none)[0]


def _pixels(image: Image.Image, side: int) -> torch.Tensor:
    """As CLIP's own preprocessing: the shorter side resized, the middle cut out, its mean and deviation."""
    from transformers import CLIPImageProcessor

    with quiet():
        read = CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
        pixels: torch.Tensor = read(image.convert("RGB"), return_tensors="pt").pixel_values
    return pixels


def _attentions(unet: Any) -> list[tuple[str, Any]]:
    names = [name.removesuffix(".processor") for name in unet.attn_processors]
    return [(name, unet.get_submodule(name)) for name in names]


def cross_attentions(unet: Any) -> list[tuple[str, Any]]:
    """The U-Net's cross-attentions in the order in which IP-Adapters number them."""
    return [(name, attention) for name, attention in _attentions(unet) if name.endswith("attn2")]


def is_image_prompt(keys: Sequence[str]) -> bool:
    """Whether a file's tensors are an IP-Adapter's."""
    return any(key.startswith(LAYER_PREFIX) for key in keys)


def read_image_prompt(
    path: Path, name: str, sha256: str, model: Model, encoder: str | Path | None = None
) -> ImagePrompt:
    """From a .safetensors file; `encoder` is the folder of its CLIP image encoder.

    Unless given it is sought next to the file, one folder up, and in the model's folder (`image_encoder`).
    ModelError for a file of another model or kind.
    """
    from diffusers.loaders.unet import UNet2DConditionLoadersMixin
    from safetensors.torch import load_file
    from transformers import CLIPVisionModelWithProjection

    tensors = load_file(str(path))
    image = {
        k.removeprefix(IMAGE_PREFIX): v.float() for k, v in tensors.items() if k.startswith(IMAGE_PREFIX)
    }
    of_faces = "norm.weight" in image and "proj.weight" not in image
    if of_faces or "perceiver_resampler.proj_in.weight" in image:
        raise ModelError(f"'{path}' is an IP-Adapter for faces", allowed="plain, plus and full ones")
    numbers = sorted({int(key.split(".")[1]) for key in tensors if key.startswith(LAYER_PREFIX)})
    try:
        layers = [
            tuple(  # copies, for the same reason as in `embeddings.read_embedding`
                tensors[f"{LAYER_PREFIX}{n}.to_{part}_ip.weight"].to(torch.float32, copy=True)
                for part in "kv"
            )
            for n in numbers
        ]
        projection = UNet2DConditionLoadersMixin._convert_ip_adapter_image_proj_to_diffusers(
            None, image, low_cpu_mem_usage=False
        )
    except (KeyError, RuntimeError) as error:
        if is_system_failure(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"'{path}' is no IP-Adapter that is known: {reason}") from error
    found = ImagePrompt(name, projection, layers, None, sha256)
    found.fit(model)
    found.encoder = read_part(CLIPVisionModelWithProjection, _encoder_folder(path, model, encoder))
    for module in (found.projection, found.encoder):
        module.eval().requires_grad_(False)
    _check_encoder(found)
    return found


def describe_image_prompt(
    path: Path,
    name: str,
    shapes: Mapping[str, Sequence[int]],
    model: Model,
    encoder: str | Path | None = None,
) -> Path:
    """The folder of an IP-Adapter's encoder, with no more than the shapes of its tensors known.

    ModelError for one of another model, or without an encoder.
    """
    numbers = sorted({int(key.split(".")[1]) for key in shapes if key.startswith(LAYER_PREFIX)})
    try:
        layers = [
            (
                torch.empty(shapes[f"{LAYER_PREFIX}{n}.to_k_ip.weight"], device="meta"),
                torch.empty(shapes[f"{LAYER_PREFIX}{n}.to_v_ip.weight"], device="meta"),
            )
            for n in numbers
        ]
    except KeyError as error:
        raise ModelError(f"'{path}' is no IP-Adapter that is known: {error}") from error
    ImagePrompt(name, None, layers, None, "").fit(model)
    return _encoder_folder(path, model, encoder)


def _encoder_folder(path: Path, model: Model, given: str | Path | None) -> Path:
    places = [path.parent / ENCODER_FOLDER, path.parent.parent / ENCODER_FOLDER]
    if model.path is not None:
        places.append(Path(model.path) / ENCODER_FOLDER)
    if given is not None:
        places = [Path(given)]
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise ModelError(
        f"no image encoder for IP-Adapter '{path.stem}'",
        allowed="a folder of CLIP's vision model: " + ", ".join(f"'{place}'" for place in places),
        mend="--image-encoder FOLDER",
    )


def _check_encoder(found: ImagePrompt) -> None:
    """ModelError unless the projection takes what the encoder gives: its projection, or its hidden states."""
    config, projection = found.encoder.config, found.projection
    if found.is_plain:
        takes, gives, what = projection.image_embeds.in_features, config.projection_dim, "projects to"
    else:
        first = projection.proj_in if hasattr(projection, "proj_in") else projection.ff.net[0].proj
        takes, gives, what = first.in_features, config.hidden_size, "has width"
    if takes != gives:
        raise ModelError(
            f"IP-Adapter '{found.name}' was trained with another image encoder",
            allowed=f"one that {what} {takes}; this one {what} {gives}",
        )


@contextmanager
def installed(model: Model, nets: Sequence[ImagePrompt | ControlNetLite]) -> Iterator[None]:
    """The U-Net's attentions have these nets in them meanwhile; afterwards it is as it was."""
    if not nets:
        yield
        return
    for net in nets:
        net.fit(model)
    attentions = [attention for _, attention in _attentions(model.unet)]
    before = [attention.processor for attention in attentions]
    install(model, dict(enumerate(nets)))
    try:
        yield
    finally:
        for attention, processor in zip(attentions, before, strict=True):
            attention.processor = processor


def install(model: Model, nets: Mapping[int, ImagePrompt | ControlNetLite]) -> None:
    """From now on the U-Net's attentions read what calls bring of the nets by their place; those may change
    between calls. A call that brings nothing is as before."""
    from darkroom.models.image_attention import ImageAttention

    attentions = _attentions(model.unet)
    if any(getattr(attention, "fused_projections", False) for _, attention in attentions):
        raise InputError("IP-Adapters or LLLites with fused_qkv", mend="leave fused_qkv out")
    numbers = {path: number for number, (path, _) in enumerate(cross_attentions(model.unet))}
    for path, attention in attentions:
        attention.processor = ImageAttention(path, numbers.get(path, -1), nets)
