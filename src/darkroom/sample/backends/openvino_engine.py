"""OpenVINO: modules converted from torch, compiled for each shape they meet, on the CPU.

One SD 1.5 U-Net call at 512 px in bfloat16 takes 5 % longer compiled for any shape than for its own. Each
compiled shape holds the weights laid out anew, so only the first shapes are. Nothing is reported to
OpenVINO's makers.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from darkroom.errors import MissingExtra
from darkroom.hardware.system import bf16_instructions
from darkroom.options import check_pair
from darkroom.sample.backends import int8
from darkroom.sample.backends.exported import ExportEngine, Run
from darkroom.sample.backends.shells import Shell

FILE = "model.xml"
KEPT_BYTES, MOST_KEPT = 4 * 10**9, 16
"""Shapes are compiled for while their weights come to this many bytes; two always are."""


def openvino() -> Any:
    """The package, with its reports of use cut off: `convert_model` sends them unless forbidden.

    Without the package `openvino_telemetry` OpenVINO takes a stand-in that sends nothing.
    """
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    try:
        import openvino as package
        from openvino.tools.ovc import convert_impl, telemetry_stub, telemetry_utils
    except ImportError as error:
        raise MissingExtra("openvino", "openvino") from error
    convert_impl.tm = telemetry_utils.tm = telemetry_stub  # for modules that imported it before us
    return package


class OpenVino(ExportEngine):
    """OpenVINO on the CPU, in float32 or bfloat16."""

    name, extra, packages = "openvino", "openvino", ("openvino",)
    quantises = True

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        check_pair("openvino", "bf16" if dtype == torch.bfloat16 else "float32", device.type)
        self._ov = openvino()
        self._core = self._ov.Core()
        can = self._core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        self._has_bf16 = "BF16" in can and bf16_instructions() is not None
        if dtype == torch.bfloat16 and "BF16" not in can:
            self.precision = "float32"
            self.notes.append("this CPU has no bfloat16: openvino computes in float32 with bfloat16 weights")

    def export(self, shell: Shell, folder: Path) -> None:
        """Trace the module and write OpenVINO's own files, its open axes left open."""
        ov = self._ov
        examples = tuple(shell.inputs.values())
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tracer's, of shapes it takes for constants
            traced = torch.jit.trace(shell.module, examples, check_trace=False, strict=False)  # type: ignore[no-untyped-call]
            converted = ov.convert_model(
                traced,
                example_input=examples,
                input=[
                    (
                        ov.PartialShape(
                            [-1 if i in shell.open_axes[name] else n for i, n in enumerate(value.shape)]
                        ),
                        ov.Type.f32,
                    )
                    for name, value in shell.inputs.items()
                ],
            )
        for port, name in zip(converted.inputs, shell.inputs, strict=True):
            port.get_tensor().set_names({name})
        ov.save_model(converted, str(folder / FILE), compress_to_fp16=False)

    def quantise(
        self, folder: Path, target: Path, samples: Sequence[dict[str, torch.Tensor]], kept: Sequence[str]
    ) -> None:
        """Write the 8-bit form of a folder's module."""
        smaller = int8.quantise(
            self._core.read_model(str(folder / FILE)), samples, kept, int8.Calibration().smooth
        )
        self._ov.save_model(smaller, str(target / FILE), compress_to_fp16=False)

    def load(self, folder: Path, shell: Shell) -> Run:
        """A run that compiles each shape when it comes."""
        return _CompiledShapes(self, folder / FILE, shell)

    def compile(self, file: Path, shapes: dict[str, list[int]]) -> Any:
        """An inference request for inputs of fixed shapes; of any, where none are given.

        What a model in 8 bits leaves in float is computed in bfloat16 where the processor has it.
        """
        ov = self._ov
        model = self._core.read_model(str(file))
        in_8_bits = any(operation.get_type_name() == "FakeQuantize" for operation in model.get_ops())
        in_bf16 = self._has_bf16 if in_8_bits else self.precision == "bfloat16"
        if shapes:
            model.reshape({name: ov.PartialShape(shape) for name, shape in shapes.items()})
        config = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "bf16" if in_bf16 else "f32",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        return self._core.compile_model(model, "CPU", config).create_infer_request()

    def tensor(self, value: torch.Tensor) -> Any:
        """An OpenVINO tensor around a torch tensor's own memory."""
        return self._ov.Tensor(value.numpy(), shared_memory=True)


class _CompiledShapes:
    """A converted module, compiled for each of the first shapes; then once more for all others."""

    def __init__(self, engine: OpenVino, file: Path, shell: Shell) -> None:
        self._engine, self._file = engine, file
        self._shell = shell
        size = sum(p.numel() for p in shell.module.parameters()) * engine.dtype.itemsize
        self._most = max(2, min(MOST_KEPT, KEPT_BYTES // max(size, 1)))
        self._requests: dict[tuple[torch.Size, ...] | None, Any] = {}
        self._alone = threading.Lock()  # a request computes for one thread at a time

    def __call__(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        self._shell.check(inputs)
        out = torch.empty(self._shell.out_shape(next(iter(inputs.values()))))
        with self._alone:
            request = self._request(inputs)
            for name, value in inputs.items():
                request.set_tensor(name, self._engine.tensor(value))
            request.set_output_tensor(self._engine.tensor(out))
            request.infer()
        return out

    def _request(self, inputs: dict[str, torch.Tensor]) -> Any:
        shapes = tuple(value.shape for value in inputs.values())
        key = shapes if shapes in self._requests or len(self._requests) < self._most else None
        if key not in self._requests:
            fixed = {} if key is None else {name: list(value.shape) for name, value in inputs.items()}
            self._requests[key] = self._engine.compile(self._file, fixed)
        return self._requests[key]
