"""Adapters: LoRA and its kin, read from files of any common layout, fitted to a model, merged, written.

An adapter file is untrusted: only safetensors is opened, its header is bounded, names in it are keys to look
up, every tensor must be of use, and numbers must be finite. `read_adapter` needs no model; `fit` finds the
model's layers and refuses what does not fit, by name.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from darkroom.errors import InputError, ModelError
from darkroom.hardware.system import write_atomically
from darkroom.models.adapters.adapter import (
    Adapter,
    Factors,
    Layer,
    factors_rank,
    fold_middle,
    magnitude_side,
    scale_of,
)
from darkroom.models.adapters.files import (
    PEFT_CONFIG,
    PEFT_WEIGHTS,
    Alphas,
    header,
    open_tensors,
    read_alphas,
    read_header,
    save_tensors,
    shown,
)
from darkroom.models.adapters.keys import (
    diffusers_keys,
    kohya_stem,
    layer_name,
    layout_of,
    numbered_layers,
    split_key,
)
from darkroom.models.card import CARD, merged_card
from darkroom.models.families import create
from darkroom.models.folder import load, save

if TYPE_CHECKING:
    from darkroom.models.model import Model


LOG = logging.getLogger("darkroom.models")
MAX_RANK = 8192
KINDS = {"hada": "loha", "lokr": "lokr"}
WHOLE = ({"diff", "diff_b"}, {"w_norm", "b_norm"}, {"oft_blocks", "rescale"})
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def read_adapter(file: str | Path, *, name: str | None = None) -> Adapter:
    """An adapter from a `.safetensors` file, or from a folder that PEFT wrote.

    Reads diffusers, PEFT, kohya, LyCORIS (LoRA, LoCon, LoHa, LoKr, each also with DoRA's magnitudes) and
    cloneofsimo's layouts. ModelError for a file that is none of these, with the first of the keys that are
    not understood, for tensors that lack their pair, and for numbers that are not finite.
    """
    path = Path(file)
    stored = open_tensors(path)
    keys = {key: split_key(key) for key in stored.tensors} | _ia3_keys(stored.tensors)
    words = [key for key in keys if stored.metadata.get(key) == "<embed>" or key.startswith("bundle_emb.")]
    unknown = [key for key, split in keys.items() if split is None and key not in words]
    if unknown:
        raise ModelError(
            f"adapter '{path.name}': {_some(unknown, len(keys))} are not understood",
            allowed="diffusers, PEFT, kohya, LyCORIS and cloneofsimo's layouts",
        )
    grouped = _grouped(path, {k: split for k, split in keys.items() if split is not None}, stored.tensors)
    if not grouped:
        raise ModelError(f"adapter '{path.name}' holds no layers")
    alphas = read_alphas(stored.metadata, stored.config)
    layers = {layer: _layer(path, layer, parts, alphas) for layer, parts in grouped.items()}
    alphas.check_used(layers)
    return Adapter(
        name or path.stem,
        layers,
        stored.metadata,
        _kind(layers),
        layout_of(keys),
        stored.sha256,
        tuple(f"the trained word '{shown(word)}' in it is not applied" for word in words),
    )


def _ia3_keys(tensors: Iterable[str]) -> dict[str, tuple[str, str] | None]:
    """Of LyCORIS' IA3, whose factors are called as a model's own weights: `on_input` stands next to them."""
    found: dict[str, tuple[str, str] | None] = {}
    known = set(tensors)
    for key in known:
        stem = key.removesuffix(".on_input")
        if stem != key and f"{stem}.weight" in known and (name := layer_name(stem)) is not None:
            found |= {key: (name, "on_input"), f"{stem}.weight": (name, "ia3")}
    return found


def _some(keys: Iterable[str], total: int, what: str = "keys") -> str:
    """`3 of 128 keys (the, first, few)`."""
    found = list(keys)
    first = ", ".join(shown(key) for key in found[:3])
    return f"{len(found)} of {total} {what} ({first}{', ...' if len(found) > 3 else ''})"


def _grouped(
    path: Path, keys: Mapping[str, tuple[str, str]], tensors: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    grouped: dict[str, dict[str, torch.Tensor]] = {}
    for key, (layer, role) in keys.items():
        parts = grouped.setdefault(layer, {})
        if role in parts:
            raise ModelError(f"adapter '{path.name}': '{shown(key)}' is there twice, by two names")
        tensor = tensors[key]
        if role == "magnitude" and "lora_magnitude_vector" in key:
            tensor = tensor.flatten()
        parts[role] = tensor
    return grouped


def _layer(path: Path, name: str, parts: dict[str, torch.Tensor], alphas: Alphas) -> Layer | Factors:
    """One layer from its tensors, each accounted for."""
    where = f"adapter '{path.name}', layer '{shown(name)}'"
    alpha = _alpha(where, parts.pop("alpha", None))
    magnitude = parts.pop("magnitude", None)
    if magnitude is not None and (magnitude.numel() == 0 or magnitude.ndim == 0):
        raise ModelError(f"{where}: magnitudes of shape {list(magnitude.shape)}")
    if "down" in parts or "up" in parts:
        return _low_rank(where, name, parts, alpha, magnitude, alphas)
    return _factors(where, parts, alpha, magnitude)


def _alpha(where: str, tensor: torch.Tensor | None) -> float | None:
    if tensor is None:
        return None
    if tensor.numel() != 1:
        raise ModelError(f"{where}: alpha has {tensor.numel()} numbers", allowed="one")
    return float(tensor.item())


def _low_rank(
    where: str,
    name: str,
    parts: dict[str, torch.Tensor],
    alpha: float | None,
    magnitude: torch.Tensor | None,
    alphas: Alphas,
) -> Layer:
    if not {"down", "up"} <= parts.keys() <= {"down", "up", "mid"}:
        raise ModelError(f"{where}: it has {', '.join(sorted(parts))}", allowed="down and up together")
    down, up, middle = parts["down"], parts["up"], parts.get("mid")
    rank = int(down.shape[0]) if down.ndim else 0
    if not (
        1 <= rank <= MAX_RANK
        and down.ndim in (2, 4)
        and up.ndim in (2, 4)
        and up.shape[1] == rank
        and up[0, 0].numel() == 1
        and down.numel()
    ):
        raise ModelError(f"{where}: down {list(down.shape)} and up {list(up.shape)} do not go together")
    if middle is not None:
        if middle.ndim != 4 or tuple(middle.shape[:2]) != (rank, rank) or down[0, 0].numel() != 1:
            raise ModelError(
                f"{where}: a middle of {list(middle.shape)}", allowed=f"[{rank}, {rank}, kh, kw]"
            )
        down = fold_middle(down, middle)
    scale = alphas.scale(name, rank) if alpha is None else scale_of(alpha, rank)
    return Layer(down, up, scale, magnitude)


def _factors(
    where: str, parts: dict[str, torch.Tensor], alpha: float | None, magnitude: torch.Tensor | None
) -> Factors:
    roles = frozenset(parts)
    loha = {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}
    if roles in (frozenset(loha), frozenset(loha | {"hada_t1", "hada_t2"})):
        kind = "loha"
    elif _is_lokr(roles):
        kind = "lokr"
    elif {"diff", "w_norm", "oft_blocks"} & roles and any(roles <= whole for whole in WHOLE):
        return _whole(where, parts, alpha, magnitude)
    elif roles in ({"ia3", "on_input"}, {"ia3_l"}):
        return _ia3(where, parts, magnitude)
    else:
        raise ModelError(
            f"{where}: it has {', '.join(sorted(roles)) or 'no weights'}",
            allowed="LoRA, LoHa, LoKr, a full difference, OFT, BOFT, IA3",
        )
    rank = factors_rank(parts)
    whole = "lokr_w1" in roles and "lokr_w2" in roles
    scale = 1.0 if alpha is None or whole else scale_of(alpha, rank)
    layer = Factors(kind, parts, scale, magnitude)
    if layer.shape is None:
        raise ModelError(f"{where}: {_shape_text(layer)} do not go together")
    return layer


def _whole(
    where: str, parts: dict[str, torch.Tensor], alpha: float | None, magnitude: torch.Tensor | None
) -> Factors:
    """A whole difference, or a rotation, whose alpha is a bound that trainers read in two ways."""
    rotation = "boft" if "oft_blocks" in parts and parts["oft_blocks"].ndim == 4 else "oft"
    kind = "full" if "diff" in parts else "norm" if "w_norm" in parts else rotation
    layer = Factors(kind, parts, 1.0)
    if magnitude is not None:
        raise ModelError(f"{where}: magnitudes with a layer of kind {kind}")
    if kind == rotation and alpha:
        raise ModelError(f"{where}: a rotation with a constraint ({alpha:g})", allowed="none: alpha 0")
    if layer.shape is None:
        raise ModelError(f"{where}: {_shape_text(layer)} do not go together")
    return layer


def _ia3(where: str, parts: dict[str, torch.Tensor], magnitude: torch.Tensor | None) -> Factors:
    """LyCORIS' factors, which say what is added, or PEFT's, which say what becomes of the whole."""
    factors = parts.get("ia3", parts.get("ia3_l"))
    assert factors is not None
    sides = [side for side in factors.shape if side != 1]
    if magnitude is not None or not factors.numel() or len(sides) > 1:
        raise ModelError(
            f"{where}: factors of shape {list(factors.shape)}", allowed="one side, no magnitudes"
        )
    if "on_input" in parts:
        return Factors("ia3", {"ia3": factors, "on_input": parts["on_input"].bool()})
    on_input = torch.tensor(factors.ndim > 1 and factors.shape[0] == 1)
    return Factors("ia3", {"ia3": factors.float() - 1, "on_input": on_input})


def _is_lokr(roles: frozenset[str]) -> bool:
    one = [{"lokr_w1"}, {"lokr_w1_a", "lokr_w1_b"}]
    two = [{"lokr_w2"}, {"lokr_w2_a", "lokr_w2_b"}, {"lokr_w2_a", "lokr_w2_b", "lokr_t2"}]
    return any(roles == a | b for a in one for b in two)


def _kind(layers: Mapping[str, Layer | Factors]) -> str:
    """lora, dora, loha or lokr; of a file that mixes layers (LyCORIS may), each kind that is in it."""
    decomposed = any(isinstance(one, Layer) and one.magnitude is not None for one in layers.values())
    low_rank = "dora" if decomposed else "lora"
    kinds = {low_rank if isinstance(layer, Layer) else layer.kind for layer in layers.values()}
    return "+".join(sorted(kinds))


def fit(adapter: Adapter, model: Model) -> Adapter:
    """The adapter with every layer under the model's own module path, in the shape of that layer's weight.

    ModelError where a layer is not found (the first few and how many) or has another shape; it says which
    base the adapter looks made for.
    """
    known = changeable(model)
    found = {name: _find(known, name) for name in _resolved(adapter, model)}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise ModelError(
            f"adapter '{adapter.name}': {_some(missing, len(found), 'layers')} are not in "
            f"{_model_name(model)}{_made_for(adapter, model)}"
        )
    layers: dict[str, Layer | Factors] = {}
    wrong: list[str] = []
    for (name, path), layer in zip(found.items(), adapter.layers.values(), strict=True):
        assert path is not None
        shape = tuple(known[path].weight.shape)
        fitted = shaped(layer, shape) if _is_for(layer, known[path]) else None
        if path in layers:
            raise ModelError(f"adapter '{adapter.name}': layer '{path}' is there twice, by two names")
        if fitted is None:
            wrong.append(f"{shown(name)}: {_shape_text(layer)}, there {list(shape)}")
        else:
            layers[path] = fitted
    if wrong:
        raise ModelError(
            f"adapter '{adapter.name}': {len(wrong)} of {len(found)} layers have another shape than in "
            f"{_model_name(model)} ({wrong[0]}){_made_for(adapter, model)}"
        )
    return replace(adapter, layers=layers)


def _resolved(adapter: Adapter, model: Model) -> list[str]:
    """The layers' names, numbers looked up in the model."""
    if not adapter.numbered:
        return list(adapter.layers)
    names = {
        part: [f"{part}.{path}" for path in numbered_layers(model, part)]
        for part in adapter.parts
        if part in model.modules
    }
    resolved = []
    for name in adapter.layers:
        part, _, number = name.partition(".")
        known = names.get(part, [])
        resolved.append(known[int(number)] if number.isdigit() and int(number) < len(known) else name)
    return resolved


def _find(known: Mapping[str, nn.Module], name: str) -> str | None:
    """The path of the model's layer that a name means: with or without transformers' `text_model.`."""
    part, _, path = name.partition(".")
    names = [name, f"{part}.text_model.{path}", f"{part}.{path.removeprefix('text_model.')}"]
    return next((one for one in names if one in known), None)


def adaptable(model: Model) -> dict[str, nn.Linear | nn.Conv2d]:
    """Every layer that an adapter may change, by its path: linear ones and convolutions."""
    found: dict[str, nn.Linear | nn.Conv2d] = {}
    for part, module in model.modules.items():
        if part == "vae":
            continue
        fused = tuple(f"{path}.to_" for path, inner in module.named_modules() if _is_fused(inner))
        for path, layer in module.named_modules():
            if path.startswith(fused) and not path.endswith("to_out.0"):
                continue
            if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1):
                found[f"{part}.{path}"] = layer
    return found


