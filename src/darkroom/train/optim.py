"""The optimisers, their learning rate over the steps, clipping, and their state as tensors and numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from darkroom.errors import MissingExtra
from darkroom.hardware import accelerator
from darkroom.recipe.sections import EmaSettings, OptimSettings
from darkroom.train import optimisers

State = dict[str, Any]


@dataclass(frozen=True)
class Rate:
    """A peak learning rate, and the steps (from 0, `stop` not among them) in which it holds; else it is 0."""

    peak: float
    start: int = 0
    stop: int | None = None


def _rate_of(name: str, peak: float, settings: OptimSettings) -> Rate:
    """The rate of a weight `<part>.<name>` whose part has this peak.

    LoRA+ (Hayou et al. 2024) multiplies that of an adapter's second matrix.
    """
    if settings.loraplus_lr_ratio is not None and ".lora_B." in name:
        peak *= settings.loraplus_lr_ratio
    rule = next((rule for rule in settings.layers if rule.holds_for(name)), None)
    rate = Rate(peak) if rule is None else Rate(peak * rule.lr_scale, rule.start_step, rule.stop_step)
    if settings.text_encoder_steps is not None and name.startswith("text_encoder"):
        stops = (settings.text_encoder_steps, rate.stop)
        rate = replace(rate, stop=min(stop for stop in stops if stop is not None))
    return rate


def parameter_groups(
    params: Mapping[str, Tensor],
    rates: Mapping[str, float],
    weight_decay: float,
    settings: OptimSettings | None = None,
) -> list[dict[str, Any]]:
    """AdamW's groups: each part's matrices and kernels with weight decay, its biases and norms without.

    `params` are named `<part>.<name>`; `rates` are peak learning rates by part, `settings` say which weights
    have others.
    """
    groups: dict[tuple[str, bool, Rate], dict[str, Any]] = {}
    for name, param in params.items():
        part, decays = name.split(".", 1)[0], param.ndim > 1
        rate = Rate(rates[part]) if settings is None else _rate_of(name, rates[part], settings)
        decay = weight_decay if decays else 0.0
        new = {"params": [], "weight_decay": decay, "lr": rate.peak, "peak_lr": rate.peak, "rate": rate}
        groups.setdefault((part, decays, rate), new)["params"].append(param)
    return list(groups.values())


class Optimiser:
    """One or several torch optimisers that step together and look like one."""

    def __init__(self, inner: Sequence[torch.optim.Optimizer], *, eager: bool = False) -> None:
        self.inner = list(inner)
        # torchao compiles its step, which takes a C++ compiler and minutes on a CPU.
        self._stance: Any = torch.compiler.set_stance if eager else None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all."""
        return [group for optimiser in self.inner for group in optimiser.param_groups]

    @property
    def state(self) -> dict[Tensor, State]:
        """The state of all, by parameter."""
        return {param: state for optimiser in self.inner for param, state in optimiser.state.items()}

    def state_of(self, param: Tensor) -> State:
        """The state of one parameter, to be filled."""
        for optimiser in self.inner:
            for group in optimiser.param_groups:
                if any(param is one for one in group["params"]):
                    state: State = optimiser.state[param]
                    return state
        raise KeyError("no optimiser has this parameter")

    def step(self) -> None:
        """One step of all."""
        stance: AbstractContextManager[Any] = self._stance("force_eager") if self._stance else nullcontext()
        with stance, _without_frozen(self.param_groups):
            for optimiser in self.inner:
                optimiser.step()


