"""What the header of an adapter file says in words: alphas, base, and the fields that other tools show.

Written are diffusers' `lora_adapter_metadata` (a LoraConfig by part, as JSON), ModelSpec's fields
(Stability AI's convention) and kohya's `ss_` fields, as far as they are known. Nothing in a header is obeyed
beyond numbers and names that are looked up.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from darkroom.models.adapter_layers import Factors, Layer, scale_of

if TYPE_CHECKING:
    from darkroom.models.adapters import Adapter

DIFFUSERS = "lora_adapter_metadata"
ARCHITECTURES = {
    "sd15": "stable-diffusion-v1",
    "sd2": "stable-diffusion-v2-512",
    "sd2-v": "stable-diffusion-v2-768-v",
    "sdxl": "stable-diffusion-xl-v1-base",
}
KOHYA_BASES = {"sd15": "sd_v1", "sd2": "sd_v2", "sd2-v": "sd_v2_v", "sdxl": "sdxl_base_v1-0"}
RESOLUTIONS = {"sd15": "512x512", "sd2": "512x512", "sd2-v": "768x768", "sdxl": "1024x1024"}
PREDICTIONS = {"sd2-v": "v", "dit": "flow", "tiny-dit": "flow"}
"""Where it is not epsilon."""
PREDICTION_NAMES = {"v_prediction": "v", "flow_prediction": "flow"}
"""ModelSpec's names of what diffusers names otherwise."""
TEXT_WIDTHS = {768: "sd15", 1024: "sd2", 2048: "sdxl"}
"""The width of the text that a U-Net listens to, which tells the families apart."""
MODULES = {"lora": "networks.lora", "dora": "lycoris.kohya", "loha": "lycoris.kohya", "lokr": "lycoris.kohya"}


@dataclass(frozen=True)
class Alphas:
    """What headers say of scales: by layer where they do, else for all layers of a part; else 1."""

    rank_stabilised: bool = False
    by_part: Mapping[str, float] = field(default_factory=dict)
    by_layer: Mapping[str, float] = field(default_factory=dict)

    def scale(self, name: str, rank: int) -> float:
        """The scale of a layer: alpha / rank, with alpha = rank where nothing is said."""
        part, _, path = name.partition(".")
        alpha = self._of_layer(part, path.removeprefix("text_model."))
        if alpha is None:
            alpha = self.by_part.get(part, self.by_part.get(""))
        return 1.0 if alpha is None else scale_of(alpha, rank, rank_stabilised=self.rank_stabilised)

    def _of_layer(self, part: str, path: str) -> float | None:
        """PEFT's patterns are endings of paths; here they are compared, not run as regular expressions."""
        steps = path.split(".")
        endings = (".".join(steps[i:]) for i in range(len(steps)))
        places = [f"{start}{ending}" for ending in endings for start in (f"{part}.", ".")]
        return next((self.by_layer[place] for place in places if place in self.by_layer), None)


def read_alphas(metadata: Mapping[str, str], config: Mapping[str, Any]) -> Alphas:
    """The scales in diffusers' metadata of the header, or in PEFT's configuration beside the file."""
    told: dict[str, Any] = {f".{key}": value for key, value in config.items()}
    try:
        diffusers = json.loads(metadata.get(DIFFUSERS, "{}"))
    except (ValueError, RecursionError):
        diffusers = {}
    if isinstance(diffusers, dict):
        told |= diffusers
    by_part: dict[str, float] = {}
    by_layer: dict[str, float] = {}
    for key, value in told.items():
        part, _, what = str(key).rpartition(".")
        if what == "lora_alpha" and _is_number(value):
            by_part[part] = float(value)
        elif what == "alpha_pattern" and isinstance(value, dict):
            plain = {str(k).lstrip("^").removeprefix("text_model."): v for k, v in value.items()}
            by_layer |= {f"{part}.{k}": float(v) for k, v in plain.items() if _is_number(v)}
    stabilised = any(str(key).endswith(".use_rslora") and value is True for key, value in told.items())
    return Alphas(stabilised, by_part, by_layer)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e9


def base_of(layers: Mapping[str, Layer | Factors], metadata: Mapping[str, str]) -> str | None:
    """The family an adapter looks made for: by its widths first, then by what its header says."""
    if any(name.startswith("unet.blocks.") for name in layers):
        return "dit"
    for name, layer in layers.items():
        if isinstance(layer, Layer) and name.endswith(("attn2.to_k", "attn2.to_v")):
            by_width = TEXT_WIDTHS.get(int(layer.down.shape[1]))
            return "sd2-v" if by_width == "sd2" and _told(metadata) == "sd2-v" else by_width
    if any(name.startswith("text_encoder_2.") for name in layers):
        return "sdxl"
    if (family := _told(metadata)) is not None:
        return family
    widths = {int(layer.down.shape[1]) for layer in layers.values() if isinstance(layer, Layer)}
    named = any(len(name.split(".")) > 2 for name in layers)
    return None if named or not widths else next((f for w, f in TEXT_WIDTHS.items() if w in widths), None)


