"""Compiled denoisers: a graph for each set of shapes, none anew for what came before, and a bound."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._filelock import FileLock

from darkroom import models
from darkroom.measure.pretraining import SwitchedStep
from darkroom.models import compiling
from darkroom.models.adapters.bank import Bank
from darkroom.models.compiling import Compiled, CompiledBlocks, compile_blocks, compile_whole
from darkroom.recipe.sections import AdapterSettings
from darkroom.sample import unet_call
from darkroom.serve.engine.batch import padded
from darkroom.train.tasks.lora import add_adapters

UNET = {"block_out_channels": [8, 16], "norm_num_groups": 4, "attention_head_dim": 2, "layers_per_block": 1}
DIT = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8}
XL = {
    "block_out_channels": [8, 16], "norm_num_groups": 4, "attention_head_dim": [2, 2],
    "cross_attention_dim": 64, "addition_time_embed_dim": 16, "projection_class_embeddings_input_dim": 112,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 1], "layers_per_block": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


class Small(torch.nn.Module):
    def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
        return x.mean(-1) + more["t"].sum()


def test_shapes_have_a_graph_each_and_past_the_bound_one_for_all(monkeypatch, caplog):
    monkeypatch.setattr(compiling, "MOST_SHAPES", 2)
    made = Compiled(Small(), backend="eager")

    def call(rows: int, length: int) -> None:
        x = torch.ones(rows, length)
        assert torch.equal(made(x, {"t": x}), Small()(x, {"t": x}))

    for rows in (2, 3, 2, 3):
        call(rows, 4)
    assert graphs() == 2
    assert "compile" not in caplog.text
    with caplog.at_level(logging.WARNING, "darkroom.models"):
        for rows in (5, 6, 7, 8):
            call(rows, 4)
    assert graphs() == 3  # one with the rows open
    assert caplog.text.count("share one graph of open sizes") == 1
    call(2, 4)
    assert graphs() == 3
    assert not counters["graph_break"]


def test_what_varied_is_open_and_nothing_else():
    seen = {(("0", (2, 4), torch.float32),), (("0", (3, 4), torch.float32),)}
    assert compiling._varying(seen) == {"0": {0}}
    assert compiling._varying({(("0", (2, 4), torch.float32),)}) == {"0": set()}


def banked(family: str, unet: dict) -> tuple[models.Model, Bank]:
    """A denoiser that takes adapters without compiling anew."""
    model = models.create(family, overrides={models.FAMILIES[family].denoiser: unet}, parts=("unet",))
    bank = Bank(model, slots=2, max_rank=2)
    bank.reserve([path for path in bank._known if path.endswith("to_q")])
    bank.seal()
    return model, bank


def added_of(model: models.Model, rows: int) -> dict[str, torch.Tensor]:
    """What SDXL reads besides a text."""
    return {"text_embeds": torch.zeros(rows, 16), "time_ids": torch.zeros(rows, 6)} if model.is_sdxl else {}


def rounds(family: str, unet: dict, compiled: type[Compiled | CompiledBlocks]) -> tuple[int, int]:
    """Graphs after each size was met once, and after all of them again, with other adapters."""
    model, bank = banked(family, unet)
    call = unet_call(compiled(model.unet, backend="eager"))
    found = []
    for slot in (1, 2):
        for rows, side, tokens in ((2, 8, 7), (2, 16, 7), (4, 8, 7), (2, 8, 14)):
            x, text = torch.zeros(rows, 4, side, side), torch.zeros(rows, tokens, 64)
            told = bank.lay_out([((slot, 0.5),)] * rows, "cpu") | added_of(model, rows)
            with torch.no_grad():
                call(x, torch.ones(rows), text, told)
        found.append(graphs())
    bank.detach()
    return found[0], found[1]


@pytest.mark.nightly
@pytest.mark.parametrize("compiled", [CompiledBlocks, Compiled])
@pytest.mark.parametrize(("family", "unet"), [("tiny", UNET), ("sdxl", XL), ("tiny-dit", DIT)])
def test_sizes_prompts_and_adapters_that_came_before_compile_nothing(family, unet, compiled):
    first, again = rounds(family, unet, compiled)
    assert first == again > 0
    assert not counters["graph_break"]


@pytest.mark.nightly
@pytest.mark.parametrize("compiled", [CompiledBlocks, Compiled])
@pytest.mark.parametrize(("family", "unet"), [("tiny", UNET), ("sdxl", XL), ("tiny-dit", DIT)])
def test_batches_within_their_padding_compile_nothing(family, unet, compiled):
    """As a server packs them: any number of rows, with adapters or not; beyond is new, the control."""
    model, bank = banked(family, unet)
    call = padded(unet_call(compiled(model.unet, backend="eager")), (2, 4))

    def step(rows: int, slot: int) -> int:
        adapters = bank.lay_out([((slot, 0.5),)] * rows, "cpu") if slot else {}
        given = torch.zeros(rows, 4, 8, 8), torch.ones(rows), torch.zeros(rows, 7, 64)
        with torch.no_grad():
            assert len(call(*given, adapters | added_of(model, rows))) == rows
        return graphs()

    before = [step(rows, slot) for rows in (2, 4) for slot in (0, 1)][-1]
    assert [step(rows, slot) for rows in (1, 3, 2, 4) for slot in (0, 1, 2)] == [before] * 12
    assert step(5, 1) > before
    assert not counters["graph_break"]
    bank.detach()


@pytest.mark.nightly
@pytest.mark.parametrize("compile_", [compile_blocks, compile_whole])
@pytest.mark.parametrize(("family", "unet"), [("tiny", UNET), ("tiny-dit", DIT)])
def test_nor_does_a_training_step(family, unet, compile_):
    """Batches, resolutions and lengths of texts; and a size that is new compiles something, the control."""
    switched = SwitchedStep(family, 32, "bf16", "cpu", unet)
    compile_(switched.unet, backend="eager")

    def step(rows: int, resolution: int, tokens: int) -> int:
        switched.resolution = resolution
        inputs = switched.inputs(rows)
        switched.step(0, {**inputs, "text": inputs["text"][:, :tokens].contiguous()})
        return graphs()

    sizes = ((2, 32, 77), (2, 64, 77), (4, 32, 77), (2, 32, 70))
    first = [step(*size) for size in sizes]
    assert [step(*size) for size in (*sizes, *sizes)] == [first[-1]] * 8
    assert step(3, 32, 77) > first[-1]
    assert not counters["graph_break"]


@pytest.mark.nightly
def test_blocks_past_the_bound_run_as_they_are(monkeypatch, caplog):
    """And the same model beside it, compiled by nobody, gives the same numbers."""
    monkeypatch.setattr(compiling, "MOST_SHAPES", 1)
    model = models.create("tiny", overrides={"unet": UNET}, parts=("unet",))
    inputs = [
        (torch.randn(rows, 4, 8, 8), torch.ones(rows), torch.randn(rows, 7, 64), {}) for rows in (1, 2, 3)
    ]
    with torch.no_grad(), caplog.at_level(logging.WARNING, "darkroom.models"):
        plain = [unet_call(model.unet)(*given) for given in inputs]
        call = unet_call(CompiledBlocks(model.unet, backend="eager"))
        first, *more = [call(*given) for given in inputs]
    after = graphs()
    for found, wanted in zip((first, *more), plain, strict=True):
        torch.testing.assert_close(found, wanted)
    assert caplog.text.count("further ones run uncompiled") == 1
    with torch.no_grad():
        call(*inputs[2])
    assert graphs() == after


@pytest.mark.nightly
def test_nor_does_a_step_of_an_adapter():
    """PEFT's layers stand inside of blocks that are compiled in one piece."""
    model = models.create("tiny", overrides={"unet": UNET}, parts=("unet",))
    add_adapters(model, AdapterSettings(rank=2, targets="all-linear"))
    compile_blocks(model.unet.train(), backend="eager")
    call, found = unet_call(model.unet), []
    for _ in range(2):
        for rows, side, tokens in ((2, 8, 7), (4, 8, 7), (2, 16, 7), (2, 8, 14)):
            x, text = torch.zeros(rows, 4, side, side), torch.zeros(rows, tokens, 64)
            call(x, torch.ones(rows), text, {}).sum().backward()
        found.append(graphs())
    assert found[0] == found[1] > 0
    assert not counters["graph_break"]


