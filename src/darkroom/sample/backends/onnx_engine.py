"""ONNX Runtime: modules exported to ONNX with open axes, run on the CPU or a CUDA device.

Weights lie next to the graph in a file of their own, so they may pass ONNX's 2 GB.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from darkroom.errors import InputError, MissingExtra
from darkroom.sample.backends.exported import ExportEngine, Run
from darkroom.sample.backends.shells import Shell

FILE = "model.onnx"
OPSET = 18
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


class OnnxRuntime(ExportEngine):
    """ONNX Runtime: float32 on a CPU, float32 or float16 on CUDA."""

    name, extra, packages = "onnx", "onnx", ("onnxruntime", "onnx", "onnxscript")

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        computed = torch.float16 if device.type == "cuda" and dtype != torch.float32 else torch.float32
        super().__init__(device, computed)
        try:
            import onnxruntime
        except ImportError as error:
            raise MissingExtra("onnxruntime", "onnx") from error
        if device.type not in PROVIDERS:
            raise InputError(f"backend onnx on {device}", allowed="cpu, cuda")
        self.provider = PROVIDERS[device.type]
        if self.provider not in (there := onnxruntime.get_available_providers()):
            raise InputError(
                f"ONNX Runtime has no {self.provider}",
                allowed=", ".join(there),
                mend="install onnxruntime-gpu, or use device cpu",
            )
        if computed != dtype:
            precision = {torch.float16: "float16", torch.float32: "float32"}[computed]
            self.notes.append(
                f"ONNX Runtime lacks {str(dtype).removeprefix('torch.')} here: it computes in {precision}"
            )

    def versions(self) -> tuple[tuple[str, str], ...]:
        """Of what an export depends on; either package of ONNX Runtime will do."""
        import onnxruntime

        rest = [(name, _version(name)) for name in ("torch", "diffusers", "onnx", "onnxscript")]
        return (("onnxruntime", onnxruntime.__version__), *rest)

    def export(self, shell: Shell, folder: Path) -> None:
        """Write the graph, and the weights in a file next to it."""
        given = tuple(value.to(self.device) for value in shell.inputs.values())
        axes = [dict.fromkeys(shell.open_axes[name], torch.export.Dim.DYNAMIC) for name in shell.inputs]
        named = 3 if shell.part == "unet" else 1  # what follows is one argument, *more
        open_axes = (*axes[:named], *([tuple(axes[named:])] if axes[named:] else []))
        with torch.no_grad(), _silent():
            program = torch.onnx.export(
                shell.module,
                given,
                dynamo=True,
                opset_version=OPSET,
                input_names=list(shell.inputs),
                output_names=["out"],
                dynamic_shapes=open_axes,
                verbose=False,
            )
            assert program is not None
            program.save(str(folder / FILE), external_data=True)

    def load(self, folder: Path, shell: Shell) -> Run:
        """A session that reads and writes torch's own memory."""
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        session = ort.InferenceSession(str(folder / FILE), options, providers=[self.provider])
        return _Bound(session, self.device, shell)


class _Bound:
    """A session's call, with inputs and output bound to tensors where they lie."""

    def __init__(self, session: Any, device: torch.device, shell: Shell) -> None:
        self._session, self._device = session, device
        self._shell = shell
        self._output = session.get_outputs()[0].name

    def __call__(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        self._shell.check(inputs)
        binding = self._session.io_binding()
        place, index = self._device.type, self._device.index or 0
        for name, value in inputs.items():
            binding.bind_input(name, place, index, np.float32, tuple(value.shape), value.data_ptr())
        out = torch.empty(self._shell.out_shape(next(iter(inputs.values()))), device=self._device)
        binding.bind_output(self._output, place, index, np.float32, tuple(out.shape), out.data_ptr())
        if place == "cuda":
            torch.accelerator.current_stream(self._device).synchronize()
        self._session.run_with_iobinding(binding)
        return out


def _version(package: str) -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingExtra(package, "onnx") from error


@contextlib.contextmanager
def _silent() -> Any:
    """Without the exporter's chatter."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