def _told(metadata: Mapping[str, str]) -> str | None:
    """The family that a header names, in ModelSpec's words or in kohya's."""
    architecture = metadata.get("modelspec.architecture", "").partition("/")[0]
    version = metadata.get("ss_base_model_version", "")
    for family in ARCHITECTURES:
        if architecture == ARCHITECTURES[family] or (not architecture and version == KOHYA_BASES[family]):
            return family
    return None


def about(
    *,
    title: str | None = None,
    trigger: str | None = None,
    base_model: str | None = None,
    author: str | None = None,
    description: str | None = None,
    license: str | None = None,
    resolution: str | None = None,
    **more: str | None,
) -> dict[str, str]:
    """Metadata for an adapter that is to be written, under the names that tools look for.

    `trigger` are the words that call what was learned; `base_model` the folder or hub id it was trained on.
    """
    told = {
        "modelspec.title": title,
        "ss_output_name": title,
        "modelspec.trigger_phrase": trigger,
        "ss_sd_model_name": base_model,
        "modelspec.author": author,
        "modelspec.description": description,
        "modelspec.license": license,
        "modelspec.resolution": resolution,
        **more,
    }
    return {key: value for key, value in told.items() if value is not None}


def header(adapter: Adapter, base: str | None, prediction: str | None, *, kohya: bool) -> dict[str, str]:
    """All that is written into a file's header; the adapter's own metadata goes before what is derived.

    `prediction` is in diffusers' words; None: what is usual with the base.
    """
    own = {key: value for key, value in adapter.metadata.items() if _is_kept(key)}
    rank, alpha = adapter.rank, _most_common([layer.alpha for layer in adapter.layers.values()])
    told = {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.implementation": "diffusers",
        "modelspec.title": adapter.name,
        "modelspec.date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S"),
        "modelspec.prediction_type": _prediction(base, prediction),
        "ss_network_module": MODULES[adapter.kind],
        "ss_network_dim": str(rank),
        "ss_network_alpha": f"{alpha:g}",
        "ss_output_name": adapter.name,
    }
    if base in ARCHITECTURES:
        told["modelspec.architecture"] = f"{ARCHITECTURES[base]}/lora"
        told["modelspec.resolution"] = RESOLUTIONS[base]
        told["ss_base_model_version"] = KOHYA_BASES[base]
        told["ss_v2"] = str(base.startswith("sd2"))
    told |= own
    if not kohya:
        told[DIFFUSERS] = json.dumps(_lora_configs(adapter), indent=2, sort_keys=True)
    return told


def _prediction(base: str | None, told: str | None) -> str:
    return PREDICTIONS.get(base or "", "epsilon") if told is None else PREDICTION_NAMES.get(told, told)


def _is_kept(key: str) -> bool:
    """Fields of the two conventions; hashes of the file as it was are not true of the new one."""
    return key.startswith(("modelspec.", "ss_", "darkroom.")) and key != "modelspec.hash_sha256"


def _lora_configs(adapter: Adapter) -> dict[str, Any]:
    """PEFT's LoraConfig of each part, as diffusers' `save_lora_weights` packs them."""
    told: dict[str, Any] = {}
    for part in adapter.parts:
        layers = {
            name.partition(".")[2].removeprefix("text_model."): layer
            for name, layer in adapter.layers.items()
            if name.startswith(f"{part}.")
        }
        ranks = {path: layer.rank for path, layer in layers.items()}
        alphas = {path: _plain(layer.alpha) for path, layer in layers.items()}
        rank, alpha = _most_common(list(ranks.values())), _most_common(list(alphas.values()))
        told |= {
            f"{part}.peft_type": "LORA",
            f"{part}.r": rank,
            f"{part}.lora_alpha": alpha,
            f"{part}.rank_pattern": {f"^{path}": r for path, r in ranks.items() if r != rank},
            f"{part}.alpha_pattern": {f"^{path}": a for path, a in alphas.items() if a != alpha},
            f"{part}.target_modules": sorted(layers),
            f"{part}.use_dora": adapter.kind == "dora",
        }
    return told


def _plain(alpha: float) -> float | int:
    """A whole alpha as a whole number, free of the last bit that scale * rank may leave."""
    rounded = round(alpha, 9)
    return int(rounded) if rounded == int(rounded) else alpha


def _most_common(values: list[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]
