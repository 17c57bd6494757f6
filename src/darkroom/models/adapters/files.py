"""Adapter files as untrusted input: safetensors opened with bounds, and written atomically; and what the
header of one says in words: alphas, base, and the fields that other tools show.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import re
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import regex
import torch

from darkroom.errors import ModelError, is_system_failure
from darkroom.hardware.system import atomic_replace, remove_file
from darkroom.models.adapters.adapter import ARCHITECTURES, KOHYA_BASES, scale_of
from darkroom.models.model import write_tensors

if TYPE_CHECKING:
    from darkroom.models.adapters.adapter import Adapter


MAX_HEADER_BYTES = 32 * 1024**2
"""kohya's files list every tag of the training set in their header: some megabytes."""
MAX_FILE_BYTES = 8 * 1024**3
MAX_TENSORS = 20_000
MAX_NAME = 512
MAX_CONFIG_BYTES = 1024**2
PEFT_WEIGHTS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
WHOLE = {"I64", "I32", "I16", "I8", "U8"}
"""What some files keep their alphas in."""


@dataclass(frozen=True, repr=False)
class Stored:
    """A file's tensors, what its header says in words, PEFT's configuration next to it, and its hash."""

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]
    config: dict[str, Any]
    sha256: str


def shown(name: str, most: int = 90) -> str:
    """A name out of a file, fit to print: no control characters, not too long."""
    text = name if len(name) <= most else name[: most - 3] + "..."
    return text if text.isprintable() else ascii(text)[1:-1]


def open_tensors(path: Path) -> Stored:
    """Every tensor of a safetensors file, checked; ModelError that says what is wrong with it."""
    if path.is_dir():
        path = path / PEFT_WEIGHTS
    if not path.is_file():
        raise ModelError(f"no adapter file at '{path}'", allowed="a .safetensors file, or PEFT's folder")
    header = read_header(path)
    _check_header(path, header)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path, device="cpu")
    except SafetensorError as error:
        raise ModelError(f"'{path.name}' is damaged: {shown(str(error), 200)}") from error
    for name, tensor in tensors.items():
        if tensor.dtype.itemsize == 1 and tensor.is_floating_point():
            tensors[name] = tensor = tensor.float()
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"'{path.name}': numbers in '{shown(name)}' are not finite")
    in_order = {name: tensors[name] for name in header if name in tensors}
    return Stored(in_order, _metadata(header), _peft_config(path), _hash_of(path))


def read_header(path: Path) -> dict[str, Any]:
    """The header as JSON, read by itself with a bound before anything else is."""
    file_name = f"'{path.name}'"
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ModelError(f"{file_name} has {size:,} bytes", allowed=f"at most {MAX_FILE_BYTES:,}")
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        is_whole = len(start) == 8 and 2 <= length <= min(MAX_HEADER_BYTES, size - 8)
        # A header of 640 or 19,280 bytes begins as a pickle does.
        pickled = not is_whole and start[:2] in (b"PK", b"\x80\x02")
        if pickled or path.suffix in (".pt", ".bin", ".ckpt", ".pkl", ".pth"):
            raise ModelError(f"{file_name} is a pickle, which can run code", mend="give it as .safetensors")
        if not is_whole:
            raise ModelError(
                f"{file_name} is no safetensors file: its header claims {length:,} of {size:,} bytes"
            )
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{file_name} is no safetensors file: its header is not JSON") from error
    if not isinstance(header, dict):
        raise ModelError(f"{file_name} is no safetensors file: its header is not an object")
    return header


def _check_header(path: Path, header: Mapping[str, Any]) -> None:
    names = [name for name in header if name != "__metadata__"]
    if len(names) > MAX_TENSORS:
        raise ModelError(f"'{path.name}' has {len(names):,} tensors", allowed=f"at most {MAX_TENSORS:,}")
    for name in names:
        entry = header[name]
        dtype = str(entry.get("dtype")) if isinstance(entry, dict) else None
        if len(name) > MAX_NAME:
            raise ModelError(f"'{path.name}': a tensor's name of {len(name):,} characters")
        # Alphas are whole numbers in some files.
        if dtype not in FLOATS and not (
            dtype in ("BOOL", "I64", "I32", "I16", "I8", "U8") and name.endswith((".alpha", ".on_input"))
        ):
            raise ModelError(
                f"'{path.name}': '{shown(name)}' holds {shown(str(dtype))}", allowed=", ".join(sorted(FLOATS))
            )


def _metadata(header: Mapping[str, Any]) -> dict[str, str]:
    metadata = header.get("__metadata__")
    return {str(k): str(v) for k, v in metadata.items()} if isinstance(metadata, dict) else {}


