"""The optimisers, their learning rate over the steps, clipping, and their state as tensors and numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from darkroom.errors import MissingExtra
from darkroom.hardware import accelerator
from darkroom.recipe.sections import EmaSettings, OptimSettings

# ---- the optimiser of a run

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
        made = Lion(groups, lr=lr, betas=betas)
    elif settings.name == "came":
        made = CAME(groups, lr=lr, betas=(*betas, settings.beta3))
    elif settings.name == "prodigy":
        made = Prodigy(
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
        return Adafactor(groups, lr=settings.lr, eps=ADAFACTOR_EPS)
    from transformers import optimization

    made: torch.optim.Optimizer = optimization.Adafactor(
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


# ---- optimisers in their papers' formulas of which no step reads anything back from the device
#
# PyTorch lacks Lion and CAME. Its Adafactor reads two numbers a weight back at each step, and so does
# prodigyopt's Prodigy: a card would idle 1,400 times a step of SD 1.5.

Groups = list[dict[str, Any]]
SQUARE_EPS, INSTABILITY_EPS = 1e-30, 1e-16  # CAME's paper's
LARGEST_UPDATE = 1.0


class _ByParameter(torch.optim.Optimizer):
    """Steps one parameter after the other."""

    def _with_gradients(self) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    yield group, param, param.grad


class Lion(torch.optim.Optimizer):
    """The sign of an interpolated mean of the gradients (Chen et al. 2023, algorithm 2).

    One number of state a weight. `betas` are those of the update and of the mean.
    """

    def __init__(
        self,
        params: Groups,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Decay, move by the sign, take the gradient into the mean."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            grads: list[Tensor] = [param.grad for param in params]
            for param in params:
                if not self.state[param]:
                    self.state[param]["exp_avg"] = torch.zeros_like(param)
            means = [self.state[param]["exp_avg"] for param in params]
            lr, (beta1, beta2) = group["lr"], group["betas"]
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            updates = torch._foreach_lerp(means, grads, 1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_add_(params, updates, alpha=-lr)
            torch._foreach_lerp_(means, grads, 1 - beta2)


class CAME(_ByParameter):
    """Adafactor's factored squares with a mean that trusts steady updates more (Luo et al. 2023).

    `betas` are those of the mean, the squares and the instability. As in the authors' code matrices and
    kernels are factored along their last two sides, biases and norms are not.
    """

    def __init__(
        self,
        params: Groups,
        lr: float = 1e-4,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of every weight that has a gradient."""
        for group, param, grad in self._with_gradients():
            beta1, beta2, beta3 = group["betas"]
            state = self.state[param]
            if not state:
                state |= _new_state(param)
            square = grad.square().add_(SQUARE_EPS)
            if param.ndim > 1:
                update = _factored(state, "sq", square, beta2).mul_(grad)
            else:
                update = state["exp_avg_sq"].lerp_(square, 1 - beta2).rsqrt().mul_(grad)
            update.div_((_rms(update) / LARGEST_UPDATE).clamp_(min=1.0))
            mean = state["exp_avg"].lerp_(update, 1 - beta1)
            if param.ndim > 1:
                instability = (update - mean).square_().add_(INSTABILITY_EPS)
                mean = _factored(state, "res", instability, beta3).mul_(mean)
            if group["weight_decay"]:
                param.mul_(1 - group["lr"] * group["weight_decay"])
            param.add_(mean, alpha=-group["lr"])


def _new_state(param: Tensor) -> dict[str, Tensor]:
    state = {"exp_avg": torch.zeros_like(param)}
    if param.ndim < 2:
        return state | {"exp_avg_sq": torch.zeros_like(param)}
    rows, columns = param.shape[:-1], (*param.shape[:-2], param.shape[-1])
    for name in ("sq", "res"):
        state[f"exp_avg_{name}_row"] = param.new_zeros(rows)
        state[f"exp_avg_{name}_col"] = param.new_zeros(columns)
    return state


def _factored(state: dict[str, Tensor], name: str, square: Tensor, beta: float) -> Tensor:
    """Take a square into its factored mean; returns one over the root of that mean."""
    row, column = state[f"exp_avg_{name}_row"], state[f"exp_avg_{name}_col"]
    row.lerp_(square.mean(dim=-1), 1 - beta)
    column.lerp_(square.mean(dim=-2), 1 - beta)
    scaled = (row / row.mean(dim=-1, keepdim=True)).rsqrt_()
    return scaled[..., None] * column[..., None, :].rsqrt()


def _rms(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor)
    return norm / math.sqrt(tensor.numel())


