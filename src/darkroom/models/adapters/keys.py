"""What adapter files call their tensors, and which layer of a model is meant.

Every layout is read into pairs of a layer's name (`unet.<module path>`) and a role (`down`, `up`, `alpha`).
A name out of a file is only ever looked up in a table: it is never walked, imported or opened.

| layout | example |
| --- | --- |
| diffusers, PEFT | `unet.down_blocks.0.attentions.0.proj_in.lora_A.weight`, `base_model.model.` before it |
| diffusers, older | `unet.<attn1>.processor.to_q_lora.down.weight`, `<path>.lora_linear_layer.up.weight` |
| kohya, LyCORIS | `lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight`, `lora_te_`, `lycoris_` |
| numbered | `unet:12:down`: cloneofsimo's, the oldest; the layer is the twelfth that was trained |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from darkroom.models.model import Model


ROLES: tuple[tuple[str, str], ...] = (
    (r"[._]lora\.down\.weight", "down"),
    (r"[._]lora\.up\.weight", "up"),
    (r"\.lora_linear_layer\.down\.weight", "down"),
    (r"\.lora_linear_layer\.up\.weight", "up"),
    (r"\.lora_A(?:\.\w{1,64})?\.weight", "down"),
    (r"\.lora_B(?:\.\w{1,64})?\.weight", "up"),
    (r"\.lora_magnitude_vector(?:\.\w{1,64}){0,2}", "magnitude"),
    (r"\.lora_down\.weight", "down"),
    (r"\.lora_up\.weight", "up"),
    (r"\.lora_mid\.weight", "mid"),
    (r"\.alpha", "alpha"),
    (r"\.dora_scale", "magnitude"),
    (r"\.(hada_(?:w[12]_[ab]|t[12]))", ""),
    (r"\.(lokr_(?:w[12](?:_[ab])?|t2))", ""),
    (r"\.(diff|diff_b|w_norm|b_norm|oft_blocks|rescale)", ""),
    (r"\.(ia3_l)", ""),
)
"""How a tensor's name ends, and what the tensor is; where the role is empty the ending itself says it."""
ENDING = re.compile("|".join(f"(?:{ending})$" for ending, _ in ROLES))

PREFIXES: tuple[tuple[str, str], ...] = (
    ("base_model.model.", ""),
    ("model.diffusion_model.", "unet"),
    ("diffusion_model.", "unet"),
    ("unet.base_model.model.", "unet"),
    ("text_encoder.base_model.model.", "text_encoder"),
    ("text_encoder_2.base_model.model.", "text_encoder_2"),
    ("unet.", "unet"),
    ("text_encoder.", "text_encoder"),
    ("text_encoder_2.", "text_encoder_2"),
    ("lora_unet_", "unet"),
    ("lora_te_", "text_encoder"),
    ("lora_te1_", "text_encoder"),
    ("lora_te2_", "text_encoder_2"),
    ("lycoris_", ""),
)
KOHYA_PREFIXES = {"unet": "lora_unet", "text_encoder": "lora_te", "text_encoder_2": "lora_te2"}
UNET_STARTS = (
    *("down_blocks", "mid_block", "up_blocks", "conv_in", "conv_out", "conv_norm_out"),
    *("time_emb", "add_emb"),
)
TEXT_STARTS = ("text_model", "encoder.layers", "text_projection")

WORDS = frozenset(
    re.findall(
        r"\w+",
        "down_blocks mid_block up_blocks transformer_blocks proj_in proj_out to_q to_k to_v to_out "
        "time_emb_proj conv_shortcut conv_in conv_out time_embedding add_embedding linear_1 linear_2 "
        "cond_proj text_model text_projection self_attn q_proj k_proj v_proj out_proj input_blocks "
        "middle_block output_blocks in_layers out_layers emb_layers skip_connection time_embed label_emb "
        "conv_norm_out layer_norm1 layer_norm2 final_layer_norm",
    )
)
"""The names of modules that hold an underscore themselves: kohya's keys join names by underscores."""

