"""Counting: the code that trains or draws runs on fake tensors, and its operations become straight lines.
So do the profiles of making pictures and of preparing them: `sample.denoise`, the VAE, the text encoder.
"""

from __future__ import annotations

import re
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from darkroom import models
from darkroom.counting import Counter, Trace, counting
from darkroom.errors import InputError, RecipeError
from darkroom.models.families import FAMILIES
from darkroom.models.model import PARTS, Model, is_flow
from darkroom.models.outline import outlined, text_configs
from darkroom.plan.counts import KINDS, Kernels, Line, Moment, Profile, envelope
from darkroom.prepare.columns import encode_moments, text_states
from darkroom.recipe.sections import VAE_TASKS
from darkroom.sample.choice import make_table
from darkroom.sample.denoise import Condition, Row, denoise
from darkroom.sample.pictures import DECODE_PIXELS
from darkroom.train import model as build
from darkroom.train.tasks.encoders import with_student

if TYPE_CHECKING:
    from darkroom.recipe.sections import ModelSettings, ObjectiveSettings


ROWS = (2, 3)
CLASSES: tuple[tuple[str, str], ...] = (
    ("attention", r"_scaled_dot_product"),
    ("conv", r"conv"),
    ("matmul", r"\.(mm|addmm|bmm|baddbmm|mv|addmv|dot|linear|_addmm_activation)"),
    ("norm", r"norm|softmax|layer_norm"),
    ("optimiser", r"_fused_adam|_foreach"),
)
_CLASSES = [(kind, re.compile(rf"^aten.*{pattern}")) for kind, pattern in CLASSES]


@cache
def _kernel_class(op: str) -> str:
    """Matmul, conv, attention, norm, optimiser or elementwise (copies too), by an operation's name."""
    return next((kind for kind, pattern in _CLASSES if pattern.search(op)), "elementwise")


def profile_of(
    traces: tuple[Trace, Trace], rows: tuple[int, int], *, cpu: bool = False, **known: Any
) -> Profile:
    """Straight lines through two traces of the same operations; ValueError where the operations differ."""
    a, b = traces
    if [k.op for k in a.kernels] != [k.op for k in b.kernels]:
        raise ValueError(f"other operations at {rows[1]} rows than at {rows[0]}: no straight line")
    return Profile(kernels=grouped(a, b, rows), moments=moments_of(traces, rows, cpu=cpu), **known)


def grouped(a: Trace, b: Trace, rows: tuple[int, int]) -> tuple[Kernels, ...]:
    """The kernels of two traces of the same operations, as straight lines; those that are alike together."""
    found: Tally[tuple[str, str, int, int, int, int]] = Tally()
    for one, other in zip(a.kernels, b.kernels, strict=True):
        stage = "update" if one.op.endswith("_foreach_norm") else one.stage  # clipping, once a step
        found[stage, _kernel_class(one.op), one.flops, other.flops, one.bytes, other.bytes] += 1
    return tuple(
        Kernels(
            stage, kind, calls, Line.through(rows, (flops_a, flops_b)), Line.through(rows, (bytes_a, bytes_b))
        )
        for (stage, kind, flops_a, flops_b, bytes_a, bytes_b), calls in found.items()
    )


def moments_of(
    traces: tuple[Trace, Trace], rows: tuple[int, int], *, cpu: bool = False
) -> tuple[Moment, ...]:
    """The moments of two traces that can be the peak, as straight lines.

    On a CPU oneDNN's convolutions have a copy of their largest tensor in their own layout.
    """
    kernels = traces[0].kernels
    if not kernels:
        return ()
    held = [_alive(trace) for trace in traces]  # [kernels, kinds] of bytes
    if cpu:
        convs = np.array([_kernel_class(kernel.op) == "conv" for kernel in kernels])
        for bytes_, trace in zip(held, traces, strict=True):
            copies = np.array([kernel.largest for kernel in trace.kernels])
            bytes_[:, KINDS.index("temporary")] += np.where(convs, copies, 0)
    row = (held[1] - held[0]) / (rows[1] - rows[0])
    fixed = held[0] - row * rows[0]
    stages = [kernel.stage for kernel in kernels]
    return tuple(
        Moment(
            stages[i],
            {kind: Line(float(fixed[i, k]), float(row[i, k])) for k, kind in enumerate(KINDS)},
        )
        for i in envelope(stages, fixed.sum(axis=1), row.sum(axis=1))
    )