def _peft_config(path: Path) -> dict[str, Any]:
    file = path.with_name(PEFT_CONFIG)
    if path.name != PEFT_WEIGHTS or not file.is_file():
        return {}
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise ModelError(f"'{file.name}' has {file.stat().st_size:,} bytes", allowed=f"{MAX_CONFIG_BYTES:,}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"'{file}' is not JSON") from error
    if not isinstance(config, dict):
        return {}
    if config.get("peft_type") == "IA3":  # which has no rank and no alpha
        return {}
    if config.get("peft_type", "LORA") != "LORA":
        message = f"'{path.parent.name}' is PEFT's {shown(str(config['peft_type']))}"
        raise ModelError(message, allowed="PEFT's LORA and IA3, or LyCORIS' files")
    return config


def _hash_of(path: Path) -> str:
    """SHA-256 of a file, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> Path:
    """Write to a temporary file, then rename it."""
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(temporary, tensors, metadata)
        atomic_replace(temporary, path)
    except OSError as error:
        if is_system_failure(error):
            raise
        raise ModelError(f"'{path}' cannot be written: {error.strerror or error}") from error
    finally:
        remove_file(temporary)
    return path


# ---- metadata
#
# Written are diffusers' `lora_adapter_metadata` (a LoraConfig by part, as JSON), ModelSpec's fields
# (Stability AI's convention) and kohya's `ss_` fields, as far as they are known. Nothing in a header is
# obeyed beyond numbers and names that are looked up.

DIFFUSERS = "lora_adapter_metadata"
PEFT_ALPHA = 8
"""LoraConfig's own, where a configuration says none."""
PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica")
"""Values of PEFT's `init_lora_weights` that leave the base's weights alone; PiSSA, OLoRA, CorDA, LoftQ and
LoRA-GA change them."""
OTHER_FORMS = ("kasa_config", "arrow_config", "alora_invocation_tokens", "use_qalora", "use_bdlora")
"""What in PEFT's LoraConfig makes layers that are no plain sums."""
MAX_PATTERNS, MAX_PATTERN, MATCH_SECONDS = 20_000, 512, 0.2
RESOLUTIONS = {"sd15": "512x512", "sd2": "512x512", "sd2-v": "768x768", "sdxl": "1024x1024"}
PREDICTIONS = {"sd2-v": "v", "dit": "flow", "tiny-dit": "flow"}
"""Where it is not epsilon."""
PREDICTION_NAMES = {"v_prediction": "v", "flow_prediction": "flow"}
"""ModelSpec's names of what diffusers names otherwise."""
KOHYA_MODULE, LYCORIS_MODULE = "networks.lora", "lycoris.kohya"


class Patterns:
    """PEFT's `alpha_pattern` or `rank_pattern`: regular expressions over module paths, the first match holds.

    They come out of a file, so their length, their counts and the time they take are bounded.
    """

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict) or len(values) > MAX_PATTERNS:
            raise ModelError(
                f"{where} is no table", allowed=f"at most {MAX_PATTERNS:,} patterns with numbers"
            )
        self.where = where
        self._values = {
            str(key): _number(value, f"{where}['{shown(str(key))}']") for key, value in values.items()
        }
        self._by_ending: dict[str, list[tuple[int, str]]] = {}
        for i, key in enumerate(self._values):
            ending = re.search(r"[\w-]*$", key)[0] if re.fullmatch(r"\^?[\w.-]+", key) else ""  # type: ignore[index]
            self._by_ending.setdefault(ending, []).append((i, key))
        self._compiled = {key: self._compile(key) for key in self._values}

    def _compile(self, key: str) -> Any:
        counts = [int(count) for count in re.findall(r"\d+(?=[,\d]*\})", key)]
        try:
            if len(key) > MAX_PATTERN or math.prod(max(1, count) for count in counts) > MAX_PATTERN:
                raise re.error("too long")
            re.compile(key)
            return regex.compile(rf"(.*\.)?({key})$")
        except (re.error, regex.error) as error:
            raise ModelError(f"the pattern '{shown(key)}' of {self.where}: {error}") from error

    def _matches(self, key: str, paths: Sequence[str]) -> bool:
        """As peft's `get_pattern_key` compares."""
        try:
            return any(self._compiled[key].match(path, timeout=MATCH_SECONDS) for path in paths)
        except TimeoutError as error:
            raise ModelError(
                f"the pattern '{shown(key)}' of {self.where} takes too long to compare"
            ) from error

    def find(self, paths: Sequence[str]) -> float | None:
        """The number of the first pattern that matches a layer's path, by whichever of its names."""
        likely = (
            keys for ending, keys in self._by_ending.items() if any(path.endswith(ending) for path in paths)
        )
        matching = (key for _, key in sorted(chain.from_iterable(likely)) if self._matches(key, paths))
        key = next(matching, None)
        return None if key is None else self._values[key]

    def check_used(self, layers: Iterable[Sequence[str]]) -> None:
        """ModelError for a pattern that matches none of the layers: it was meant for some."""
        left = dict.fromkeys(self._values)
        for paths in layers:
            for ending, keys in self._by_ending.items():
                if any(path.endswith(ending) for path in paths):
                    for _, key in keys:
                        if key in left and self._matches(key, paths):
                            del left[key]
        if left:
            raise ModelError(
                f"the pattern '{shown(next(iter(left)))}' of {self.where} matches no layer of the adapter",
                mend="take it out, or name the layers as the model does",
            )


