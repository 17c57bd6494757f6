"""Making pictures on a CUDA device without a card: nothing lies elsewhere, and no step is waited for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from darkroom import models, sample
from darkroom.models.adapters.bank import Bank
from darkroom.options import FLOW_SOLVER_NAMES, SOLVER_NAMES
from darkroom.sample.backends import open_backend, unet_call
from darkroom.sample.choice import make_table
from darkroom.sample.denoise import Condition, Row, RunningBatch
from darkroom.serve.engine.batch import padded
from fake_card import Watched, elsewhere, fake_cuda

CUDA = torch.device("cuda", 0)
UNET = {"block_out_channels": [8, 16], "norm_num_groups": 4, "attention_head_dim": 2, "layers_per_block": 1}
DDIM = {
    "_class_name": "DDIMScheduler",
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
}
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000}
STEPS = 6
GOLDEN = json.loads((Path(__file__).parent / "kernels.json").read_text())
"""Kernels of a step of a small U-Net. A change that launches more has to say why."""


@pytest.fixture(scope="module")
def cuda():
    with fake_cuda():
        yield


@pytest.fixture(scope="module")
def model(cuda):
    made = models.create("tiny", overrides={"unet": UNET}, parts=("unet", "vae", "text_encoder", "tokenizer"))
    for module in made.modules.values():
        torch.nn.Module.to(module, CUDA, torch.bfloat16)
    return made


def rows_of(tables: list[Any], tokens: int = 7, **more: Any) -> list[Row]:
    """Rows on the device, every other guided."""
    width = 64

    def told() -> Condition:
        return Condition(torch.zeros(tokens, width, device=CUDA, dtype=torch.bfloat16))

    return [
        Row(
            table, torch.zeros(4, 8, 8, device=CUDA), told(), told() if i % 2 else None, guidance=5.0,
            generator=torch.Generator().manual_seed(i), **more,
        )
        for i, table in enumerate(tables)
    ]  # fmt: skip


def steady(unet: Any, rows: list[Row], after: int = 2) -> Watched:
    """One step of a batch that has taken some, watched."""
    batch = RunningBatch(rows)
    for _ in range(after):
        batch.advance(unet)
    with Watched() as watched:
        latents, x0 = batch.advance(unet)
    assert not elsewhere([latents, x0], "cuda")
    return watched


@pytest.fixture(scope="module")
def unet(model):
    return unet_call(model.unet)


@pytest.mark.parametrize("solver", [*SOLVER_NAMES, *FLOW_SOLVER_NAMES])
def test_a_step_of_a_solver_is_not_waited_for(unet, solver):
    table = make_table(solver, FLOW if solver in FLOW_SOLVER_NAMES else DDIM, STEPS)
    assert steady(unet, rows_of([table, table])).waits == []


def test_rows_of_several_solvers_and_texts_share_a_step(unet):
    tables = [make_table(name, DDIM, STEPS) for name in ("ddim", "euler_a", "dpmpp_2m_sde", "unipc")]
    rows = rows_of(tables, guidance_rescale=0.5)
    rows[1].positive = rows[1].negative = Condition(torch.zeros(14, 64, device=CUDA, dtype=torch.bfloat16))
    assert steady(unet, rows).waits == []
    assert steady(padded(unet, (1, 2, 4, 8)), rows_of(tables)).waits == []


def test_a_step_launches_as_many_kernels_as_it_did(unet):
    table = make_table("ddim", DDIM, STEPS)
    found = {
        "one row": steady(unet, rows_of([table])).launched,
        "two rows, one guided": steady(unet, rows_of([table, table])).launched,
        "half of them outside the interval": steady(
            unet, rows_of([table, table], guidance_interval=(0.9, 1.0))
        ).launched,
    }
    assert found == GOLDEN["denoise"]
    assert found["one row"] < found["two rows, one guided"]


def test_adapters_of_a_bank_cost_no_wait(model, unet):
    bank = Bank(model, slots=2, max_rank=4)
    try:
        bank.reserve([path for path in bank._known if path.startswith("unet.") and path.endswith("to_q")])
        table = make_table("ddim", DDIM, STEPS)
        plain = steady(unet, rows_of([table, table]))
        watched = steady(unet, rows_of([table, table], adapters=((1, 1.0), (2, 0.5))))
        assert watched.waits == []
        assert watched.launched > plain.launched
    finally:
        bank.detach()


def test_a_prompt_s_states_are_made_on_the_device(model):
    settings = sample.GenerateSettings(steps=3, size=(32, 32))
    job = sample.Generation(model, ["a red circle"], settings, open_backend("torch", model, optimise="none"))
    row = job.row(0)
    assert row.negative is not None
    assert not elsewhere([row.latents_CHW, row.positive.text_LD, row.negative.text_LD], "cuda")


def test_what_reads_back_is_seen_and_mixed_devices_are_refused(unet):
    """The control: a step that asks for a number, one that copies, and one that mixes devices."""
    table = make_table("ddim", DDIM, STEPS)

    def copies(x: Any, t: Any, text: Any, added: Any) -> torch.Tensor:
        return unet(x, t, text, added) + torch.zeros(1).to(CUDA)

    def reads(x: Any, t: Any, text: Any, added: Any) -> torch.Tensor:
        return unet(x, t, text, added) if x.sum() > 0 else x

    def mixes(x: Any, t: Any, text: Any, added: Any) -> torch.Tensor:
        return unet(x, t, text, added) + torch.zeros(4, 8, 8)

    [wait] = steady(copies, rows_of([table])).waits
    assert "cpu to cuda" in wait
    with pytest.raises(DataDependentOutputException):
        steady(reads, rows_of([table]))
    with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
        steady(mixes, rows_of([table]))
