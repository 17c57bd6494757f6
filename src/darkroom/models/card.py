"""Model cards (`README.md`): which pictures were trained on, by source and licence. An adapter's file has
these in its header, from where they come into the card of a model that it is merged into.

No folder's path is written, only its last name.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from darkroom import __version__
from darkroom.models.reference import is_hub_id

if TYPE_CHECKING:
    from darkroom.models.adapters.adapter import Adapter

CARD, UNKNOWN = "README.md", "unknown"
SOURCES = "darkroom.sources"
"""Of an adapter's header: its sources in JSON, each a list with the fields of `SourceCount`."""
MOST_NOTED, MOST_CHARS, MOST_CARD_BYTES = 500, 200, 2**20
"""Sources in a header; characters of a name from one; bytes of a base's card."""


class SourceCount(NamedTuple):
    """Pictures of one source: how many, None where nobody can count them, and their licence."""

    store: str
    source: str
    pictures: int | None
    licence: str


def last_name(path: str) -> str:
    """A path's last name, which is all that a card says of it."""
    return Path(path.rstrip("/")).name


def without_path(text: str) -> str:
    """A source or licence as a card has it: of an absolute path the last name."""
    local = text.startswith(("~", "file:")) or PurePosixPath(text).is_absolute()
    if "://" in text and not local:
        return text
    return last_name(text.replace("\\", "/")) if local or PureWindowsPath(text).is_absolute() else text


def common_licence(sources: Sequence[SourceCount]) -> str | None:
    """The licence of all pictures; None where there are several, or one is not known."""
    names = {one.licence for one in sources}
    return names.pop() if len(names) == 1 and UNKNOWN not in names else None


def card_head(values: Mapping[str, Any]) -> list[str]:
    """A card's YAML, for the hub's search."""
    return [
        "---",
        *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()),
        "---",
    ]


def source_tables(sources: Sequence[SourceCount]) -> list[str]:
    """The pictures of each source, and of each licence."""
    lines = ["| store | source | pictures | licence |", "| --- | --- | --- | --- |"]
    lines += [
        _row(one.store, one.source, UNKNOWN if one.pictures is None else one.pictures, one.licence)
        for one in sources
    ]
    lines += ["", "| licence | pictures |", "| --- | --- |"]
    for licence in sorted({one.licence for one in sources}):
        counts = [one.pictures for one in sources if one.licence == licence]
        counted = sum(count for count in counts if count is not None)
        lines.append(_row(licence, counted if None not in counts else f"{counted} and more"))
    return lines


def _row(*cells: object) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def sources_in_header(sources: Sequence[SourceCount]) -> dict[str, str]:
    """Metadata for an adapter's header. Of more than `MOST_NOTED` the smallest are summed by licence."""
    by_size = sorted(sources, key=lambda one: -(one.pictures or 0))
    smallest = defaultdict[str, list[SourceCount]](list)
    for one in by_size[MOST_NOTED:]:
        smallest[one.licence].append(one)
    kept = by_size[:MOST_NOTED] if smallest else list(sources)
    for licence, some in smallest.items():
        counts = [one.pictures for one in some]
        total = None if None in counts else sum(count or 0 for count in counts)
        kept.append(SourceCount("", f"{len(some)} further sources", total, licence))
    return {SOURCES: json.dumps(kept, ensure_ascii=False)} if kept else {}


def sources_of(adapter: Adapter) -> list[SourceCount]:
    """What an adapter's header says of its pictures; one unknown source where it says nothing readable."""
    try:
        rows = json.loads(adapter.metadata.get(SOURCES, "[]"))
        found = [_read(*row) for row in rows[: 2 * MOST_NOTED]]
    except (ValueError, TypeError, RecursionError):
        found = []
    if found:
        return found
    licence = _plain(adapter.metadata.get("modelspec.license") or UNKNOWN)
    return [SourceCount(_plain(adapter.name), "not in the adapter's file", None, licence)]


def _read(store: object, source: object, pictures: object, licence: object) -> SourceCount:
    """A row of a header, which may be a stranger's. ValueError for a number that is none."""
    if pictures is not None and (type(pictures) is not int or pictures < 0):
        raise ValueError("pictures")
    return SourceCount(_plain(store), _plain(source), pictures, _plain(licence))


def _plain(text: object) -> str:
    return without_path(" ".join(str(text).split())[:MOST_CHARS])


def merged_card(name: str, base: str | Path, adapters: Sequence[tuple[Adapter, float]]) -> str:
    """The card of a model folder: `base` with adapters merged in, their weights given. What was trained on is
    that of the adapters' headers and of the base's own card, which follows in full.
    """
    ref = str(base)
    is_on_hub = is_hub_id(ref) and not Path(ref).exists()
    shown = ref if is_on_hub else last_name(ref)
    sources = [source for adapter, _ in adapters for source in sources_of(adapter)]
    licence, body = _base_card(Path(base))
    licences = {licence, (common_licence(sources) or "").lower()}
    head: dict[str, Any] = {"library_name": "diffusers", "pipeline_tag": "text-to-image"}
    head |= {"license": licences.pop() if len(licences) == 1 and "" not in licences else "other"}
    head |= {"base_model": ref} if is_on_hub else {}
    head["tags"] = ["stable-diffusion", "text-to-image"]
    lines = [*card_head(head), f"# {name}", f"{shown} with adapters merged in by darkroom {__version__}.", ""]
    lines += ["| adapter | weight | SHA-256 |", "| --- | --- | --- |"]
    lines += [_row(_plain(one.name), f"{weight:g}", one.sha256 or UNKNOWN) for one, weight in adapters]
    lines += ["", "## Training data of the adapters", *source_tables(sources), ""]
    lines += [f"## The base: {shown}", body or "It has no card: its training data is unknown here."]
    return "\n".join(lines) + "\n"


def _base_card(folder: Path) -> tuple[str, str]:
    """The licence that a model folder's card gives, in lower case, and the card without its YAML; nothing
    where there is none that can be read.
    """
    try:
        with (folder / CARD).open(encoding="utf-8", errors="replace") as file:
            text = file.read(MOST_CARD_BYTES)
    except OSError:
        return "", ""
    before, _, rest = text.partition("---\n")
    head, closed, body = rest.partition("\n---\n")
    if before.strip() or not closed:
        return "", text.strip()
    try:
        values = yaml.safe_load(head)
        licence = values.get("license") if isinstance(values, dict) else None
    except (yaml.YAMLError, RecursionError, ValueError):
        licence = None
    return licence.lower() if isinstance(licence, str) else "", body.strip()
