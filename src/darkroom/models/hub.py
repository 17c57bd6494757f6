"""Repositories on the Hugging Face hub: from the cache where all of it is there, else in one short try.

Nothing is retried before the hub has answered once: without a network that is reported within `ANSWER_S`.
What the hub's client raises may quote the token, so nothing of it goes on unread.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from fnmatch import fnmatch
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from darkroom.errors import ModelError, is_disk_full

LOG = logging.getLogger("darkroom.models")
T = TypeVar("T")
ANSWER_S = 8.0
"""The hub has answered once within this, or is reported as unreachable."""


def fetch(
    ref: str,
    allow: Sequence[str],
    *,
    ignore: Sequence[str] = (),
    revision: str | None = None,
    whole: Callable[[Path], bool],
    mend: str = "give a folder",
) -> Path:
    """The folder of a repository's files that match `allow` and not `ignore`.

    `whole` says whether a folder of the cache has what is needed: then the hub is not asked. ModelError in
    one line where it cannot be had; `mend` says what else could be given.
    """
    from huggingface_hub import constants, snapshot_download

    asked: dict[str, Any] = {"revision": revision, "allow_patterns": allow, "ignore_patterns": ignore}
    try:
        cached = _cached(ref, asked)
        if cached is not None and whole(cached):
            return cached
        if not constants.HF_HUB_OFFLINE:
            _say_size(ref, _within(ANSWER_S, lambda: _files(ref, revision)), allow, ignore)
            return Path(snapshot_download(ref, **asked))
    except Late:
        reason = f"no answer within {ANSWER_S:g} s"
    except Exception as error:  # whatever the hub's client raises may quote the token
        if is_disk_full(error):
            raise
        reason = without_token(" ".join(str(error).split()))[:300] or type(error).__name__
    else:
        reason = "HF_HUB_OFFLINE is set"
    raise ModelError(
        f"'{ref}' is no folder here, is not in the hub's cache, and could not be had from the hub ({reason})",
        mend=f"{mend}; or check the name, the connection and, for a gated model, $HF_TOKEN",
    )


def _cached(ref: str, asked: dict[str, Any]) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(ref, **asked, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _files(ref: str, revision: str | None) -> list[tuple[str, int | None]]:
    """Names and sizes of a repository's files: one request, without a second try."""
    from huggingface_hub import HfApi, constants

    found = HfApi(endpoint=constants.ENDPOINT).model_info(
        ref, revision=revision, files_metadata=True, timeout=ANSWER_S / 2
    )
    return [(file.rfilename, file.size) for file in found.siblings or ()]


def _within(seconds: float, ask: Callable[[], T]) -> T:
    """What a call gives, or TimeoutError: a name server or a proxy can be silent where no timeout reaches."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:  # raised again where it is waited for
            answer.set_exception(error)

    Thread(target=run, daemon=True).start()
    return answer.result(seconds)


def _say_size(
    ref: str, files: Sequence[tuple[str, int | None]], allow: Sequence[str], ignore: Sequence[str]
) -> None:
    """What will come, before it comes; the hub's client shows how far it is."""
    taken = [
        size
        for name, size in files
        if any(fnmatch(name, one) for one in allow) and not any(fnmatch(name, one) for one in ignore)
    ]
    known = sum(size for size in taken if size)
    LOG.warning(
        "fetching '%s' from the hub: %d files%s", ref, len(taken), f", {known / 1e6:,.0f} MB" if known else ""
    )


def without_token(text: str) -> str:
    """A message without any token for the hub that is set here, or that looks like one."""
    from huggingface_hub import get_token

    for token in {os.environ.get("HF_TOKEN", ""), get_token() or ""}:
        for form in {token, token.strip()} - {""}:
            text = text.replace(form, "***")
    return re.sub(r"hf_\w{4,}|(?<=Bearer )[^\s'\"]+", "***", text)
