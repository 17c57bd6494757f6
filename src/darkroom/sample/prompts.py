"""Prompts to what the U-Net listens to: tokens, text states, and SDXL's pooled text and size conditioning.

A prompt longer than the encoder reads at once is read in parts of 75 tokens, whose states stand one after
the other. Shapes: B prompts, N parts of all prompts together, L tokens, D text width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from darkroom.errors import InputError
from darkroom.hardware.accelerator import computed_on, new_tensor, to_device
from darkroom.models.embeddings import with_words
from darkroom.models.tokenizer import spelled, vectors_of_words
from darkroom.sample.denoise import Condition

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

    from darkroom.models.model import Model


ENCODE_BATCH = 32
MAX_PARTS = 16
# A1111 moves what stands behind a comma to the next part where the comma is at most so many tokens back.
A1111_COMMA_REACH = 20


@dataclass
class PromptChunk:
    """What an encoder reads at once: token ids between the start and the end token, each with its weight."""

    ids: list[int]
    weights: list[float]


def read_prompt(
    tokenizer: CLIPTokenizer, prompt: str, *, weighting: str = "none", length: int = 77
) -> list[PromptChunk]:
    """A prompt in parts of at most `length` - 2 tokens, at least one part. InputError beyond MAX_PARTS."""
    part_length = min(length, tokenizer.model_max_length) - 2
    comma = tokenizer.convert_tokens_to_ids(",</w>") if weighting == "a1111" else None
    words = vectors_of_words(tokenizer)
    parts = [PromptChunk([], [])]
    for piece in pieces(prompt, weighting):
        if piece.ends_part:
            parts.append(PromptChunk([], []))
            continue
        text = spelled(tokenizer, [with_words(tokenizer, piece.text)])[0]
        for token in tokenizer(text, verbose=False).input_ids[1:-1]:
            if len(parts[-1].ids) == part_length:
                parts.append(_carried_over(parts[-1], token, comma))
            if len(parts[-1].ids) + words.get(token, 1) > part_length:  # a word's vectors stay together
                parts.append(PromptChunk([], []))
            parts[-1].ids.append(token)
            parts[-1].weights.append(piece.weight)
    if len(parts) > 1 and not parts[-1].ids:  # nothing stands behind the last BREAK
        parts.pop()
    if len(parts) > MAX_PARTS:
        raise InputError(
            f"the prompt '{_short(prompt)}' has {len(parts)} parts of {part_length} tokens",
            allowed=f"up to {MAX_PARTS}",
        )
    return parts


def _carried_over(full: PromptChunk, token: int, comma: int | None) -> PromptChunk:
    """The start of the part after a full one: empty, or what stood behind a comma near the end."""
    if comma is None or token == comma or comma not in full.ids[-A1111_COMMA_REACH:]:
        return PromptChunk([], [])
    cut = len(full.ids) - full.ids[::-1].index(comma)
    carried = PromptChunk(full.ids[cut:], full.weights[cut:])
    del full.ids[cut:], full.weights[cut:]
    return carried


def _short(text: str, most: int = 40) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


@torch.no_grad()
def encode_prompts(
    model: Model,
    prompts: Sequence[str],
    size: tuple[int, int],
    *,
    weighting: str = "none",
    clip_skip: int | None = None,
    parts: Sequence[int] | None = None,
) -> tuple[list[Condition], list[str]]:
    """A condition for each prompt, and notices of what was read in parts. `size` (width, height) is for SDXL.

    SD 1 and 2: the text encoder's last states after its final norm. SDXL: both encoders' states one layer
    below the last, side by side, with the second one's pooled projection (of the first part) and the
    picture's size. `clip_skip` leaves out so many more of the last layers. `weighting` is the prompts' syntax
    (none, a1111, compel). `parts` says for each prompt how many parts it has at least; empty ones are added.
    """
    readings = [read_parts(model, prompt, weighting) for prompt in prompts]
    counts = [
        max(len(one[0]), least) for one, least in zip(readings, parts or [1] * len(prompts), strict=True)
    ]
    notices = [
        f"prompt '{_short(prompt)}' is read in {len(one[0])} parts of the text encoder's length"
        for prompt, one in zip(prompts, readings, strict=True)
        if len(one[0]) > 1
    ]
    states: list[torch.Tensor] = []
    pooled = None
    for i in range(len(model.text_encoders)):
        padded = [
            part
            for reading, count in zip(readings, counts, strict=True)
            for part in [*reading[i], *[PromptChunk([], [])] * (count - len(reading[i]))]
        ]
        text_NLD, pooled = _encode_parts(model, i, padded, weighting, clip_skip)
        states.append(text_NLD)
    text_NLD = torch.cat(states, dim=-1)
    conditions, start = [], 0
    for count in counts:
        added = {}
        if pooled is not None:
            added = {"text_embeds": pooled[start], "time_ids": time_ids(size, text_NLD)}
        conditions.append(Condition(text_NLD[start : start + count].flatten(0, 1), added))
        start += count
    return conditions, list(dict.fromkeys(notices))


def read_parts(model: Model, prompt: str, weighting: str = "none") -> list[list[PromptChunk]]:
    """A prompt as each of the model's encoders reads it; all in the same number of parts."""
    readings = [
        read_prompt(tokenizer, prompt, weighting=weighting, length=_length(encoder))
        for tokenizer, encoder in zip(model.tokenizers, model.text_encoders, strict=True)
    ]
    most = max(len(reading) for reading in readings)
    return [[*reading, *[PromptChunk([], [])] * (most - len(reading))] for reading in readings]


