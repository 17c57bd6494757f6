"""A device that this machine lacks, out of fake tensors: shapes, types and places without numbers.

`python tests/fake_device.py FOLDER [NAME...]` trains a step of every task and draws with every solver there
(the cases whose names begin like one of these), with float64 and complex128 refused as on Apple's and some of
Intel's GPUs. A case is a line of JSON. It proves which types and devices each operation is asked for; not
numbers, and not speed.

torch's autograd works on the machine's own accelerator alone, and a build for CPUs has none: this one is
registered from Python, which changes the process and why it is one of its own.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

REFUSED = (torch.float64, torch.complex128)
OTHER = "other"
"""The accelerator that is registered from Python."""


class Refused(AssertionError):
    """A tensor of 64-bit numbers reached a device that has none."""


class Mode(FakeTensorMode):
    avoid_device_init = True  # else it takes the device of `register` for one that computes


class Watch(TorchDispatchMode):
    """Counts what operations leave on a device, and refuses what it cannot hold."""

    def __init__(self, place: torch.device, mode: FakeTensorMode) -> None:
        super().__init__()
        self.place, self.mode, self.results = place, mode, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::_pin_memory", "aten::pin_memory"):
            return args[0]  # fake memory is any kind
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device == self.place:
                self.results += 1
                if leaf.dtype in REFUSED:
                    raise Refused(f"{func} makes {leaf.dtype} on {self.place}")
        return out

    def put(self, *modules: nn.Module, device: Any = None, dtype: torch.dtype | None = None) -> None:
        """Move modules there: their weights become fake ones, which Module.to cannot put in place."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            wanted = dtype if tensor.is_floating_point() else None
            return self.fake(tensor.detach()).to(device or self.place, wanted or tensor.dtype)

        for part in [part for module in modules for part in module.modules()]:
            for name, param in part._parameters.items():
                if param is not None and not same(param, device or self.place, dtype):
                    part._parameters[name] = nn.Parameter(moved(param), param.requires_grad)
            for name, buffer in part._buffers.items():
                if buffer is not None and not same(buffer, device or self.place, dtype):
                    part._buffers[name] = moved(buffer)

    def fake(self, value: Any) -> Any:
        """A tensor's fake twin, still on the CPU; other values as they are."""
        real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        return self.mode.from_tensor(value) if real else value


