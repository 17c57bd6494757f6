"""Adapters for the pictures of one call: files by name, and which prompt has which.

`{"sks": "sks.safetensors", "ink": ("ink.safetensors", 0.6)}` gives adapters names. A prompt with A1111's
tags, such as `<lora:sks:0.8>`, has just those it names, with the tags' weights; one without has all that are
given, blended. `<lora:sks:0.5:1>` weighs text encoders and U-Net apart, `<lora:sks:1:lbw=1,0,...>` the
U-Net's blocks. Tags are not read as words. Adapters of all kinds are added row by row: all pictures share
the U-Net calls, whatever their adapters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from darkroom.errors import InputError
from darkroom.hardware import accelerator
from darkroom.hardware.system import split_weight
from darkroom.models.adapters.adapter import MAX_BLOCKS, Adapter, Blocks, check_weight, low_rank_of
from darkroom.models.adapters.bank import SLOTS, WEIGHTS, Bank, Choice, lay_out
from darkroom.models.adapters.read import read_adapter
from darkroom.sample.denoise import Condition

if TYPE_CHECKING:
    from darkroom.models.model import Model

Given = str | Path | Adapter
TAG = re.compile(r"<lora:([^:<>]*)((?::[^:<>]*)*)>")
NAME = re.compile(r"[\w.\- ]{1,100}")
MOST_A_PICTURE = 8

Encode = Callable[[Sequence[str], Sequence[int]], tuple[list[Condition], list[str]]]
"""Prompts, and how many parts each has at least, to conditions and notices: `encode_prompts`, made ready."""


@dataclass(frozen=True, repr=False)
class Named:
    """An adapter under the name that prompts call it by, and the weight where they do not say one."""

    name: str
    adapter: Adapter
    weight: float = 1.0

    @classmethod
    def parsed(cls, text: str) -> Named:
        """From the command line: NAME=FILE[:WEIGHT], or FILE[:WEIGHT] under the file's own name."""
        name, equals, rest = text.partition("=")
        if not equals:
            name, rest = "", text
        file, tail = split_weight(rest)
        weight = 1.0
        if tail and (weight := _number(tail, math.nan)) == weight:
            rest = file
        elif file != rest and not Path(rest).exists():
            raise InputError(
                f"--adapter {text}", allowed="NAME=FILE[:WEIGHT], such as sks=sks.safetensors:0.8"
            )
        else:
            weight = 1.0
        return cls.of(name or Path(rest).stem, rest, weight)

    @classmethod
    def of(cls, name: str, given: Given, weight: float = 1.0) -> Named:
        """Read where it is a file. InputError for a name that no tag could say, or a weight beyond reason."""
        if not NAME.fullmatch(name):
            raise InputError(f"adapter name '{name[:40]}'", allowed="letters, digits, spaces and -_.")
        adapter = given if isinstance(given, Adapter) else read_adapter(given, name=name)
        return cls(name, adapter, check_weight(weight, f"adapter '{name}'"))


def named(given: Mapping[str, Given | tuple[Given, float]] | Sequence[Named]) -> list[Named]:
    """The adapters of a call, however they were given."""
    if isinstance(given, Mapping):
        pairs = {name: one if isinstance(one, tuple) else (one, 1.0) for name, one in given.items()}
        given = [Named.of(name, adapter, weight) for name, (adapter, weight) in pairs.items()]
    names = [one.name for one in given]
    if twice := {name for name in names if names.count(name) > 1}:
        raise InputError(f"two adapters are named '{min(twice)}'", mend="give each a name: NAME=FILE")
    return list(given)


class Tag(NamedTuple):
    """What a prompt says of an adapter; None is the weight that was given with it."""

    name: str
    text: float | None = None
    """Of the text encoders."""
    unet: float | None = None
    blocks: Blocks = ()


def read_tags(prompt: str) -> tuple[str, list[Tag]]:
    """A prompt without its `<lora:NAME:WEIGHT>` tags, and what they say.

    As A1111: `<lora:NAME:TEXT:UNET>`, `te=` and `unet=` by name; and as its block weights are written,
    `lbw=1,0,...`, or the list alone.
    """
    tags = [_tag(tag) for tag in TAG.finditer(prompt)]
    plain = re.sub(r"[ \t]{2,}", " ", TAG.sub(" ", prompt)).strip() if tags else prompt
    return plain, tags


