"""Adapters on a model's frozen weights: which layers, how many numbers, and the file they become; and textual
inversion (Gal et al. 2022): a new word whose vectors alone are trained, and its file.

PEFT makes the layers of LoRA, LoHa and LoKr; a rotation (OFT) and a whole difference are parametrizations of
the layer's weight. Their parameters alone are trained, averaged and saved. They are named
`<part>.<module>.lora_A.default.weight`, `.hada_w1_a.default`, `.parametrizations.weight.0.diff` and so on.
"""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from darkroom.errors import RecipeError
from darkroom.hardware.system import atomic_replace
from darkroom.libraries import waiting
from darkroom.models.embeddings import pool_at_end
from darkroom.models.model import write_tensors
from darkroom.recipe.sections import AdapterSettings, WordSettings
from darkroom.train.memory import BLOCKS, packed_weights

if TYPE_CHECKING:
    from darkroom.models.adapters.adapter import Adapter
    from darkroom.models.model import Model


NAME = "default"  # PEFT's own name for a single adapter
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
TEXT_ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")
TEXT_LINEAR = (*TEXT_ATTENTION, "fc1", "fc2")
NAMED = ("qv", "attention", "all-linear", "conv")


def add_adapters(
    model: Model, settings: AdapterSettings, *, seed: int = 0, begun: Path | None = None
) -> dict[str, nn.Module]:
    """Put adapter layers into the U-Net (and text encoders); returns the parts that have some, by name.

    They start as PEFT draws them with `seed`, and the model is unchanged; or as the file `settings.start` has
    them. Only the new parameters require gradients. RecipeError where a pattern names no layer. `begun` is
    where a run has noted what PiSSA took out of the base (`note_start`), if it has.
    """
    parts = {
        name: module
        for name, module in model.modules.items()
        if name == "unet" or (settings.text_encoder and name.startswith("text_encoder"))
    }
    chosen = {part: target_layers(part, module, settings.targets) for part, module in parts.items()}
    _check_patterns(parts, chosen, settings.targets)
    chosen = {p: [n for n in layers if settings.rank_of(f"{p}.{n}")] for p, layers in chosen.items()}
    _check_ranks(chosen, settings)
    _check_linear(parts, chosen, settings)
    before = None if begun is None or not settings.changes_base else read_noted_start(begun)
    given = None if settings.start is None else _read_start(settings, model, chosen)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for part, layers in chosen.items():
            if layers:
                _inject(part, parts[part], layers, settings, draws=before is None)
    if before is not None:
        _take_out(parts, before, settings)
    if given is not None:
        _begin_with(parts, given, settings)
    return {part: parts[part] for part, layers in chosen.items() if layers}


def target_layers(part: str, module: nn.Module, targets: str | tuple[str, ...]) -> list[str]:
    """The names of a part's layers that targets mean."""
    names = [name for name, layer in module.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    if not isinstance(targets, str):
        return [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in targets)]
    if part != "unet":
        ends = {"qv": ("q_proj", "v_proj"), "attention": TEXT_ATTENTION}.get(targets, TEXT_LINEAR)
        return [name for name in names if name.rsplit(".", 1)[-1] in ends]
    if targets in ("qv", "attention"):
        ends = ("to_q", "to_v") if targets == "qv" else ATTENTION
        return [name for name in names if name.endswith(tuple(f".{end}" for end in ends))]
    kinds = (nn.Linear,) if targets == "all-linear" else (nn.Linear, nn.Conv2d)
    return [n for n, layer in module.named_modules() if isinstance(layer, kinds) and BLOCKS.match(n)]


def _check_patterns(
    parts: Mapping[str, nn.Module], chosen: Mapping[str, list[str]], targets: str | tuple[str, ...]
) -> None:
    if isinstance(targets, str):
        return
    found = [name for layers in chosen.values() for name in layers]
    for pattern in targets:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in found):
            example = next(n for n, m in parts["unet"].named_modules() if n.endswith("attn2.to_k"))
            raise RecipeError(
                "adapter.targets",
                f"'{pattern}' names no linear or convolution layer",
                allowed=f"{', '.join(NAMED)}, or patterns of names such as {example}",
            )