def _length(encoder: Any) -> int:
    return int(encoder.config.max_position_embeddings)


def _encode_parts(
    model: Model, i: int, parts: Sequence[PromptChunk], weighting: str, clip_skip: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weighted states [N, L, D] of the i-th encoder, and for SDXL its pooled text [N, D]."""
    tokenizer, encoder = model.tokenizers[i], model.text_encoders[i]
    is_weighted = [any(weight != 1 for weight in part.weights) for part in parts]
    padded = [*parts, *[PromptChunk([], [])] * (weighting == "compel" and any(is_weighted))]
    ids_NL = torch.tensor([_ids(tokenizer, part, _length(encoder)) for part in padded])
    states, pooled = [], []
    for some_BL in torch.split(ids_NL, ENCODE_BATCH):
        text_BLD, given = _states(encoder, some_BL, model.is_sdxl, clip_skip)
        states.append(text_BLD)
        pooled.append(given)
    text_NLD = torch.cat(states)
    for n, part in enumerate(parts):
        if is_weighted[n]:
            text_NLD[n] = _weighted(text_NLD[n], part, text_NLD[-1] if weighting == "compel" else None)
    return text_NLD[: len(parts)], torch.cat(pooled) if model.is_sdxl else None


def part_tokens(
    model: Model, prompt: str, weighting: str, count: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and weights, both [count, L], of a prompt in so many parts, for each of the encoders."""
    found = []
    for tokenizer, encoder in zip(model.tokenizers, model.text_encoders, strict=True):
        length = min(_length(encoder), tokenizer.model_max_length)
        read = read_prompt(tokenizer, prompt, weighting=weighting, length=length)[:count]
        parts = [*read, *[PromptChunk([], [])] * (count - len(read))]
        weights = [[1.0, *part.weights, *[1.0] * (length - 1 - len(part.weights))] for part in parts]
        ids = torch.tensor([_ids(tokenizer, part, length) for part in parts])
        found.append((ids, torch.tensor(weights)))
    return found


def part_states(
    encoder: Any, ids_BL: torch.Tensor, is_sdxl: bool, clip_skip: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states the U-Net takes [B, L, D], gradients kept, and SDXL's pooled text."""
    return _states(encoder, ids_BL, is_sdxl, clip_skip)


def _ids(tokenizer: CLIPTokenizer, part: PromptChunk, length: int) -> list[int]:
    length = min(length, tokenizer.model_max_length)
    ids = [tokenizer.bos_token_id, *part.ids, tokenizer.eos_token_id]
    return ids + [tokenizer.pad_token_id] * (length - len(ids))


def _states(
    encoder: Any, ids_BL: torch.Tensor, is_sdxl: bool, clip_skip: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states the U-Net takes [B, L, D], and the encoder's first output (SDXL's second: pooled text)."""
    given = encoder(to_device(ids_BL, computed_on(encoder)), output_hidden_states=is_sdxl or bool(clip_skip))
    if not is_sdxl and not clip_skip:
        return given[0], given[0]
    back = (clip_skip or 0) + (2 if is_sdxl else 1)
    if back > encoder.config.num_hidden_layers:
        raise InputError(
            f"clip-skip {clip_skip}",
            allowed=f"up to {encoder.config.num_hidden_layers - (2 if is_sdxl else 1)}",
        )
    states = given.hidden_states[-back]
    if not is_sdxl:
        states = getattr(encoder, "text_model", encoder).final_layer_norm(states)
    return states, given[0]


def _weighted(text_LD: torch.Tensor, part: PromptChunk, empty_LD: torch.Tensor | None) -> torch.Tensor:
    """States weighted by token: away from the empty prompt's (compel), or scaled, the mean kept (A1111)."""
    after = len(text_LD) - 1 - len(part.weights)
    weights_L1 = new_tensor([1.0, *part.weights, *[1.0] * after], text_LD.device, text_LD.dtype)[:, None]
    if empty_LD is not None:
        return empty_LD + (text_LD - empty_LD) * weights_L1
    return with_mean_of(text_LD, text_LD * weights_L1)


MEAN_NOISE = 1e-4
"""A mean below this share of the states' size is rounding: states of a norm without a bias have none."""


def with_mean_of(text_LD: torch.Tensor, scaled_LD: torch.Tensor) -> torch.Tensor:
    """Weighted states [..., L, D] scaled so that their mean is as before, where there is one (A1111)."""
    before, after = (states.mean(dim=(-2, -1), keepdim=True) for states in (text_LD, scaled_LD))
    noise = MEAN_NOISE * text_LD.square().mean(dim=(-2, -1), keepdim=True).sqrt()
    has_one = (before.abs() > noise) & (after.abs() > noise)
    return scaled_LD * torch.where(has_one, before / torch.where(has_one, after, 1.0), 1.0)


def time_ids(size: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    """SDXL's size conditioning [6]: original height and width, crop top and left, target height and width."""
    width, height = size
    return new_tensor([height, width, 0, 0, height, width], like.device, like.dtype)


def silent(condition: Condition) -> Condition:
    """SDXL's condition for no negative prompt at all: zeros for the text, the size as it is."""
    added = {
        name: value if name == "time_ids" else torch.zeros_like(value)
        for name, value in condition.added.items()
    }
    return Condition(torch.zeros_like(condition.text_LD), added)


def guidance_embedding(guidance: float, width: int) -> torch.Tensor:
    """A guidance scale as sines and cosines [width], for U-Nets distilled to take it (Luo et al. 2023)."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10000.0) / (half - 1)))
    angles = (guidance - 1) * 1000.0 * frequencies
    return torch.nn.functional.pad(torch.cat([angles.sin(), angles.cos()]), (0, width % 2))


def check_text_parts(model: Model) -> None:
    """InputError unless the model can read prompts and its U-Net takes what they give."""
    if not model.text_encoders or len(model.tokenizers) != len(model.text_encoders):
        raise InputError("the model has no text encoder with its tokenizer", mend="it cannot read prompts")
    if not model.is_sdxl or model.unet is None:
        return
    config: Any = model.unet.config
    pooled = int(getattr(model.text_encoders[-1].config, "projection_dim", 0))
    given = pooled + 6 * int(config.addition_time_embed_dim)
    if given != config.projection_class_embeddings_input_dim:
        raise InputError(
            f"the U-Net takes {config.projection_class_embeddings_input_dim} added numbers, not {given}",
            allowed="SDXL base's conditioning; its refiner is not known",
        )


WEIGHTINGS = ("none", "a1111", "compel")
A1111_STEP = 1.1
COMPEL_UP, COMPEL_DOWN = 1.1, 0.9
MAX_WEIGHT, MAX_DEPTH = 100.0, 100


@dataclass(frozen=True)
class WeightedText:
    """A stretch of text and its weight; `ends_part` where a BREAK stands in its place."""

    text: str
    weight: float = 1.0
    ends_part: bool = False


def pieces(prompt: str, weighting: str) -> list[WeightedText]:
    """A prompt taken apart by a syntax of WEIGHTINGS; InputError for syntax that is not known here."""
    if weighting not in WEIGHTINGS:
        raise InputError(f"weighting '{weighting}'", allowed=", ".join(WEIGHTINGS))
    if weighting == "a1111":
        return a1111_pieces(prompt)
    return compel_pieces(prompt) if weighting == "compel" else [WeightedText(prompt)]


A1111_TOKEN = re.compile(r"\\[\\()\[\]]|\\|\(|\[|:\s*([+-]?(?:\d+\.?\d*|\.\d+))\s*\)|\)|\]|[^\\()\[\]:]+|:")
A1111_BREAK = re.compile(r"\bBREAK\b")
A1111_LORA = re.compile(r"<(?:lora|lyco|hypernet):[^>]*>")
A1111_SQUARE = re.compile(r"\[([^\[\]]*)\]")


def a1111_pieces(prompt: str) -> list[WeightedText]:
    """A1111's syntax. A bracket that is never closed counts to the end; one never opened is plain text."""
    _refuse_a1111(prompt)
    found: list[tuple[str, float]] = []
    round_starts: list[int] = []
    square_starts: list[int] = []

    def weigh(starts: list[int], factor: float) -> None:
        start = starts.pop()
        found[start:] = [(text, weight * factor) for text, weight in found[start:]]

    for match in A1111_TOKEN.finditer(prompt):
        token = match[0]
        if token == "(":
            round_starts.append(len(found))
        elif token == "[":
            square_starts.append(len(found))
        elif match[1] is not None and round_starts:
            weigh(round_starts, _weight(match[1]))
        elif token == ")" and round_starts:
            weigh(round_starts, A1111_STEP)
        elif token == "]" and square_starts:
            weigh(square_starts, 1 / A1111_STEP)
        else:
            found.append((token[1:] if len(token) == 2 and token[0] == "\\" else token, 1.0))
    for starts, factor in ((round_starts, A1111_STEP), (square_starts, 1 / A1111_STEP)):
        while starts:
            weigh(starts, factor)
    return _joined([piece for text, weight in found for piece in _parted(text, weight)])


def _refuse_a1111(prompt: str) -> None:
    plain = re.sub(r"\\.", "", prompt)
    if found := A1111_LORA.search(plain):
        raise InputError(f"'{found[0]}' in a prompt", mend="name adapters by --adapter, not in the prompt")
    for found in A1111_SQUARE.finditer(plain):
        inner = re.sub(r"\([^()]*\)", "", found[1])
        if "|" in inner or inner.count(":") > 1 or re.search(r":\s*[\d.]+$", inner.rstrip()):
            raise InputError(
                f"'{found[0][:60]}' in a prompt: prompts that change between steps are not known",
                mend="write \\[ for a plain bracket",
            )
    if re.search(r"\bAND\b", plain):
        raise InputError("AND in a prompt: prompts are not composed here", mend="write 'and'")


def _parted(text: str, weight: float) -> list[WeightedText]:
    pieces: list[WeightedText] = []
    for i, stretch in enumerate(A1111_BREAK.split(text)):
        if i:
            pieces.append(WeightedText("", ends_part=True))
        pieces.append(WeightedText(stretch, weight))
    return pieces


COMPEL_FACTOR = re.compile(r"\++|-+(?!\w)|\d+(?:\.\d+)?|\.\d+")
COMPEL_RUN = re.compile(r"(?P<between>[\s,;:!?\"]+)|(?:\\.|[^\\()\s,;:!?\"])+|\\")
COMPEL_SIGNED = re.compile(r"(?s)(.*[^+])(\++)|(.*[^-])(-+)")
COMPEL_CALL = re.compile(r"\.\s*(and|blend|swap)\s*\(")


def compel_pieces(prompt: str) -> list[WeightedText]:
    """compel's syntax. Blends, conjunctions and swaps are refused, and so is a bracket out of place."""
    if found := COMPEL_CALL.search(prompt):
        raise InputError(
            f".{found[1]}() in a prompt", allowed="++, --, (words)1.2", mend="only weights are known"
        )
    pieces, end = _compel_group(prompt, 0, 1.0, 0)
    if end < len(prompt):
        raise InputError(
            _bracket(prompt, "closes a bracket that was not opened"), mend="write \\) for a plain one"
        )
    return _joined(pieces)


def _compel_group(prompt: str, at: int, weight: float, depth: int) -> tuple[list[WeightedText], int]:
    """The pieces from `at` to the bracket that closes this group (or the prompt's end), and where that is."""
    if depth > MAX_DEPTH:
        raise InputError(f"brackets {depth} deep in a prompt", allowed=f"up to {MAX_DEPTH}")
    pieces: list[WeightedText] = []
    while at < len(prompt) and prompt[at] != ")":
        if prompt[at] == "(":
            inner, end = _compel_group(prompt, at + 1, 1.0, depth + 1)
            if end >= len(prompt):
                raise InputError(_bracket(prompt, "leaves a bracket open"), mend="write \\( for a plain one")
            factor, at = _compel_factor(prompt, end + 1)
            pieces += [WeightedText(one.text, one.weight * factor * weight) for one in inner]
        else:
            run = COMPEL_RUN.match(prompt, at)
            assert run is not None
            pieces += [WeightedText(run[0], weight)] if run["between"] else _compel_word(run[0], weight)
            at = run.end()
    return pieces, at


def _compel_word(word: str, weight: float) -> list[WeightedText]:
    """A word without its signs, weighted by them, and the full stops behind it."""
    signed = COMPEL_SIGNED.fullmatch(word.rstrip("."))
    if signed is None or (signed[1] or signed[3]).endswith("\\"):
        return [WeightedText(_unescaped(word), weight)]
    bare, signs = (signed[1], signed[2]) if signed[1] else (signed[3], signed[4])
    stops = word[len(bare) + len(signs) :]
    return [WeightedText(_unescaped(bare), weight * _signs(signs)), WeightedText(stops, weight)]


def _compel_factor(prompt: str, at: int) -> tuple[float, int]:
    """The weight written right behind a closing bracket, and where it ends."""
    found = COMPEL_FACTOR.match(prompt, at)
    if found is None:
        return 1.0, at
    return (_signs(found[0]) if found[0][0] in "+-" else _weight(found[0])), found.end()


def _signs(signs: str) -> float:
    step = COMPEL_UP if signs[0] == "+" else COMPEL_DOWN
    return _weight(step ** min(len(signs), 1000))


def _bracket(prompt: str, what: str) -> str:
    return f"the prompt '{prompt[:40]}' {what}"


def _unescaped(text: str) -> str:
    return re.sub(r"\\([\\()\"+\-])", r"\1", text)


def _weight(value: str | float) -> float:
    weight = float(value)
    if not abs(weight) <= MAX_WEIGHT:
        raise InputError(f"a prompt's weight of {value}", allowed=f"-{MAX_WEIGHT:g} to {MAX_WEIGHT:g}")
    return weight


def _joined(pieces: list[WeightedText]) -> list[WeightedText]:
    """Neighbours of the same weight as one piece, so that words are not torn for the tokenizer."""
    joined: list[WeightedText] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if not piece.text and not piece.ends_part:
            continue
        if last and not last.ends_part and not piece.ends_part and last.weight == piece.weight:
            joined[-1] = WeightedText(last.text + piece.text, last.weight)
        else:
            joined.append(piece)
    return joined or [WeightedText("")]