@dataclass(frozen=True)
class Scaling:
    """PEFT's LoraConfig of one part of a model, as far as scales go."""

    alpha: float
    rank: float | None
    stabilised: bool
    alphas: Patterns
    ranks: Patterns

    @classmethod
    def of(cls, config: Mapping[str, Any], part: str) -> Scaling:
        """From the configuration's own keys. What it does not say is as PEFT has it."""
        prefix = f"{part}." if part else ""
        rank = None if config.get("r") is None else _number(config["r"], f"{prefix}r")
        return cls(
            _number(config.get("lora_alpha", PEFT_ALPHA), f"{prefix}lora_alpha"),
            rank,
            config.get("use_rslora") is True,
            Patterns(config.get("alpha_pattern") or {}, f"{prefix}alpha_pattern"),
            Patterns(config.get("rank_pattern") or {}, f"{prefix}rank_pattern"),
        )

    def scale(self, paths: Sequence[str], rank: int) -> float:
        """alpha / rank of a layer; ModelError where the configuration has another rank than its tensors."""
        wanted = self.ranks.find(paths) or self.rank
        if wanted is not None and wanted != rank:
            raise ModelError(
                f"layer '{shown(paths[0])}' has rank {rank}, and by the adapter's configuration {wanted:g}"
            )
        alpha = self.alphas.find(paths)
        return scale_of(self.alpha if alpha is None else alpha, rank, rank_stabilised=self.stabilised)


@dataclass(frozen=True)
class Alphas:
    """What headers say of scales, by part of the model ('' is any part); where they say nothing, 1."""

    parts: Mapping[str, Scaling] = field(default_factory=dict)

    def scale(self, name: str, rank: int) -> float:
        """The scale of a layer: alpha / rank, with alpha = rank where nothing is said."""
        part, _, path = name.partition(".")
        scaling = self.parts.get(part, self.parts.get(""))
        return 1.0 if scaling is None else scaling.scale(_names_of(part, path), rank)

    def check_used(self, names: Iterable[str]) -> None:
        """ModelError for a pattern that matches none of these layers."""
        layers = [name.partition(".")[::2] for name in names]
        for part, scaling in self.parts.items():
            own = [_names_of(*layer) for layer in layers if layer[0] == part or not part]
            for patterns in (scaling.alphas, scaling.ranks):
                patterns.check_used(own)


def _names_of(part: str, path: str) -> list[str]:
    """What a layer's path may be called: text encoders' also with transformers' older `text_model.`."""
    return [path] if part == "unet" else [path, f"text_model.{path.removeprefix('text_model.')}"]