SINE = """
import torch
from darkroom.models.compiling import compile_whole
class Sine(torch.nn.Module):
    def forward(self, x):
        return (2 * x + 1).sin()
x = torch.linspace(0, 1, 64, requires_grad=True)
wanted, module = Sine()(x), Sine()
torch.set_grad_enabled(True)
if {mends}:
    compile_whole(module)
else:
    module.compile(dynamic=False)
made = module(x)
assert torch.allclose(made, wanted)
(found,) = torch.autograd.grad(made.sum(), x)
assert torch.allclose(found, 2 * (2 * x + 1).cos())
"""


def sine(folder: Path, *, mends: bool = True) -> subprocess.CompletedProcess[str]:
    """A process that compiles a module, forwards and backwards, with this folder as Inductor's cache."""
    return subprocess.run(
        [sys.executable, "-c", SINE.format(mends=mends)],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="libraries in ELF are Linux's")
def test_what_a_killed_compiler_left_half_written_is_compiled_anew(tmp_path):
    assert sine(tmp_path).returncode == 0
    libraries = list(tmp_path.glob("*/*.main.so"))
    assert len(libraries) == 2  # of each way one
    for cut in (1, libraries[0].stat().st_size - 100):  # bytes that are missing
        for library in libraries:
            library.write_bytes(library.read_bytes()[:-cut])
        mended = sine(tmp_path)
        assert mended.returncode == 0, mended.stderr
        assert mended.stderr.count("was left half written") == 2
    again = sine(tmp_path)
    assert (again.returncode, again.stderr.count("half written")) == (0, 0)
    for library in libraries:
        library.write_bytes(b"")
    assert "file too short" in sine(tmp_path, mends=False).stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="libraries in ELF are Linux's")
def test_whole_libraries_and_those_being_written_stay(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "ab").mkdir()
    (tmp_path / "locks").mkdir()
    whole, half, written = (tmp_path / "ab" / f"{name}.main.so" for name in ("whole", "half", "written"))
    whole.write_bytes(Path(torch._C.__file__).read_bytes())
    for library in (half, written):
        library.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with FileLock(str(tmp_path / "locks" / "written.lock")):
        compile_whole(Small(), backend="eager")
    assert [library.exists() for library in (whole, half, written)] == [True, False, True]
    compile_whole(Small(), backend="eager")
    assert not written.exists()
    assert whole.exists()
    assert caplog.text.count("was left half written") == 2
