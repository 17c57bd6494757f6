"""Adapters for the pictures of one call: files by name, and which prompt has which.

`{"sks": "sks.safetensors", "ink": ("ink.safetensors", 0.6)}` gives adapters names. A prompt with A1111's
tags, such as `<lora:sks:0.8>`, has just those it names, with the tags' weights; one without has all that are
given, blended. Tags are not read as words. LoRAs are added row by row: all pictures share the U-Net calls,
whatever their adapters. Other kinds (DoRA, LoHa, LoKr) are no additions of low rank: they are merged into the
model while the pictures of the prompts that have them are made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from darkroom.errors import InputError
from darkroom.models.adapters.adapter import Adapter
from darkroom.models.adapters.bank import SLOTS, WEIGHTS, Bank, Choice, check_weight, lay_out
from darkroom.models.adapters.read import merged_for_now, read_adapter
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
        file, colon, tail = rest.rpartition(":")
        weight = 1.0
        if colon and (weight := _number(tail, math.nan)) == weight:
            rest = file
        elif colon and not Path(rest).exists():
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


def read_tags(prompt: str) -> tuple[str, list[tuple[str, float | None]]]:
    """A prompt without its `<lora:NAME:WEIGHT>` tags, and what they say; no weight is None."""
    told = []
    for tag in TAG.finditer(prompt):
        weights = tag[2].split(":")[1:]
        weight = _number(weights[0], math.nan) if weights else None
        if len(weights) > 1 or (weight is not None and not math.isfinite(weight)):
            raise InputError(f"'{tag[0][:80]}' in a prompt", allowed="<lora:NAME> or <lora:NAME:WEIGHT>")
        told.append((tag[1].strip(), weight))
    plain = re.sub(r"[ \t]{2,}", " ", TAG.sub(" ", prompt)).strip() if told else prompt
    return plain, told


def _number(text: str, otherwise: float) -> float:
    try:
        return float(text)
    except ValueError:
        return otherwise


def _told(pairs: Sequence[tuple[Named, float]]) -> list[tuple[str, float]]:
    return [(one.name, weight) for one, weight in pairs]


@dataclass(repr=False)
class Adapted:
    """The adapters of one call in a bank, and each prompt's share of them."""

    prompts: list[str]
    """Without tags."""
    used: list[list[tuple[Named, float]]]
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
            for name, _ in tags:
                if name not in by_name:
                    allowed = ", ".join(by_name) or "none are given: --adapter NAME=FILE"
                    raise InputError(f"'<lora:{name}>' in a prompt", allowed=allowed)
            told = [(by_name[name], weight) for name, weight in tags] or [(one, None) for one in given]
            summed: dict[str, float] = {}
            for one, weight in told:
                added = one.weight if weight is None else weight
                summed[one.name] = check_weight(summed.get(one.name, 0.0) + added, f"adapter '{one.name}'")
            chosen = [(by_name[name], weight) for name, weight in summed.items() if weight]
            if len(chosen) > MOST_A_PICTURE:
                raise InputError(
                    f"{len(chosen)} adapters on one picture", allowed=f"at most {MOST_A_PICTURE}"
                )
            used.append(chosen)
        return cls(plain, used, list(given))

    @property
    def chosen(self) -> list[Named]:
        """The adapters that some prompt has."""
        return list({one.name: one for used in self.used for one, _ in used}.values())

    @property
    def has_any(self) -> bool:
        """Whether any adapter is at work."""
        return self.bank is not None or bool(self.chosen)

    @property
    def banked(self) -> list[Named]:
        """Those that are added row by row."""
        return [one for one in self.chosen if one.adapter.kind == "lora"]

    def merged(self, prompt: int) -> list[tuple[Named, float]]:
        """Those of a prompt that are merged into the model, by name."""
        whole = [(one, weight) for one, weight in self.used[prompt] if one.adapter.kind != "lora"]
        return sorted(whole, key=lambda pair: pair[0].name)

    def parted(self) -> list[Adapted]:
        """Neighbouring prompts for which the same adapters are merged, in their order."""
        places = range(len(self.prompts))
        parts = [list(part) for _, part in groupby(places, key=lambda i: _told(self.merged(i)))]
        return [
            Adapted([self.prompts[i] for i in part], [self.used[i] for i in part], self.given)
            for part in parts
        ]

    def put_into(self, model: Model) -> None:
        """Make the bank that holds them; ModelError where one does not fit the model."""
        chosen = self.banked
        if not chosen:
            return
        rank = max(one.adapter.rank for one in chosen)
        most = max(len(used) for used in self.used)
        bank = Bank(model, slots=len(chosen), max_rank=max(1, rank), most_a_row=most)
        try:
            for slot, one in enumerate(chosen, start=1):
                bank.load(slot, one.adapter)
        except BaseException:
            bank.detach()
            raise
        self.bank = bank

    @contextmanager
    def within(self, model: Model) -> Iterator[None]:
        """Merged and in a bank while pictures are made; afterwards the model is as it was, to the bit."""
        with merged_for_now(model, [(one.adapter, weight) for one, weight in self._merged_of_all()]):
            self.put_into(model)
            try:
                yield
            finally:
                if self.bank is not None:
                    self.bank.detach()
                    self.bank = None

    def _merged_of_all(self) -> list[tuple[Named, float]]:
        found = self.merged(0) if self.used else []
        assert all(_told(self.merged(i)) == _told(found) for i in range(len(self.used)))
        return found

    def choice(self, prompt: int) -> tuple[tuple[int, float], ...]:
        """The slots and weights of a prompt's pictures."""
        slots = {one.name: slot for slot, one in enumerate(self.banked, start=1)}
        return tuple((slots[one.name], weight) for one, weight in self.used[prompt] if one.name in slots)

    def parameters(self, prompt: int) -> list[dict[str, Any]]:
        """What a picture says of its adapters."""
        return [
            {"name": one.name, "weight": weight, "sha256": one.adapter.sha256}
            for one, weight in self.used[prompt]
        ]

    @property
    def notes(self) -> list[str]:
        """What users should know of the files."""
        told = [f"adapter '{one.name}': {note}" for one in self.chosen for note in one.adapter.notes]
        whole = self._merged_of_all()
        return told + [
            f"adapter '{one.name}' ({one.adapter.kind}) is merged into the model for these pictures"
            for one, _ in whole
        ]

    def encode(
        self, encode: Encode, prompts: Sequence[str], parts: Sequence[int], which: Sequence[int]
    ) -> tuple[list[Condition], list[str]]:
        """Conditions for texts, the i-th read by the text encoders with the adapters of prompt `which[i]`."""
        bank = self.bank
        if bank is None or not any(path.startswith("text_encoder") for path in bank.layers):
            return encode(prompts, parts)
        by_choice: dict[Choice, list[int]] = {}
        for i, prompt in enumerate(which):
            by_choice.setdefault(self.choice(prompt), []).append(i)
        conditions: dict[int, Condition] = {}
        notices: list[str] = []
        device = next(bank.model.text_encoders[0].parameters()).device
        for choice, places in by_choice.items():
            told = lay_out([choice], device)
            with bank.applied("text", told.get(SLOTS), told.get(WEIGHTS)):
                encoded, more = encode([prompts[i] for i in places], [parts[i] for i in places])
            conditions |= dict(zip(places, encoded, strict=True))
            notices += more
        return [conditions[i] for i in range(len(prompts))], list(dict.fromkeys(notices))