def _check_ranks(chosen: Mapping[str, list[str]], settings: AdapterSettings) -> None:
    """RecipeError for a pattern of ranks or alphas that names no layer, or where no layer is left."""
    names = [f"{part}.{layer}" for part, layers in chosen.items() for layer in layers]
    if not names:
        raise RecipeError("adapter.rank_pattern", "0 for every layer, so nothing is trained")
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern, number in getattr(settings, key).items():
            either = (one for name in names for one in (name, name.partition(".")[2]))
            if number and not any(fnmatch.fnmatchcase(one, pattern) for one in either):
                raise RecipeError(
                    f"adapter.{key}",
                    f"'{pattern}' names no layer of adapter.targets",
                    allowed=f"patterns of names such as {names[0]}",
                )


def _check_linear(
    parts: Mapping[str, nn.Module], chosen: Mapping[str, list[str]], settings: AdapterSettings
) -> None:
    """RecipeError where a start by singular vectors meets a convolution, for which PEFT has none."""
    if settings.init_lora_weights in ("default", "gaussian"):
        return
    for part, layers in chosen.items():
        for name in layers:
            if not isinstance(parts[part].get_submodule(name), nn.Linear):
                raise RecipeError(
                    "adapter.init_lora_weights",
                    f"{settings.init_lora_weights}, but {name} is a convolution",
                    mend="set adapter.targets=all-linear, and adapter.rank_pattern={'*.proj_in': 0, "
                    "'*.proj_out': 0} where these are convolutions",
                )


def _inject(
    part: str, module: nn.Module, layers: list[str], settings: AdapterSettings, *, draws: bool = True
) -> None:
    """Put the layers in; without `draws` they are to be filled, and the base stays as it is."""
    module.requires_grad_(False)
    if settings.kind in PARAMETRIZED:
        for name in layers:
            layer = module.get_submodule(name)
            made = PARAMETRIZED[settings.kind](layer.weight, settings.rank_of(f"{part}.{name}"))
            parametrize.register_parametrization(layer, "weight", made)
        return
    with waiting(but="peft"):  # of transformers it would import the sharding
        from peft import inject_adapter_in_model

    _ask_loaded_torchao()
    config = _peft_config(part, layers, settings)
    if settings.init_lora_weights in PEFT_STARTS and draws:
        config.init_lora_weights = settings.init_lora_weights
    with _without_sharding():
        inject_adapter_in_model(config, module, adapter_name=NAME)
    if settings.kind == "lokr":
        for name in layers:
            whole: Any = module.get_submodule(name)
            if NAME in whole.lokr_w1 and NAME in whole.lokr_w2:
                whole.scaling[NAME] = 1.0
    if settings.rank_dropout and settings.kind == "lora":
        for name in layers:
            inner: Any = module.get_submodule(name)
            inner.lora_A[NAME].register_forward_hook(partial(_drop_ranks, settings.rank_dropout))
    if settings.module_dropout and settings.kind == "lora":
        for name in layers:
            inner = module.get_submodule(name)
            inner.lora_B[NAME].register_forward_hook(partial(_drop_module, settings.module_dropout))


def _ask_loaded_torchao() -> None:
    """Let PEFT look for torchao's weights only where torchao was imported: nothing else can have made one.

    PEFT imports it for each layer's check otherwise: 70 MB, 0.8 s and lines of kernels that it lacks.
    """
    from peft.tuners.lora import torchao as lora
    from peft.utils import quantization_utils

    for module in (lora, quantization_utils):
        asked = getattr(module, "is_torchao_available", None)
        if asked is not None and not isinstance(asked, partial):
            vars(module)["is_torchao_available"] = partial(_is_loaded, asked)


@contextmanager
def _without_sharding() -> Iterator[None]:
    """Within, PEFT does not ask whether a weight is cut among processes: those with adapters never are."""
    from peft.tuners import tuners_utils

    asks, names = "_torch_supports_distributed", vars(tuners_utils)
    if asks not in names or "torch.distributed.tensor" in sys.modules:
        yield
        return
    before, names[asks] = names[asks], False
    try:
        yield
    finally:
        names[asks] = before


def _is_loaded(is_available: Callable[[], bool]) -> bool:
    return sys.modules.get("torchao") is not None and is_available()