class DrawnOnTheHost(TorchFunctionMode):
    """PEFT's LoHa and LoKr draw on the host whether a layer is dropped: it is not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__bool__ and args[0].device.type == "cpu":
            return True
        return func(*args, **(kwargs or {}))


def same(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> bool:
    is_cast = dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype
    return isinstance(tensor, FakeTensor) and tensor.device == device and not is_cast


@contextmanager
def watched(kind: str) -> Iterator[Watch]:
    """Within, tensors are fake, and those on the first device of a kind are watched."""
    mode = Mode(allow_non_fake_inputs=True)
    watch = Watch(torch.device(kind, 0), mode)

    def put(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        watch.put(module, device=device or next(module.parameters()).device, dtype=dtype)
        return module

    with mode, watch, DrawnOnTheHost(), patch.object(nn.Module, "to", put):
        yield watch


def register() -> None:
    from torch.utils import backend_registration

    backend_registration._setup_privateuseone_for_python_backend(OTHER)


# ---- drawing


def draw(model: Any, solver: str, kind: str, **more: Any) -> int:
    """Prompt to decoded picture; how many results lay on the device."""
    from darkroom.sample.denoise import denoise
    from darkroom.sample.generate import GenerateSettings, Generation

    with watched(kind) as watch:
        watch.put(*model.modules.values())
        side = 2 * model.size_unit
        settings = GenerateSettings.of(steps=3, solver=solver, guidance=3.0, size=(side, side), **more)
        job = Generation(model, ["a red square"], settings)
        rows = [job.row(0)]
        for state in denoise(job.backend.unet, rows):
            assert state.latents_BCHW.device == watch.place
        vae: Any = job.model.vae
        pixels = vae.decode(rows[0].latents_CHW[None] / vae.config.scaling_factor).sample
        assert (pixels.device, tuple(pixels.shape)) == (watch.place, (1, 3, side, side))
        return watch.results


def draw_steered(model: Any, net: Any, kind: str, **more: Any) -> int:
    """The same with a ControlNet, T2I-Adapter or IP-Adapter; `more` is what `Control` takes."""
    from PIL import Image

    from darkroom.models.image_prompt import installed
    from darkroom.sample.control import Control, ControlledUnet, Controls
    from darkroom.sample.denoise import denoise
    from darkroom.sample.generate import GenerateSettings, Generation

    side = 2 * model.size_unit
    picture = Image.new("RGB", (side, side), "red")
    controls = Controls.read([Control(net, picture, weight=0.7, **more)], model)
    with watched(kind) as watch, installed(model, controls.in_attention):
        watch.put(*model.modules.values())
        settings = GenerateSettings.of(steps=3, solver="euler", guidance=3.0, size=(side, side))
        job = Generation(model, ["a red square"], settings, controls=controls)
        rows = [job.row(0)]
        encoded = [tensor for control in rows[0].controls for tensor in control.encoded]
        assert {tensor.device for tensor in encoded} == {watch.place}
        unet = ControlledUnet(job.backend.unet, dict(enumerate(controls.in_attention)))
        for state in denoise(unet, rows):
            assert state.latents_BCHW.device == watch.place
        return watch.results


def prepare(model: Any, kind: str) -> int:
    """Pictures to latent moments and captions to states, as `darkroom prepare` and inline encoding do it."""
    from darkroom.prepare import columns
    from darkroom.prepare.columns import TextEncoder, VaeEncoder

    def placed(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
        return module.to(device, dtype).eval()  # without the copy, which fake weights do not take

    vae, text = VaeEncoder(model.vae), TextEncoder(model.text_encoders, model.tokenizers)
    with watched(kind) as watch, patch.object(columns, "_placed", placed):
        vae.to(watch.place)
        text.to(watch.place)
        moments = vae.encode(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
        states, pooled = text.encode(["a red square", ""])
        made = [one for one in (moments, states, pooled) if one is not None]
        assert {(one.device, one.dtype) for one in made} == {(watch.place, torch.float16)}
        return watch.results


# ---- training


def train_a_step(recipe: Any, folder: Path, kind: str, *, spoil: bool = False) -> int:
    """Batch to updated weights and held-out losses; how many results lay on the device."""
    from darkroom.data.order import Rows
    from darkroom.models import precision
    from darkroom.train.feed import read_once, select_rows
    from darkroom.train.local_dataset import gather, has_own_store, open_store
    from darkroom.train.model import build_model
    from darkroom.train.setup import bare_step, make_task
    from darkroom.train.tasks.encoders import build_extractor

    data = recipe.data
    if has_own_store(data):
        gather(recipe.task, data, folder, lambda _: None)
    store = open_store(data, folder, None)
    rows, _ = select_rows(store, data)
    assert isinstance(rows, Rows)
    captions = ["a red square on blue"] * 4
    model = (
        build_extractor(recipe.model, recipe.objective.extractor, data.resolution, store, rows)
        if recipe.task == "extractor"
        else build_model(
            recipe.task, recipe.model, recipe.objective, data.resolution, lambda: iter(captions), folder
        )
    )
    with watched(kind) as watch:
        watch.put(*model.modules.values())
        task = make_task(recipe, model, store, watch.place)
        watch.put(*task.modules.values())
        columns: Mapping[str, Any] = outside(lambda: read_once(store, rows, 2, task.read))
        dtype = precision(recipe.train.precision)
        step = bare_step(task, train=recipe.train, optim=recipe.optim, micro_batch=2, dtype=dtype)
        inputs = task.inputs({name: watch.fake(value) for name, value in columns.items()}, watch.place)
        assert {value.device for value in inputs.values()} == {watch.place}
        if spoil:
            inputs["t"] = inputs["t"].double()
        losses = step(0, inputs).losses
        with torch.no_grad():
            task.heldout(inputs)
        assert losses["loss"].device == watch.place
        return watch.results


def outside(call: Callable[[], Any]) -> Any:
    """A call that makes real tensors."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return call()


def main() -> None:
    from cases_of_devices import drawings, preparations, steered, trainings

    register()
    folder, asked = Path(sys.argv[1]), tuple(word for word in sys.argv[2:] if word != "-v")
    trains = not asked or any(word.startswith("train") for word in asked)
    steers = not asked or any(word.startswith(("steer", "prepare")) for word in asked)
    drawn = [*drawings(), *(steered(folder) if steers else ()), *(preparations() if steers else ())]
    for name, call in [*drawn, *(trainings(folder) if trains else ())]:
        if not asked or name.startswith(asked):
            try:
                line: dict[str, Any] = {"results": call()}
            except Exception as error:
                line = {"error": f"{type(error).__name__}: {error}"[:500]}
                if "-v" in sys.argv:
                    traceback.print_exc(limit=-6)
            print(json.dumps({"case": name, **line}), flush=True)


if __name__ == "__main__":
    main()