def _tag(tag: re.Match[str]) -> Tag:
    plain: list[str] = []
    named: dict[str, str] = {}
    for part in tag[2].split(":")[1:]:
        key, equals, value = part.partition("=")
        if equals:
            named[key.strip().lower()] = value
        elif "," in part:
            named["lbw"] = part
        else:
            plain.append(part)
    text = named.get("te", plain[0] if plain else None)
    unet = named.get("unet", plain[1] if len(plain) > 1 else text)
    blocks = named.get("lbw", "").split(",") if "lbw" in named else []
    weights = [math.nan if one is None else _number(one, math.inf) for one in (text, unet, *blocks)]
    known = named.keys() <= {"te", "unet", "lbw"} and len(plain) <= 2 and len(blocks) <= MAX_BLOCKS
    if not known or any(math.isinf(one) or (math.isnan(one) and i > 1) for i, one in enumerate(weights)):
        raise InputError(
            f"'{tag[0][:80]}' in a prompt",
            allowed="<lora:NAME>, <lora:NAME:WEIGHT>, <lora:NAME:TEXT:UNET>, with :lbw=1,0,... for blocks",
        )
    text_weight, other = (None if math.isnan(one) else one for one in weights[:2])
    return Tag(tag[1].strip(), text_weight, other, tuple(weights[2:]))


def _number(text: str, otherwise: float) -> float:
    """A number, else what stands in for it: for what is none, too large or no number at all."""
    try:
        return number if math.isfinite(number := float(text)) else otherwise
    except ValueError:
        return otherwise


class WeightedAdapter(NamedTuple):
    """An adapter on a picture, and how much of it."""

    one: Named
    unet: float
    text: float
    blocks: Blocks = ()

    @property
    def kept_as(self) -> tuple[str, Blocks]:
        """What has a slot of its own."""
        return self.one.name, self.blocks


def said_of(name: str, unet: float, text: float, blocks: Blocks, sha256: str) -> dict[str, Any]:
    """An adapter among a picture's parameters; what is as usual is left out."""
    entry: dict[str, Any] = {"name": name, "weight": unet, "sha256": sha256}
    if text != unet:
        entry["text_weight"] = text
    if blocks:
        entry["blocks"] = list(blocks)
    return entry


def _summed(tags: Sequence[Tag], given: Mapping[str, Named]) -> list[WeightedAdapter]:
    """What tags say of given adapters; one that is named twice with the same blocks adds up."""
    summed: dict[tuple[str, Blocks], WeightedAdapter] = {}
    for tag in tags:
        one = given[tag.name]
        text, unet = (
            one.weight if weight_given is None else weight_given for weight_given in (tag.text, tag.unet)
        )
        before = summed.get((tag.name, tag.blocks), WeightedAdapter(one, 0.0, 0.0))
        weights = before.unet + unet, before.text + text
        for weight in (*weights, *tag.blocks):
            check_weight(weight, f"adapter '{one.name}'")
        summed[tag.name, tag.blocks] = WeightedAdapter(one, *weights, tag.blocks)
    chosen = [use for use in summed.values() if use.unet or use.text]
    if len(chosen) > MOST_A_PICTURE:
        raise InputError(f"{len(chosen)} adapters on one picture", allowed=f"at most {MOST_A_PICTURE}")
    return chosen