def _peft_config(part: str, layers: list[str], settings: AdapterSettings) -> Any:
    """PEFT's configuration, with the rank and alpha of every layer that differs."""
    from peft import LoHaConfig, LoKrConfig, LoraConfig

    ranks = {name: settings.rank_of(f"{part}.{name}") for name in layers}
    alphas = {name: settings.alpha_of(f"{part}.{name}") for name in layers}
    rank, alpha = settings.rank, settings.alpha or settings.rank
    common: dict[str, Any] = {
        "r": rank,
        "target_modules": "|".join(map(re.escape, layers)),
        "rank_pattern": {f"^{re.escape(name)}": r for name, r in ranks.items() if r != rank},
        "alpha_pattern": {f"^{re.escape(name)}": a for name, a in alphas.items() if a != alpha},
    }
    if settings.kind == "lora":
        return LoraConfig(
            **common,
            lora_alpha=alpha,
            lora_dropout=settings.dropout,
            use_rslora=settings.rslora,
            use_dora=settings.dora,
        )
    common["alpha"] = alpha
    common |= {name: getattr(settings, name) for name in ("rank_dropout", "module_dropout")}
    if settings.kind == "loha":
        return LoHaConfig(**common)
    return LoKrConfig(
        **common, decompose_factor=settings.factor, decompose_both=settings.decompose_both, init_weights=True
    )


def _drop_ranks(share: float, module: nn.Module, _: Any, out: Tensor) -> Tensor:
    """Leave out some ranks of each row, the others so much larger, as kohya's networks do."""
    if not module.training:
        return out
    rank, place = (out.shape[1], 1) if out.ndim == 4 else (out.shape[-1], -1)
    kept_Br = torch.rand(out.shape[0], rank, device=out.device) > share
    shape = [out.shape[0], *[1] * (out.ndim - 1)]
    shape[place] = rank
    return out * kept_Br.view(shape).to(out.dtype) / (1 - share)


def _drop_module(share: float, module: nn.Module, _: Any, out: Tensor) -> Tensor:
    """Leave out all that a layer adds, in some steps."""
    return out * (torch.rand(1, device=out.device) >= share).to(out.dtype) if module.training else out


class Difference(nn.Module):
    """A weight and a difference to it, which is trained from zero."""

    def __init__(self, weight: Tensor, _: int) -> None:
        super().__init__()
        self.diff = nn.Parameter(torch.zeros_like(weight))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.diff


