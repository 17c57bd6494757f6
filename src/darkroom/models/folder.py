"""Model folders in the diffusers layout: opened, written, described, and identified by their weights."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from darkroom.errors import InputError, ModelError, is_system_failure
from darkroom.hardware.system import atomic_replace, cache_folder, remove_tree, write_atomically
from darkroom.libraries import quiet, waiting, without_compiler
from darkroom.models.card import CARD
from darkroom.models.checked import (
    FLOATS,
    check_complete,
    check_numbers,
    fetch,
    read_json,
    read_scheduler,
    tensor_types,
    weight_files,
)
from darkroom.models.families import FAMILIES, check_fit, create
from darkroom.models.model import (
    PARTS,
    TRANSFORMER,
    LatentScaling,
    Model,
    noted_guidance,
    numbered,
    slow_bf16,
)
from darkroom.models.quick_open import opened_exactly
from darkroom.models.reference import check_reference, is_single_file
from darkroom.models.single_file import load_single_file, save_single_file
from darkroom.models.tokenizer import read_tokenizer, tokenizer_or_stand_in

LOG = logging.getLogger("darkroom.models")
# Of a hub's repository only what is opened: no other frameworks' weights, no single files next to the parts.
HUB_FOLDERS = (
    "unet",
    TRANSFORMER,
    "vae",
    "text_encoder",
    "text_encoder_2",
    "tokenizer",
    "tokenizer_2",
    "scheduler",
)
TOLD_BY = {
    "unet": ("block_out_channels", "cross_attention_dim", "addition_embed_type"),
    TRANSFORMER: ("num_layers", "num_attention_heads", "attention_head_dim", "cross_attention_dim"),
}
"""What tells families apart."""
DIT_PIPELINE = "DarkroomDiTPipeline"
"""What `model_index.json` says of a model with a `DiT`: no class of diffusers, which has none for it."""
OWN = "_darkroom"
"""The key of `model_index.json` under which darkroom notes what diffusers has no place for."""
BAD_SETTINGS = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    IndexError,
    ZeroDivisionError,
    OverflowError,
    AssertionError,
    ImportError,
)
"""What diffusers and transformers raise for a configuration that no module can be built by."""
HUB_VARIANTS = ["*.fp16*", "*.bf16*", "*.non_ema*", "*.ema_only*", "*openvino*"]


def load(
    ref: str | Path,
    *,
    parts: Sequence[str] | None = None,
    dtype: torch.dtype | None = torch.float32,
    device: str | torch.device = "cpu",
    variant: str | None = None,
    revision: str | None = None,
) -> Model:
    """Open a family's name (random weights), a model folder, a single file or a hub id; safetensors only.

    A folder that has a family's name is opened as `./sd15`. Where CLIP's tokenizer cannot be had for a
    family, one of single letters stands in, with a warning.

    `parts` names what must be there (of `unet, vae, text_encoder, tokenizer`); None takes all there is. A
    `transformer` that darkroom wrote stands in the U-Net's place.
    `variant` picks weight files such as `fp16`; `revision` a hub branch, tag or commit. A gated model
    is opened with the token in $HF_TOKEN. Raises ModelError where something asked for is missing.
    With `dtype` None weights keep the type that their files have and are mapped from them, on the CPU: they
    take memory as they are read.
    """
    if dtype is not None and slow_bf16(dtype, torch.device(device)):
        LOG.warning("this processor has no bf16 and emulates it: float32 is many times as fast")
    with quiet():
        if str(ref) in FAMILIES:
            asked = parts or PARTS
            reads = "tokenizer" in asked and not FAMILIES[str(ref)].tiny
            model = create(str(ref), parts=asked, tokenizer=tokenizer_or_stand_in() if reads else None)
        elif (path := Path(ref)).is_dir():
            model = _open(path, parts, variant, dtype is None)
        elif is_single_file(ref):
            model = load_single_file(ref, parts, as_stored=dtype is None)
        else:
            model = _open(_from_hub(str(ref), revision, variant), parts, variant, dtype is None)
            model.path = str(ref)  # not the hash under which the hub's cache keeps it
        if dtype is not None:
            return model.to(device, dtype)
        model.in_files = str(ref) not in FAMILIES
        return model


def _from_hub(ref: str, revision: str | None, variant: str | None) -> Path:
    check_reference(ref)
    kinds = ("*.json", "*.txt", f"*.{variant}*.safetensors" if variant else "*.safetensors")
    wanted = ["model_index.json", *(f"{folder}/{kind}" for folder in HUB_FOLDERS for kind in kinds)]
    left_out = [pattern for pattern in HUB_VARIANTS if not variant]
    return fetch(
        ref,
        wanted,
        ignore=left_out,
        revision=revision,
        whole=lambda folder: _has_weights(folder, variant),
        mend=f"give a folder or a .safetensors file, or random weights by name: {', '.join(FAMILIES)}",
    )


def _has_weights(folder: Path, variant: str | None) -> bool:
    """Whether a folder of the hub's cache has all weights that its `model_index.json` speaks of."""
    try:
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    kind = f"*.{variant}*.safetensors" if variant else "*.safetensors"
    parts = [name for name in HUB_FOLDERS if isinstance(index.get(name), list) and index[name][0]]
    weighty = [name for name in parts if not name.startswith(("tokenizer", "scheduler"))]
    return all((folder / name).is_dir() for name in parts) and all(
        any((folder / name).glob(kind)) and _shards(folder / name) for name in weighty
    )