def changeable(model: Model) -> dict[str, nn.Linear | nn.Conv2d | nn.GroupNorm | nn.LayerNorm]:
    """Every layer that an adapter's file may change: those, and normalisations with weights."""
    found: dict[str, nn.Linear | nn.Conv2d | nn.GroupNorm | nn.LayerNorm] = dict(adaptable(model))
    for part, module in model.modules.items():
        for path, layer in module.named_modules() if part != "vae" else ():
            if isinstance(layer, (nn.GroupNorm, nn.LayerNorm)) and isinstance(layer.weight, nn.Parameter):
                found[f"{part}.{path}"] = layer
    return found


def _is_for(layer: Layer | Factors, module: nn.Module) -> bool:
    """Whether a layer changes modules of this kind, and no bias that the module lacks."""
    of_norm = isinstance(layer, Factors) and layer.kind == "norm"
    has_bias = layer.bias is None or module.bias is not None
    return of_norm == isinstance(module, (nn.GroupNorm, nn.LayerNorm)) and has_bias


def _is_fused(module: nn.Module) -> bool:
    """Whether an attention computes query, key and value by one fused layer and passes its own by."""
    return bool(getattr(module, "fused_projections", False))


def shaped(layer: Layer | Factors, shape: tuple[int, ...]) -> Layer | Factors | None:
    """The layer for a weight of this shape, None where it cannot be; 1x1 kernels may be matrices."""
    if layer.magnitude is not None and magnitude_side(layer.magnitude, shape) is None:
        return None
    if isinstance(layer, Factors):
        own = layer.shape
        return layer if own is not None and _covers(own, shape) else None
    down, up = layer.down, layer.up
    if layer.shape != shape:
        pointwise = layer.shape[:2] == shape[:2] and all(n == 1 for n in (*layer.shape[2:], *shape[2:]))
        if not pointwise:
            return None
    wanted = (layer.rank, *shape[1:]), (shape[0], layer.rank, *[1] * (len(shape) - 2))
    return replace(layer, down=down.reshape(wanted[0]), up=up.reshape(wanted[1]))


