"""A part of a model opened without its library's loader, where its files hold exactly its weights.

The loaders import quantizers, adapters and sharding to look for what is not there. What is in any way
unusual (other names, shapes or types, legacy layouts, missing or additional tensors) is left to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from darkroom.models.checked import read_json

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
POSITIONS = "position_ids"
"""What transformers once stored with a text encoder's weights and now computes itself."""


class _NoStart(TorchFunctionMode):
    """Leaves out the random start of weights that are read, or that have no values at all."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        if func is torch.arange and str(kwargs.get("device")) == "meta":
            # There torch counts in Python, for which it imports sympy.
            return func(*args, **(kwargs | {"device": "cpu"})).to("meta")
        return func(*args, **kwargs)


@contextmanager
def without_start(device: str | torch.device | None = None) -> Iterator[None]:
    """Modules built in here have the weights that memory happens to hold; of this thread only."""
    place = torch.device(device) if device is not None else None
    with _NoStart():
        if place is None:
            yield
        else:
            with place:
                yield


def opened_exactly(cls: Any, folder: Path, files: Sequence[Path], dtype: torch.dtype) -> Any | None:
    """The module of a folder in `dtype`, or None where its files are not exactly its weights."""
    from safetensors.torch import load_file

    module = _built(cls, folder, dtype)
    expected = module.state_dict()
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        weights |= load_file(str(file))
    weights = {name: value for name, value in weights.items() if not name.endswith(POSITIONS)}
    if weights.keys() != expected.keys():
        return None
    if any(weights[name].shape != value.shape for name, value in expected.items()):
        return None
    if not all(value.dtype in FLOATS for value in weights.values()):
        return None
    module.load_state_dict({name: value.to(dtype) for name, value in weights.items()}, assign=True)
    if any(value.is_meta for value in (*module.parameters(), *module.buffers())):
        return None
    return module.eval()


def _built(cls: Any, folder: Path, dtype: torch.dtype) -> Any:
    """The module of a folder's configuration, its weights unset."""
    if cls.__module__.startswith("transformers"):
        config = cls.config_class.from_pretrained(str(folder), local_files_only=True)
        config.dtype = dtype
        with without_start():  # not on the meta device: it counts its positions
            module = cls(config)
        module.config.name_or_path = module.name_or_path = str(folder)
        return module
    with without_start("meta"):
        module = cls.from_config(read_json(folder / "config.json"))
    module.register_to_config(_name_or_path=str(folder))
    return module