QUICK_BYTES = 256 * 2**20  # hashed within half a second


def file_digest(model: Model) -> dict[str, str] | None:
    """What was hashed of the files that a model was opened from, and its SHA-256: a single file whole, of a
    folder the first file of the denoiser's weights. None for random weights.

    Cached by the file's path, size and time: hashing gigabytes takes seconds.
    """
    place = _hashed_file(model)
    if place is None:
        return None
    of = place.name if Path(model.path or "") == place else f"{place.parent.name}/{place.name}"
    note = _hash_note(place)
    if (sha256 := _noted(note)) is None:
        with place.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        with suppress(OSError):  # a cache that cannot be written: it is hashed again
            write_atomically(note, sha256)
    return {"file": of, "sha256": sha256}


def has_quick_digest(model: Model) -> bool:
    """Whether `file_digest` answers within a second: the hash is known, or the file is small."""
    place = _hashed_file(model)
    return place is None or place.stat().st_size <= QUICK_BYTES or _noted(_hash_note(place)) is not None


def _hashed_file(model: Model) -> Path | None:
    if model.path is None or not (place := Path(model.path)).exists():
        return None
    if place.is_dir():
        found = sorted((place / denoiser_of(place)).glob("*.safetensors"))
        return found[0] if found else None
    return place


