"""`Texts`: encoded texts that are kept for a while, and those of many works encoded in one call."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from darkroom.sample.adapters import read_tags
from darkroom.sample.denoise import Condition
from darkroom.sample.prompts import encode_prompts, read_parts
from darkroom.serve.work import Work

if TYPE_CHECKING:
    from darkroom.models import Model
    from darkroom.sample.adapters import Encode

LOG = logging.getLogger("darkroom.serve")
MOST_BYTES = 64 * 2**20
"""Of texts that are kept: one part is 236 KB for Stable Diffusion 1 in float32, and a text has up to 16."""


class Way(NamedTuple):
    """All that a text's states depend on but the text."""

    weighting: str
    clip_skip: int
    size: tuple[int, int] | None
    """For SDXL, which is told of it."""


Key = tuple[str, int, Way]
"""A text, in how many parts it is read at least, and how."""
Text = tuple[Condition, list[str]]


class Texts:
    """Texts as encoded lately: most requests share their negative text, and many a prompt comes again."""

    def __init__(self, model: Model, most_bytes: int = MOST_BYTES) -> None:
        self._model, self._most_bytes = model, most_bytes
        self._kept: OrderedDict[Key, Text] = OrderedDict()
        self.bytes = 0
        """Of what is kept."""

    def through(self, encode: Encode, weighting: str, clip_skip: int, size: tuple[int, int]) -> Encode:
        """`encode`, with what is known taken from here."""
        way = self._way(weighting, clip_skip, size)

        def remembered(prompts: Sequence[str], parts: Sequence[int]) -> tuple[list[Condition], list[str]]:
            texts = [self._text(encode, (*one, way)) for one in zip(prompts, parts, strict=True)]
            return [condition for condition, _ in texts], [note for _, notes in texts for note in notes]

        return remembered

    def _way(self, weighting: str, clip_skip: int, size: tuple[int, int]) -> Way:
        return Way(weighting, clip_skip, size if self._model.is_sdxl else None)

    def _text(self, encode: Encode, key: Key) -> Text:
        if (text := self._kept.get(key)) is None:
            [condition], notes = encode([key[0]], [key[1]])
            text = condition, notes
            self._keep(key, text)
        else:
            self._kept.move_to_end(key)
        return text

    def _keep(self, key: Key, text: Text) -> None:
        self._kept[key] = text
        self.bytes += _bytes(text)
        while self.bytes > self._most_bytes and len(self._kept) > 1:
            self.bytes -= _bytes(self._kept.popitem(last=False)[1])

    def read(self, works: Iterable[Work]) -> None:
        """Encode what these works will ask for and nobody has yet, in one call for each way of reading.

        Only texts of one part, as most are. What cannot be encoded so fails in its work's own turn, alone.
        """
        asked: dict[Way, dict[str, None]] = {}
        for work in works:
            with suppress(Exception):
                for prompt, parts, way in self._wanted(work):
                    if parts == 1 and (prompt, parts, way) not in self._kept:
                        asked.setdefault(way, {})[prompt] = None
        for way, prompts in asked.items():
            try:
                self._read(way, list(prompts))
            except Exception as error:
                LOG.warning("%d texts could not be encoded together: %s", len(prompts), error)

    def _wanted(self, work: Work) -> Iterator[Key]:
        """The texts of a work as `sample.Job` asks for them."""
        request, shape = work.request, work.shape
        weighting, skip = request.weighting, request.clip_skip
        texts = [(read_tags(request.prompt)[0], skip)]
        if shape.evaluations > 1 and (request.negative is not None or not self._model.is_sdxl):
            texts.append((request.negative or "", skip if weighting == "a1111" else 0))
        parts = max(len(read_parts(self._model, text, weighting)[0]) for text, _ in texts)
        for text, skipped in texts:
            yield text, parts, self._way(weighting, skipped, (shape.width, shape.height))

    def _read(self, way: Way, prompts: Sequence[str]) -> None:
        size, told = way.size or (0, 0), {"weighting": way.weighting, "clip_skip": way.clip_skip}
        conditions, _ = encode_prompts(self._model, prompts, size, **told)  # type: ignore[arg-type]
        for prompt, condition in zip(prompts, conditions, strict=True):
            self._keep((prompt, 1, way), (_apart(condition), []))


def _apart(condition: Condition) -> Condition:
    """In memory of its own: the states of a call are slices of one tensor."""
    added = {name: value.clone() for name, value in condition.added.items()}
    return Condition(condition.text_LD.clone(), added)


def _bytes(text: Text) -> int:
    condition, _ = text
    return condition.text_LD.nbytes + sum(value.nbytes for value in condition.added.values())
