"""A model's files before a library opens them: fetched from the Hugging Face hub, and checked (JSON, weights,
schedulers, words).
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from fnmatch import fnmatch
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from darkroom.errors import ModelError, is_disk_full, is_system_failure

# ---- checks
#
# The libraries pass over much of this: a tensor given twice, whole numbers for weights, a text encoder's
# missing layers (made up at random); the rest ends in errors that name no file.

FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
MAX_HEADER_BYTES = 100_000_000
MAX_JSON_BYTES = 2**28
MAX_TIMESTEPS = 100_000
PREDICTIONS = ("epsilon", "sample", "v_prediction", "flow_prediction")
_NUMBERS = {
    "num_train_timesteps": (1, MAX_TIMESTEPS),
    "beta_start": (0.0, 1.0),
    "beta_end": (0.0, 1.0),
    "steps_offset": (0, MAX_TIMESTEPS),
    "shift": (0.0, 1000.0),
}
"""Of a scheduler's configuration, what is counted with, and from where to where."""
DENOISERS = ("unet", "transformer")
_LAYERS, _CHANNELS = (1, 1000), (1, 100_000)
_SIZES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("layers_per_block", "num_hidden_layers", "num_layers"), _LAYERS),
    "transformer_layers_per_block": (0, 1000),
    **dict.fromkeys(("in_channels", "out_channels", "block_out_channels", "latent_channels"), _CHANNELS),
    **dict.fromkeys(("cross_attention_dim", "hidden_size", "intermediate_size"), _CHANNELS),
    "norm_num_groups": _CHANNELS,
    "conv_in_kernel": (1, 99),
    "conv_out_kernel": (1, 99),
    "norm_eps": (0.0, 1.0),
    "layer_norm_eps": (0.0, 1.0),
    "vocab_size": (1, 10_000_000),
    "max_position_embeddings": (1, 1_000_000),
    "eos_token_id": (0, 10_000_000),
    "sample_size": (1, 8192),
}
"""The same of the configurations of a model's parts; `sample_size` is that of what denoises."""
_NEEDED = ("norm_eps", "layer_norm_eps", "eos_token_id", "sample_size")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; ModelError for a file that is missing, no JSON, or something else."""
    _check_plain(file)
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        if is_system_failure(error):
            raise
        raise ModelError(f"'{file}' cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"'{file}' is no JSON: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(content, dict):
        kind = "null" if content is None else f"a {type(content).__name__}"
        raise ModelError(f"'{file}' holds {kind}", allowed="a JSON object")
    return content


def _check_plain(file: Path) -> None:
    """ModelError for a pipe, a device or the like: reading it would wait for ever, or never end."""
    if file.exists() and not file.is_file() and not file.is_dir():
        raise ModelError(f"'{file}' cannot be read: it is no plain file")
    if file.is_file() and file.suffix == ".json" and (size := file.stat().st_size) > MAX_JSON_BYTES:
        raise ModelError(f"'{file}' has {size:,} bytes", allowed=f"at most {MAX_JSON_BYTES:,}")


# ---- weights


def weight_files(folder: Path, variant: str | None) -> list[Path]:
    """The safetensors files of a part: the shards that an index names, or what lies there.

    ModelError for an index that names files which are not there or lie elsewhere.
    """
    ending = f".{variant}" if variant else ""
    indexes = sorted(folder.glob(f"*.safetensors.index{ending}.json"))
    if not indexes:
        found = sorted(folder.glob(f"*{ending}.safetensors"))
        usual = [f for f in found if f.name in _usual(ending)]
        return usual or found
    shards: dict[str, None] = {}
    for index in indexes:
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places or not all(isinstance(p, str) for p in places.values()):
            raise ModelError(f"'{index}' has no weight_map of tensors and their files")
        for name in places.values():
            if Path(name).name != name or not (folder / name).is_file():
                raise ModelError(f"'{index}' names '{name[:200]}', which is not next to it")
        shards |= dict.fromkeys(places.values())
    return [folder / name for name in shards]


def _usual(ending: str) -> tuple[str, ...]:
    return f"diffusion_pytorch_model{ending}.safetensors", f"model{ending}.safetensors"


def tensor_types(files: Iterable[Path]) -> dict[str, str]:
    """Of each tensor in safetensors files its type, such as F32.

    ModelError for what is cut short, damaged, or holds a tensor twice.
    """
    from safetensors import SafetensorError, safe_open

    types: dict[str, str] = {}
    for file in files:
        _check_plain(file)
        try:
            with safe_open(str(file), "pt"):
                pass
        except (SafetensorError, OSError) as error:
            if is_system_failure(error):
                raise
            reason = " ".join(str(error).split())[:200]
            raise ModelError(
                f"'{file}' is damaged: {reason}", mend="it may have been cut short: copy it anew"
            ) from error
        for name, entry in _header(file):
            if name == "__metadata__":
                continue
            if name in types:
                raise ModelError(f"'{file}' holds the tensor '{name}' twice")
            types[name] = entry["dtype"]
    return types


def tensor_shapes(files: Iterable[Path]) -> dict[str, list[int]]:
    """Of each tensor in safetensors files its shape; `tensor_types` has found them whole."""
    return {
        name: list(entry["shape"])
        for file in files
        for name, entry in _header(file)
        if name != "__metadata__"
    }


def _header(file: Path) -> list[tuple[str, Any]]:
    """Names and descriptions of a file's tensors, also those given twice; safetensors has read it before."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        raw = stream.read(min(length, MAX_HEADER_BYTES))
    pairs: list[tuple[str, Any]] = []

    def keep(found: list[tuple[str, Any]]) -> dict[str, Any]:
        pairs[:] = found  # the outermost object comes last
        return dict(found)

    json.loads(raw, object_pairs_hook=keep)
    return pairs


