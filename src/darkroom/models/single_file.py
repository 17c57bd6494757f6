"""Single-file checkpoints in the original Stable Diffusion layout (SD 1.x, 2.x, SDXL): read and written.

The architecture is known by the shapes of a few weights, or by what darkroom wrote into the file's metadata.
Nothing is fetched: configurations are the families'. Only safetensors are opened, never pickles.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from darkroom.errors import ModelError, first_line, is_system_failure
from darkroom.hardware.system import atomic_replace, remove_file
from darkroom.models.checked import FLOATS, check_complete, tensor_types
from darkroom.models.families import CLIP_L, FAMILIES, Config, create
from darkroom.models.model import PARTS, Model, noted_guidance, write_tensors
from darkroom.models.reference import SUFFIX, check_file

if TYPE_CHECKING:
    from transformers import CLIPTokenizer


LOG = logging.getLogger("darkroom")

METADATA = "darkroom"
CLIP_VOCABULARY = 49_408
# What original files hold besides the weights that are used: schedules, averages, position numbers, heads.
ALSO_THERE = re.compile(
    r"^(model_ema\.|denoiser\.|betas$|alphas_|sqrt_|log_one|posterior_|lvlb_weights$|logvar$|v_pred$|ztsnr$"
    r"|scale_factor$|first_stage_model\.(loss|model_ema)\.|loss\."
    r"|.*(position_ids|logit_scale|text_projection)$|.*resblocks\.(2[3-9]|3[0-9])\.)"
)

UNET, VAE = "model.diffusion_model.", "first_stage_model."
# SD 2's two predictions share every shape; trained weights of this layer spread wider with v-prediction.
V_WEIGHT, V_SPREAD = f"{UNET}output_blocks.11.1.transformer_blocks.0.norm1.bias", 0.09


def load_single_file(
    path: str | Path,
    parts: Sequence[str] | None = None,
    *,
    as_stored: bool = False,
    with_weights: bool = True,
) -> Model:
    """Open a checkpoint; weights as float32 on the CPU. A file of only a U-Net or only a VAE gives that part.

    `as_stored`: weights in the file's own type, mapped from it; without weights they stay on the meta device.

    Raises ModelError for pickles, adapters, parts of folders, what is missing, and architectures not known.
    """
    path = Path(path)
    check_file(path)
    whole_numbers = [name for name, kind in tensor_types([path]).items() if kind not in FLOATS]
    odd = [name for name in whole_numbers if not ALSO_THERE.search(name)]
    check_complete(f"'{path}'", whole_numbers=odd)
    with _opened(path) as file:
        return _read(path, file, parts, as_stored, with_weights)


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        if is_system_failure(error):
            raise
        raise ModelError(f"'{path}' could not be opened: {first_line(error)}") from error


def _read(path: Path, file: Any, parts: Sequence[str] | None, as_stored: bool, with_weights: bool) -> Model:
    keys = set(file.keys())
    prefixes = _prefixes(path, keys)
    shape = _FileShapes(file, keys, prefixes)
    metadata = _own_metadata(file)
    family, overrides = (metadata["family"], metadata["configs"]) if metadata else _recognised(path, shape)
    there: list[str] = [part for part in ("unet", "vae", "text_encoder") if part in prefixes]
    if "text_encoder" in there:
        there.append("tokenizer")
    missing = [part for part in parts or [] if part not in there]
    if missing:
        raise ModelError(f"'{path}' has no {' and no '.join(missing)}", mend=f"it has {', '.join(there)}")
    wanted = [part for part in PARTS if part in (parts or there)]
    model = create(
        family,
        tokenizer=_tokenizer(metadata),
        overrides=overrides,
        parts=wanted,
        device="meta",
    )
    model.path, model.guidance = str(path), noted_guidance(metadata)
    if not with_weights:
        return model
    if model.unet is not None:
        _fill(path, model.unet, _Unet(prefixes["unet"]), file, keys, as_stored)
    if model.vae is not None:
        _fill(path, model.vae, _Vae(prefixes["vae"]), file, keys, as_stored)
    for i, encoder in enumerate(model.text_encoders):
        rules = _Text(SDXL_OPENCLIP if i else prefixes["text_encoder"])
        _fill(path, encoder, rules, file, keys, as_stored)
        _number_positions(encoder)
    if keys and parts is None:
        _log_unused(path, keys)
    return model


def _prefixes(path: Path, keys: set[str]) -> dict[str, str]:
    """Where each part's names start; ModelError for files that are no original checkpoint."""
    found: dict[str, str] = {}
    for prefix in (UNET, ""):
        if f"{prefix}input_blocks.0.0.weight" in keys:
            found.setdefault("unet", prefix)
    for prefix in (VAE, "vae.", ""):
        if f"{prefix}encoder.conv_in.weight" in keys and f"{prefix}decoder.conv_in.weight" in keys:
            found.setdefault("vae", prefix)
    for prefix in (SDXL_CLIP, CLIP, OPENCLIP):
        if any(key.startswith(prefix) for key in keys):
            found.setdefault("text_encoder", prefix)
    if "unet" in found or ("vae" in found and _is_original_vae(keys)):
        return found
    if any("lora_" in key or ".lora" in key for key in keys):
        raise ModelError(f"'{path}' is an adapter, not a model", mend="give the model it is for")
    if any(key.startswith(("down_blocks.", "encoder.down_blocks.", "text_model.")) for key in keys):
        raise ModelError(f"'{path}' is one part of a model folder", mend="give the folder")
    if any(key.startswith("conditioner.embedders.0.model.") for key in keys):
        raise ModelError(f"'{path}' is SDXL's refiner, which is not known here")
    raise ModelError(f"'{path}' is no Stable Diffusion checkpoint", allowed="SD 1.x, SD 2.x, SDXL, or a VAE")