@contextmanager
def _without_frozen(groups: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Within, schedule-free's groups that have stopped are empty: it moves weights at a rate of 0 too."""
    frozen = [
        (group, group["params"]) for group in groups if group["lr"] == 0 and group.get("lr_max", 0.0) > 0
    ]
    for group, _ in frozen:
        group["params"] = []
    try:
        yield
    finally:
        for group, params in frozen:
            group["params"] = params


def make_optimiser(groups: list[dict[str, Any]], settings: OptimSettings) -> Optimiser:
    """The optimiser over the groups. Raises MissingExtra where its package is not installed."""
    device = groups[0]["params"][0].device
    eager = settings.name == "adamw8bit" and device.type == "cpu"
    if settings.name == "muon":
        return Optimiser(_muon(groups, settings))
    return Optimiser([_made(groups, settings)], eager=eager)


def make_each(groups: list[dict[str, Any]], settings: OptimSettings) -> dict[Tensor, Optimiser]:
    """An optimiser for each parameter, to step one by one."""
    return {
        param: make_optimiser([{**group, "params": [param]}], settings)
        for group in groups
        for param in group["params"]
    }


def _made(groups: list[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
    lr, eps, betas = settings.lr, settings.eps, (settings.beta1, settings.beta2)
    made: torch.optim.Optimizer
    if settings.name == "adamw8bit":
        made = _imported("torchao.optim", "AdamW8bit", "quant")(groups, lr=lr, betas=betas, eps=eps)
    elif settings.name == "adafactor":
        made = _adafactor(groups, settings)
    elif settings.name == "lion":
        made = optimisers.Lion(groups, lr=lr, betas=betas)
    elif settings.name == "came":
        made = optimisers.CAME(groups, lr=lr, betas=(*betas, settings.beta3))
    elif settings.name == "prodigy":
        made = optimisers.Prodigy(
            groups,
            lr=lr,
            betas=betas,
            eps=eps,
            d_coef=settings.d_coef,
            use_bias_correction=settings.use_bias_correction,
            safeguard_warmup=settings.warmup_steps > 0,
        )
    elif settings.name == "schedule-free":
        made = _imported("schedulefree", "AdamWScheduleFree", "optim")(groups, lr=lr, betas=betas, eps=eps)
        for group in made.param_groups:
            group["train_mode"] = True
    else:
        made = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
        if not accelerator.kind_of(groups[0]["params"][0].device).scaled_adamw:
            made._step_supports_amp_scaling = False
    return made


ADAFACTOR_EPS = (1e-18, 1e-3)
"""The first is the floor of the squares' mean, and squared that of the squares. PyTorch's own, 1e-7,
is more than most squares in fine-tuning; the paper's is 1e-30.
"""


def _adafactor(groups: list[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
    """The paper's; with rates that are not relative to a weight's size transformers', as in sd-scripts."""
    if settings.scale_parameter:
        return optimisers.Adafactor(groups, lr=settings.lr, eps=ADAFACTOR_EPS)
    from transformers.optimization import Adafactor

    made: torch.optim.Optimizer = Adafactor(
        groups, lr=settings.lr, scale_parameter=False, relative_step=False, warmup_init=False
    )
    return made


def _muon(groups: list[dict[str, Any]], settings: OptimSettings) -> list[torch.optim.Optimizer]:
    """Muon for matrices, its updates as large as AdamW's so that one rate fits both; AdamW for the rest."""
    matrices, rest = (
        [
            {**group, "params": chosen}
            for group in groups
            if (chosen := [p for p in group["params"] if (p.ndim == 2) == is_matrix])
        ]
        for is_matrix in (True, False)
    )
    plain = settings.model_copy(update={"name": "adamw"})
    made: list[torch.optim.Optimizer] = [_made(rest, plain)] if rest else []
    if matrices:
        made.append(torch.optim.Muon(matrices, lr=settings.lr, adjust_lr_fn="match_rms_adamw"))
    return made


def _imported(module: str, name: str, extra: str) -> Any:
    import importlib

    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        raise MissingExtra(module.partition(".")[0], extra) from None


def averaged_by_itself(
    optimiser: Optimiser, params: Mapping[str, Tensor], settings: OptimSettings
) -> dict[str, Tensor] | None:
    """The averaged weights that schedule-free keeps behind those it trains on; None of other optimisers."""
    if settings.name != "schedule-free":
        return None
    states, away = optimiser.state, 1 - 1 / settings.beta1
    return {
        name: param.detach().lerp(states[param]["z"], away)
        if "z" in states.get(param, {})
        else param.detach()
        for name, param in params.items()
    }


# ---- to be saved


def optimiser_tensors(optimiser: Optimiser, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state's tensors by `<parameter>/<key>`, such as AdamW's `exp_avg`, `exp_avg_sq` and `step`.

    Those of 8 bits are taken apart: `<parameter>/exp_avg.codes`, `.scale`, `.qmap`.
    """
    states = optimiser.state
    tensors: dict[str, Tensor] = {}
    for name, param in params.items():
        for key, value in states.get(param, {}).items():
            for inner, tensor in _taken_apart(value):
                tensors[f"{name}/{key}{inner}"] = tensor
    return tensors


def optimiser_numbers(optimiser: Optimiser, params: Mapping[str, Tensor]) -> dict[str, Any]:
    """What else the optimiser has to remember, as JSON: numbers of its groups and of single parameters."""
    states = optimiser.state
    own = {name: numbers for name, param in params.items() if (numbers := _numbers(states.get(param, {})))}
    return {"groups": [_numbers(group) for group in optimiser.param_groups], "state": own}


def restore_optimiser(
    optimiser: Optimiser,
    params: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, Any] | None = None,
) -> None:
    """Put a saved state back. Each tensor takes the memory layout of its parameter, as AdamW made it."""
    saved: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, inner = key.rpartition("/")
        saved.setdefault(name, {})[inner] = tensor
    scalars = numbers or {"groups": [], "state": {}}
    for name, param in params.items():
        if name in saved or name in scalars["state"]:  # else it never had a gradient
            state = optimiser.state_of(param)
            state |= scalars["state"].get(name, {})
            _put_together(state, param, saved.get(name, {}))
    for group, kept in zip(optimiser.param_groups, scalars["groups"], strict=False):
        group |= kept


def _taken_apart(value: Any) -> list[tuple[str, Tensor]]:
    if not isinstance(value, Tensor):
        return []
    if type(value) is Tensor or not hasattr(value, "__tensor_flatten__"):
        return [("", value)]
    names, _ = value.__tensor_flatten__()
    return [(f".{name}", getattr(value, name)) for name in names]


def _put_together(state: State, param: Tensor, saved: Mapping[str, Tensor]) -> None:
    split: dict[str, dict[str, Tensor]] = {}
    for key, tensor in saved.items():
        name, dot, inner = key.partition(".")
        if dot:
            split.setdefault(name, {})[inner] = tensor.to(param.device, copy=True)
        elif tensor.shape == param.shape:
            state[name] = torch.zeros_like(
                param, dtype=tensor.dtype, memory_format=torch.preserve_format
            ).detach()
            state[name].copy_(tensor)
        else:
            state[name] = tensor.to(param.device, copy=True)
    for name, parts in split.items():
        made = _imported("torchao.optim.subclass_8bit", "OptimState8bit", "quant")
        # Means have signs, means of squares none: the code's table says which.
        state[name] = made(parts["codes"], parts["scale"], parts["qmap"], bool(parts["qmap"].min() < 0))


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """The plain numbers of a group or state; rates are set anew at each step, and infinity never changes."""
    fixed = ("params", "lr", "peak_lr", "fused", "foreach")
    return {
        key: value
        for key, value in values.items()
        if key not in fixed and isinstance(value, (bool, int, float)) and math.isfinite(value)
    }


class Ema:
    """Averaged float32 weights of the trained ones, by the parameters' names.

    Until the first averaged step there is no copy: the average is the weights, and costs nothing.
    """

    def __init__(self, params: Mapping[str, Tensor], settings: EmaSettings) -> None:
        self._params, self._settings = dict(params), settings
        self._average: dict[str, Tensor] = {}
        self._pairs: tuple[list[Tensor], list[Tensor]] = ([], [])

    def update(self, k: int) -> None:
        """Take in the weights after step k (from 0)."""
        n = k - self._settings.start_step
        if not self._settings.enabled or n < 0:
            return
        if n % self._settings.every:
            return
        if not self._average:
            self._start({name: param.detach() for name, param in self._params.items()})
        else:
            torch._foreach_lerp_(*self._pairs, 1.0 - ema_decay(n, self._settings))

    def weights(self) -> dict[str, Tensor]:
        """The averaged weights by name; the trained ones while there is no average."""
        return self._average or {name: param.detach() for name, param in self._params.items()}

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds: the average, empty until it starts."""
        return self._average

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put a checkpoint's average back."""
        if state and self._settings.enabled:
            self._start({name: state[name] for name in self._params})

    def _start(self, values: Mapping[str, Tensor]) -> None:
        for name, param in self._params.items():
            # The parameter's own memory layout lets lerp walk both in one order.
            average = torch.empty_like(param, dtype=torch.float32, memory_format=torch.preserve_format)
            self._average[name] = average.detach().copy_(values[name])
        self._pairs = (list(self._average.values()), [p.detach() for p in self._params.values()])


def ema_decay(n: int, settings: EmaSettings) -> float:
    """How much of the average the update after n averaged steps keeps; little at first: early weights go."""
    decay = min(settings.decay, (1 + n) / (10 + n)) if settings.warmup else settings.decay
    return decay**settings.every