class Rotation(nn.Module):
    """A weight whose outputs are rotated in blocks by Cayley's map (Qiu et al. 2023), from none.

    The layout is that of LyCORIS and kohya: `oft_blocks` [blocks, side, side], of which the skew part counts.
    """

    def __init__(self, weight: Tensor, most: int) -> None:
        super().__init__()
        outputs = weight.shape[0]
        side = next(n for n in range(min(most, outputs), 0, -1) if outputs % n == 0)
        blocks = torch.zeros(outputs // side, side, side, dtype=weight.dtype, device=weight.device)
        self.oft_blocks = nn.Parameter(blocks)

    def forward(self, weight: Tensor) -> Tensor:
        from darkroom.models.adapters.adapter import rotated

        return rotated(self.oft_blocks, weight.float()).to(weight.dtype)


PARAMETRIZED: dict[str, Any] = {"full": Difference, "oft": Rotation}


# ---- other starts

PEFT_STARTS = ("gaussian", "pissa", "pissa_niter_16")
"""Of `init_lora_weights`: those that PEFT makes of the layer alone."""
START = "adapter_start.safetensors"
EVA_BATCHES = 32
"""At most so many batches are looked at; fewer where the directions have come to rest before."""
AT_REST = 0.99  # cosine between a direction and what it was a batch before, as in PEFT


def note_start(run: Path, values: Mapping[str, Tensor], settings: AdapterSettings | None) -> None:
    """Keep in the run what PiSSA took out of the base: the file of an adapter is the difference to it."""
    from safetensors.torch import save_file

    if settings is None or not settings.changes_base or (run / START).exists():
        return
    temporary = run / f".{START}"
    save_file(
        {name: value.detach().to("cpu", copy=True).contiguous() for name, value in values.items()}, temporary
    )
    atomic_replace(temporary, run / START)


def read_noted_start(run: Path) -> dict[str, Tensor] | None:
    """What `note_start` kept; None where there is nothing."""
    from safetensors.torch import load_file

    return load_file(run / START) if (run / START).is_file() else None


@torch.no_grad()
def _take_out(
    parts: Mapping[str, nn.Module], before: Mapping[str, Tensor], settings: AdapterSettings
) -> None:
    """Begin with noted factors, taken out of the base as PEFT does it."""
    for path, tensors in _trained_layers(before):
        part, _, name = path.partition(".")
        layer: Any = parts[part].get_submodule(name)
        down, up = tensors["down"], tensors["up"]
        layer.lora_A[NAME].weight.data, layer.lora_B[NAME].weight.data = down.clone(), up.clone()
        weight = layer.get_base_layer().weight
        rest = weight.float() - layer.scaling[NAME] * up @ down
        weight.data = rest.to(weight.dtype)


@torch.no_grad()
def find_eva_start(
    modules: Mapping[str, nn.Module], passes: Iterable[Callable[[], object]]
) -> dict[str, Tensor]:
    """EVA (Paischer et al. 2024): for each adapter layer the main directions of its inputs, by parameter.

    `passes` run the model on a batch each; PEFT's incremental principal components take the inputs in.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils.incremental_pca import IncrementalPCA

    found: dict[str, Any] = {}
    moving: set[str] = set()

    def look(name: str, layer: Any, given: tuple[Tensor, ...]) -> None:
        """Take a layer's inputs [rows, in] into its components."""
        rows = given[0].flatten(0, -2).float()
        rank = layer.r[NAME]
        if len(rows) < rank:
            return
        components = found.setdefault(name, IncrementalPCA(n_components=rank, lowrank=True, lowrank_seed=42))
        before = getattr(components, "components_", None)
        components.partial_fit(rows)
        now = components.components_
        if before is None or (torch.cosine_similarity(before, now) < AT_REST).any():
            moving.add(name)

    layers = {
        f"{part}.{name}": layer
        for part, module in modules.items()
        for name, layer in module.named_modules()
        if isinstance(layer, LoraLayer)
    }
    handles = [layer.register_forward_pre_hook(partial(look, name)) for name, layer in layers.items()]
    try:
        for run_once in passes:
            moving.clear()
            run_once()
            if not moving:
                break
    finally:
        for handle in handles:
            handle.remove()
    return {f"{name}.lora_A.{NAME}.weight": one.components_ for name, one in found.items()}


# ---- from a file


def _read_start(settings: AdapterSettings, model: Model, chosen: Mapping[str, list[str]]) -> Adapter:
    """The adapter that training starts from, fitted to the model; RecipeError where it is another kind,
    changes layers that are not trained, or has other ranks.
    """
    from darkroom.models.adapters.read import fit, read_adapter

    file = Path(str(settings.start))
    if not file.exists():
        raise RecipeError("adapter.from", f"no file '{file}'")
    adapter = fit(read_adapter(file), model)
    kind = "dora" if settings.dora else settings.kind
    if adapter.kind != kind:
        message = f"'{file.name}' is of kind {adapter.kind}, not {kind}"
        raise RecipeError("adapter.from", message, mend="set adapter.kind (dora: adapter.dora)")
    names = [f"{part}.{name}" for part, layers in chosen.items() for name in layers]
    trained = {_unwrapped(name): name for name in names}
    outside = [name for name in adapter.layers if _unwrapped(name) not in trained]
    if outside:
        raise RecipeError(
            "adapter.from",
            f"'{file.name}' changes {len(outside)} layers that are not trained here ({outside[0]}, ...)",
            mend="set adapter.targets and adapter.text_encoder so that they are",
        )
    for name, layer in adapter.layers.items():
        own = settings.rank_of(trained[_unwrapped(name)])
        if kind in ("lora", "dora", "loha") and layer.rank != own:
            raise RecipeError(
                "adapter.from",
                f"'{file.name}' has rank {layer.rank} in {name}, and the recipe {own}",
                mend=f"set adapter.rank={layer.rank} (or conv_rank, rank_pattern)",
            )
    return adapter


def _unwrapped(name: str) -> str:
    part, _, path = name.partition(".")
    return f"{part}.{path.removeprefix('text_model.')}"


@torch.no_grad()
def _begin_with(parts: Mapping[str, nn.Module], adapter: Adapter, settings: AdapterSettings) -> None:
    """Set the new parameters to a file's values; its own scale goes into the factor that is linear in it."""
    trained = {
        f"{part}.{name}": param
        for part, module in parts.items()
        for name, param in module.named_parameters()
        if param.requires_grad
    }
    own = {_unwrapped(name): (name, tensors) for name, tensors in _trained_layers(trained)}
    for name, layer in adapter.layers.items():
        path, params = own[_unwrapped(name)]
        values = dict(layer.tensors)
        linear = next((r for r in ("up", "hada_w1_a", "lokr_w1", "lokr_w1_a") if r in values), None)
        if linear is not None:
            values[linear] = values[linear].float() * (layer.scale / _scale_of(path, params, settings))
        fits = {role: role in values and values[role].numel() == params[role].numel() for role in params}
        if odd := [role for role, does in fits.items() if not does]:
            raise RecipeError(
                "adapter.from",
                f"{name} has {', '.join(sorted(values))} of other shapes than here ({odd[0]})",
                mend="set adapter.rank, factor and decompose_both as the file was trained",
            )
        for role, param in params.items():
            param.copy_(values[role].reshape(param.shape))


_TRAINED = re.compile(
    rf"\.(?:lora_(?P<lora>A|B|magnitude_vector)\.{NAME}(?:\.weight)?"
    rf"|(?P<factor>(?:hada|lokr)_\w+)\.{NAME}|parametrizations\.weight\.0\.(?P<whole>\w+))$"
)
_LORA_ROLES = {"A": "down", "B": "up", "magnitude_vector": "magnitude"}


def _trained_layers(values: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Layers by their names, each with its trained tensors by role."""
    layers: dict[str, dict[str, Tensor]] = {}
    for key, value in values.items():
        if (found := _TRAINED.search(key)) is not None:
            role = _LORA_ROLES.get(found["lora"] or "", found["factor"] or found["whole"] or "")
            layers.setdefault(key[: found.start()], {})[role] = value
    yield from layers.items()


@torch.no_grad()
def limit_norms(masters: Mapping[str, Tensor], settings: AdapterSettings) -> None:
    """Make both factors of a layer smaller alike where its addition's norm is above `scale_weight_norms`.

    Nothing waits for the device: the norm is that of r x r matrices, |BA|^2 = sum(B'B * AA').
    """
    most = settings.scale_weight_norms
    if most is None:
        return
    for path, factors in _trained_layers(masters):
        down_rI, up_Or = factors["down"].flatten(1), factors["up"].flatten(1)
        square = ((down_rI @ down_rI.T) * (up_Or.T @ up_Or)).sum().clamp(min=0)
        norm = settings.scale_of(path) * square.sqrt()
        ratio = (most / norm.clamp(min=most)).sqrt()
        factors["down"].mul_(ratio)
        factors["up"].mul_(ratio)


def parameter_table(modules: Mapping[str, nn.Module]) -> tuple[int, int]:
    """Trainable parameters, and all of the parts' parameters together."""
    params = [param for module in modules.values() for param in module.parameters()]
    total = sum(p.numel() for p in params) + sum(map(packed_weights, modules.values()))
    return sum(p.numel() for p in params if p.requires_grad), total


# ---- out again


def adapter_of(
    name: str,
    values: Mapping[str, Tensor],
    settings: AdapterSettings,
    metadata: Mapping[str, str],
    start: Mapping[str, Tensor] | None = None,
) -> Adapter:
    """The adapter that trained values, named `<part>.<module>.lora_...`, are, in float32.

    `start` are the values that were taken out of the base: the adapter is what was learned since, of twice
    the rank, so that it goes with the base as it was.
    """
    from darkroom.models.adapters.adapter import Adapter, Factors, Layer

    layers: dict[str, Layer | Factors] = {}
    begun = {} if start is None else dict(_trained_layers(start))
    for path, trained in _trained_layers(values):
        tensors = {role: _plain(value) for role, value in trained.items()}
        if settings.kind == "lora":
            magnitude = tensors.get("magnitude")
            flat = None if magnitude is None else magnitude.flatten()
            if path in begun:
                down, up = (_plain(begun[path][role]) for role in ("down", "up"))
                tensors["down"] = torch.cat([tensors["down"], down])
                tensors["up"] = torch.cat([tensors["up"], -up], dim=1)
            layers[path] = Layer(tensors["down"], tensors["up"], settings.scale_of(path), flat)
            continue
        scale = 1.0 if settings.kind in PARAMETRIZED else _scale_of(path, tensors, settings)
        layers[path] = Factors(settings.kind, tensors, scale)
    return Adapter(name, layers, metadata, "dora" if settings.dora else settings.kind)


def _scale_of(path: str, tensors: Mapping[str, Tensor], settings: AdapterSettings) -> float:
    """A layer's scale; 1 where both of LoKr's factors are whole, which have no rank, as LyCORIS has it."""
    return 1.0 if {"lokr_w1", "lokr_w2"} <= tensors.keys() else settings.scale_of(path)


def _plain(value: Tensor) -> Tensor:
    return value.detach().to("cpu", torch.float32).contiguous()


# ---- textual inversion
#
# Shapes: B rows, L tokens, D width of a text encoder, n vectors of the new word.

FILE = "learned_embeds.safetensors"
SDXL_KEYS = ("clip_l", "clip_g")


class ExtendedEmbedding(nn.Module):
    """An encoder's table of words with a few trained rows behind it; the old rows are left as they are."""

    def __init__(self, table: nn.Embedding, rows_nD: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(table.weight.detach(), requires_grad=False)
        self.added = nn.Parameter(rows_nD)

    def forward(self, ids_BL: Tensor) -> Tensor:
        """Token ids [B, L] to their vectors [B, L, D]."""
        known = len(self.weight)
        old_BLD = F.embedding(ids_BL.clamp(max=known - 1), self.weight)
        new_BLD = F.embedding((ids_BL - known).clamp(min=0), self.added)
        return torch.where((ids_BL >= known)[..., None], new_BLD, old_BLD)


def add_word(model: Model, word: WordSettings) -> dict[str, nn.Module]:
    """Teach tokenizers and text encoders the word; returns the encoders by part, the new rows trainable.

    Every vector starts as the initial word's. RecipeError where the word exists, or the initial word is
    not one token.
    """
    parts = {name: m for name, m in model.modules.items() if name.startswith("text_encoder")}
    for tokenizer, encoder in zip(model.tokenizers, parts.values(), strict=True):
        _add(tokenizer, encoder, word)
    return parts


def _add(tokenizer: Any, encoder: Any, word: WordSettings) -> None:
    start = tokenizer(word.initial, add_special_tokens=False).input_ids
    if len(start) != 1:
        raise RecipeError(
            "model.word.initial",
            f"'{word.initial}' is {len(start)} tokens of this model's tokenizer",
            allowed="a word that is one token",
            mend="take a commoner one",
        )
    table = encoder.get_input_embeddings()
    known = tokenizer.get_vocab()
    if any(token in known for token in word.tokens) or tokenizer.add_tokens(word.tokens) != word.vectors:
        raise RecipeError(
            "model.word.token", f"the tokenizer knows '{word.token}' already", mend="write it otherwise"
        )
    first = tokenizer.convert_tokens_to_ids(word.token)
    if first != len(table.weight):
        raise RecipeError(
            "model.word",
            f"the text encoder has {len(table.weight)} words and its tokenizer {first}",
            mend="this model cannot be taught a word",
        )
    rows_nD = table.weight.detach()[start[0]].repeat(word.vectors, 1)
    encoder.requires_grad_(False)
    encoder.set_input_embeddings(ExtendedEmbedding(table, rows_nD))
    pool_at_end(encoder, tokenizer)


def settle_words(model: Model) -> None:
    """Make the new rows ordinary rows of the encoders' tables, as files hold them."""
    for encoder in model.text_encoders:
        described: Any = encoder
        words = described.get_input_embeddings()
        if isinstance(words, ExtendedEmbedding):
            table = torch.cat([words.weight, words.added.to(words.weight)]).detach()
            rows, width = table.shape
            described.set_input_embeddings(nn.Embedding(rows, width, _weight=table))
            described.config.vocab_size = len(table)


def write_words(values: Mapping[str, Tensor], word: WordSettings, path: Path) -> Path:
    """Save the trained rows as diffusers' `load_textual_inversion` reads them.

    Of one encoder {token: [n, D]}; of SDXL's two `clip_l` and `clip_g`, as its scripts write them.
    """
    rows = [
        value.detach().to("cpu", torch.float32) for name, value in values.items() if name.endswith(".added")
    ]
    names = [word.token] if len(rows) == 1 else list(SDXL_KEYS)
    tensors = {name: value.contiguous() for name, value in zip(names, rows, strict=True)}
    temporary = path.with_name(f".{path.name}")
    write_tensors(temporary, tensors, {"format": "pt", "token": word.token, "initial": word.initial})
    return atomic_replace(temporary, path)