def _alive(trace: Trace) -> NDArray[np.int64]:
    """Bytes alive during each operation, by kind: [kernels, kinds]."""
    place = {
        serial: KINDS.index(trace.kinds.get(serial) or _kind_by_birth(stage))
        for serial, stage in trace.born.items()
    }
    number = len(trace.kernels)
    gained = np.zeros((number + 1, len(KINDS)), dtype=np.int64)
    begun, serials, sizes = zip(*trace.changes, strict=True) if trace.changes else ((), (), ())
    at = (np.array(begun, dtype=np.intp), np.array([place[one] for one in serials], dtype=np.intp))
    np.add.at(gained, at, np.array(sizes, dtype=np.int64))
    return gained[:number].cumsum(axis=0)


def _kind_by_birth(stage: str) -> str:
    return "activations" if stage == "forward" else "temporary"


@contextmanager
def fakes(*modules: nn.Module) -> Iterator[Counter]:
    """Fake tensors for modules that may be cast inside.

    torch 2.13 cannot cast a module with fake weights in place: meanwhile a cast makes new parameters.
    """
    held = [(table, dict(table)) for module in modules for table in _tables(module)]
    in_place = nn.Module._apply
    nn.Module._apply = _apply_anew  # type: ignore[method-assign]
    try:
        with counting(*modules) as counter:
            yield counter
    finally:
        nn.Module._apply = in_place  # type: ignore[method-assign]
        for table, content in held:
            table.clear()
            table.update(content)