def _is_original_vae(keys: set[str]) -> bool:
    return any(key.endswith("encoder.down.0.block.0.norm1.weight") for key in keys)


class _FileShapes:
    """The shapes of a file's tensors, by name."""

    def __init__(self, file: Any, keys: set[str], prefixes: dict[str, str]) -> None:
        self.file, self.keys, self.prefixes = file, keys, prefixes

    def of(self, part: str, name: str) -> list[int] | None:
        key = f"{self.prefixes.get(part, '')}{name}"
        return list(self.file.get_slice(key).get_shape()) if key in self.keys else None


def _recognised(path: Path, shapes: _FileShapes) -> tuple[str, dict[str, Config]]:
    """The family of a checkpoint that does not say, by its U-Net's width of text; a lone VAE is SD 1's."""
    conv_in = shapes.of("unet", "input_blocks.0.0.weight")
    if conv_in is None:
        return "sd15", {}
    context = shapes.of("unet", "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight")
    if shapes.of("unet", "label_emb.0.0.weight") is not None:
        context = shapes.of("unet", "input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight")
        family = "sdxl" if context is not None and context[1] == 2048 else None
        if any(key.startswith("conditioner.embedders.0.model.") for key in shapes.keys):
            raise ModelError(f"'{path}' is SDXL's refiner, which is not known here")
    else:
        family = {768: "sd15", 1024: "sd2"}.get(context[1] if context else 0)
    if family is None or conv_in[0] != 320:
        raise ModelError(f"'{path}' has a U-Net of no known family", allowed="SD 1.x, SD 2.x, SDXL base")
    if family == "sd2" and _predicts_v(path, shapes):
        family = "sd2-v"
    overrides: dict[str, Config] = {}
    if conv_in[1] != 4:
        overrides["unet"] = {"in_channels": conv_in[1]}
    if "v_pred" in shapes.keys:
        zero = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
        overrides["scheduler"] = {
            "prediction_type": "v_prediction",
            **(zero if "ztsnr" in shapes.keys else {}),
        }
    return family, overrides


def _predicts_v(path: Path, shapes: _FileShapes) -> bool:
    prediction = (shapes.file.metadata() or {}).get("modelspec.prediction_type", "")
    if prediction:
        return bool(prediction.startswith("v"))
    if V_WEIGHT not in shapes.keys:
        return False
    predicts_v = float(shapes.file.get_tensor(V_WEIGHT).float().std(unbiased=False)) > V_SPREAD
    kind = "v-prediction at 768 px" if predicts_v else "noise prediction at 512 px"
    LOG.warning("'%s' does not say what it predicts; by its weights it is taken for %s", path, kind)
    return predicts_v