def read_alphas(metadata: Mapping[str, str], config: Mapping[str, Any]) -> Alphas:
    """The scales in diffusers' metadata of the header, or in PEFT's configuration next to the file."""
    try:
        diffusers = json.loads(metadata.get(DIFFUSERS, "{}"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"the header's {DIFFUSERS} is not JSON") from error
    if not isinstance(diffusers, dict):
        raise ModelError(f"the header's {DIFFUSERS} is no object")
    by_part: dict[str, dict[str, Any]] = {"": dict(config)} if config else {}
    for key, value in diffusers.items():
        part, _, what = str(key).rpartition(".")
        by_part.setdefault(part, {})[what] = value
    for part_config in by_part.values():
        _check_added(part_config)
    return Alphas({part: Scaling.of(part_config, part) for part, part_config in by_part.items()})


def _check_added(config: Mapping[str, Any]) -> None:
    """ModelError unless the layers are added to the base's weights as they are: nothing else is done here."""
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in PLAIN_STARTS:
        raise ModelError(
            f"init_lora_weights '{shown(start)}': such an adapter goes with changed weights of its base",
            allowed=", ".join(PLAIN_STARTS),
            mend="save it with PEFT's path_initial_model_for_weight_conversion",
        )
    if other := next((name for name in OTHER_FORMS if config.get(name)), None):
        raise ModelError(
            f"the adapter's configuration has {other}", allowed="layers that are added as they are"
        )


def _number(value: Any, where: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e9:
        return float(value)
    raise ModelError(f"{where} is {shown(str(value))}", allowed="a number")


def about(
    *,
    title: str | None = None,
    trigger: str | None = None,
    base_model: str | None = None,
    author: str | None = None,
    description: str | None = None,
    license: str | None = None,
    resolution: str | None = None,
    **more: str | None,
) -> dict[str, str]:
    """Metadata for an adapter that is to be written, under the names that tools look for.

    `trigger` are the words that call what was learned; `base_model` the folder or hub id it was trained on.
    """
    metadata = {
        "modelspec.title": title,
        "ss_output_name": title,
        "modelspec.trigger_phrase": trigger,
        "ss_sd_model_name": base_model,
        "modelspec.author": author,
        "modelspec.description": description,
        "modelspec.license": license,
        "modelspec.resolution": resolution,
        **more,
    }
    return {key: value for key, value in metadata.items() if value is not None}


def header(adapter: Adapter, base: str | None, prediction: str | None, *, kohya: bool) -> dict[str, str]:
    """All that is written into a file's header; the adapter's own metadata goes before what is derived.

    `prediction` is in diffusers' words; None: what is usual with the base.
    """
    own = {key: value for key, value in adapter.metadata.items() if _is_kept(key)}
    own |= {key: _without_place(own[key]) for key in FILES_OF_OTHERS if key in own}
    rank, alpha = adapter.rank, _most_common([layer.alpha for layer in adapter.layers.values()])
    metadata = {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.implementation": "diffusers",
        "modelspec.title": adapter.name,
        "modelspec.date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S"),
        "modelspec.prediction_type": _prediction(base, prediction),
        "ss_network_module": KOHYA_MODULE if adapter.kind == "lora" else LYCORIS_MODULE,
        "ss_network_dim": str(rank),
        "ss_network_alpha": f"{alpha:g}",
        "ss_output_name": adapter.name,
    }
    if base in ARCHITECTURES:
        metadata["modelspec.architecture"] = f"{ARCHITECTURES[base]}/lora"
        metadata["modelspec.resolution"] = RESOLUTIONS[base]
        metadata["ss_base_model_version"] = KOHYA_BASES[base]
        metadata["ss_v2"] = str(base.startswith("sd2"))
    metadata |= own
    if not kohya:
        metadata[DIFFUSERS] = json.dumps(_lora_configs(adapter), indent=2, sort_keys=True)
    return metadata


def _prediction(base: str | None, prediction: str | None) -> str:
    return (
        PREDICTIONS.get(base or "", "epsilon")
        if prediction is None
        else PREDICTION_NAMES.get(prediction, prediction)
    )


FILES_OF_OTHERS = ("ss_sd_model_name", "ss_vae_name")
"""Fields that may name a file by where it lay when the adapter was trained."""


def _is_kept(key: str) -> bool:
    """Fields of the two conventions; hashes of the file as it was are not true of the new one."""
    return key.startswith(("modelspec.", "ss_", "darkroom.")) and key != "modelspec.hash_sha256"


def _without_place(value: str) -> str:
    """The last part of an absolute path: who gets the file learns nothing of the machine."""
    if re.fullmatch(r"(/|~/|[A-Za-z]:[\\/]|\\\\)[^\n]*", value) is None:
        return value
    return re.split(r"[\\/]", value.rstrip("\\/"))[-1]


def _lora_configs(adapter: Adapter) -> dict[str, Any]:
    """PEFT's LoraConfig of each part, as diffusers' `save_lora_weights` packs them."""
    configs: dict[str, Any] = {}
    for part in adapter.parts:
        layers = {
            name.partition(".")[2].removeprefix("text_model."): layer
            for name, layer in adapter.layers.items()
            if name.startswith(f"{part}.")
        }
        ranks = {path: layer.rank for path, layer in layers.items()}
        alphas = {path: _plain(layer.alpha) for path, layer in layers.items()}
        rank, alpha = _most_common(list(ranks.values())), _most_common(list(alphas.values()))
        # transformers calls layers `encoder.` in CLIPTextModel, `text_model.encoder.` with a projection
        start = "^" if part == "unet" else ""
        configs |= {
            f"{part}.peft_type": "LORA",
            f"{part}.r": rank,
            f"{part}.lora_alpha": alpha,
            f"{part}.rank_pattern": {f"{start}{path}": r for path, r in ranks.items() if r != rank},
            f"{part}.alpha_pattern": {f"{start}{path}": a for path, a in alphas.items() if a != alpha},
            f"{part}.target_modules": sorted(layers),
            f"{part}.use_dora": adapter.kind == "dora",
        }
    return configs


def _plain(alpha: float) -> float | int:
    """A whole alpha as a whole number, free of the last bit that scale * rank may leave."""
    rounded = round(alpha, 9)
    return int(rounded) if rounded == int(rounded) else alpha


def _most_common(values: list[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]
