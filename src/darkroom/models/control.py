"""What steers a U-Net by a picture, read and matched to a model: ControlNets, LLLites and T2I-Adapters.

A ControlNet (Zhang, Rao and Agrawala 2023, arXiv 2302.05543) runs at every step with the U-Net and adds
residuals to its skip connections. A T2I-Adapter (Mou et al. 2023, arXiv 2302.08453) runs once a picture and
adds features to the U-Net's down blocks.

Shapes: B rows, C H W latents, h w pixels.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from darkroom.errors import ModelError
from darkroom.libraries import quiet
from darkroom.models.checked import (
    FLOATS,
    check_complete,
    read_json,
    tensor_shapes,
    tensor_types,
    weight_files,
)
from darkroom.models.folder import read_part
from darkroom.models.image_prompt import (
    LAYER_PREFIX,
    STRENGTH,
    TOKENS,
    ImagePrompt,
    describe_image_prompt,
    is_image_prompt,
    read_image_prompt,
)
from darkroom.models.lllite import (
    LITE,
    LITE_STRENGTH,
    ControlNetLite,
    is_lite,
    read_lite,
)

if TYPE_CHECKING:
    from darkroom.models.model import Model

Kind = Literal["controlnet", "t2i-adapter"]
LDM_PREFIX = "control_model."
LDM_KEY, DIFFUSERS_KEY = "input_hint_block.0.weight", "controlnet_cond_embedding.conv_in.weight"

ALLOWED = "a diffusers folder or a .safetensors file"

DOWN, MID, FEATURE = "down_residual", "mid_residual", "down_feature"
"""Names under which the U-Net gets what nets add, a row for every row of x."""


@dataclass(eq=False, repr=False)
class ControlNet:
    """A network that was read; `fit` says whether a model's U-Net takes what it gives.

    `module` is diffusers' `ControlNetModel` or `T2IAdapter`, without gradients. A ControlNet's encoder of the
    picture stands apart, in `hint`: it does not depend on the step and runs once a picture.
    """

    name: str
    kind: Kind
    module: Any
    sha256: str
    hint: Any = None
    pools: bool = False
    """Whether its residuals are averaged over the picture (`global_pool_conditions`: the shuffle nets)."""
    reversed_channels: bool = False
    """Whether it reads pictures as blue, green, red."""

    @property
    def picture_channels(self) -> int:
        """Of the picture it reads: 3, or 1 for some T2I-Adapters."""
        config = self.module.config
        return int(config.conditioning_channels if self.kind == "controlnet" else config.in_channels)

    @property
    def size_unit(self) -> int:
        """What the sides of its picture must be multiples of, in pixels."""
        return int(self.module.total_downscale_factor) if self.kind == "t2i-adapter" else 1

    @property
    def num_bytes(self) -> int:
        """Of its weights."""
        return sum(weight.nbytes for weight in self.weights)

    @property
    def weights(self) -> list[torch.Tensor]:
        """Of all its parts."""
        return [weight for module in filter(None, (self.module, self.hint)) for weight in module.parameters()]

    def names(self, levels: int) -> list[str]:
        """Under which the U-Net gets what it adds, level by level."""
        if self.kind == "t2i-adapter":
            return [f"{FEATURE}_{i:02}" for i in range(levels)]
        return [f"{DOWN}_{i:02}" for i in range(levels - 1)] + [MID]

    def to(self, device: torch.device, dtype: torch.dtype) -> ControlNet:
        """On a device and in a precision, in place."""
        with quiet():
            for module in filter(None, (self.module, self.hint)):
                module.to(device, dtype)
        return self

    def fit(self, model: Model) -> None:
        """ModelError unless it was made for U-Nets of this shape."""
        model.needs_unet(f"{self.kind} '{self.name}'")
        unet: Any = model.unet
        wide = list(unet.config.block_out_channels)
        config = self.module.config
        if self.kind == "t2i-adapter":
            own = list(config.channels)
            made_for: dict[str, Any] = {"widths": own[: len(wide)]}
            takes: dict[str, Any] = {"widths": wide}
            if config.adapter_type == "full_adapter_xl":
                made_for, takes = {"SDXL": True}, {"SDXL": model.is_sdxl}
        else:
            keys = {
                "widths": "block_out_channels",
                "text width": "cross_attention_dim",
                "layers": "layers_per_block",
            }
            made_for = {name: _plain(config.get(key)) for name, key in keys.items()}
            takes = {name: _plain(unet.config.get(key)) for name, key in keys.items()}
            made_for["SDXL"] = config.addition_embed_type == "text_time"
            takes["SDXL"] = model.is_sdxl
        for name, value in made_for.items():
            if value != takes[name]:
                raise ModelError(
                    f"{self.kind} '{self.name}' is for another model: {name} {value}",
                    allowed=f"{name} {takes[name]} of {model.family}",
                )

    @torch.no_grad()
    def encode(self, pixels_BChw: torch.Tensor) -> list[torch.Tensor]:
        """What does not depend on the step, of pictures of 0 to 1: a ControlNet's hint [B, D, H, W], or a
        T2I-Adapter's features, one [B, D, H, W] a level."""
        parameter = next(self.module.parameters())
        pixels = pixels_BChw.to(parameter.device, parameter.dtype)
        if self.reversed_channels:
            pixels = pixels.flip(1)
        return [self.hint(pixels)] if self.kind == "controlnet" else list(self.module(pixels))

    def residuals(
        self,
        x_BCHW: torch.Tensor,
        t_B: torch.Tensor,
        text_BLD: torch.Tensor,
        hint_BDHW: torch.Tensor,
        added: dict[str, torch.Tensor],
    ) -> list[torch.Tensor]:
        """A ControlNet's residuals for one step: of each skip connection, then of the middle block."""
        dtype = next(self.module.parameters()).dtype
        added_states = {name: added[name] for name in ("text_embeds", "time_ids") if name in added}
        down, mid = self.module(
            x_BCHW[:, : self.module.config.in_channels].to(dtype),
            t_B,
            encoder_hidden_states=text_BLD.to(dtype),
            controlnet_cond=hint_BDHW,
            timestep_cond=added.get("timestep_cond"),
            added_cond_kwargs=added_states or None,
            return_dict=False,
        )
        found = [*down, mid]
        return [one.mean((2, 3), keepdim=True).expand_as(one) for one in found] if self.pools else found