def _own_metadata(file: Any) -> dict[str, Any] | None:
    """What darkroom wrote into the metadata: family, configurations, tokenizers."""
    text = (file.metadata() or {}).get(METADATA)
    if text is None:
        return None
    try:
        metadata = json.loads(text)
        known = metadata["family"] in FAMILIES and all(
            isinstance(c, dict) for c in metadata["configs"].values()
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        known = False
    return metadata if known else None


def _tokenizer(metadata: dict[str, Any] | None) -> CLIPTokenizer | None:
    written = (metadata or {}).get("tokenizer")
    if not written:
        return None
    from darkroom.models.parts import CLIPTokenizer

    return CLIPTokenizer(
        vocab=written["vocab"],
        merges=[tuple(pair) for pair in written["merges"]],
        model_max_length=written["model_max_length"],
    )


class _Unet:
    """How a U-Net's weights stand in the original."""

    def __init__(self, prefix: str = UNET) -> None:
        self.prefix = prefix

    def entries(self, module: Any) -> Iterator[tuple[str, list[str]]]:
        """Original names, each with the weights of ours that it holds."""
        names = _unet_names(module.config)
        for name in module.state_dict():
            yield self.prefix + _original_unet_name(name, names), [name]

    def shaped(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of ours as the original has it."""
        return tensor


class _Vae(_Unet):
    """How a VAE's weights stand in the original."""

    def __init__(self, prefix: str = VAE) -> None:
        super().__init__(prefix)

    def entries(self, module: Any) -> Iterator[tuple[str, list[str]]]:
        names = _vae_names(module.config)
        for name in module.state_dict():
            yield self.prefix + _original_vae_name(name, names), [name]

    def shaped(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:, :, None, None] if _is_flat_in_vae(name) else tensor


class _Text(_Unet):
    """How a text encoder's weights stand in the original: OpenAI's names, or OpenCLIP's, packed."""

    def entries(self, module: Any) -> Iterator[tuple[str, list[str]]]:
        """The file's keys of one text encoder, each with the names of the weights that make its tensor."""
        inside = {name.removeprefix("text_model."): name for name in module.state_dict()}
        projection = inside.pop("text_projection.weight", None)
        if self.prefix not in (OPENCLIP, SDXL_OPENCLIP):
            yield from ((self.prefix + plain, [name]) for plain, name in inside.items())
            return
        layers = module.config.num_hidden_layers
        for plain, theirs in _openclip_names(layers).items():
            yield self.prefix + theirs, [inside[plain]]
        for theirs, three in _openclip_packed(layers).items():
            yield self.prefix + theirs, [inside[plain] for plain in three]
        if projection is not None:
            yield self.prefix + "text_projection", [projection]

    def shaped(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.T if name == "text_projection.weight" else tensor


def _fill(path: Path, module: nn.Module, rules: _Unet, file: Any, keys: set[str], as_stored: bool) -> None:
    """Give a module on the meta device its weights from the file, and take their names out of `keys`."""
    ours = module.state_dict()
    found: Weights = {}
    missing: list[str] = []
    for theirs, names in rules.entries(module):
        if theirs not in keys:
            missing.append(theirs)
            continue
        keys.discard(theirs)
        tensor = file.get_tensor(theirs)
        tensor = tensor if as_stored else tensor.to(torch.float32, copy=True)
        for name, part in zip(names, tensor.chunk(len(names)), strict=True):
            found[name] = _as_ours(path, theirs, rules.shaped(name, ours[name]).shape, name, part, ours)
    if missing:
        raise ModelError(f"'{path}' lacks {len(missing)} weights, such as {missing[0]}", mend="is it whole?")
    module.load_state_dict(found, strict=True, assign=True)
    module.requires_grad_(True)


def _as_ours(
    path: Path, theirs: str, expected: torch.Size, name: str, part: torch.Tensor, ours: Weights
) -> torch.Tensor:
    """A tensor of the file in our shape; a matrix may stand for a 1x1 convolution and the other way round."""
    target = ours[name].shape
    if _solid(part.shape) != _solid(expected):
        raise ModelError(f"'{path}': {theirs} is {list(part.shape)}, not {list(expected)}")
    if name == "text_projection.weight":
        part = part.T
    return part.reshape(target).contiguous()


def _solid(shape: torch.Size) -> list[int]:
    """The sides that are not 1."""
    return [side for side in shape if side != 1]


def _number_positions(encoder: nn.Module) -> None:
    """Fill in the numbers 0, 1, 2 ... that no file holds."""
    for module in encoder.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta and name == "position_ids":
                module.register_buffer(name, torch.arange(buffer.shape[-1])[None], persistent=False)


def _log_unused(path: Path, keys: set[str]) -> None:
    unused = sorted(key for key in keys if not ALSO_THERE.search(key))
    if unused:
        LOG.warning("'%s': %d tensors are not used, such as %s", path, len(unused), unused[0])


def save_single_file(model: Model, path: str | Path) -> Path:
    """Write a model as one file in the original layout, atomically; weights keep their type."""
    path = Path(path)
    if path.suffix.lower() != SUFFIX:
        raise ModelError(f"'{path}'", allowed=f"a name that ends in {SUFFIX}")
    if model.vae is not None and (model.latent_scaling.shift or model.latent_scaling.std):
        LOG.warning(
            "'%s' keeps the VAE's shift in a note that only darkroom reads: elsewhere colours are off",
            path.name,
        )
    weights = {name: tensor.contiguous().cpu() for name, tensor in original_weights(model)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        write_tensors(temporary, weights, _metadata(model))
        atomic_replace(temporary, path)
    finally:
        remove_file(temporary)
    return path


def original_weights(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's weights by their names in the original layout, in its shapes."""
    for name, module in model.modules.items():
        rules = _rules_of(model, name)
        ours = module.state_dict()
        for theirs, names in rules.entries(module):
            parts = [rules.shaped(one, ours[one]) for one in names]
            yield theirs, torch.cat(parts) if len(parts) > 1 else parts[0]


def _rules_of(model: Model, part: str) -> _Unet:
    if part == "unet":
        return _Unet()
    if part == "vae":
        return _Vae()
    if len(model.text_encoders) > 1:
        return _Text(SDXL_CLIP if part == "text_encoder" else SDXL_OPENCLIP)
    activation = model.text_encoders[0].config.hidden_act  # type: ignore[union-attr]
    return _Text(CLIP if activation == "quick_gelu" else OPENCLIP)


def _metadata(model: Model) -> dict[str, str]:
    family = model.family
    if family not in FAMILIES:
        family = "sdxl" if len(model.text_encoders) > 1 else "sd15"
    configs: dict[str, Config] = {"scheduler": model.scheduler}
    for name, module in model.modules.items():
        config: Any = module.config
        if name.startswith("text_encoder"):
            configs[name] = {key: getattr(config, key) for key in CLIP_L}
        else:
            configs[name] = {key: value for key, value in dict(config).items() if key[0] != "_"}
    metadata: dict[str, Any] = {"family": family, "configs": configs}
    if model.guidance is not None:
        metadata["guidance"] = model.guidance
    if model.tokenizers and len(model.tokenizers[0]) != CLIP_VOCABULARY:
        metadata["tokenizer"] = _written(model.tokenizers[0])
    prediction = model.scheduler.get("prediction_type", "epsilon").removesuffix("_prediction")
    return {"format": "pt", "modelspec.prediction_type": prediction, METADATA: json.dumps(metadata)}


def _written(tokenizer: Any) -> dict[str, Any]:
    learned = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    return {
        "vocab": learned["vocab"],
        "merges": learned["merges"],
        "model_max_length": tokenizer.model_max_length,
    }


Weights = dict[str, torch.Tensor]
# The text encoders by the width of the text, as the original code's classes name them.
CLIP = "cond_stage_model.transformer.text_model."
OPENCLIP = "cond_stage_model.model."
SDXL_CLIP = "conditioner.embedders.0.transformer.text_model."
SDXL_OPENCLIP = "conditioner.embedders.1.model."

UNET_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
UNET_ENDS = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
OPENCLIP_LAYER = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}
OPENCLIP_ENDS = {
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "final_layer_norm.weight": "ln_final.weight",
    "final_layer_norm.bias": "ln_final.bias",
}
QKV = ("q_proj", "k_proj", "v_proj")


def _unet_names(config: Any) -> dict[str, str]:
    """Module paths of a U-Net and where they stand in the original, without its prefix."""
    names = dict(UNET_ENDS)
    depth, layers = len(config["block_out_channels"]), config["layers_per_block"]
    at = 1
    for block in range(depth):
        for layer in range(layers):
            names[f"down_blocks.{block}.resnets.{layer}"] = f"input_blocks.{at}.0"
            names[f"down_blocks.{block}.attentions.{layer}"] = f"input_blocks.{at}.1"
            at += 1
        if block + 1 < depth:
            names[f"down_blocks.{block}.downsamplers.0.conv"] = f"input_blocks.{at}.0.op"
            at += 1
    for place, name in enumerate(("resnets.0", "attentions.0", "resnets.1")):
        names[f"mid_block.{name}"] = f"middle_block.{place}"
    at = 0
    for block in range(depth):
        for layer in range(layers + 1):
            names[f"up_blocks.{block}.resnets.{layer}"] = f"output_blocks.{at}.0"
            names[f"up_blocks.{block}.attentions.{layer}"] = f"output_blocks.{at}.1"
            at += 1
        attends = config["up_block_types"][block].startswith("CrossAttn")
        names[f"up_blocks.{block}.upsamplers.0.conv"] = f"output_blocks.{at - 1}.{1 + attends}.conv"
    return names


def _vae_names(config: Any) -> dict[str, str]:
    """Module paths of a VAE and where they stand in the original, without its prefix."""
    depth, layers = len(config["block_out_channels"]), config["layers_per_block"]
    names = {"quant_conv": "quant_conv", "post_quant_conv": "post_quant_conv"}
    for half in ("encoder", "decoder"):
        names |= {f"{half}.conv_in": f"{half}.conv_in", f"{half}.conv_out": f"{half}.conv_out"}
        names |= {
            f"{half}.conv_norm_out": f"{half}.norm_out",
            f"{half}.mid_block.resnets.0": f"{half}.mid.block_1",
            f"{half}.mid_block.attentions.0": f"{half}.mid.attn_1",
            f"{half}.mid_block.resnets.1": f"{half}.mid.block_2",
        }
    for block in range(depth):
        down, up = f"encoder.down.{block}", f"decoder.up.{depth - 1 - block}"
        for layer in range(layers):
            names[f"encoder.down_blocks.{block}.resnets.{layer}"] = f"{down}.block.{layer}"
        for layer in range(layers + 1):
            names[f"decoder.up_blocks.{block}.resnets.{layer}"] = f"{up}.block.{layer}"
        names[f"encoder.down_blocks.{block}.downsamplers.0.conv"] = f"{down}.downsample.conv"
        names[f"decoder.up_blocks.{block}.upsamplers.0.conv"] = f"{up}.upsample.conv"
    return names


def _original_unet_name(name: str, names: dict[str, str]) -> str:
    """The original name of a U-Net's weight."""
    path, rest = _place(name, names)
    return names[path] + _inner(rest, UNET_RESNET if ".resnets." in f".{path}." else {})


def _original_vae_name(name: str, names: dict[str, str]) -> str:
    """The original name of a VAE's weight."""
    path, rest = _place(name, names)
    inner = VAE_ATTENTION if ".attentions." in f".{path}." else {"conv_shortcut": "nin_shortcut"}
    return names[path] + _inner(rest, inner)


def _place(name: str, names: dict[str, str]) -> tuple[str, str]:
    """The longest known module path that a weight's name starts with, and the rest of the name."""
    path = name
    while path not in names:
        path, _, _ = path.rpartition(".")
        if not path:
            raise KeyError(name)
    return path, name[len(path) :]


def _inner(rest: str, renamed: dict[str, str]) -> str:
    module, _, kind = rest[1:].rpartition(".")
    inner = renamed.get(module, module)
    return f".{inner}.{kind}" if inner else f".{kind}"


def _is_flat_in_vae(name: str) -> bool:
    """Whether a VAE's weight is a matrix here and a 1x1 convolution in the original."""
    return bool(re.search(r"attentions\.0\.to_(q|k|v|out\.0)\.weight$", name))


def _openclip_names(layers: int) -> dict[str, str]:
    """Weights of a CLIP text model that stand in an OpenCLIP file under another name, as they are."""
    names = dict(OPENCLIP_ENDS)
    for i in range(layers):
        for ours, theirs in OPENCLIP_LAYER.items():
            for kind in ("weight", "bias"):
                names[f"encoder.layers.{i}.{ours}.{kind}"] = f"transformer.resblocks.{i}.{theirs}.{kind}"
    return names


def _openclip_packed(layers: int) -> dict[str, list[str]]:
    """OpenCLIP's packed tensors, and the three of ours that each holds."""
    return {
        f"transformer.resblocks.{i}.attn.in_proj_{kind}": [
            f"encoder.layers.{i}.self_attn.{one}.{kind}" for one in QKV
        ]
        for i in range(layers)
        for kind in ("weight", "bias")
    }