def _covers(own: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether factors of this shape are a weight's: a kernel may be flattened into the inputs."""
    if len(own) == 1:
        return own[0] == shape[0]
    if own[0] == 0:
        return own[1] == shape[1]
    if len(own) == len(shape) == 4:
        return own == shape
    kernel = own[2:]
    return own[0] == shape[0] and math.prod(own[1:]) == math.prod(shape[1:]) and math.prod(kernel) == 1


def _shape_text(layer: Layer | Factors) -> str:
    if isinstance(layer, Layer):
        return str(list(layer.shape))
    return ", ".join(f"{role} {list(tensor.shape)}" for role, tensor in layer.parts.items())


def _model_name(model: Model) -> str:
    return "this model" if model.family == "custom" else f"this {model.family} model"


def _made_for(adapter: Adapter, model: Model) -> str:
    base = adapter.base
    missing = [part for part in adapter.parts if part not in model.modules]
    message = f"; the model has no {' and no '.join(missing)}" if missing else ""
    return message + (f"; it looks made for {base}" if base and base != model.family else "")


def merge(model: Model, adapter: Adapter, weight: float = 1.0) -> None:
    """Add `weight` times the adapter to the model's own weights, in place, with float32 arithmetic.

    Takes every kind. A DoRA at a weight between 0 and 1 goes that part of the way to its full effect.
    """
    merge_all(model, [(adapter, weight)])


@torch.no_grad()
def merge_all(model: Model, adapters: Sequence[tuple[Adapter, float]]) -> None:
    """Add several adapters, each times its weight, to the model's own weights.

    Each one's change is taken from the weights as they were before, so the order makes no difference: a
    DoRA's depends on the weights that it is merged into.
    """
    for adapter, weight in adapters:
        if not (weight == weight and abs(weight) <= 100):
            raise ModelError(f"adapter '{adapter.name}' with weight {weight}", allowed="-100 to 100")
    known = changeable(model)
    fitted = [(adapter.name, fit(adapter, model).layers, weight) for adapter, weight in adapters]
    for path in dict.fromkeys(path for _, layers, _ in fitted for path in layers):
        stored, bias = known[path].weight, known[path].bias
        before = stored.float()
        whole = before.clone()
        shift = None if bias is None else bias.float().clone()
        for _, layers, weight in fitted:
            if path in layers:
                layer = layers[path].to(stored.device)
                whole.add_(layer.change(before), alpha=weight)
                if shift is not None and layer.bias is not None:
                    shift.add_(layer.bias.float(), alpha=weight)
        for parameter, value in ((stored, whole), (bias, shift)):
            if parameter is None or value is None:
                continue
            changed = value.to(parameter.dtype)
            if not bool(torch.isfinite(changed).all()):
                names = ", ".join(f"'{name}'" for name, layers, _ in fitted if path in layers)
                raise ModelError(f"adapter {names}, layer '{path}': too large for {parameter.dtype}")
            parameter.copy_(changed)


def check_untouched(path: str, layer: nn.Module) -> None:
    """ModelError for a layer with hooks: those that move weights put a forward before its own."""
    if "forward" in vars(layer):
        raise ModelError(f"layer '{path}' is run by something else, so adapters would be passed by")


def write_adapter(
    adapter: Adapter,
    file: str | Path,
    *,
    kohya: bool = False,
    dtype: torch.dtype | None = None,
    family: str | None = None,
    prediction: str | None = None,
) -> Path:
    """Write one `.safetensors` file atomically: diffusers' keys, or kohya's for ComfyUI and A1111.

    Alpha goes into diffusers' `lora_adapter_metadata` or kohya's `.alpha` tensors, so nothing is lost either
    way; `dtype` (float32, float16, bfloat16) casts the weights. The header tells base, rank, alpha and
    ModelSpec's fields besides what the adapter's metadata says (see `adapter_metadata.about`). `family` says
    the base and `prediction` (in diffusers' words) what it predicts, where layers and header do not tell.
    """
    if adapter.numbered:
        raise ModelError(
            f"adapter '{adapter.name}' knows its layers by number only", mend="fit it to its base"
        )
    if dtype not in (None, *DTYPES):
        raise ModelError(f"an adapter in {dtype}", allowed="float32, float16, bfloat16")
    base = family or adapter.base
    if kohya:
        for note in _not_in_diffusers(adapter):
            LOG.warning("'%s': %s", Path(file).name, note)
    tensors = dict(_kohya_tensors(adapter, base == "sdxl") if kohya else _diffusers_tensors(adapter))
    cast = {
        key: (t if dtype is None or key.endswith(".alpha") else t.to(dtype)).detach().cpu().contiguous()
        for key, t in tensors.items()
    }
    return save_tensors(Path(file), cast, header(adapter, base, prediction, kohya=kohya))


def _not_in_diffusers(adapter: Adapter) -> Iterator[str]:
    """What diffusers 0.42 leaves out of kohya's keys without an error."""
    if any(layer.magnitude is not None for layer in adapter.layers.values()):
        yield "diffusers leaves a DoRA's magnitudes out of kohya's keys; for it write without --kohya"
    text = [name for name in adapter.layers if name.startswith("text_encoder")]
    if text and not any("out_proj" in name for name in text):
        yield "diffusers passes kohya's keys of a text encoder by where no out_proj is among them"
    if any(_has_unusual_alphas(adapter, part) for part in adapter.parts):
        yield "diffusers takes one alpha for all layers of kohya's keys; for it write without --kohya"


def _has_unusual_alphas(adapter: Adapter, part: str) -> bool:
    """Whether layers have another alpha than most, of which diffusers' reader of kohya's keys takes no note:
    of a U-Net those of attention."""
    alphas = {
        name: round(layer.alpha, 6)
        for name, layer in adapter.layers.items()
        if isinstance(layer, Layer) and name.startswith(f"{part}.")
    }
    usual = Counter(alphas.values()).most_common(1)
    return any(
        alpha != usual[0][0] and (part != "unet" or re.search(r"\.attn\d\.to_", name))
        for name, alpha in alphas.items()
    )


def _diffusers_tensors(adapter: Adapter) -> Iterator[tuple[str, torch.Tensor]]:
    for name, layer in adapter.layers.items():
        if isinstance(layer, Factors):
            raise ModelError(
                f"adapter '{adapter.name}' is of kind {layer.kind}: diffusers has no keys for it",
                mend="--kohya",
            )
        keys = diffusers_keys(name)
        for role, tensor in layer.tensors.items():
            yield keys[role], _peft_magnitude(adapter, layer) if role == "magnitude" else tensor


def _peft_magnitude(adapter: Adapter, layer: Layer) -> torch.Tensor:
    assert layer.magnitude is not None
    if layer.magnitude.shape[0] != layer.up.shape[0]:
        raise ModelError(f"adapter '{adapter.name}': diffusers knows no DoRA by inputs", mend="use kohya's")
    flat = layer.magnitude.flatten()
    return flat if layer.down.ndim == 2 else flat.reshape(1, -1, 1, 1)


def _kohya_magnitude(layer: Layer | Factors) -> torch.Tensor:
    """With the weight's sides: [O, 1] or [O, 1, 1, 1] by outputs, [1, I] or [1, I, 1, 1] by inputs."""
    assert layer.magnitude is not None
    if isinstance(layer, Factors):
        return layer.magnitude
    ones = [1] * (layer.down.ndim - 2)
    by_outputs = layer.magnitude.shape[0] == layer.up.shape[0]
    return layer.magnitude.reshape(-1, 1, *ones) if by_outputs else layer.magnitude.reshape(1, -1, *ones)


def _kohya_tensors(adapter: Adapter, sdxl: bool) -> Iterator[tuple[str, torch.Tensor]]:
    attended = {
        int(m[1]) for name in adapter.layers if (m := re.match(r"unet\.up_blocks\.(\d+)\.attentions", name))
    }
    attended |= {0, 1} if sdxl else set()  # also where the adapter leaves their attention alone
    roles = {
        "down": "lora_down.weight",
        "up": "lora_up.weight",
        "magnitude": "dora_scale",
        "ia3": "weight",
    }
    for name, layer in adapter.layers.items():
        stem = kohya_stem(name, sdxl=sdxl, attended=attended)
        for role, tensor in layer.tensors.items():
            yield (
                f"{stem}.{roles.get(role, role)}",
                _kohya_magnitude(layer) if role == "magnitude" else tensor,
            )
        if not (isinstance(layer, Factors) and layer.kind in ("full", "norm", "ia3")):
            rotation = isinstance(layer, Factors) and layer.kind in ("oft", "boft")
            yield f"{stem}.alpha", _exact(0.0 if rotation else layer.alpha)


def _exact(alpha: float) -> torch.Tensor:
    """In float32 where that holds it, as kohya writes it."""
    short = torch.tensor(round(alpha, 9), dtype=torch.float32)
    return short if float(short) == round(alpha, 9) else torch.tensor(alpha, dtype=torch.float64)


# ---- what the command line does with adapter files: tell what is in one, write it in other keys, merge it

MOST_SHOWN = 200
TRIGGERS = ("modelspec.trigger_phrase", "ss_trigger", "trained_words")


def is_adapter(path: Path) -> bool:
    """Whether a file (or PEFT's folder) is an adapter, by the names in its header."""
    if path.is_dir():
        return (path / PEFT_CONFIG).is_file() and (path / PEFT_WEIGHTS).is_file()
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    return any(split_key(name) is not None for name in read_header(path))


def describe_adapter(file: str | Path) -> dict[str, Any]:
    """What `darkroom inspect ADAPTER` tells."""
    adapter = read_adapter(file)
    ranks = Counter(layer.rank for layer in adapter.layers.values())
    scales = Counter(round(layer.scale, 6) for layer in adapter.layers.values())
    trigger = next((adapter.metadata[key] for key in TRIGGERS if key in adapter.metadata), None)
    tensors = [t for layer in adapter.layers.values() for t in layer.tensors.values()]
    return {
        "path": str(file),
        "kind": adapter.kind,
        "layout": adapter.layout,
        "made_for": adapter.base or "unknown",
        "rank": _span(ranks),
        "scale": _span(scales),
        "layers": dict(Counter(name.partition(".")[0] for name in adapter.layers)),
        "parameters": adapter.num_parameters,
        "bytes": sum(t.nbytes for t in tensors),
        "precision": ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors})),
        "trigger": None if trigger is None else shown(trigger, MOST_SHOWN),
        "notes": list(adapter.notes) or None,
        "metadata": {
            shown(key): shown(text, MOST_SHOWN)
            for key, text in sorted(adapter.metadata.items())
            if ":" not in key
        },
        "sha256": adapter.sha256,
    }


