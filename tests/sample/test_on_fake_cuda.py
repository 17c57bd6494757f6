"""Making pictures on a CUDA device without a card: nothing lies elsewhere, and no step is waited for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode

from darkroom import models, sample
from darkroom.hardware import accelerator
from darkroom.models.adapters.adapter import Adapter, Change, Factors, Layer
from darkroom.models.adapters.bank import Bank
from darkroom.models.adapters.read import adaptable
from darkroom.models.control import ControlNet, _controlnet
from darkroom.models.image_prompt import ImagePrompt, cross_attentions, installed
from darkroom.models.lllite import ControlNetLite, LiteLayer, _level
from darkroom.options import FLOW_SOLVER_NAMES, SOLVER_NAMES
from darkroom.sample.backends import open_backend
from darkroom.sample.choice import make_table
from darkroom.sample.control import ControlledUnet, RowControl
from darkroom.sample.denoise import Condition, KnownPart, Row, RunningBatch, Stage, unet_call
from darkroom.sample.optimisations import offload, precision
from darkroom.sample.optimisations.applied import VaeFront
from darkroom.serve.engine.batch import padded
from darkroom.serve.engine.loop import Engine
from darkroom.serve.engine.runner import shape_of
from darkroom.serve.engine.tickets import EngineJob
from darkroom.serve.metrics import Metrics
from darkroom.serve.request import PictureRequest
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
    with fake_cuda(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(accelerator, "free_bytes", lambda device: 2**34)
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


def first(unet: Any, rows: list[Row]) -> Watched:
    """A batch packed anew and its first step, as where a row has joined or left."""
    with Watched() as watched:
        RunningBatch(rows).advance(unet)
    return watched


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


def test_packing_rows_anew_is_not_waited_for(model, unet):
    """A server does so whenever a row joins or leaves, with steps on their way."""
    bank = Bank(model, slots=2, max_rank=4)
    try:
        bank.reserve(["unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"])
        tables = [make_table(name, DDIM, STEPS) for name in ("ddim", "euler_a", "unipc")]
        rows = rows_of(tables, adapters=((1, 1.0), (2, 0.5)), guidance_rescale=0.5)
        rows[1].positive = rows[1].negative = Condition(
            torch.zeros(14, 64, device=CUDA, dtype=torch.bfloat16)
        )
        assert first(unet, rows).waits == []
        batch = RunningBatch(rows)
        batch.advance(unet)
        batch.unpack()
        assert first(unet, [*rows[:2], *rows_of(tables[2:])]).waits == []
    finally:
        bank.detach()


def test_differences_as_large_as_layers_are_not_waited_for(model, unet):
    """Full and rotated adapters: which rows have them is known on the host."""
    bank = Bank(model, slots=2, max_rank=4)
    path = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
    try:
        bank.reserve([path])
        bank._held[path].bank_deltas[1] = torch.zeros(16, 16, device=CUDA, dtype=torch.bfloat16), None
        bank._rows["unet"].dense.add(1)
        table = make_table("ddim", DDIM, STEPS)
        rows = rows_of([table, table], adapters=((1, 1.0),))
        rows[1].adapters = ()
        plain = first(unet, rows_of([table, table]))
        watched = first(unet, rows)
        assert watched.waits == []
        assert watched.launched > plain.launched
        assert steady(unet, rows).waits == []
        for call in (unet, padded(unet, (4, 8))):  # texts of two lengths; batches that are filled up
            rows = rows_of([table, table], adapters=((1, 1.0),))
            rows[1].positive = rows[1].negative = Condition(
                torch.zeros(14, 64, device=CUDA, dtype=torch.bfloat16)
            )
            assert first(call, rows).waits == []
            assert steady(call, rows).waits == []
        lost = torch.ones(2, 1, dtype=torch.int64, device=CUDA)  # the control: nobody told the numbers
        with pytest.raises(DataDependentOutputException), bank.applied("unet", lost, lost.float()):
            pass
    finally:
        bank.detach()


def test_filled_batches_keep_an_adapter_s_matrices(model, unet):
    """From step to step: gathered anew they cost two kernels a layer, as in the first."""
    bank = Bank(model, slots=2, max_rank=4)
    try:
        bank.reserve([path for path in bank._known if path.startswith("unet.") and path.endswith("to_q")])
        table = make_table("ddim", DDIM, STEPS)
        rows = rows_of([table, table, table], adapters=((1, 1.0), (2, 0.5)))
        call = padded(unet, (8,))
        kept = steady(call, rows)
        assert kept.waits == []
        assert (
            kept.launched + 2 * len(bank.layers)
            <= first(call, rows_of([table] * 3, adapters=((1, 1.0),))).launched
        )
    finally:
        bank.detach()


def test_rows_repainted_composed_and_told_otherwise_later_are_not_waited_for(unet):
    def text() -> Condition:
        return Condition(torch.zeros(7, 64, device=CUDA, dtype=torch.bfloat16))

    table = make_table("euler_a", DDIM, STEPS)
    for after in (1, 2, 3):
        rows = rows_of([table, table, table, table])
        blank = torch.zeros(4, 8, 8, device=CUDA)
        rows[0].known = KnownPart(blank, blank, torch.ones(1, 8, 8, device=CUDA))
        rows[1].stages = (Stage(2, text(), text()), Stage(STEPS, text(), text()))
        rows[2].negative = text()
        rows[2].further, rows[2].weights = (text(), text()), (1.0, 0.5, -0.5)
        assert steady(unet, rows, after).waits == []


def control_net(model: models.Model) -> ControlNet:
    """A ControlNet of the model's shape, on the device."""
    import diffusers

    module = diffusers.ControlNetModel.from_unet(model.unet, conditioning_embedding_out_channels=(16, 32))
    torch.nn.Module.to(module, CUDA, torch.bfloat16)
    return _controlnet("net", module, "0")