ORIGINAL_BLOCKS = 3
"""Steps of a level as Stability numbers them, in SD 1, 2 and XL: two residual blocks, then the size."""
ORIGINAL_OUTSIDE = {
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
}
ORIGINAL_RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "emb_layers.1": "time_emb_proj",
    "skip_connection": "conv_shortcut",
}
ORIGINAL_MIDDLE = {"0": "resnets.0", "1": "attentions.0", "2": "resnets.1"}
OLD_TEXT = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}

NUMBERED = re.compile(r"(unet|text_encoder):(\d{1,5}):(up|down)")
NUMBERED_LINEARS = re.compile(r"\.(?:attn1|attn2)\.to_(?:q|k|v|out\.0)$|\.ff\.net\.0\.proj$")


def split_key(key: str) -> tuple[str, str] | None:
    """A tensor's name as its layer's name and its role; None where it is no part of an adapter."""
    if numbered := NUMBERED.fullmatch(key):
        return f"{numbered[1]}.{int(numbered[2])}", numbered[3]
    ending = ENDING.search(key)
    if ending is None:
        return None
    name = layer_name(key[: ending.start()])
    return None if name is None else (name, _role(ending[0]))


def _role(ending: str) -> str:
    for pattern, role in ROLES:
        if match := re.fullmatch(pattern, ending):
            return role or match[1]
    raise AssertionError(ending)


def layout_of(keys: Iterable[str]) -> str:
    """The layout that a file's keys are in, by its usual name."""
    for key in keys:
        if NUMBERED.fullmatch(key):
            return "numbered"
        if key.startswith(("lora_unet_", "lora_te", "lycoris_")):
            return "kohya"
        if key.startswith("base_model.model.") or ".base_model.model." in key:
            return "peft"
        if "_lora." in key or ".processor." in key:
            return "diffusers (older)"
        if split_key(key) is not None:
            return "diffusers"
    return "unknown"


def layer_name(stem: str) -> str | None:
    """`unet.<path>`, `text_encoder.<path>` or `text_encoder_2.<path>` of what a key says before its role."""
    for prefix, part in PREFIXES:
        if not stem.startswith(prefix):
            continue
        rest = stem.removeprefix(prefix)
        if not part:  # LyCORIS' own wrapper says the path alone, flattened
            return layer_name(_split_words(rest) if prefix == "lycoris_" else rest)
        path = _split_words(rest) if prefix.startswith("lora_") else rest
        return f"{part}.{_unet_path(path) if part == 'unet' else _text_path(path)}"
    if stem.startswith(UNET_STARTS):
        return f"unet.{_unet_path(stem)}"
    return f"text_encoder.{_text_path(stem)}" if stem.startswith(TEXT_STARTS) else None


def _split_words(flat: str) -> str:
    """`down_blocks_0_proj_in` as `down_blocks.0.proj_in`: the longest known word first."""
    parts, words, i = flat.split("_"), [], 0
    while i < len(parts):
        size = next((n for n in (3, 2) if "_".join(parts[i : i + n]) in WORDS), 1)
        words.append("_".join(parts[i : i + size]))
        i += size
    return ".".join(words)


def _unet_path(path: str) -> str:
    path = path.replace(".processor.", ".")
    if path.endswith(".to_out"):
        path += ".0"
    return _from_original(path)


def _text_path(path: str) -> str:
    """Without `text_model.`, which newer transformers have left out of CLIPTextModel's names."""
    path = path.removeprefix("text_model.").replace(".processor.", ".")
    head, _, last = path.rpartition(".")
    return f"{head}.{OLD_TEXT[last]}" if last in OLD_TEXT else path


def _from_original(path: str) -> str:
    """Stability's own name of a U-Net's layer, as kohya's SDXL files have it, turned into diffusers'."""
    if path in ORIGINAL_OUTSIDE:
        return ORIGINAL_OUTSIDE[path]
    if middle := re.fullmatch(r"middle_block\.([012])\.(.+)", path):
        return f"mid_block.{ORIGINAL_MIDDLE[middle[1]]}.{_inner(middle[2])}"
    found = re.fullmatch(r"(input|output)_blocks\.(\d{1,2})\.([012])\.(.+)", path)
    if found is None:
        return path
    down, number, place, rest = found[1] == "input", int(found[2]), int(found[3]), found[4]
    block, step = divmod(number - down, ORIGINAL_BLOCKS)
    if rest in ("op", "conv"):
        return f"{'down' if down else 'up'}_blocks.{block}.{'down' if down else 'up'}samplers.0.conv"
    kind = "resnets" if place == 0 else "attentions"
    return f"{'down' if down else 'up'}_blocks.{block}.{kind}.{step}.{_inner(rest)}"


