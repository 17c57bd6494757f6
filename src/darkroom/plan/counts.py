"""What a job computes, moves and holds, as straight lines in the number of pictures: counted at two batch
sizes, good for all. Plain numbers: no torch here, so a plan from the cache answers at once.

Time: kernels of one kind and size together, each with FLOPs and bytes `fixed + row * rows`. Memory: the
moments that can be the peak, each with its bytes by kind. Both come from one run of the real code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import darkroom
from darkroom.counting import Counter, Trace, counting
from darkroom.errors import RecipeError
from darkroom.hardware.system import atomic_replace
from darkroom.models.families import FAMILIES
from darkroom.models.model import PARTS, Model
from darkroom.models.outline import outlined
from darkroom.train import model as build
from darkroom.train.objective import scheduler_config
from darkroom.train.tasks.distill import lcm_scheduler

if TYPE_CHECKING:
    from darkroom.recipe.sections import Recipe


Floats = NDArray[np.float64]
KINDS = ("weights", "gradients", "optimiser", "ema", "activations", "temporary")
TRAIN_STAGES = ("inputs", "forward", "backward", "update")
GENERATE_STAGES = ("text", "denoise", "decode")
MAX_ROWS = 65536
# Stages of a run beside its steps.
LATENTS, SAMPLES, DECODED = "latents", "samples", "decoded samples"


@dataclass(frozen=True)
class Line:
    """A quantity of `rows` pictures: fixed + row * rows."""

    fixed: float
    row: float

    def at(self, rows: float) -> float:
        """Its value for a number of pictures, never below zero."""
        return max(0.0, self.fixed + self.row * rows)

    @classmethod
    def through(cls, rows: tuple[int, int], values: tuple[float, float]) -> Line:
        """The line through what was counted at two batch sizes."""
        row = (values[1] - values[0]) / (rows[1] - rows[0])
        return cls(values[0] - row * rows[0], row)


@dataclass(frozen=True)
class Kernels:
    """`calls` kernels of one class that do the same amount of work each."""

    stage: str
    kind: str  # matmul, conv, attention, norm, elementwise, optimiser, view
    calls: int
    flops: Line
    bytes: Line


@dataclass(frozen=True)
class KernelColumns:
    """The kernels of one stage as columns: `flops` and `bytes` of one call are (fixed, a row)."""

    names: tuple[str, ...]  # classes of kernels
    kinds: NDArray[np.intp]  # of each, an index into names
    calls: Floats
    flops: tuple[Floats, Floats]
    bytes: tuple[Floats, Floats]

    def holds(self, *names: str) -> NDArray[np.bool_]:
        """Which kernels are of these classes."""
        return np.isin(self.kinds, [i for i, name in enumerate(self.names) if name in names])


@dataclass(frozen=True)
class Moment:
    """A moment that can be the peak: bytes alive, by kind."""

    stage: str
    bytes: dict[str, Line]

    def at(self, rows: float) -> dict[str, float]:
        """Bytes by kind for a number of pictures."""
        return {kind: line.at(rows) for kind, line in self.bytes.items()}


@dataclass(frozen=True)
class Profile:
    """A job's counts. `rows` of the stage 'inputs' are those of the whole step, of the other stages those of
    a micro-batch; a stage in `chunks` takes at most so many rows at once.
    """

    kernels: tuple[Kernels, ...]
    moments: tuple[Moment, ...]
    parameters: dict[str, int]  # by part
    trained: int
    chunks: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # what else the job says: resolution, file sizes

    @property
    def total_parameters(self) -> int:
        """Parameters of all parts that are held."""
        return sum(self.parameters.values())

    def flops(self, rows: float, *stages: str) -> float:
        """FLOPs of the stages' kernels (of all unless said), 2 a multiply-add, attention included."""
        return sum(k.calls * k.flops.at(rows) for k in self.kernels if not stages or k.stage in stages)

    def work(self, stage: str) -> KernelColumns:
        """The kernels of a stage as columns, made once."""
        if stage not in self._work:
            found = [kernel for kernel in self.kernels if kernel.stage == stage]
            names = tuple(dict.fromkeys(kernel.kind for kernel in found))
            self._work[stage] = KernelColumns(
                names,
                np.array([names.index(kernel.kind) for kernel in found], dtype=np.intp),
                np.array([float(kernel.calls) for kernel in found]),
                (np.array([k.flops.fixed for k in found]), np.array([k.flops.row for k in found])),
                (np.array([k.bytes.fixed for k in found]), np.array([k.bytes.row for k in found])),
            )
        return self._work[stage]

    @cached_property
    def _work(self) -> dict[str, KernelColumns]:
        return {}

    def of_pictures(self, number: int) -> Profile:
        """The same of a run of so few pictures of its own: no more are encoded at once."""
        most = self.chunks.get(LATENTS, 0)
        return self if most <= number else replace(self, chunks={**self.chunks, LATENTS: number})

    def memory(
        self,
        rows: int,
        *,
        accumulate: bool = False,
        step_rows: int | None = None,
        shards: int = 1,
        gathers: bool = False,
    ) -> dict[str, float]:
        """Bytes by kind at the highest moment, of a micro-batch of `rows`.

        `accumulate`: the gradients of earlier micro-batches are alive too. `shards`: devices that share what
        is sharded (ZeRO-2: gradients, optimiser and averaged weights). `gathers`: the weights too, of which
        each device has whole only the block at work and the next one.
        """
        kinds = [
            self._held(moment, rows, accumulate, step_rows or rows, shards, gathers)
            for moment in self.moments
        ]
        return max(kinds, key=lambda held: sum(held.values()))

    def _held(
        self, moment: Moment, rows: int, accumulate: bool, step_rows: int, shards: int, gathers: bool
    ) -> dict[str, float]:
        if moment.stage == LATENTS:  # before training, on each device, whatever its batch will be
            return {kind: moment.bytes[kind].at(self.chunks[LATENTS]) for kind in KINDS}
        given = step_rows if moment.stage == "inputs" else rows
        held = moment.at(min(given, self.chunks.get(moment.stage, MAX_ROWS)))
        if accumulate and moment.stage in ("forward", "backward"):
            held["gradients"] = max(held.get("gradients", 0.0), self.gradient_bytes)
        for kind in ("gradients", "optimiser", "ema"):
            held[kind] = held.get(kind, 0.0) / shards
        if shards > 1 and "masters_apart" in self.facts:
            masters = 4.0 * self.trained
            # Beside its shard of the float32 masters a device holds the weights it computes with, whole.
            held["weights"] += masters / shards - (masters if self.facts["masters_apart"] else 0.0)
            if gathers:
                held["weights"] += 2.0 * self.facts["block_bytes"] - self.facts["computing_bytes"]
        return {kind: held.get(kind, 0.0) for kind in KINDS}

    @property
    def gradient_bytes(self) -> float:
        """All gradients of a step together."""
        return max(moment.bytes["gradients"].at(1) for moment in self.moments)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a cache; see `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Profile:
        """A profile as `to_dict` gave it."""
        kernels = tuple(
            Kernels(k["stage"], k["kind"], k["calls"], Line(**k["flops"]), Line(**k["bytes"]))
            for k in content["kernels"]
        )
        moments = tuple(
            Moment(m["stage"], {kind: Line(**line) for kind, line in m["bytes"].items()})
            for m in content["moments"]
        )
        plain = {key: content[key] for key in ("parameters", "trained", "chunks", "facts")}
        return cls(kernels=kernels, moments=moments, **plain)


def highest(moments: list[Moment], max_rows: int = MAX_ROWS) -> tuple[Moment, ...]:
    """The moments of each stage that are the highest for some number of rows: the lines' upper envelope."""
    kept: list[Moment] = []
    for stage in dict.fromkeys(moment.stage for moment in moments):
        lines = [(_total(moment), moment) for moment in moments if moment.stage == stage]
        rows = 1.0
        while rows <= max_rows:
            line, moment = max(lines, key=lambda item: (item[0].at(rows), item[0].row))
            kept.append(moment)
            crossings = [
                (line.fixed - other.fixed) / (other.row - line.row)
                for other, _ in lines
                if other.row > line.row + 1e-9
            ]
            later = [at for at in crossings if at > rows]
            if not later:
                break
            rows = min(later) + 1e-6
    return tuple(kept)


def _total(moment: Moment) -> Line:
    return Line(
        sum(line.fixed for line in moment.bytes.values()), sum(line.row for line in moment.bytes.values())
    )


CODE = (
    *("train", "sample", "models", "prepare", "recipe", "counting.py", "proof/peers.py"),
    *(f"plan/{name}.py" for name in ("counts", "generation", "memory", "settings", "training")),
)
"""What a count depends on: these folders and files of darkroom."""
PACKAGES = ("torch", "diffusers", "transformers", "peft")


def cached_profile(key: dict[str, Any], make: Callable[[], Profile]) -> Profile:
    """The profile that `make` counts, or the one it counted before."""
    return Profile.from_dict(cached(key, lambda: make().to_dict()))


def cached(key: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` gives, or what it gave before."""
    file = cache_folder() / "plans" / f"{_digest(key)}.json"
    with suppress(OSError, ValueError):
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return content
    made = make()
    with suppress(OSError):  # a home that cannot be written to only costs the next call its time
        _write(file, json.dumps(made))
    return made


def cache_folder() -> Path:
    """Where darkroom keeps what can be made again: $DARKROOM_CACHE, or `darkroom` in the user's cache."""
    if asked := os.environ.get("DARKROOM_CACHE"):
        return Path(asked)
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "darkroom"


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    atomic_replace(beside, file)