def _apply_anew(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    made: dict[int, Tensor] = {}
    for table in _tables(module):
        for name, tensor in table.items():
            if tensor is None:
                continue
            if id(tensor) not in made:
                made[id(tensor)] = _changed(tensor, fn)
            table[name] = made[id(tensor)]
    return module


def _changed(tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        new = fn(tensor)
    if new is tensor or not isinstance(tensor, nn.Parameter):
        return new
    return nn.Parameter(new.detach(), requires_grad=tensor.requires_grad)


def _tables(module: nn.Module) -> Iterator[dict[str, Any]]:
    for part in module.modules():
        yield from (part._parameters, part._buffers)


def as_on_gpu(modules: Iterable[nn.Module]) -> None:
    """Let attention run in the modules' own precision, as it does on every device but a CPU."""
    from darkroom.models.parts import Attention, AttnProcessor2_0, PreTrainedModel

    for module in modules:
        if isinstance(module, PreTrainedModel):
            module.set_attn_implementation("sdpa")
        for part in module.modules():
            if isinstance(part, Attention):
                part.set_processor(AttnProcessor2_0())


def tag_weights(counter: Counter, modules: Iterable[nn.Module]) -> None:
    """What the modules hold is weights."""
    for module in modules:
        counter.tag([*module.parameters(), *module.buffers()], "weights")


def trace_training(
    counter: Counter,
    step: Any,
    task: Any,
    columns: Callable[[int], Mapping[str, Any]],
    rows: tuple[int, int] = ROWS,
    k: int | None = None,
) -> tuple[Trace, Trace]:
    """Trace two whole steps of a `train.Step`: the frozen encoders, forward, backward, update.

    `columns(rows)` is what the loader would give of so many pictures; `k` the step, by default one that
    averages.
    """
    k = step.ema._settings.start_step + 1 if k is None else k
    _begin(counter, step)
    step.task = _Staged(task, counter)
    with _noting_gradients(counter, step):
        first, second = (_traced_step(counter, step, task, columns(number), k) for number in rows)
    return first, second


def _begin(counter: Counter, step: Any) -> None:
    """Let the optimiser and the average make their state, as the first step does."""
    masters = step.weights.masters
    for master in masters.values():
        master.grad = torch.zeros_like(master)
    step.optimiser.step()
    step.weights.clear_gradients()
    step.ema.update(step.ema._settings.start_step)
    counter.tag(masters.values(), "weights")
    for inner in step.optimiser.inner:
        counter.tag(tensors(inner.state), "optimiser")
    counter.tag(step.ema.state().values(), "ema")


def _traced_step(counter: Counter, step: Any, task: Any, columns: Mapping[str, Any], k: int) -> Trace:
    counter.stage = "inputs"
    given = counter.fake(columns)
    trace = counter.start_trace()
    inputs = task.inputs(given, torch.device("cpu"))
    step._micro_rows = len(next(iter(inputs.values())))
    step(k, inputs)
    counter.stage, counter.trace = "", None
    return trace


class _Staged:
    """A task that tells the counter when a forward pass begins and ends."""

    def __init__(self, task: Any, counter: Counter) -> None:
        self._task, self._counter = task, counter

    def losses(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self._counter.stage = "forward"
        losses: dict[str, Tensor] = self._task.losses(inputs)
        self._counter.stage = "backward"
        return losses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


@contextmanager
def _noting_gradients(counter: Counter, step: Any) -> Iterator[None]:
    """Tag each gradient when it is made, and note when the update begins."""

    def made(param: Tensor) -> None:
        if param.grad is not None:
            counter.tag([param.grad], "gradients")

    def updates(*_: Any) -> None:
        counter.tag([p.grad for p in step.weights.masters.values() if p.grad is not None], "gradients")
        counter.stage = "update"

    params = [param for param in step.weights.computing.values() if param.requires_grad]
    hooks = [param.register_post_accumulate_grad_hook(made) for param in params]
    hooks += [inner.register_step_pre_hook(updates) for inner in step.optimiser.inner]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors of an optimiser's state."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors(value)


def size_bytes(tensor: Any) -> int:
    """Bytes that a tensor is kept in; of one that is packed of others (8-bit states), of those."""
    if is_traceable_wrapper_subclass(tensor):
        return sum(size_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return int(tensor.numel() * tensor.element_size())


def outline(task: str, settings: ModelSettings, objective: ObjectiveSettings, resolution: int) -> Model:
    """The model of a recipe on the meta device: its shapes, no weights, no downloads of them."""
    parts = ("vae",) if task in VAE_TASKS else PARTS
    vae = outlined(str(settings.vae), ("vae",)).vae if isinstance(settings.vae, str) else None
    if settings.base in FAMILIES:
        own = settings.text_encoder if isinstance(settings.text_encoder, str) else None
        text = None if own is None else outlined(own, ("text_encoder",))
        overrides = build.family_changes(task, settings, resolution, vae, text)
        if settings.tokenizer == "train" and "text_encoder" in overrides:
            learned = {"vocab_size": settings.vocab_size, "max_position_embeddings": settings.max_length}
            overrides["text_encoder"] = learned | overrides["text_encoder"]
        model = outlined(settings.base, parts, overrides)
        if text is not None:
            model.text_encoders, model.tokenizers = text.text_encoders, text.tokenizers
    else:
        model = outlined(settings.base, parts)
    model.vae = vae or model.vae
    if task == "tiny-vae":
        with torch.device("meta"):
            return with_student(model, objective.tiny_vae, settings.seed)
    if task not in VAE_TASKS:
        if model.unet is None:
            raise RecipeError("model.base", f"'{settings.base}' has no unet")
        build.settle_scheduler(model, task, objective, resolution)
    return model


# ---- making and preparing pictures


ATTENTIONS = ("fused", "plain")


@dataclass(frozen=True)
class GenerateSpec:
    """What is counted of making pictures; steps and batch multiply it afterwards."""

    model: str
    width: int
    height: int
    guided: bool = True
    precision: str = "fp16"
    attention: str = "fused"  # or plain: scores in memory
    decode_pixels: int | None = DECODE_PIXELS  # at once; None: the whole batch

    def key(self) -> dict[str, Any]:
        """What a cache knows it by."""
        return {"job": "generate", **asdict(self)}


def profile_generation(spec: GenerateSpec, prepare: Callable[[Model], None] | None = None) -> Profile:
    """Count text encoding, one denoising step and decoding; `prepare` may change the modules first."""
    model = outlined(spec.model, ("unet", "vae", "text_encoder"))
    _check_size(model, spec.width, spec.height)
    dtype = models.precision(spec.precision)
    with fakes(*model.modules.values()) as counter:
        for module in model.modules.values():
            nn.Module.to(module, dtype)  # diffusers' own warns of nothing
        vae: Any = model.vae
        upcast = dtype == torch.float16 and bool(vae.config.get("force_upcast"))
        if upcast:
            nn.Module.to(vae, torch.float32)
        _set_attention(model, spec.attention)
        if prepare is not None:
            prepare(model)
        tag_weights(counter, model.modules.values())
        traces = tuple(_trace_pictures(counter, model, spec, rows) for rows in (2, 3))
    pixels = spec.width * spec.height
    chunk = {"decode": max(1, spec.decode_pixels // pixels)} if spec.decode_pixels else {}
    return profile_of(
        (traces[0], traces[1]),
        (2, 3),
        parameters=model.num_parameters,
        trained=0,
        chunks=chunk,
        facts={"width": spec.width, "height": spec.height, "decodes_in_float32": upcast},
    )


def _check_size(model: Model, width: int, height: int) -> None:
    """InputError unless the model can make pictures of this size."""
    assert model.unet is not None
    unit = model.size_unit
    if width % unit or height % unit or min(width, height) < unit or max(width, height) > 8192:
        raise InputError(f"size {width}x{height}", allowed=f"sides of {unit} to 8192 that {unit} divides")


def _set_attention(model: Model, kind: str) -> None:
    if kind not in ATTENTIONS:
        raise InputError(f"attention '{kind}'", allowed=", ".join(ATTENTIONS))
    as_on_gpu(model.modules.values())
    if kind == "fused":
        return
    from darkroom.models.parts import Attention, AttnProcessor

    parts: list[Any] = [part for module in model.modules.values() for part in module.modules()]
    for part in parts:
        if isinstance(part, Attention):
            part.set_processor(AttnProcessor())
        if hasattr(part, "set_attn_implementation"):
            part.set_attn_implementation("eager")


def _trace_pictures(counter: Counter, model: Model, spec: GenerateSpec, rows: int) -> Trace:
    trace = counter.start_trace()
    with torch.no_grad():
        counter.stage = "text"
        conditions = _conditions(model, spec, rows)
        counter.stage = "denoise"
        latents = _denoise(counter, model, spec, conditions)
        counter.stage = "decode"
        decoded(model.vae, latents)
    counter.stage, counter.trace = "", None
    return trace


def decoded(vae: Any, latents: Tensor) -> Tensor:
    """Latents to uint8 pixels."""
    pixels = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
    out: Tensor = pixels.float().clamp(0, 1).mul(255).round().to(torch.uint8)
    return out


def _conditions(model: Model, spec: GenerateSpec, rows: int) -> list[Condition]:
    """Each picture's prompt, and one negative for all."""
    number = rows + spec.guided
    ids = [torch.zeros(number, t.model_max_length, dtype=torch.long) for t in model.tokenizers]
    text_BLD, pooled_BD = text_states(model.text_encoders, ids)
    if pooled_BD is None:
        return [Condition(text) for text in text_BLD]
    sizes = torch.zeros(6)
    return [
        Condition(text, {"text_embeds": pooled, "time_ids": sizes})
        for text, pooled in zip(text_BLD, pooled_BD, strict=True)
    ]


def _denoise(counter: Counter, model: Model, spec: GenerateSpec, conditions: list[Condition]) -> Tensor:
    """The second of three steps is counted; the first makes what stays alive."""
    factor = model.vae_factor
    shape = (model.latent_channels, spec.height // factor, spec.width // factor)
    table = make_table("flow_euler" if is_flow(model.scheduler) else "ddim", model.scheduler, 3)
    negative = conditions[-1] if spec.guided else None
    positives = conditions[: len(conditions) - spec.guided]
    rows = [
        Row(table, noise, condition, negative, guidance=7.5 if spec.guided else 1.0)
        for noise, condition in zip(torch.zeros(len(positives), *shape), positives, strict=True)
    ]
    steps: Any = denoise(unet_call(model.unet), rows)
    counter.stage = "first"
    next(steps)
    counter.stage = "denoise"
    latents: Tensor = next(steps).latents_BCHW
    counter.stage = "first"
    steps.close()
    return latents


def unet_call(unet: Any) -> Callable[..., Tensor]:
    """The U-Net as `sample.denoise` calls it: latents, timestep, text and its further conditions."""
    dtype = next(unet.parameters()).dtype

    def call(x: Tensor, t: Tensor, text: Tensor, added: dict[str, Tensor]) -> Tensor:
        """The U-Net's output for latents [B, C, h, w], as its forward takes them."""
        added_states = {name: added[name] for name in ("text_embeds", "time_ids") if name in added}
        out: Tensor = unet(
            x.to(dtype),
            t,
            encoder_hidden_states=text,
            added_cond_kwargs=added_states or None,
            return_dict=False,
        )[0]
        return out

    return call


@dataclass(frozen=True)
class PrepareSpec:
    """What is counted of preparing a store: pictures to moments, captions to states if asked."""

    model: str
    resolution: int
    text: bool = False
    precision: str = "bf16"
    vae: str | None = None  # another model's

    def key(self) -> dict[str, Any]:
        """What a cache knows it by."""
        return {"job": "prepare", **asdict(self)}


def profile_preparing(spec: PrepareSpec) -> Profile:
    """Count the encoders on a batch of pictures."""
    model = outlined(spec.model, ("vae", "text_encoder") if spec.text else ("vae",))
    if spec.vae is not None:
        model.vae = outlined(spec.vae, ("vae",)).vae
    dtype = models.precision(spec.precision)
    with fakes(*model.modules.values()) as counter:
        for module in model.modules.values():
            nn.Module.to(module, dtype)  # diffusers' own warns of nothing
        as_on_gpu(model.modules.values())
        tag_weights(counter, model.modules.values())
        traces = tuple(_trace_encoders(counter, model, spec, rows) for rows in (2, 3))
    side = spec.resolution // model.vae_factor
    text = [(c.max_position_embeddings, c.hidden_size) for c in text_configs(model)]
    facts = {
        "resolution": spec.resolution,
        "latent_bytes_a_row": 2 * 2 * model.latent_channels * side * side,
        "text_bytes_a_row": sum(2 * length * width for length, width in text),
    }
    return profile_of((traces[0], traces[1]), (2, 3), parameters=model.num_parameters, trained=0, facts=facts)


def _trace_encoders(counter: Counter, model: Model, spec: PrepareSpec, rows: int) -> Trace:
    counter.stage = "encode"
    pixels = counter.fake_tensor(
        torch.empty(rows, 3, spec.resolution, spec.resolution, dtype=torch.uint8, device="meta")
    )
    trace = counter.start_trace()
    with torch.no_grad():
        moments = encode_moments(model.vae, pixels)
        if spec.text:
            counter.stage = "text"
            ids = [torch.zeros(rows, t.model_max_length, dtype=torch.long) for t in model.tokenizers]
            states = text_states(model.text_encoders, ids)
            del states
    del moments
    counter.stage, counter.trace = "", None
    return trace