def _hash_note(place: Path) -> Path:
    stat = place.stat()
    key = hashlib.sha256(f"{place.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:32]
    return cache_folder() / "hashes" / key


def _noted(note: Path) -> str | None:
    """A hash that was kept, whole."""
    try:
        sha256 = note.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return sha256 if re.fullmatch(r"[0-9a-f]{64}", sha256) else None


def _shards(folder: Path) -> bool:
    """Whether every file that an index of shards names is there."""
    indexes = list(folder.glob("*.safetensors.index.json"))
    names = {
        name
        for file in indexes
        for name in json.loads(file.read_text(encoding="utf-8"))["weight_map"].values()
    }
    return all((folder / name).is_file() for name in names)


def _open(path: Path, parts: Sequence[str] | None, variant: str | None, as_stored: bool = False) -> Model:
    wanted = _wanted(path, parts)
    model = Model("custom", scheduler=_scheduler(path), guidance=_guidance(path), path=str(path))
    if "unet" in wanted:
        folder = path / denoiser_of(path)
        model.unet = read_part(denoiser_class(folder), folder, variant, as_stored)
    if "vae" in wanted:
        model.vae = read_part(vae_class(path / "vae"), path / "vae", variant, as_stored)
        # SDXL's says that float16 overflows in it; of older ones diffusers' class assumes it.
        config = read_json(path / "vae" / "config.json")
        model.vae.register_to_config(force_upcast=bool(config.get("force_upcast")))
        LatentScaling.of(model.vae)  # raises for what nobody could decode with
    for i in range(2):
        if "text_encoder" in wanted and (folder := path / numbered("text_encoder", i)).is_dir():
            model.text_encoders.append(read_part(text_class(folder), folder, variant, as_stored))
        if "tokenizer" in wanted and (folder := path / numbered("tokenizer", i)).is_dir():
            model.tokenizers.append(read_tokenizer(folder))
    check_fit(model, f"'{path}'")
    model.family = _family_of(path)
    for module in model.modules.values():
        module.eval()
    return model


def _wanted(path: Path, parts: Sequence[str] | None) -> list[str]:
    there = [part for part in PARTS if (path / (denoiser_of(path) if part == "unet" else part)).is_dir()]
    if not there:
        raise ModelError(
            f"'{path}' is no model folder", mend=f"it should hold {', '.join(PARTS)} and scheduler"
        )
    missing = [part for part in parts or [] if part not in there]
    if missing:
        raise ModelError(f"'{path}' has no {' and no '.join(missing)}", mend=f"it has {', '.join(there)}")
    return list(parts or there)


def denoiser_of(path: Path) -> str:
    """The folder of what denoises, of a model's folder."""
    return TRANSFORMER if (path / TRANSFORMER).is_dir() else "unet"


def denoiser_class(folder: Path) -> Any:
    """The class of the denoiser in a folder; ModelError for a transformer that is not darkroom's."""
    if folder.name != TRANSFORMER:
        from darkroom.models.parts import UNet2DConditionModel

        return UNet2DConditionModel
    from darkroom.models.dit import DiT

    file = folder / "config.json"
    kind = read_json(file).get("_class_name") if file.is_file() else None
    if kind != DiT.__name__:
        raise ModelError(f"'{folder}' is a {kind}", allowed=f"a U-Net, or darkroom's own {DiT.__name__}")
    return DiT


def vae_class(folder: Path) -> Any:
    """The class of the VAE in a folder: diffusers' AutoencoderKL, or a tiny autoencoder."""
    from darkroom.models.parts import AutoencoderKL

    file = folder / "config.json"
    if not file.is_file() or "blocks_per_stage_decoder" not in read_json(file):
        return AutoencoderKL
    from darkroom.models.tiny import TinyAutoencoder

    return TinyAutoencoder


def text_class(folder: Path) -> Any:
    """The class of the text encoder in a folder; ModelError for one that is not CLIP's."""
    from darkroom.models.parts import CLIPTextModel, CLIPTextModelWithProjection

    config = read_json(folder / "config.json")
    if (kind := config.get("model_type", "clip_text_model")) not in ("clip_text_model", "clip"):
        raise ModelError(f"'{folder}' is a {kind}", allowed="CLIP's text encoder (clip_text_model)")
    named = config.get("architectures")
    with_projection = isinstance(named, list) and "CLIPTextModelWithProjection" in named
    return CLIPTextModelWithProjection if with_projection else CLIPTextModel


def read_part(cls: Any, folder: Path, variant: str | None = None, as_stored: bool = False) -> Any:
    """A module of diffusers or transformers from its folder; ModelError where it is none or incomplete."""
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"'{folder}' holds no .safetensors weights",
            mend="pickled weights are never opened: convert them",
        )
    if variant and not any(folder.glob(f"*.{variant}*.safetensors")):
        raise ModelError(f"'{folder}' holds no weights of variant '{variant}'", mend="leave the variant out")
    of_transformers = cls.__module__.startswith("transformers")
    check_kind(cls, folder, of_transformers)
    files = weight_files(folder, variant)
    types = tensor_types(files)
    # transformers then says which tensors have another shape; diffusers says it in its error.
    stored = _stored_type(folder, variant) if as_stored else torch.float32
    named = {"dtype": stored, "ignore_mismatched_sizes": True}
    from huggingface_hub.errors import StrictDataclassError

    try:
        if not as_stored and (exact := opened_exactly(cls, folder, files, stored)) is not None:
            return exact
        opened, info = cls.from_pretrained(
            str(folder),
            variant=variant,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **(named if of_transformers else {"torch_dtype": stored}),
        )
    except (OSError, RuntimeError, StrictDataclassError, *BAD_SETTINGS) as error:
        if is_system_failure(error):
            raise
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelError(f"'{folder}' could not be opened: {reason}") from error
    extra = {name for name in info["unexpected_keys"] if not name.endswith("position_ids")}
    whole = [name for name, kind in types.items() if kind not in FLOATS and not name.endswith("position_ids")]
    check_complete(
        f"'{folder}'",
        missing=list(info["missing_keys"]),
        whole_numbers=[name for name in whole if name not in extra],
        shapes=list(info["mismatched_keys"]),
    )
    if unused := sorted(extra):
        LOG.warning("'%s': %d tensors are not used, such as %s", folder, len(unused), unused[0])
    return opened


def check_kind(cls: Any, folder: Path, of_transformers: bool) -> None:
    """ModelError for a configuration of another class: its weights would be looked for in vain."""
    config = read_json(folder / "config.json")
    kind = config.get("_class_name", cls.__name__)
    if not of_transformers and kind != cls.__name__:
        raise ModelError(f"'{folder}' is a {kind}", allowed=cls.__name__)
    check_numbers(folder / "config.json", config)