Net = ControlNet | ControlNetLite | ImagePrompt
"""All that steers."""


def read_control(
    path: str | Path, model: Model, name: str | None = None, image_encoder: str | Path | None = None
) -> Net:
    """A ControlNet or T2I-Adapter from a folder of diffusers; a ControlNet, kohya's ControlNet-LLLite or an
    IP-Adapter from one file.

    A single file may have diffusers' keys or those of the first release (`control_model.*`); its shape is
    taken to be that of `model`, the model it is for. ModelError for what cannot be read or does not fit.
    """
    path = Path(path)
    name = name or path.stem
    net: Net
    with quiet():
        if path.is_dir():
            net = _from_folder(path, name)
        elif path.is_file():
            net = _from_file(path, name, model, image_encoder)
        else:
            raise ModelError(f"no ControlNet at '{path}'", allowed=ALLOWED)
    net.fit(model)
    if isinstance(net, ControlNet):
        for module in filter(None, (net.module, net.hint)):
            module.eval().requires_grad_(False)
    return net


@dataclass(frozen=True)
class ControlCard:
    """What is known of a net before its weights are read."""

    kind: Kind | Literal["controlnet-lllite", "ip-adapter"]
    size_unit: int
    """What the sides of its picture must be multiples of, in pixels."""
    num_weights: int
    """An IP-Adapter's with those of its encoder."""


def describe_control(path: str | Path, model: Model, image_encoder: str | Path | None = None) -> ControlCard:
    """A net by its configuration and the shapes of its tensors: no weights are read.

    ModelError, as `read_control`, for what cannot be read or is for another model.
    """
    path = Path(path)
    net: Net
    with quiet(), torch.device("meta"):
        if path.is_dir():
            kind, module = _kind_of(path)
            net = ControlNet(path.stem, kind, module.from_config(read_json(path / "config.json")), "")
            files = weight_files(path, None)
        elif path.is_file() and path.suffix == ".safetensors":
            files = [path]
            types = tensor_types(files)
            if is_image_prompt(list(types)):
                shapes = tensor_shapes(files)
                encoder = describe_image_prompt(path, path.stem, shapes, model, image_encoder)
                more = tensor_shapes(weight_files(encoder, None))
                return ControlCard("ip-adapter", 1, _count(shapes) + _count(more))
            net = _from_file(path, path.stem, model, None, weights=False)
            assert not isinstance(net, ImagePrompt)
        else:
            raise ModelError(f"no ControlNet at '{path}'", allowed=ALLOWED)
        net.fit(model)
    tensor_types(files)
    return ControlCard(net.kind, net.size_unit, _count(tensor_shapes(files)))