def _inner(rest: str) -> str:
    return ORIGINAL_RESNET.get(rest, rest)


def _to_original(path: str, attended: Iterable[int] = ()) -> str:
    """The inverse: a U-Net's layer by Stability's names. `attended` are the up blocks that have attention."""
    for original, ours in ORIGINAL_OUTSIDE.items():
        if path == ours:
            return original
    names = {ours: original for original, ours in ORIGINAL_RESNET.items()}
    if middle := re.fullmatch(r"mid_block\.(\w+\.[01])\.(.+)", path):
        place = {ours: original for original, ours in ORIGINAL_MIDDLE.items()}[middle[1]]
        return f"middle_block.{place}.{names.get(middle[2], middle[2])}"
    found = re.fullmatch(r"(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.(.+)", path)
    if found is None:
        return path
    side, block, kind, step, rest = found[1], int(found[2]), found[3], int(found[4]), found[5]
    down = side == "down"
    first = block * ORIGINAL_BLOCKS + down
    if kind == "downsamplers":
        return f"input_blocks.{first + ORIGINAL_BLOCKS - 1}.0.op"
    if kind == "upsamplers":
        return f"output_blocks.{first + ORIGINAL_BLOCKS - 1}.{2 if block in set(attended) else 1}.conv"
    place = "0" if kind == "resnets" else "1"
    return f"{'input' if down else 'output'}_blocks.{first + step}.{place}.{names.get(rest, rest)}"


def diffusers_keys(name: str) -> dict[str, str]:
    """The keys of one layer as diffusers' `save_lora_weights` and scripts write them, by role."""
    part, _, path = name.partition(".")
    if part == "unet":
        stem = f"{name}.lora_"
        return {"down": f"{stem}A.weight", "up": f"{stem}B.weight", "magnitude": f"{stem}magnitude_vector"}
    stem = f"{part}.{_full_text_path(path)}."
    # transformers, which loads a text encoder's, finds magnitudes by their full name alone.
    return {
        "down": f"{stem}lora_linear_layer.down.weight",
        "up": f"{stem}lora_linear_layer.up.weight",
        "magnitude": f"{stem}lora_magnitude_vector.weight",
    }


def _full_text_path(path: str) -> str:
    return path if path.startswith(("text_projection", "text_model.")) else f"text_model.{path}"


def kohya_stem(name: str, *, sdxl: bool, attended: Iterable[int] = ()) -> str:
    """What kohya's key says before the role; for SDXL in Stability's names, the first encoder as te1."""
    part, _, path = name.partition(".")
    prefix = "lora_te1" if sdxl and part == "text_encoder" else KOHYA_PREFIXES[part]
    if part != "unet":
        path = _full_text_path(path)
    elif sdxl:
        path = _to_original(path, attended)
    return f"{prefix}_{path.replace('.', '_')}"


def numbered_layers(model: Model, part: str) -> Iterator[str]:
    """The layers of a part in the order that cloneofsimo's files number them.

    They number the linear layers of attention and GEGLU as modules stood in diffusers of early 2023, whose
    transformer blocks held self-attention, feed-forward, cross-attention in this order.
    """
    module = model.modules[part]
    if part != "unet":
        yield from (n for n, _ in module.named_modules() if re.search(r"\.self_attn\.\w+_proj$", n))
        return
    held: dict[str, list[str]] = {}
    for name, _ in module.named_modules():
        if NUMBERED_LINEARS.search(name):
            block = re.split(r"\.(?:attn1|attn2|ff)\.", name)[0]
            held.setdefault(block, []).append(name)
    order = (".attn1.", ".ff.", ".attn2.")
    for block in held.values():
        yield from sorted(block, key=lambda name: next(i for i, one in enumerate(order) if one in name))