class Adafactor(_ByParameter):
    """Factored squares, and steps relative to a weight's size (Shazeer & Stern 2018, algorithm 4).

    Numbers and state are those of `torch.optim.Adafactor`. `eps` are the floor of the squares' mean, and the
    least size that a weight counts with.
    """

    def __init__(
        self,
        params: Groups,
        lr: float = 1e-2,
        eps: tuple[float, float] = (1e-18, 1e-3),
        beta2_decay: float = -0.8,
        weight_decay: float = 0.0,
    ) -> None:
        numbers = {"lr": lr, "eps": eps, "beta2_decay": beta2_decay, "weight_decay": weight_decay}
        super().__init__(params, numbers)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of every weight that has a gradient."""
        for group, param, grad in self._with_gradients():
            state, (floor, least) = self.state[param], group["eps"]
            if not state:
                state |= _adafactor_state(param)
            state["step"] = t = float(state["step"]) + 1  # PyTorch's own left a tensor in older checkpoints
            fresh, rate = t ** group["beta2_decay"], min(group["lr"], t**-0.5)
            size = _rms(param).clamp_(min=least).mul_(rate)
            if group["weight_decay"]:
                param.mul_(1 - group["lr"] * group["weight_decay"])
            if param.ndim > 1:
                row, column = state["row_var"], state["col_var"]
                row.lerp_(_mean_square(grad, -1), fresh)
                column.lerp_(_mean_square(grad, -2), fresh)
                square = (row @ column).div_(row.mean(dim=-2, keepdim=True).clamp_(min=floor))
            else:
                square = state["variance"].lerp_(grad.square(), fresh).clone()
            update = square.clamp_(min=floor * floor).rsqrt_().mul_(grad)
            param.addcmul_(update, size.div_((_rms(update) / LARGEST_UPDATE).clamp_(min=1.0)), value=-1.0)


def _adafactor_state(param: Tensor) -> dict[str, Any]:
    if param.ndim < 2:
        return {"step": 0.0, "variance": torch.zeros_like(param)}
    rows, columns = (*param.shape[:-1], 1), (*param.shape[:-2], 1, param.shape[-1])
    return {"step": 0.0, "row_var": param.new_zeros(rows), "col_var": param.new_zeros(columns)}


def _mean_square(tensor: Tensor, side: int) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dim=side, keepdim=True)
    return norm.square_().div_(tensor.shape[side])


class Prodigy(_ByParameter):
    """AdamW at a rate that is found from how far weights are from their start (Mishchenko & Defazio 2023).

    Numbers are those of prodigyopt's 1.1 with `decouple` and without a bound of growth. `lr` is a factor of
    the rate found, one for all groups; a group at 0 stands still. `safeguard_warmup` keeps a warm-up's small
    factors out of the estimate. The rate, `d`, stays on the device, in the first parameter's state.
    """

    def __init__(
        self,
        params: Groups,
        lr: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        d0: float = 1e-6,
        d_coef: float = 1.0,
        use_bias_correction: bool = False,
        safeguard_warmup: bool = False,
    ) -> None:
        numbers: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        numbers |= {"d0": d0, "d_coef": d_coef, "use_bias_correction": use_bias_correction}
        super().__init__(params, {**numbers, "safeguard_warmup": safeguard_warmup, "k": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take the gradients in, find the rate, move."""
        first, lr = self.param_groups[0], max(group["lr"] for group in self.param_groups)
        moving = [(group, param, grad) for group, param, grad in self._with_gradients() if group["lr"] > 0]
        if not moving:
            return
        found = self._found(first["params"][0], first)
        (beta1, beta2), k = first["betas"], first["k"] + 1
        corrected = math.sqrt(1 - beta2**k) / (1 - beta1**k) if first["use_bias_correction"] else 1.0
        d = found["d"].clone()
        moved, size = self._taken_in(moving, d, lr * corrected)
        found["d_numerator"].mul_(math.sqrt(beta2)).add_(moved)
        found["d"].copy_(torch.maximum(d, first["d_coef"] * found["d_numerator"] / size).where(size > 0, d))
        rate = (d * (lr * corrected)).where(size > 0, 0.0)  # no gradient so far, no step
        for group, param, _ in moving:
            state = self.state[param]
            if group["weight_decay"]:
                param.addcmul_(param, rate, value=-group["weight_decay"])
            steepness = state["exp_avg_sq"].sqrt().add_(found["d"] * group["eps"])
            param.addcmul_(state["exp_avg"] / steepness, rate, value=-1.0)
        for group in self.param_groups:
            group["k"] = k

    def _found(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Where the rate is kept; of a checkpoint of prodigyopt's, whose groups have it, taken from there."""
        state: dict[str, Any] = self.state[param]
        for name, value in {"d": group["d0"], "d_numerator": 0.0}.items():
            if name not in state:
                state[name] = torch.full((), group.get(name, value), dtype=param.dtype, device=param.device)
        return state

    def _taken_in(
        self, moving: list[tuple[dict[str, Any], Tensor, Tensor]], d: Tensor, factor: float
    ) -> tuple[Tensor, Tensor]:
        """Take gradients in; returns how far they pull back to the start, and how large the sums are."""
        moved, sizes = [], []
        for group, param, grad in moving:
            state, (beta1, beta2) = self.state[param], group["betas"]
            if "s" not in state:
                state |= {name: torch.zeros_like(param) for name in ("s", "exp_avg", "exp_avg_sq")}
                state["p0"] = param.detach().clone()
            elif state["s"].shape != param.shape:  # prodigyopt's are flat, and one zero stands for many
                state["s"] = state["s"].reshape(param.shape)
                state["p0"] = state["p0"].expand(param.numel()).reshape(param.shape)
            share = d / group["d0"]
            moved.append(share * d * factor * ((state["p0"] - param) * grad).sum())
            scaled = grad * d
            state["exp_avg"].mul_(beta1).add_(scaled, alpha=1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(scaled, scaled, value=1 - beta2)
            step = share * d * (1.0 if group["safeguard_warmup"] else factor)
            state["s"].mul_(math.sqrt(beta2)).addcmul_(grad, step)
            sizes.append(torch.linalg.vector_norm(state["s"], 1))
        return torch.stack(moved).sum(), torch.stack(sizes).sum()