def _count(shapes: Mapping[str, Sequence[int]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _from_folder(path: Path, name: str) -> ControlNet:
    kind, cls = _kind_of(path)
    module = read_part(cls, path)
    digest = hashlib.sha256()
    for weights in weight_files(path, None):
        with weights.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    if kind == "t2i-adapter":
        return ControlNet(name, kind, module, digest.hexdigest())
    return _controlnet(name, module, digest.hexdigest())


def _kind_of(path: Path) -> tuple[Kind, Any]:
    """What a folder of diffusers holds, and its class."""
    from diffusers import ControlNetModel, T2IAdapter

    kinds = {"ControlNetModel": ControlNetModel, "T2IAdapter": T2IAdapter}
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(
            f"'{path}' has no config.json", allowed="a folder of diffusers' " + " or ".join(kinds)
        )
    kind = read_json(file).get("_class_name")
    if kind not in kinds:
        raise ModelError(f"'{path}' is a {kind}", allowed=", ".join(kinds))
    return "t2i-adapter" if kind == "T2IAdapter" else "controlnet", kinds[kind]


def _controlnet(name: str, module: Any, sha256: str) -> ControlNet:
    """With the encoder of the picture taken out, which runs once a picture and not at each step."""
    order = module.config.controlnet_conditioning_channel_order
    if order not in ("rgb", "bgr"):
        raise ModelError(f"ControlNet '{name}' reads channels as {order!r}", allowed="rgb, bgr")
    pools = bool(module.config.global_pool_conditions)
    hint, module.controlnet_cond_embedding = module.controlnet_cond_embedding, torch.nn.Identity()
    module.register_to_config(controlnet_conditioning_channel_order="rgb", global_pool_conditions=False)
    return ControlNet(name, "controlnet", module, sha256, hint, pools, order == "bgr")


def _from_file(
    path: Path, name: str, model: Model, image_encoder: str | Path | None, *, weights: bool = True
) -> Net:
    from diffusers import ControlNetModel
    from diffusers.loaders.single_file_utils import convert_controlnet_checkpoint
    from safetensors.torch import load_file

    if path.suffix != ".safetensors":
        raise ModelError(
            f"'{path}' is no .safetensors file", mend="pickled weights are never opened: convert them"
        )
    model.needs_unet(f"ControlNet '{name}'")
    types = tensor_types([path])
    digest = ""
    if weights:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if is_image_prompt(list(types)):
        return read_image_prompt(path, name, digest, model, image_encoder)
    tensors: dict[str, torch.Tensor]
    if weights:
        tensors = load_file(str(path))
    else:
        tensors = {key: torch.empty(shape) for key, shape in tensor_shapes([path]).items()}
    if is_lite(list(types)):
        return read_lite(path, name, digest, tensors, types)
    plain = {key.removeprefix(LDM_PREFIX): kind for key, kind in types.items()}
    if not {LDM_KEY, DIFFUSERS_KEY} & plain.keys():
        allowed = f"a tensor {DIFFUSERS_KEY} or {LDM_KEY}, or {LAYER_PREFIX}* of an IP-Adapter"
        raise ModelError(f"'{path}' holds no ControlNet", allowed=allowed)
    check_complete(f"'{path}'", whole_numbers=[key for key, kind in plain.items() if kind not in FLOATS])
    module = ControlNetModel.from_unet(model.unet, load_weights_from_unet=False)
    tensors = {key.removeprefix(LDM_PREFIX): tensor.float() for key, tensor in tensors.items()}
    if LDM_KEY in tensors:
        try:
            tensors = convert_controlnet_checkpoint(tensors, dict(module.config))
        except (KeyError, IndexError) as error:
            raise ModelError(f"ControlNet '{name}' is for another model: it lacks {error}") from error
        tensors = {key: value for key, value in tensors.items() if value is not None}
    own = module.state_dict()
    shapes = [
        (key, list(tensors[key].shape), list(value.shape))
        for key, value in own.items()
        if key in tensors and tensors[key].shape != value.shape
    ]
    missing, unknown = own.keys() - tensors.keys(), tensors.keys() - own.keys()
    if shapes or missing or unknown:
        found = shapes[0][0] if shapes else min(missing | unknown)
        raise ModelError(
            f"ControlNet '{name}' is for another model than {model.family}: '{found}' does not fit",
            mend="give the ControlNet of this model's family",
        )
    module.load_state_dict(tensors)
    return _controlnet(name, module, digest)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value


def take_residuals(added: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What nets add, taken out of `added`, as keyword arguments of diffusers' U-Net."""
    down, features = (
        [added.pop(name) for name in sorted(added) if name.startswith(prefix)] for prefix in (DOWN, FEATURE)
    )
    added_states: dict[str, Any] = {}
    if MID in added:
        added_states = {
            "down_block_additional_residuals": tuple(down),
            "mid_block_additional_residual": added.pop(MID),
        }
    tokens, strengths = (
        {
            int(name.removeprefix(f"{prefix}_")): added.pop(name)
            for name in sorted(added)
            if name.startswith(prefix)
        }
        for prefix in (TOKENS, STRENGTH)
    )
    inside: dict[str, Any] = {"ip_hidden_states": tokens, "ip_adapter_masks": strengths} if tokens else {}
    if lites := _take_lites(added):
        inside["lites"] = lites
    if inside:
        added_states["cross_attention_kwargs"] = inside
    if features:
        added_states["down_intrablock_additional_residuals"] = features
    return added_states


def _take_lites(added: dict[str, torch.Tensor]) -> list[tuple[int, torch.Tensor, list[torch.Tensor]]]:
    """LLLites in the order in which they work: place, strengths [B] and encoded pictures by resolution."""
    found = []
    for name in sorted(name for name in added if name.startswith(LITE_STRENGTH)):
        which = name.removeprefix(LITE_STRENGTH)
        pictures = sorted(one for one in added if one.startswith(f"{LITE}{which}_"))
        found.append((int(which.rpartition("_")[2]), added.pop(name), [added.pop(one) for one in pictures]))
    return found