def _digest(key: dict[str, Any]) -> str:
    told = json.dumps([key, _code()], sort_keys=True, default=str)
    return hashlib.sha256(told.encode()).hexdigest()[:32]


@cache
def _code() -> str:
    """The source that counting runs through, and the packages below it."""
    root = Path(darkroom.__file__).parent
    digest = hashlib.sha256()
    for room in CODE:
        place = root / room
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(file.read_bytes())
    digest.update(repr([(name, _version(name)) for name in PACKAGES]).encode())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


ROWS = (2, 3)
CLASSES: tuple[tuple[str, str], ...] = (
    ("attention", r"_scaled_dot_product"),
    ("conv", r"conv"),
    ("matmul", r"\.(mm|addmm|bmm|baddbmm|mv|addmv|dot|linear|_addmm_activation)"),
    ("norm", r"norm|softmax|layer_norm"),
    ("optimiser", r"_fused_adam|_foreach"),
)
_CLASSES = [(kind, re.compile(rf"^aten.*{pattern}")) for kind, pattern in CLASSES]


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
    return Profile(kernels=_grouped(a, b, rows), moments=moments_of(traces, rows, cpu=cpu), **known)


def _grouped(a: Trace, b: Trace, rows: tuple[int, int]) -> tuple[Kernels, ...]:
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

    On a CPU oneDNN's convolutions have a copy of their largest tensor beside, in their own layout.
    """
    a, b = traces
    moments = []
    for kernel, other, held_a, held_b in zip(a.kernels, b.kernels, _alive(a), _alive(b), strict=True):
        lines = {kind: Line.through(rows, (held_a[i], held_b[i])) for i, kind in enumerate(KINDS)}
        if cpu and _kernel_class(kernel.op) == "conv":
            copy, held = Line.through(rows, (kernel.largest, other.largest)), lines["temporary"]
            lines["temporary"] = Line(held.fixed + copy.fixed, held.row + copy.row)
        moments.append(Moment(kernel.stage, lines))
    return highest(moments)


def _alive(trace: Trace) -> Iterator[tuple[int, ...]]:
    """Bytes alive by kind during each operation."""
    place = {
        serial: KINDS.index(trace.kinds.get(serial) or _kind_by_birth(stage))
        for serial, stage in trace.born.items()
    }
    held = [0] * len(KINDS)
    changes = iter(trace.changes)
    change = next(changes, None)
    for i in range(len(trace.kernels)):
        while change is not None and change[0] <= i:
            held[place[change[1]]] += change[2]
            change = next(changes, None)
        yield tuple(held)


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
) -> tuple[Trace, Trace]:
    """Trace two whole steps of a `train.Step`: the frozen encoders, forward, backward, update.

    `columns(rows)` is what the loader would give of so many pictures.
    """
    _begin(counter, step)
    step.task = _Staged(task, counter)
    with _noting_gradients(counter, step):
        first, second = (_traced_step(counter, step, task, columns(number)) for number in rows)
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


def _traced_step(counter: Counter, step: Any, task: Any, columns: Mapping[str, Any]) -> Trace:
    counter.stage = "inputs"
    given = counter.fake(columns)
    trace = counter.start_trace()
    inputs = task.inputs(given, torch.device("cpu"))
    step._micro_rows = len(next(iter(inputs.values())))
    step(step.ema._settings.start_step + 1, inputs)
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


def outline(recipe: Recipe) -> Model:
    """The model of a recipe on the meta device: its shapes, no weights, no downloads of them."""
    settings = recipe.model
    parts = ("vae",) if recipe.task == "autoencoder" else PARTS
    vae = outlined(str(settings.vae), ("vae",)).vae if isinstance(settings.vae, str) else None
    if settings.base in FAMILIES:
        own = settings.text_encoder if isinstance(settings.text_encoder, str) else None
        text = None if own is None else outlined(own, ("text_encoder",))
        overrides = build._overrides(recipe, vae, text)
        if settings.tokenizer == "train" and "text_encoder" in overrides:
            learned = {"vocab_size": settings.vocab_size, "max_position_embeddings": settings.max_length}
            overrides["text_encoder"] = learned | overrides["text_encoder"]
        model = outlined(settings.base, parts, overrides)
        if text is not None:
            model.text_encoders, model.tokenizers = text.text_encoders, text.tokenizers
    else:
        model = outlined(settings.base, parts)
    model.vae = vae or model.vae
    if recipe.task != "autoencoder":
        if model.unet is None:
            raise RecipeError("model.base", f"'{settings.base}' has no unet")
        latent_pixels = (recipe.data.resolution // model.vae_factor) ** 2
        model.scheduler = scheduler_config(recipe.objective, model.scheduler, latent_pixels)
        if recipe.task == "distill":
            model.scheduler = lcm_scheduler(model.scheduler, recipe.objective.distill)
        build.check_resolution(recipe.data.resolution, model)
    return model
