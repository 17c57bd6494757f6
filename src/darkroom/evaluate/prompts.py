"""The prompts that are drawn: from a file, a store's captions, or the DreamBooth paper's list."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from darkroom.data.importers.folder import FolderSource
from darkroom.data.importers.source import CAPTION_NAMES, Columns, find_name, no_column
from darkroom.data.store import Store
from darkroom.data.texts import flaw_of
from darkroom.errors import InputError, first_line, is_system_failure
from darkroom.evaluate.pictures import FolderPictures

DREAMBOOTH = "dreambooth:"
# The list of Ruiz et al. 2023 as github.com/google/dreambooth has it; it is not ours to hand out.
DREAMBOOTH_LIST = "dataset/prompts_and_classes.txt of github.com/google/dreambooth"
DREAMBOOTH_HEADINGS = {"object": "Object Prompts", "live": "Live Subject Prompts"}
TOKEN, CLASS = "{token}", "{class}"
DEFAULT_TOKEN = "sks"
KINDS = (
    ".txt (one a line), .jsonl, .csv, .tsv, .parquet, a store, dreambooth:live=FILE, dreambooth:object=FILE"
)


@dataclass(frozen=True)
class Prompts:
    """Prompts as they are drawn, and as a reader who does not know the rare token is asked."""

    name: str
    texts: tuple[str, ...]
    plain: tuple[str, ...]

    @classmethod
    def of(cls, name: str, texts: Sequence[str], token: str | None = None) -> Prompts:
        """Prompts at hand; `token` is what `plain` leaves out."""
        if not texts:
            raise InputError(f"no prompts in '{name}'", mend="give at least one")
        return cls(name, tuple(texts), tuple(without_token(text, token) for text in texts))

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def sha256(self) -> str:
        """Of the prompts: which ones these are."""
        return hashlib.sha256("\n".join(self.texts).encode()).hexdigest()


def without_token(text: str, token: str | None) -> str:
    """A prompt without the rare token, which CLIP has never seen with the subject."""
    if not token:
        return text
    return " ".join(re.sub(rf"(?<!\w){re.escape(token)}(?!\w)", " ", text).split())


def read_prompts(
    where: str | Path,
    *,
    class_word: str | None = None,
    token: str | None = None,
    column: str | None = None,
    most: int | None = None,
) -> Prompts:
    """Read prompts; InputError for what is none.

    `{token}` and `{class}` in a prompt are filled in. `column` names the column of a table, `most` takes
    the first so many.
    """
    name = str(where)
    if name.startswith(DREAMBOOTH):
        found, token = _dreambooth(name), token or DEFAULT_TOKEN
    elif name.endswith(".lance"):
        found = _captions(name, most)
    else:
        found = _file(Path(where), column)
    found = [text for raw in found if (text := " ".join(raw.split()))]
    if flaw := next((flaw for text in found if (flaw := flaw_of(text))), ""):
        raise InputError(f"prompts of '{name}': {flaw.replace('caption', 'prompt')}")
    if len(found) > (most or len(found)):
        found = found[:most]
    return Prompts.of(name, [_filled(text, token, class_word) for text in found], token)


def prompts_of_pictures(
    pictures: FolderPictures, own: Callable[[Path], str | None] | None = None
) -> tuple[str, ...]:
    """The prompt of each picture in a folder: what `own` reads in its file, else its caption file.

    Beside it are a text of the same name (`.txt`, `.caption`) or a line of `metadata.jsonl`, `captions.jsonl`
    or their `.csv`, as `import` reads them; of several captions the first. InputError where one has none.
    """
    found = {file: None if own is None else own(file) for file in pictures.files}
    if None in found.values():
        folder = Path(pictures.name)
        captions: dict[str, str | None] = {}
        for key, caption in _captions_of_pictures(folder):
            captions.setdefault(key, caption)
        for file, prompt in found.items():
            if prompt is None:
                found[file] = captions.get(file.relative_to(folder).as_posix())
    missing = [file for file, prompt in found.items() if prompt is None]
    if missing:
        raise InputError(
            f"{len(missing)} of {len(found)} pictures do not say their prompt, such as '{missing[0].name}'",
            allowed="pictures that darkroom or A1111 wrote, a .txt for each, or a metadata.jsonl",
        )
    return tuple(prompt or "" for prompt in found.values())


def _captions_of_pictures(folder: Path) -> Iterator[tuple[str, str | None]]:
    """Keys and captions as `import` reads them; InputError in terms of what can be said here."""
    try:
        yield from FolderSource(folder, Columns()).captions()
    except InputError as error:
        if "-column" not in error.mend:
            raise
        mend = "call its columns file_name and text, or rename the file and put a .txt next to each picture"
        raise InputError(error.given, mend=mend) from error


def _filled(text: str, token: str | None, class_word: str | None) -> str:
    for mark, value, option in ((TOKEN, token, "--token sks"), (CLASS, class_word, "--class-word dog")):
        if mark in text:
            if not value:
                raise InputError(f"the prompt '{text}' needs a {mark}", mend=f"say it with {option}")
            text = text.replace(mark, value)
    return text


def _dreambooth(name: str) -> list[str]:
    """The 25 prompts of a kind of subject, from the paper's own list."""
    kind, _, where = name.removeprefix(DREAMBOOTH).partition("=")
    if kind not in DREAMBOOTH_HEADINGS or not where:
        allowed = "dreambooth:live=FILE or dreambooth:object=FILE"
        raise InputError(f"prompts '{name}'", allowed=allowed, mend=f"FILE is {DREAMBOOTH_LIST}")
    if not Path(where).is_file():
        raise InputError(f"no prompts at '{where}'", mend=f"FILE is {DREAMBOOTH_LIST}")
    text = Path(where).read_text(encoding="utf-8-sig", errors="replace")
    part = re.search(rf"^{DREAMBOOTH_HEADINGS[kind]}\s*$(.*?)^\]", text, re.M | re.S)
    found = re.findall(r"^'(.*)'\.format\(", part[1], re.M) if part else []
    if not found:
        raise InputError(f"'{where}' has no '{DREAMBOOTH_HEADINGS[kind]}'", mend=f"FILE is {DREAMBOOTH_LIST}")
    return [prompt.replace("{0}", TOKEN).replace("{1}", CLASS) for prompt in found]


