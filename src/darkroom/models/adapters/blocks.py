"""Block weights: how much of an adapter each block of the U-Net takes, in the order that A1111's users write.

A list names the blocks from the text encoders on: BASE, IN00 ... , M00, OUT00 ... (26 for SD 1 and 2, 20 for
SDXL), or only those with attention (17 and 12), where the others take nothing. Layers of no block, such as
the time embedding's, take all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from darkroom.errors import ModelError

if TYPE_CHECKING:
    from darkroom.models.model import Model

Blocks = tuple[float, ...]
"""Weights of blocks as a user gave them; () is 1 for all."""
BASE, MIDDLE = "BASE", "M00"
MAX_BLOCKS = 64
INSIDE = re.compile(r"unet\.(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.")


def names_of(model: Model) -> tuple[list[str], list[str]]:
    """The names of all blocks of a model, and of those with attention."""
    unet: Any = model.unet
    if not hasattr(unet, "down_blocks"):
        raise ModelError("block weights with a transformer", allowed="U-Nets")
    deep = _deep(model)
    attentive, everything = [BASE], [BASE]
    for kind, blocks in (("IN", unet.down_blocks), ("OUT", unet.up_blocks)):
        for i in range(len(blocks) * (1 + deep)):
            name = f"{kind}{i:02}"
            everything.append(name)
            level, at = divmod(i - 1 if kind == "IN" else i, 1 + deep)
            if i - (kind == "IN") >= 0 and at < len(getattr(blocks[level], "attentions", ())):
                attentive.append(name)
        if kind == "IN":
            everything.append(MIDDLE)
            attentive.append(MIDDLE)
    return everything, attentive


def _deep(model: Model) -> int:
    """Residual blocks of a level on the way down."""
    unet: Any = model.unet
    return len(unet.down_blocks[0].resnets)


def by_layer(model: Model, blocks: Sequence[float]) -> Callable[[str], float]:
    """How much a layer takes, by its path. ModelError for a number of weights that is not a list's."""
    if not blocks:
        return lambda path: 1.0
    lists = names_of(model)
    names = next((one for one in lists if len(one) == len(blocks)), None)
    if names is None:
        raise ModelError(
            f"{len(blocks)} block weights",
            allowed=" or ".join(f"{len(one)} ({', '.join(one)})" for one in lists[::-1]),
        )
    weights = dict.fromkeys(lists[0], 0.0) | dict(zip(names, blocks, strict=True))
    deep = _deep(model)
    return lambda path: weights.get(block_of(path, deep), 1.0)


def block_of(path: str, deep: int) -> str:
    """The block of a layer, where a level has so many residual blocks on the way down; '' for none."""
    if path.startswith("text_encoder"):
        return BASE
    if path.startswith("unet.mid_block."):
        return MIDDLE
    if path == "unet.conv_in":
        return "IN00"
    found = INSIDE.match(path)
    if found is None:
        return ""
    level = int(found[2]) * (1 + deep)
    at = deep if found[3].endswith("samplers") else int(found[4])
    return f"IN{1 + level + at:02}" if found[1] == "down" else f"OUT{level + at:02}"
