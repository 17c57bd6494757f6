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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from darkroom.errors import InputError, ModelError, is_out_of_memory
from darkroom.models.families import FAMILIES, create
from darkroom.models.model import PARTS, TRANSFORMER, Model, noted_guidance, numbered
from darkroom.models.place import slow_bf16
from darkroom.models.quiet import quiet
from darkroom.models.single_file import is_single_file, load_single_file, save_single_file
from darkroom.models.tokenizer import tokenizer_or_stand_in

LOG = logging.getLogger("darkroom.models")
# Of a hub's repository only what is opened: no other frameworks' weights, no single files beside the parts.
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
HUB_VARIANTS = ["*.fp16*", "*.bf16*", "*.non_ema*", "*.ema_only*", "*openvino*"]


def load(
    ref: str | Path,
    *,
    parts: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float32,
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
    """
    if slow_bf16(dtype, torch.device(device)):
        LOG.warning("this processor has no bf16 and emulates it: float32 is many times as fast here")
    with quiet():
        if str(ref) in FAMILIES:
            asked = parts or PARTS
            reads = "tokenizer" in asked and not FAMILIES[str(ref)].tiny
            model = create(str(ref), parts=asked, tokenizer=tokenizer_or_stand_in() if reads else None)
        elif (path := Path(ref)).is_dir():
            model = _open(path, parts, variant)
        elif is_single_file(ref):
            model = load_single_file(ref, parts)
        else:
            model = _open(_from_hub(str(ref), revision, variant), parts, variant)
            model.path = str(ref)  # not the hash under which the hub's cache keeps it
        return model.to(device, dtype)


def _from_hub(ref: str, revision: str | None, variant: str | None) -> Path:
    if ref.count("/") != 1 or ref.startswith((".", "/", "~")):
        raise ModelError(
            f"no model at '{ref}'", allowed=f"a folder, a hub id, or one of {', '.join(FAMILIES)}"
        )
    from huggingface_hub import snapshot_download

    kinds = ("*.json", "*.txt", f"*.{variant}*.safetensors" if variant else "*.safetensors")
    wanted = ["model_index.json", *(f"{folder}/{kind}" for folder in HUB_FOLDERS for kind in kinds)]
    left_out = [pattern for pattern in HUB_VARIANTS if not variant]
    try:
        return Path(
            snapshot_download(ref, revision=revision, allow_patterns=wanted, ignore_patterns=left_out)
        )
    except Exception as error:  # whatever the hub's client raises may quote the token: nothing of it goes on
        reason = _without_token(" ".join(str(error).split()))[:300]
        raise ModelError(
            f"'{ref}' is no folder here and could not be had from the hub ({reason})",
            mend="check the name, the connection and, for a gated model, $HF_TOKEN",
        ) from None


def _without_token(text: str) -> str:
    """A message without any token for the hub that is set here, or that looks like one."""
    from huggingface_hub import get_token

    for token in {os.environ.get("HF_TOKEN", ""), get_token() or ""}:
        for form in {token, token.strip()} - {""}:
            text = text.replace(form, "***")
    return re.sub(r"hf_\w{4,}|(?<=Bearer )[^\s'\"]+", "***", text)


def _open(path: Path, parts: Sequence[str] | None, variant: str | None) -> Model:
    wanted = _wanted(path, parts)
    model = Model("custom", scheduler=_scheduler(path), guidance=_guidance(path), path=str(path))
    if "unet" in wanted:
        folder = path / denoiser_of(path)
        model.unet = _weights(denoiser_class(folder), folder, variant)
    if "vae" in wanted:
        from diffusers import AutoencoderKL

        model.vae = _weights(AutoencoderKL, path / "vae", variant)
        # SDXL's says that float16 overflows in it; of older ones diffusers' class assumes it.
        said = json.loads((path / "vae" / "config.json").read_text())
        model.vae.register_to_config(force_upcast=bool(said.get("force_upcast")))
    for i in range(2):
        if "text_encoder" in wanted and (folder := path / numbered("text_encoder", i)).is_dir():
            model.text_encoders.append(_weights(_text_class(folder), folder, variant))
        if "tokenizer" in wanted and (folder := path / numbered("tokenizer", i)).is_dir():
            from transformers import CLIPTokenizer

            model.tokenizers.append(CLIPTokenizer.from_pretrained(str(folder)))
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
        from diffusers import UNet2DConditionModel

        return UNet2DConditionModel
    from darkroom.models.dit import DiT

    file = folder / "config.json"
    kind = json.loads(file.read_text()).get("_class_name") if file.is_file() else None
    if kind != DiT.__name__:
        raise ModelError(f"'{folder}' is a {kind}", allowed=f"a U-Net, or darkroom's own {DiT.__name__}")
    return DiT


def _text_class(folder: Path) -> Any:
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    config = json.loads((folder / "config.json").read_text())
    with_projection = "CLIPTextModelWithProjection" in config.get("architectures", [])
    return CLIPTextModelWithProjection if with_projection else CLIPTextModel


def _weights(cls: Any, folder: Path, variant: str | None) -> Any:
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"'{folder}' holds no .safetensors weights",
            mend="pickled weights are never opened: convert them",
        )
    if variant and not any(folder.glob(f"*.{variant}*.safetensors")):
        raise ModelError(f"'{folder}' holds no weights of variant '{variant}'", mend="leave the variant out")
    dtype = "dtype" if cls.__module__.startswith("transformers") else "torch_dtype"
    try:
        return cls.from_pretrained(
            str(folder),
            variant=variant,
            use_safetensors=True,
            local_files_only=True,
            **{dtype: torch.float32},
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"'{folder}' could not be opened: {str(error).strip().splitlines()[0]}") from error


def _scheduler(path: Path) -> dict[str, Any]:
    file = path / "scheduler" / "scheduler_config.json"
    if not file.is_file():
        return {}
    config: dict[str, Any] = json.loads(file.read_text())
    return config


def _guidance(path: Path) -> float | None:
    """The guidance scale that was noted with a model; what is no number is none."""
    try:
        return noted_guidance(json.loads((path / "model_index.json").read_text())[OWN])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _family_of(path: Path) -> str:
    """The family whose denoiser this is, told by its widths and the width of the text it listens to."""
    file = path / denoiser_of(path) / "config.json"
    if not file.is_file():
        return "custom"
    config = json.loads(file.read_text())
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
    """Write a model folder that diffusers opens: beside its place first, then renamed into it.

    Of a model with a `DiT` diffusers opens the other parts: it has no pipeline for it.
    Weights go to safetensors in the type they have. An existing folder at `path` is replaced whole.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        beside.chmod(0o755)
        with quiet():
            for name, module in model.modules.items():
                _saver(module)(str(beside / (model.denoiser if name == "unet" else name)))
        for i, tokenizer in enumerate(model.tokenizers):
            tokenizer.save_pretrained(str(beside / numbered("tokenizer", i)))
        if model.scheduler:
            (beside / "scheduler").mkdir()
            _write_json(beside / "scheduler" / "scheduler_config.json", model.scheduler)
        _write_json(beside / "model_index.json", _index(model))
        _readable(beside)
        _swap(beside, path)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def is_model(ref: str | Path) -> bool:
    """Whether a reference is a family, a model folder or a single file; hub ids are not looked up."""
    return str(ref) in FAMILIES or (Path(ref) / "model_index.json").is_file() or is_single_file(ref)


def export_model(
    ref: str | Path, to: str | Path, *, single_file: bool = False, dtype: torch.dtype | None = None
) -> Path:
    """Write a model as a folder, or as one file in the original layout; what is there stays.

    Weights are written as float32 unless a `dtype` is given.
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
    return target


def _saver(module: nn.Module) -> Callable[[str], None]:
    save_pretrained: Callable[[str], None] = cast(Any, module).save_pretrained
    return save_pretrained


def _swap(beside: Path, path: Path) -> None:
    """Put a finished folder in its place; what stood there goes only when the new one is in."""
    old = path.with_name(f".{path.name}-old-{os.getpid()}")
    if path.exists():
        path.rename(old)
    beside.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _readable(folder: Path) -> None:
    """Give weights the mode of the folder's other files; safetensors leaves 600."""
    mode = (folder / "model_index.json").stat().st_mode & 0o777
    for file in folder.rglob("*.safetensors"):
        file.chmod(mode)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


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
            name, library = TRANSFORMER, "darkroom"
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
    told: dict[str, Any] = {"path": str(ref), "family": model.family, "parameters": model.num_parameters}
    if model.unet is not None:
        told["picture_size"] = model.sample_size
        told["denoiser"] = f"{model.denoiser}: {type(model.unet).__name__}"
        told["prediction"] = model.prediction
    if model.vae is not None:
        told["latents"] = f"{model.latent_channels} channels, 1/{model.vae_factor} of each side"
    told["scheduler"] = model.scheduler.get("_class_name")
    told["tokens"] = [len(tokenizer) for tokenizer in model.tokenizers]
    told["sha256"] = {name: identity(module) for name, module in model.modules.items()}
    return told