def _captions(name: str, most: int | None) -> list[str]:
    found: list[str] = []
    for batch in Store.open(name).scan(["caption"]):
        found += batch.column("caption").to_pylist()
        if most is not None and len(found) >= most:
            break
    return found


def _file(path: Path, column: str | None) -> list[str]:
    suffix = path.suffix.lower()
    if not path.is_file():
        raise InputError(f"no prompts at '{path}'", allowed=KINDS)
    if suffix == ".parquet":
        return _parquet(path, column)
    if suffix not in (".txt", ".jsonl", ".csv", ".tsv"):
        raise InputError(f"prompts '{path}'", allowed=KINDS)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"'{path}' is no UTF-8 text") from error
    if suffix == ".txt":
        return text.split("\n")  # splitlines() would cut a prompt at U+2028 and its like too
    rows = list(_json_rows(path, text) if suffix == ".jsonl" else _table_rows(path, text, suffix))
    names = list(dict.fromkeys(name for row in rows for name in row))
    chosen = _column(path, column, names)
    return [_text_of(row.get(chosen), f"'{path}', row {i}") for i, row in enumerate(rows, 1)]


def _text_of(value: Any, place: str) -> str:
    """A cell as a prompt, nothing where it is empty; InputError for a list or an object, which is none."""
    if value is None or value != value:  # not-a-number, which tables write where a cell is empty
        return ""
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    raise InputError(f"{place}: {str(value)[:60]}", allowed="a prompt as text")


def _json_rows(path: Path, text: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}:{number} is no JSON: {error}") from error
        yield row if isinstance(row, dict) else {"prompt": row}


def _table_rows(path: Path, text: str, suffix: str) -> Iterator[dict[str, Any]]:
    reader = csv.DictReader(io.StringIO(text), delimiter="\t" if suffix == ".tsv" else ",", strict=True)
    named = [column for column in reader.fieldnames or () if column]
    if twice := next((column for column in named if named.count(column) > 1), None):
        raise InputError(f"'{path}' has two columns '{twice}'", mend="take one out")
    try:
        for row in reader:
            if None in row or None in row.values():
                raise InputError(f"{path}:{reader.line_num} has another number of cells than the first line")
            yield row
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num + 1} is no CSV: {error}") from error


def _parquet(path: Path, column: str | None) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(path).names
        chosen = _column(path, column, names)
        values = pq.read_table(path, columns=[chosen])[chosen].to_pylist()
        return [_text_of(value, f"'{path}', row {i}") for i, value in enumerate(values, 1)]
    except UnicodeDecodeError as error:
        raise InputError(f"'{path}' holds text that is no UTF-8") from error
    except (pa.ArrowInvalid, OSError) as error:
        if is_system_failure(error):
            raise
        raise InputError(f"'{path}' is no Parquet file: {first_line(error)}") from error


def _column(path: Path, column: str | None, names: Sequence[str]) -> str:
    if not names:
        raise InputError(f"no prompts in '{path}'")
    found = find_name(column, ("prompt", *CAPTION_NAMES), names, "prompt")
    if found is None:
        raise no_column("prompt", str(path), names)
    return found