@dataclass(repr=False)
class Adapted:
    """The adapters of one call in a bank, and each prompt's share of them."""

    prompts: list[str]
    """Without tags."""
    used: list[list[WeightedAdapter]]
    """By prompt."""
    given: list[Named] = field(default_factory=list)
    bank: Bank | None = None

    @classmethod
    def of(cls, prompts: Sequence[str], given: Sequence[Named] = ()) -> Adapted:
        """Tags read, names looked up. InputError for a name that was not given."""
        by_name = {one.name: one for one in given}
        plain, used = [], []
        for prompt in prompts:
            text, tags = read_tags(prompt)
            plain.append(text)
            for tag in tags:
                if tag.name not in by_name:
                    allowed = ", ".join(by_name) or "none are given: --adapter NAME=FILE"
                    raise InputError(f"'<lora:{tag.name}>' in a prompt", allowed=allowed)
            used.append(_summed(tags or [Tag(one.name) for one in given], by_name))
        return cls(plain, used, list(given))

    @property
    def chosen(self) -> list[Named]:
        """The adapters that some prompt has."""
        return list({use.one.name: use.one for used in self.used for use in used}.values())

    @property
    def has_any(self) -> bool:
        """Whether any adapter is at work."""
        return self.bank is not None or bool(self.chosen)

    @property
    def slots(self) -> dict[tuple[str, Blocks], int]:
        """Where each adapter is, with each choice of its blocks."""
        kept = dict.fromkeys(use.kept_as for used in self.used for use in used)
        return {one: slot for slot, one in enumerate(kept, start=1)}

    def put_into(self, model: Model) -> None:
        """Make the bank that holds them; ModelError where one does not fit the model."""
        slots = self.slots
        if not slots:
            return
        rank = max(low_rank_of(one.adapter) for one in self.chosen)
        most = max(len(used) for used in self.used)
        adapters = {one.name: one.adapter for one in self.chosen}
        bank = Bank(model, slots=len(slots), max_rank=max(1, rank), most_a_row=most)
        try:
            for (name, blocks), slot in slots.items():
                bank.load(slot, bank.stage(adapters[name], blocks))
        except BaseException:
            bank.detach()
            raise
        self.bank = bank

    @contextmanager
    def within(self, model: Model) -> Iterator[None]:
        """In a bank while pictures are made; afterwards the model is as it was, to the bit."""
        self.put_into(model)
        try:
            yield
        finally:
            if self.bank is not None:
                self.bank.detach()
                self.bank = None

    def choice(self, prompt: int) -> tuple[tuple[int, float], ...]:
        """The slots of a prompt's pictures, and the U-Net's weights."""
        slots = self.slots
        return tuple((slots[use.kept_as], use.unet) for use in self.used[prompt])

    def text_choice(self, prompt: int) -> tuple[tuple[int, float], ...]:
        """The same with the text encoders' weights."""
        slots = self.slots
        return tuple((slots[use.kept_as], use.text) for use in self.used[prompt])

    def parameters(self, prompt: int) -> list[dict[str, Any]]:
        """What a picture says of its adapters."""
        return [
            said_of(use.one.name, use.unet, use.text, use.blocks, use.one.adapter.sha256)
            for use in self.used[prompt]
        ]

    @property
    def notes(self) -> list[str]:
        """What users should know of the files, and of the memory that they take."""
        notes = [f"adapter '{one.name}': {note}" for one in self.chosen for note in one.adapter.notes]
        if self.bank is not None and (held := self.bank.dense_bytes()):
            kinds = ", ".join(dict.fromkeys(one.adapter.kind for one in self.chosen))
            notes.append(f"adapters ({kinds}) hold {held / 2**20:.1f} MiB of differences as large as layers")
        return notes

    def encode(
        self, encode: Encode, prompts: Sequence[str], parts: Sequence[int], which: Sequence[int]
    ) -> tuple[list[Condition], list[str]]:
        """Conditions for texts, the i-th read by the text encoders with the adapters of prompt `which[i]`."""
        bank = self.bank
        if bank is None or not any(path.startswith("text_encoder") for path in bank.layers):
            return encode(prompts, parts)
        by_choice: dict[Choice, list[int]] = {}
        for i, prompt in enumerate(which):
            by_choice.setdefault(self.text_choice(prompt), []).append(i)
        conditions: dict[int, Condition] = {}
        notices: list[str] = []
        device = accelerator.computed_on(bank.model.text_encoders[0])
        for choice, places in by_choice.items():
            slots = lay_out([choice], device)
            with bank.applied("text", slots.get(SLOTS), slots.get(WEIGHTS)):
                encoded, more = encode([prompts[i] for i in places], [parts[i] for i in places])
            conditions |= dict(zip(places, encoded, strict=True))
            notices += more
        return [conditions[i] for i in range(len(prompts))], list(dict.fromkeys(notices))