def check_complete(
    what: str, *, missing: Sequence[str] = (), whole_numbers: Sequence[str] = (), shapes: Sequence[Any] = ()
) -> None:
    """ModelError where weights lack tensors, hold whole numbers, or have other shapes than are described."""
    if missing:
        raise ModelError(
            f"{what} lacks {_named(missing)}", mend="the file is of another model, or was not written whole"
        )
    if whole_numbers:
        raise ModelError(f"{what} holds whole numbers for {_named(whole_numbers)}", allowed="floats")
    if shapes:
        raise ModelError(
            f"{what}: {_named([str(one[0]) for one in shapes])} has another shape than config.json says",
            mend=f"{list(shapes[0][1])} in the file, {list(shapes[0][2])} by config.json",
        )


def _named(names: Sequence[str]) -> str:
    first = sorted(names)
    return f"the tensor '{first[0]}'" + (f" and {len(first) - 1} more" if len(first) > 1 else "")


def check_numbers(file: Path, config: Mapping[str, Any]) -> None:
    """ModelError for numbers that no model has: to build it would take all memory or for ever, or drawing
    ends in an error far from here. What is no number at all, the libraries refuse, but for `_NEEDED`.
    """
    for key, (low, high) in _SIZES.items():
        if key not in config or (key == "sample_size" and file.parent.name not in DENOISERS):
            continue
        for number in _numbers_in(config[key]):
            is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
            if (is_number and not low <= number <= high) or (not is_number and key in _NEEDED):
                raise _wrong(file, key, number, f"{low:g} to {high:,.0f}")
        if key == "sample_size" and isinstance(config[key], list):
            raise _wrong(file, key, config[key], "one number")


def _numbers_in(value: Any) -> list[Any]:
    return [one for inner in value for one in _numbers_in(inner)] if isinstance(value, list) else [value]


# ---- schedulers


