"""What Lance complains of, told in one line: stores that do not open, columns that are none, filters.

Lance says much, with places in its own source; a user needs the wrong name and the nearest right one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from darkroom.errors import StoreError


def not_opened(path: str, version: int | None, error: Exception) -> StoreError:
    """Why a store at a path, or a version of it, could not be opened."""
    if "not found" not in str(error):
        return StoreError(f"{path} is damaged: {plain(error)}")
    if version is not None and "://" not in path and (Path(path) / "_versions").is_dir():
        return StoreError(f"{path} has no version {version}", mend="it was dropped; pin a version to keep it")
    return StoreError(f"no picture store at {path}", mend=f"make one with: darkroom import SOURCE {path}")


def no_column(name: str, names: Sequence[str], what: str) -> StoreError:
    """That none of the `names` is this one, with those that are near; `what` they are, in a word."""
    near = difflib.get_close_matches(name.lower(), names, 3, 0.5)
    mend = f"did you mean {' or '.join(near)}?" if near else ""
    return StoreError(f"no {what} '{name}'", allowed=", ".join(names), mend=mend)


def plain(error: Exception) -> str:
    """Lance's message in one line, without the place in its own source."""
    text = " ".join(str(error).split()).removeprefix("Invalid user input: ")
    return re.sub(r"(, )?\S*/rust/\S+\.rs:\d+:\d+", "", text)


class Filtering:
    """Within, what Lance says of a filter becomes a StoreError of one line."""

    def __init__(self, filter: str | None, names: Sequence[str]) -> None:
        self._filter, self._names = filter, names
        for quoted in re.findall(r'"([^"]*)"', filter or ""):
            if quoted in names:
                # Lance takes it for a text and would find nothing.
                raise StoreError(f'filter {filter!r}: "{quoted}" is a text', mend=f"the column is `{quoted}`")

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._filter is None or not isinstance(error, ValueError):
            return
        unknown = re.search(r"No field named [\"`]?([^\"`. ]+)", str(error))
        if unknown:
            raise no_column(unknown[1], self._names, "column") from error
        raise StoreError(
            f"filter {self._filter!r}: {plain(error)}", mend="SQL, such as: width >= 512"
        ) from error