def _span(counted: Counter[Any]) -> Any:
    return next(iter(counted)) if len(counted) == 1 else f"{min(counted)} to {max(counted)}"


def export_adapter(
    source: str | Path, to: str | Path, *, kohya: bool = False, dtype: torch.dtype | None = None
) -> Path:
    """An adapter of any layout written anew: diffusers' keys, or kohya's. A file that is there stays."""
    target = Path(to)
    if target.suffix != ".safetensors":
        raise InputError(f"an adapter to '{to}'", allowed="--to FILE.safetensors")
    if target.exists():
        raise InputError(f"'{target}' is there already", mend="choose another file")
    return write_adapter(_named_by_base(read_adapter(source)), target, kohya=kohya, dtype=dtype)


def _named_by_base(adapter: Adapter) -> Adapter:
    """Layers that are known by number get their names from the architecture that the adapter is made for."""
    if not adapter.numbered:
        return adapter
    if adapter.base is None:
        raise ModelError(f"adapter '{adapter.name}' numbers its layers and does not tell its base")
    return fit(adapter, create(adapter.base, parts=("unet", "text_encoder"), device="meta"))


def export_merged(
    model: str | Path,
    to: str | Path,
    adapters: Sequence[tuple[Adapter, float]],
    *,
    dtype: torch.dtype | None = None,
    **how: Any,
) -> Path:
    """A model with adapters merged into its weights, as a folder; merged in float32, then cast to `dtype`.

    `how` is what `load` takes besides: variant, revision. A folder that is there stays. Its card (README.md)
    has the sources and licences of the adapters and of the model.
    """
    target = Path(to)
    if target.exists():
        raise InputError(f"'{target}' is there already", mend="choose another folder")
    if target.suffix == ".safetensors":
        raise InputError(f"a merged model to '{to}'", allowed="a folder")
    opened = load(model, **how)
    merge_all(opened, adapters)
    save(opened.to(dtype=dtype), target)
    write_atomically(target / CARD, merged_card(target.resolve().name, model, adapters))
    return target