def read_scheduler(file: Path) -> dict[str, Any]:
    """A scheduler's configuration; ModelError for what nobody could draw or train with."""
    config = read_json(file)
    for key, (low, high) in _NUMBERS.items():
        if key not in config:
            continue
        value = config[key]
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not low <= value <= high:
            raise _wrong(file, key, value, f"a number from {low:g} to {high:g}")
    named = config.get("_class_name")
    if named is not None and not isinstance(named, str):
        raise _wrong(file, "_class_name", named, "a scheduler's name")
    predicted = config.get("prediction_type", "epsilon")
    if predicted not in PREDICTIONS:
        raise _wrong(file, "prediction_type", predicted, ", ".join(PREDICTIONS))
    for key in ("rescale_betas_zero_snr", "use_flow_sigmas"):
        if not isinstance(value := config.get(key, False), bool):
            raise _wrong(file, key, value, "true or false")
    betas = config.get("trained_betas")
    if betas is not None and not (
        isinstance(betas, list)
        and 0 < len(betas) <= MAX_TIMESTEPS
        and all(isinstance(beta, (int, float)) and 0 <= beta <= 1 for beta in betas)
    ):
        raise _wrong(file, "trained_betas", betas, "a list of numbers from 0 to 1")
    return config


def _wrong(file: Path, key: str, value: Any, allowed: str) -> ModelError:
    return ModelError(f"'{file}': {key} is {repr(value)[:100]}", allowed=allowed)


# ---- words


def check_tokenizer(folder: Path) -> None:
    """ModelError for a tokenizer folder whose files are no vocabulary that words can be looked up in."""
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if (folder / name).is_file():
            most = read_json(folder / name).get("model_max_length", 1)
            if not isinstance(most, (int, float)) or not most > 0:
                raise _wrong(folder / name, "model_max_length", most, "a number above 0")
    whole, vocabulary, merges = (folder / n for n in ("tokenizer.json", "vocab.json", "merges.txt"))
    if whole.is_file():
        model = read_json(whole).get("model")
        if not isinstance(model, dict) or not isinstance(model.get("merges"), list):
            raise ModelError(f"'{whole}' has no model of vocabulary and merges")
        if model.get("type", "BPE") != "BPE":
            raise _wrong(whole, "model.type", model["type"], "BPE")
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        _check_words(whole, model.get("vocab"), pairs)
    elif vocabulary.is_file() and merges.is_file():
        try:
            lines = merges.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ModelError(f"'{merges}' is no text: {error}") from error
        pairs = [line.split(" ") for line in lines if line.strip() and not line.startswith("#version")]
        _check_words(merges, read_json(vocabulary), pairs)
    else:
        raise ModelError(
            f"'{folder}' has no tokenizer", allowed="tokenizer.json, or vocab.json and merges.txt"
        )


def _check_words(file: Path, words: Any, merges: Sequence[Any]) -> None:
    if not isinstance(words, Mapping) or not words:
        raise ModelError(f"'{file}': its vocabulary is empty or none at all")
    odd = next((n for n in words.values() if not isinstance(n, int) or isinstance(n, bool) or n < 0), None)
    if odd is not None:
        raise ModelError(f"'{file}': a word's number is {repr(odd)[:100]}", allowed="0, 1, 2, ...")
    number, times = Counter(words.values()).most_common(1)[0]
    if times > 1:
        raise ModelError(f"'{file}': {times} words have the number {number}")
    for pair in merges:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise ModelError(f"'{file}': {repr(pair)[:100]} is no merge", allowed="two parts of a word")
        if unknown := next((part for part in (*pair, "".join(pair)) if part not in words), None):
            raise ModelError(
                f"'{file}': the merge {' '.join(pair)[:100]} needs '{unknown[:100]}', which no word is"
            )


# ---- the hub: from the cache where all of it is there, else in one short try
#
# Nothing is retried before the hub has answered once: without a network that is reported within `ANSWER_S`.
# What the hub's client raises may quote the token, so nothing of it goes on unread.

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
