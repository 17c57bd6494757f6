"""What an adapter is: its layers, and the base model that it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from darkroom.models.adapters.layers import Factors, Layer

ARCHITECTURES = {
    "sd15": "stable-diffusion-v1",
    "sd2": "stable-diffusion-v2-512",
    "sd2-v": "stable-diffusion-v2-768-v",
    "sdxl": "stable-diffusion-xl-v1-base",
}
KOHYA_BASES = {"sd15": "sd_v1", "sd2": "sd_v2", "sd2-v": "sd_v2_v", "sdxl": "sdxl_base_v1-0"}
TEXT_WIDTHS = {768: "sd15", 1024: "sd2", 2048: "sdxl"}
"""The width of the text that a U-Net listens to, which tells the families apart."""


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


@dataclass(frozen=True, eq=False, repr=False)
class Adapter:
    """What was learned on top of a model, by layer.

    `layers` are keyed by `unet.<module path>`, `text_encoder.<..>`, `text_encoder_2.<..>`; `text_model.` at
    the start of a text encoder's path may be there or not. `metadata` is the file's own; `kind` is lora,
    dora, loha or lokr, or several joined by '+'. `notes` tell what is in the file and not in the adapter.
    `sha256` is that of the file.
    """

    name: str
    layers: Mapping[str, Layer | Factors]
    metadata: Mapping[str, str] = field(default_factory=dict)
    kind: str = "lora"
    layout: str = ""
    sha256: str = ""
    notes: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """The largest rank of a layer."""
        return max((layer.rank for layer in self.layers.values()), default=0)

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of a model that it changes."""
        return tuple(dict.fromkeys(name.partition(".")[0] for name in self.layers))

    @property
    def num_parameters(self) -> int:
        """Numbers in all its tensors."""
        return sum(t.numel() for layer in self.layers.values() for t in layer.tensors.values())

    @property
    def base(self) -> str | None:
        """The family that it looks made for, by the width of the text that its layers listen to."""
        return base_of(self.layers, self.metadata)

    @property
    def numbered(self) -> bool:
        """Whether its layers are known by number only, as in the oldest files; `fit` finds which they are."""
        return any(name.rpartition(".")[2].isdigit() and name.count(".") == 1 for name in self.layers)