def image_prompt(model: models.Model) -> ImagePrompt:
    """An IP-Adapter of the model's shape without its encoder, on the device."""
    wide = [(a.to_k.out_features, a.to_k.in_features) for _, a in cross_attentions(model.unet)]
    layers = [tuple(torch.zeros(*w, device=CUDA, dtype=torch.bfloat16) for _ in "kv") for w in wide]
    return ImagePrompt("prompt", SimpleNamespace(num_image_text_embeds=4), layers, None, "0")


def picture_adapter() -> ControlNet:
    """A T2I-Adapter of the model's widths, on the device."""
    import diffusers

    module = diffusers.T2IAdapter(3, [8, 16], num_res_blocks=1, downscale_factor=2)
    torch.nn.Module.to(module, CUDA, torch.bfloat16)
    return ControlNet("adapter", "t2i-adapter", module, "0")


def lite_net(model: models.Model) -> tuple[ControlNetLite, tuple[torch.Tensor]]:
    """An LLLite in front of one layer, and a picture that it encoded, on the device."""
    path = cross_attentions(model.unet)[0][0].removesuffix("attn2") + "attn1.to_q"
    level = _level(path, len(model.unet.config.block_out_channels) - 1)
    pixels, width = model.vae_factor * 2**level, model.unet.get_submodule(path).in_features

    def pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.zeros(*shape, device=CUDA, dtype=torch.bfloat16)
        return weight, weight.new_zeros(shape[0])

    layer = LiteLayer([pair(4, 3, pixels, pixels)], pair(4, width), pair(4, 8), pair(width, 4))
    picture = torch.zeros((8 // 2**level) ** 2, 4, device=CUDA, dtype=torch.bfloat16)
    return ControlNetLite("lite", {path: layer}, "0"), (picture,)


def test_nets_of_single_rows_are_not_waited_for(model):
    net, prompt, adapter = control_net(model), image_prompt(model), picture_adapter()
    lite, picture = lite_net(model)
    features = adapter.encode(torch.zeros(1, 3, 16, 16))
    assert not elsewhere(features, "cuda")
    hint = torch.zeros(8, 8, 8, device=CUDA, dtype=torch.bfloat16)
    tokens = torch.zeros(4, 64, device=CUDA, dtype=torch.bfloat16)
    controls = (
        RowControl(net, (hint,), 0.8, 0.0, 1.0, False),
        RowControl(prompt, (tokens, tokens), 0.5, 0.0, 1.0, False, torch.ones(16, 16, device=CUDA)),
    )
    with installed(model, [prompt, lite]):
        unet = ControlledUnet(unet_call(model.unet), {0: prompt, 1: lite})
        table = make_table("ddim", DDIM, STEPS)
        rows = rows_of([table, table, table])
        plain = steady(unet, rows_of([table, table, table]))
        rows[0].controls, rows[1].controls = controls, controls[1:]
        rows[2].controls = (
            RowControl(adapter, tuple(f[0] for f in features), 1.0, 0.0, 1.0, False),
            RowControl(lite, picture, 0.5, 0.0, 1.0, False),
        )
        watched = steady(unet, rows)
    assert watched.waits == []
    assert watched.launched > plain.launched


@pytest.mark.parametrize(
    "names",
    [
        "none",
        "auto",
        "feature_cache:3",
        pytest.param("channels_last,fused_qkv,lean", marks=pytest.mark.nightly),
        pytest.param("attention_slicing:1", marks=pytest.mark.nightly),
        pytest.param("guidance_interval,vae_slicing,vae_tiling:64", marks=pytest.mark.nightly),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("int8", "int8:weights", "fp8:weights")),
        pytest.param("offload_model", marks=pytest.mark.nightly),
    ],
)
def test_no_step_with_an_optimisation_is_waited_for(model, names, monkeypatch):
    """Rows at several steps, so that kept features are of some of them."""
    monkeypatch.setattr(precision, "WORTH_QUANTISING", 16 * 16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    backend = open_backend("torch", model, optimise=names)
    table = make_table("ddim", DDIM, 2 * STEPS)
    older, younger = rows_of([table, table]), rows_of([table, table])
    batch = RunningBatch(older)
    batch.advance(backend.unet)
    batch.unpack()
    rows = [*older, *younger]
    found = [steady(backend.unet, rows, after) for after in (1, 2, 3)]
    assert [watched.waits for watched in found] == [[]] * 3
    assert not elsewhere([row.latents_CHW for row in rows], "cuda")


class Stream:
    """A second stream where there is none: what is asked of it is noted."""

    device = CUDA

    def __init__(self) -> None:
        self.waited = 0

    def record_event(self) -> None: ...
    def wait_event(self, event: None) -> None:
        self.waited += 1

    def wait_stream(self, other: Stream) -> None:
        self.waited += 1

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def waiting(cuda):
    """A model in main memory, as it is opened to be offloaded."""
    made = models.create("tiny", overrides={"unet": UNET}, parts=("unet", "vae", "text_encoder", "tokenizer"))
    for module in made.modules.values():
        torch.nn.Module.to(module, torch.bfloat16)
    return made


@pytest.mark.parametrize("name", ["offload_sequential", "offload_group"])
def test_no_step_of_a_model_in_main_memory_is_waited_for(waiting, unet, name, monkeypatch):
    """Nothing is launched but the plain step's kernels, and copies of the large weights."""
    monkeypatch.setattr(offload, "SMALL_BYTES", 2**9)
    computing = Stream()
    monkeypatch.setattr(accelerator, "new_stream", lambda device: Stream())
    monkeypatch.setattr(accelerator, "current_stream", lambda device: computing)
    backend = open_backend("torch", waiting, optimise=name, device=CUDA)
    large = [p for p in waiting.unet.parameters() if p.nbytes >= offload.SMALL_BYTES]
    assert len(large) > 50
    table = make_table("ddim", DDIM, STEPS)
    watched = steady(backend.unet, rows_of([table, table]))
    assert watched.waits == []
    copies = watched.kernels["aten::copy_"]
    assert copies == (
        len(large) if name == "offload_group" else 0
    )  # the other way makes none of them by itself
    assert watched.launched - copies == GOLDEN["denoise"]["two rows, one guided"]
    assert (computing.waited > 0) == (name == "offload_group")
    at_home = [p for p in backend.model.unet.parameters() if p.device.type == "cpu"]
    assert len(at_home) == len(large)  # put away after the step
    with Watched() as watched:
        row = sample.Generation(
            waiting, ["a red circle"], sample.GenerateSettings(steps=3, size=(32, 32)), backend
        ).row(0)
        backend.encode(torch.zeros(1, 3, 16, 16, device=CUDA))
    assert watched.waits == []
    assert not elsewhere([row.latents_CHW, row.positive.text_LD], "cuda")


@pytest.mark.parametrize("name", ["offload_sequential", "offload_group", "offload_model"])
def test_adapters_of_a_model_in_main_memory_are_on_the_card(waiting, name, monkeypatch):
    """They are loaded before the model is offloaded: their matrices lay where the weights do."""
    monkeypatch.setattr(offload, "SMALL_BYTES", 2**9)
    monkeypatch.setattr(accelerator, "new_stream", lambda device: Stream())
    monkeypatch.setattr(accelerator, "current_stream", lambda device: Stream())
    monkeypatch.setattr(FakeTensorMode, "__deepcopy__", lambda self, memo: self, raising=False)
    bank = Bank(waiting, slots=2, max_rank=4)
    path = next(path for path in bank._known if path.startswith("unet.") and path.endswith("to_q"))
    weight = bank._known[path].weight
    bank.reserve([path])
    difference = Change(delta=torch.zeros_like(weight))
    bank._put(bank._held[path], 1, difference)
    for rows in bank._rows.values():
        rows.dense.add(1)
    backend = open_backend("torch", waiting, optimise=name, device=CUDA)
    table = make_table("ddim", DDIM, STEPS)
    assert steady(backend.unet, rows_of([table, table], adapters=((1, 1.0),))).waits == []


class Finite(TorchFunctionMode):
    """Numbers that are looked at before an adapter is taken: fake ones pass."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func is torch.Tensor.__bool__ or func(*args, **(kwargs or {}))


def adapter_of_every_form(model: models.Model) -> Adapter:
    """Layers of low rank, with magnitudes, and with a difference as large as the layer."""
    weights = {path: layer.weight for path, layer in adaptable(model).items() if path.endswith("to_q")}
    layers: dict[str, Any] = {}
    for i, (path, weight) in enumerate(weights.items()):
        outputs, inputs = weight.shape
        down, up = torch.zeros(4, inputs), torch.zeros(outputs, 4)
        low_rank = Layer(down, up, 1.0, magnitude=torch.ones(outputs, 1) if i % 3 == 1 else None)
        whole = Factors("full", {"diff": torch.zeros(outputs, inputs)})
        layers[path] = whole if i % 3 == 2 else low_rank
    return Adapter("mine", layers)


@pytest.mark.parametrize("name", ["offload_sequential", "offload_group", "offload_model"])
def test_adapters_that_arrive_while_a_model_is_served_are_put_on_the_card(waiting, name, monkeypatch):
    """The bank is made of the offloaded model, as a server does, and loaded into between steps: its weights
    wait in main memory, and what adapters add to their products lies on the card."""
    monkeypatch.setattr(offload, "SMALL_BYTES", 2**7)
    monkeypatch.setattr(accelerator, "new_stream", lambda device: Stream())
    monkeypatch.setattr(accelerator, "current_stream", lambda device: Stream())
    backend = open_backend("torch", waiting, optimise=name, device=CUDA)
    made = backend.model
    bank, adapter = Bank(made, slots=2, max_rank=4), adapter_of_every_form(made)
    at_home = [bank._known[path].weight for path in adapter.layers]
    assert {weight.device.type for weight in at_home} == {"cpu"}
    table = make_table("ddim", DDIM, STEPS)
    rows = rows_of([table, table], adapters=((1, 1.0), (2, 0.5)))
    with Finite():
        for slot in (1, 2):
            bank.load(slot, adapter)
            watched = steady(backend.unet, rows)
            assert watched.waits == []
    assert watched.launched > steady(backend.unet, rows_of([table, table])).launched
    waiting_still = [accelerator.weight_of(bank._known[path]) for path in adapter.layers]
    assert {weight.device.type for weight in waiting_still} == {"cpu"}


@pytest.mark.nightly
def test_products_in_fp8_are_not_waited_for(model, monkeypatch):
    """torchao asks the build for a card with fp8 units; the products' shapes are checked as on one."""
    from torchao.quantization import quant_api

    monkeypatch.setattr(precision, "WORTH_QUANTISING", 16 * 16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda *_: None)
    backend = open_backend("torch", model, optimise="fp8")
    table = make_table("ddim", DDIM, STEPS)
    watched = steady(backend.unet, rows_of([table, table]))
    assert watched.waits == []
    assert watched.launched == GOLDEN["fp8"]["two rows, one guided"]
    assert watched.kernels["aten::_scaled_mm"] == GOLDEN["fp8"]["products"]
    assert steady(unet_call(model.unet), rows_of([table])).kernels["aten::_scaled_mm"] == 0  # the control


def rows_in_float32(tables: list[Any]) -> list[Row]:
    """The same rows with texts in float32."""
    rows = rows_of(tables)
    for row in rows:
        row.positive = Condition(row.positive.text_LD.float())
        row.negative = row.negative and Condition(row.negative.text_LD.float())
    return rows


@pytest.mark.parametrize("name", ["tf32", "autocast:bf16", "autocast:fp16"])
def test_a_float32_model_in_other_arithmetic_is_not_waited_for(waiting, name, monkeypatch):
    """TF32 is on within the call alone; autocast's products are in the type asked for."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    for module in waiting.modules.values():
        torch.nn.Module.to(module, CUDA, torch.float32)
    seen = []
    waiting.unet.conv_out.register_forward_hook(
        lambda module, given, out: seen.append((out.dtype, torch.backends.cuda.matmul.allow_tf32))
    )
    backend = open_backend("torch", waiting, optimise=name)
    table = make_table("ddim", DDIM, STEPS)
    watched = steady(backend.unet, rows_in_float32([table, table]))
    assert watched.waits == []
    dtype = {"tf32": torch.float32, "autocast:bf16": torch.bfloat16, "autocast:fp16": torch.float16}[name]
    assert set(seen) == {(dtype, name == "tf32")}
    assert not torch.backends.cuda.matmul.allow_tf32
    # autocast's own casts lie below what is watched here: the kernels seen are the plain step's
    assert watched.launched == GOLDEN["denoise"]["two rows, one guided"]


@pytest.mark.parametrize("tile", [None, 16])
def test_a_picture_is_decoded_on_the_device(model, tile):
    front = VaeFront(model.vae, CUDA, tile)
    with Watched() as watched, torch.no_grad():
        pixels = front.decode(torch.zeros(2, 4, 16, 16, device=CUDA, dtype=torch.bfloat16)).sample
    assert tuple(pixels.shape[:2]) == (2, 3)
    assert not elsewhere([pixels], "cuda")
    assert watched.waits == []
    assert watched.launched > 50


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("tiny", torch.float16),
        ("tiny-dit", torch.bfloat16),
        ("sdxl", torch.bfloat16),
        pytest.param("sd15", torch.float16, marks=pytest.mark.nightly),
        pytest.param("sd2-v", torch.bfloat16, marks=pytest.mark.nightly),
        pytest.param("sdxl", torch.float16, marks=pytest.mark.nightly),
        pytest.param("dit", torch.bfloat16, marks=pytest.mark.nightly),
    ],
)
def test_a_family_s_whole_way_is_not_waited_for(cuda, family, dtype):
    """At full size: a picture is encoded, rows of several solvers go from their first step to their last,
    and what they made is decoded."""
    made = models.create(family, parts=("unet", "vae"))
    for module in made.modules.values():
        torch.nn.Module.to(module, CUDA, dtype)
    backend = open_backend("torch", made, optimise="auto")
    width, side = made.unet.config.cross_attention_dim, 4 * made.size_unit // made.vae_factor
    added = {}
    if family == "sdxl":
        added = {
            "text_embeds": torch.zeros(1280, device=CUDA, dtype=dtype),
            "time_ids": torch.zeros(6, device=CUDA),
        }
    text = Condition(torch.zeros(77, width, device=CUDA, dtype=dtype), added)
    solvers = FLOW_SOLVER_NAMES[:1] * 2 if "dit" in family else ("ddim", "euler_a", "dpmpp_2m")
    config = FLOW if "dit" in family else DDIM
    rows = [
        Row(
            make_table(name, config, STEPS), torch.zeros(4, side, side, device=CUDA), text, text,
            guidance=5.0, generator=torch.Generator().manual_seed(i),
        )
        for i, name in enumerate(solvers)
    ]  # fmt: skip
    pixels = torch.zeros(1, 3, side * made.vae_factor, side * made.vae_factor, device=CUDA)
    front = VaeFront(made.vae, CUDA)
    with Watched() as watched, torch.no_grad():
        mean, spread = backend.encode(pixels)
        batch = RunningBatch(rows)
        for _ in range(STEPS):
            latents, _ = batch.advance(backend.unet)
        batch.unpack()
        drawn = front.decode(latents.to(dtype)).sample
    assert all(row.done for row in rows)
    assert watched.waits == []
    assert not elsewhere([mean, spread, latents, drawn, *(row.latents_CHW for row in rows)], "cuda")
    assert tuple(drawn.shape) == (len(rows), 3, *pixels.shape[2:])


class Ends:
    """Notes how works end."""

    def __init__(self) -> None:
        self.over: dict[str, BaseException | None] = {}

    def began(self, work: EngineJob) -> None: ...
    def drawn(self, work: EngineJob, index: int) -> None: ...
    def made(self, work: EngineJob) -> None:
        self.over[work.uid] = None

    def failed(self, work: EngineJob, error: BaseException) -> None:
        self.over[work.uid] = error


def test_a_server_s_rounds_wait_for_nothing_but_finished_pictures(model):
    """Rows of two sizes join, leave, are cancelled; the engine's own thread would do the same rounds."""
    backend = open_backend("torch", model, optimise="auto")
    seen = []

    def decode(latents_BCHW):
        """What is drawn is looked at by nobody: fake numbers make no picture."""
        assert not elsewhere([latents_BCHW], "cuda")
        seen.append(len(latents_BCHW))
        return [Image.new("RGB", (16, 16)) for _ in latents_BCHW]

    backend.decode = decode
    ends = Ends()
    engine = Engine(backend.model or model, backend, capacity=4, metrics=Metrics())
    works = []
    with Watched() as watched:
        for i in range(8):
            request = PictureRequest(
                prompt="a red circle", seed=i, steps=2 + i % 3, width=16 * (1 + i % 2), height=16,
                solver=("ddim", "euler_a", "dpmpp_2m")[i % 3], guidance=(1.0, 5.0)[i % 2],
            )  # fmt: skip
            works.append(EngineJob(str(i), "key", request, shape_of(model, request), ends))
            engine.submit(works[-1])
            engine._round()
        engine.drop(works[-1])
        rounds = 0
        while len(ends.over) < 7:
            engine._round()
            rounds += 1
            assert rounds < 100
    assert ends.over == dict.fromkeys(map(str, range(7)))
    assert sum(seen) == 7
    in_steps = [wait for wait in watched.waits if "denoise.py" in wait or "engine/batch.py" in wait]
    assert in_steps == []
    assert len(watched.waits) == 7  # each finished picture's latents are copied to the host
    assert engine.trouble is None


def test_a_prompt_s_states_are_made_on_the_device(model):
    settings = sample.GenerateSettings(steps=3, size=(32, 32))
    backend = open_backend("torch", model, optimise="none")
    with Watched() as watched:
        row = sample.Generation(model, ["a red circle"], settings, backend).row(0)
    assert watched.waits == []
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

    def pages(x: Any, t: Any, text: Any, added: Any) -> torch.Tensor:
        return unet(x, t, text, added) + torch.zeros(1).to(CUDA, non_blocking=True)

    def sends(x: Any, t: Any, text: Any, added: Any) -> torch.Tensor:
        return unet(x, t, text, added) + accelerator.to_device(torch.zeros(1), CUDA)

    for spoilt in (copies, pages):
        [wait] = steady(spoilt, rows_of([table])).waits
        assert "cpu to cuda" in wait
    assert steady(sends, rows_of([table])).waits == []
    with pytest.raises(DataDependentOutputException):
        steady(reads, rows_of([table]))
    with pytest.raises(RuntimeError, match="cuda:0(,| and) cpu"):
        steady(mixes, rows_of([table]))