def _stored_type(folder: Path, variant: str | None) -> torch.dtype:
    """The type of the weights in a part's files, by the first of them; float32 where it is none of ours."""
    from safetensors import safe_open

    kind = f"*.{variant}*.safetensors" if variant else "*.safetensors"
    with safe_open(str(min(folder.glob(kind))), framework="pt") as file:
        dtype = file.get_slice(min(file.keys())).get_dtype()
    return {"F16": torch.float16, "BF16": torch.bfloat16}.get(dtype, torch.float32)


def _scheduler(path: Path) -> dict[str, Any]:
    file = path / "scheduler" / "scheduler_config.json"
    return read_scheduler(file) if os.path.lexists(file) else {}


def _guidance(path: Path) -> float | None:
    """The guidance scale that was noted with a model; what is no number is none."""
    index = path / "model_index.json"
    return noted_guidance(read_json(index).get(OWN)) if index.is_file() else None


def _family_of(path: Path) -> str:
    """The family whose denoiser this is, known by its widths and the width of the text it listens to."""
    file = path / denoiser_of(path) / "config.json"
    if not file.is_file():
        return "custom"
    config = read_json(file)
    prediction = _scheduler(path).get("prediction_type", "epsilon")
    for name in _shaped_as(config, file.parent.name):
        if file.parent.name == TRANSFORMER or FAMILIES[name].scheduler["prediction_type"] == prediction:
            return name
    return "custom"


def _shaped_as(config: Mapping[str, Any], denoiser: str) -> list[str]:
    """The families whose denoiser has this configuration's widths."""
    return [
        name
        for name, family in FAMILIES.items()
        if family.denoiser == denoiser
        and all(_plain(config.get(key)) == _plain(family.unet.get(key)) for key in TOLD_BY[denoiser])
    ]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value


def base_family(model: Model) -> str | None:
    """The family that an adapter of this model is for: whose widths it has, with its prediction if there is
    one such, or SDXL's where it is built like it. None of another shape.
    """
    if model.unet is None:
        return None
    shaped = _shaped_as(model.unet.config, model.denoiser)
    same = [name for name in shaped if FAMILIES[name].scheduler.get("prediction_type") == model.prediction]
    like_sdxl = ["sdxl"] if model.is_sdxl and len(model.unet.config.block_out_channels) == 3 else []
    return next(iter([*same, *shaped, *like_sdxl]), None)


def save(model: Model, path: str | Path) -> None:
    """Write a model folder that diffusers opens, atomically: a temporary folder, then a rename.

    Of a model with a `DiT` diffusers opens the other parts: it has no pipeline for it.
    Weights go to safetensors in the type they have. An existing folder at `path` is replaced whole.
    """
    with replaced_folder(Path(path)) as temporary:
        with quiet(), waiting(), without_compiler():
            for name, module in model.modules.items():
                with _contiguous(module):
                    _saver(module)(str(temporary / (model.denoiser if name == "unet" else name)))
        for i, tokenizer in enumerate(model.tokenizers):
            tokenizer.save_pretrained(str(temporary / numbered("tokenizer", i)))
        if model.scheduler:
            (temporary / "scheduler").mkdir()
            _write_json(temporary / "scheduler" / "scheduler_config.json", model.scheduler)
        _write_json(temporary / "model_index.json", _index(model))


@contextmanager
def _contiguous(module: nn.Module) -> Iterator[None]:
    """Within, a module's weights lie as files have them. They are laid out one by one: diffusers would hold a
    second copy of all that do not, 2 GB of a SD 1.5 U-Net in `channels_last`.
    """
    apart = [
        tensor
        for tensor in (*module.parameters(), *module.buffers())
        if not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
    ]
    for tensor in apart:
        tensor.data = tensor.data.contiguous()
    try:
        yield
    finally:
        for tensor in apart:
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)


@contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """A temporary folder to be filled, which then stands at `path` whole; an existing one goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        temporary.chmod(0o755)
        yield temporary
        _forget_places(temporary)
        _readable(temporary)
        _swap(temporary, path)
    except BaseException:
        remove_tree(temporary)
        raise


def export_model(
    ref: str | Path, to: str | Path, *, single_file: bool = False, dtype: torch.dtype | None = None
) -> Path:
    """Write a model as a folder, or as one file in the original layout; what is there stays.

    Weights are written as float32 unless a `dtype` is given. A folder's card (README.md) goes with it.
    """
    target = Path(to)
    if target.exists():
        raise InputError(f"'{target}' is there already", mend="choose another place")
    model = load(ref, dtype=dtype or torch.float32)
    if single_file:
        model.needs_unet("a single file")
        return save_single_file(model, target)
    if target.suffix == ".safetensors":
        raise InputError(f"a model to '{to}'", allowed="a folder", mend="or add --single-file")
    save(model, target)
    card = Path(ref) / CARD
    if card.is_file():
        shutil.copyfile(card, target / card.name)
    return target


def _saver(module: nn.Module) -> Callable[[str], None]:
    save_pretrained: Callable[[str], None] = cast(Any, module).save_pretrained
    return save_pretrained


def _forget_places(folder: Path) -> None:
    """Leave out the folders that parts were opened from, which libraries note: models are given away."""
    for file in folder.glob("*/*config.json"):
        given = read_json(file)
        kept = {key: value for key, value in given.items() if key not in ("_name_or_path", "name_or_path")}
        if kept != given:
            _write_json(file, kept)


def _swap(temporary: Path, path: Path) -> None:
    """Put a finished folder in its place; what stood there goes only when the new one is in."""
    old = path.with_name(f".{path.name}-old-{os.getpid()}")
    if path.exists():
        atomic_replace(path, old)
    try:
        atomic_replace(temporary, path)
    except OSError:
        with suppress(OSError):
            atomic_replace(old, path)
        raise
    remove_tree(old)


def _readable(folder: Path) -> None:
    """Give weights the mode of the folder's other files; safetensors leaves 600."""
    mode = next(folder.glob("*.json")).stat().st_mode & 0o777
    for file in folder.rglob("*.safetensors"):
        file.chmod(mode)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _index(model: Model) -> dict[str, Any]:
    import diffusers

    sdxl = len(model.text_encoders) > 1
    pipeline = "StableDiffusionXLPipeline" if sdxl else "StableDiffusionPipeline"
    index: dict[str, Any] = {
        "_class_name": DIT_PIPELINE if model.is_dit else pipeline,
        "_diffusers_version": diffusers.__version__,
    }
    if model.guidance is not None:
        index[OWN] = {"guidance": model.guidance}
    if not sdxl and not model.is_dit:
        index |= {
            "feature_extractor": [None, None],
            "requires_safety_checker": False,
            "safety_checker": [None, None],
        }
    elif sdxl:
        index["force_zeros_for_empty_prompt"] = True
    for name, module in model.modules.items():
        library = "transformers" if name.startswith("text_encoder") else "diffusers"
        if name == "unet" and model.is_dit:
            name = TRANSFORMER
        if type(module).__module__.startswith("darkroom."):
            library = "darkroom"
        index[name] = [library, type(module).__name__]
    for i in range(len(model.tokenizers)):
        index[numbered("tokenizer", i)] = ["transformers", "CLIPTokenizer"]
    if model.scheduler:
        index["scheduler"] = ["diffusers", model.scheduler["_class_name"]]
    return index


def identity(*modules: nn.Module) -> str:
    """SHA-256 of weights, as hex: over the sorted names, shapes and float32 little-endian values.

    It does not depend on files, devices or the order of the layers. Take it before casting down:
    weights rounded to another precision are other weights. Of weights without values (a plan's) it is over
    names and shapes alone.
    """
    digest = hashlib.sha256()
    for i, module in enumerate(modules):
        for name, tensor in sorted(module.state_dict().items()):
            digest.update(f"{i}:{name}:{tuple(tensor.shape)}".encode())
            if tensor.is_meta or isinstance(tensor, FakeTensor):
                continue
            values = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
            digest.update(values if sys.byteorder == "little" else values.byteswap())
    return digest.hexdigest()


def describe(ref: str | Path) -> dict[str, Any]:
    """What `darkroom inspect MODEL` tells: family, parameters, sizes, scheduler, identities."""
    model = load(ref)
    description: dict[str, Any] = {
        "path": str(ref),
        "family": model.family,
        "parameters": model.num_parameters,
    }
    if model.unet is not None:
        description["picture_size"] = model.sample_size
        description["denoiser"] = f"{model.denoiser}: {type(model.unet).__name__}"
        description["prediction"] = model.prediction
    if model.vae is not None:
        description["latents"] = f"{model.latent_channels} channels, 1/{model.vae_factor} of each side"
    description["scheduler"] = model.scheduler.get("_class_name")
    description["tokens"] = [len(tokenizer) for tokenizer in model.tokenizers]
    description["sha256"] = {name: identity(module) for name, module in model.modules.items()}
    return description
