"""The adapter bank: rows with other adapters in one batch, each as if the adapter were merged."""

from __future__ import annotations

import copy

import pytest
import torch

from darkroom import models
from darkroom.errors import ModelError
from darkroom.models.adapters.adapter import Adapter, Factors, Layer, low_rank_of, names_of
from darkroom.models.adapters.bank import SLOTS, WEIGHTS, Bank, Choice, rows_of, take_rows
from darkroom.models.adapters.read import adaptable, merge, merge_all
from darkroom.models.model import Model
from darkroom.sample.optimisations.table import optimise
from models.made_adapters import everywhere, made

CLOSE, APART = 1e-5, 1e-2
X = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(5))
TEXT = torch.randn(4, 77, 64, generator=torch.Generator().manual_seed(6))
TIMES = torch.tensor([1, 500, 900, 20])


@pytest.fixture(scope="module")
def tiny() -> Model:
    return models.create("tiny", seed=1)


@pytest.fixture
def model(tiny: Model) -> Model:
    return copy.deepcopy(tiny)


@torch.no_grad()
def run(model: Model, **more: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model.unet(X, TIMES, encoder_hidden_states=TEXT, return_dict=False, **more)[0]  # type: ignore[misc]
    return out


def run_rows(bank: Bank, rows: list[Choice]) -> torch.Tensor:
    told = bank.lay_out(rows, "cpu")
    with bank.applied("unet", told.get(SLOTS), told.get(WEIGHTS)):
        return run(bank.model)


def merged(model: Model, *pairs: tuple[Adapter, float]) -> Model:
    changed = copy.deepcopy(model)
    for adapter, weight in pairs:
        merge(changed, adapter, weight)
    return changed


def test_rows_with_other_adapters_equal_merged_models(tiny: Model, model: Model) -> None:
    """Linear layers and convolutions, ranks 4 and 8, a blend, a negative weight, and a row without any."""
    one, two = made(tiny, 1, where=everywhere), made(tiny, 2, rank=8, scale=0.5)
    bank = Bank(model, slots=3, max_rank=8)
    bank.load(1, one)
    bank.load(3, two)
    rows: list[Choice] = [[(1, 1.0)], [(3, 0.7)], [], [(1, 0.5), (3, -1.0)]]
    out, plain = run_rows(bank, rows), run(tiny)
    for i, pairs in enumerate([[(one, 1.0)], [(two, 0.7)], [], [(one, 0.5), (two, -1.0)]]):
        expected = run(merged(tiny, *pairs))[i]
        assert (out[i] - expected).abs().max() < CLOSE
        assert not pairs or (plain[i] - expected).abs().max() > APART


def factors(kind: str, weight: torch.Tensor, draw: torch.Generator) -> Layer | Factors:
    """One layer of a kind for a weight."""
    outputs, inputs = weight.shape[0], weight[0].numel()

    def random(*shape: int, size: float = 0.3) -> torch.Tensor:
        return size * torch.randn(*shape, generator=draw)

    if kind.startswith("dora"):
        down, up = random(4, *weight.shape[1:]), random(outputs, 4, *[1] * (weight.ndim - 2))
        many = (outputs,) if kind == "dora" else (1, weight.shape[1])
        return Layer(down, up, 0.5, 0.5 + torch.rand(many, generator=draw))
    if kind == "loha":
        sides = {"hada_w1_a": (outputs, 2), "hada_w1_b": (2, inputs), "hada_w2_a": (outputs, 2)}
        return Factors("loha", {n: random(*s) for n, s in {**sides, "hada_w2_b": (2, inputs)}.items()}, 0.5)
    if kind == "lokr":
        return Factors("lokr", {"lokr_w1": random(8, 8), "lokr_w2": random(outputs // 8, inputs // 8)})
    if kind == "full":
        return Factors("full", {"diff": random(*weight.shape, size=0.05)})
    if kind == "oft":
        return Factors("oft", {"oft_blocks": random(outputs // 8, 8, 8)})
    if kind == "boft":
        return Factors("boft", {"oft_blocks": random(3, outputs // 8, 8, 8)})
    on_input = kind == "ia3 on input"
    told = {"ia3": random(weight.shape[1] if on_input else outputs), "on_input": torch.tensor(on_input)}
    return Factors("ia3", told)


KINDS = ("dora", "dora by inputs", "loha", "lokr", "full", "oft", "boft", "ia3", "ia3 on input")


def of_kind(model: Model, kind: str, seed: int) -> Adapter:
    draw = torch.Generator().manual_seed(seed)
    ends = ("attn1.to_q", "attn2.to_out.0", "resnets.0.conv1", "time_emb_proj", "proj_in")
    layers = {
        path: factors(kind, layer.weight, draw)
        for path, layer in adaptable(model).items()
        if path.startswith("unet.") and path.endswith(ends) and layer.weight.shape[1] % 8 == 0
    }
    return Adapter(kind, layers, kind=kind.partition(" ")[0])


def test_rows_of_every_kind_in_one_call_equal_merged_models(tiny: Model, model: Model) -> None:
    lora = made(tiny, 1, where=everywhere)
    adapters = {1: lora} | {2 + i: of_kind(tiny, kind, i) for i, kind in enumerate(KINDS)}
    bank = Bank(model, slots=len(adapters), max_rank=4)
    for slot, adapter in adapters.items():
        bank.load(slot, adapter)
    plain = run(tiny)
    pairs = [[(slot, 0.7)] for slot in adapters] + [[(4, 0.5), (1, 1.0), (2, -0.5)], []]
    for start in range(0, len(pairs), 4):
        some = pairs[start : start + 4]
        out = run_rows(bank, some)
        if start == 8:
            bank.take_whole_calls()
            assert (run_rows(bank, some) - out).abs().max() < CLOSE
        for i, row in enumerate(some):
            changed = copy.deepcopy(tiny)
            merge_all(changed, [(adapters[slot], weight) for slot, weight in row])
            expected = run(changed)[i]
            assert (out[i] - expected).abs().max() < 1e-4, [adapters[slot].name for slot, _ in row]
            assert not row or (plain[i] - expected).abs().max() > APART
    with torch.no_grad():  # one row that holds for all of a call
        told = bank.lay_out([[(5, 0.7)]], "cpu")
        with bank.applied("unet", told[SLOTS], told[WEIGHTS]):
            assert (run(model) - run(merged(tiny, (adapters[5], 0.7)))).abs().max() < 1e-4
    held = bank.dense_bytes(5)
    numbers = sum(
        layer.weight.numel() for path, layer in adaptable(tiny).items() if path in adapters[5].layers
    )
    assert held == 4 * numbers
    assert (low_rank_of(adapters[1]), low_rank_of(adapters[10])) == (4, 0)
    assert bank.dense_bytes(2) == bank.dense_bytes(9) == 0, "magnitudes and factors are no differences"
    bank.clear(5)
    assert bank.dense_bytes(5) == 0
    assert (run_rows(bank, [[(5, 1.0)]] * 4) - plain).abs().max() < CLOSE


def test_blocks_take_as_much_as_a1111s_lists_say(tiny: Model, model: Model) -> None:
    everything, attentive = names_of(tiny)
    assert everything[:3] == ["BASE", "IN00", "IN01"]
    assert [
        len(names) for names in names_of(models.create("sd15", device="meta", tokenizer=tiny.tokenizers[0]))
    ] == [26, 17]
    assert [
        len(names) for names in names_of(models.create("sdxl", device="meta", tokenizer=tiny.tokenizers[0]))
    ] == [20, 12]
    lora = made(tiny, 1, where=everywhere)
    bank = Bank(model, slots=2, max_rank=4)
    weights = [0.25 * i for i in range(len(everything))]
    bank.load(1, bank.stage(lora, tuple(weights)))
    bank.load(2, bank.stage(lora, tuple(float(name == "M00") for name in attentive)))
    out = run_rows(bank, [[(1, 1.0)], [(2, 1.0)], [], []])
    told = dict(zip(everything, weights, strict=True))

    def share(path: str) -> float:
        """By diffusers' names, written out for two levels of this model."""
        parts = path.split(".")
        deep = len(tiny.unet.down_blocks[0].resnets)  # type: ignore[union-attr, arg-type]
        if parts[1] == "mid_block":
            return told["M00"]
        if parts[1] == "conv_in":
            return told["IN00"]
        if parts[1] not in ("down_blocks", "up_blocks"):
            return 1.0
        at = deep if parts[3].endswith("samplers") else int(parts[4])
        place = int(parts[2]) * (deep + 1) + at
        return told[f"IN{place + 1:02}"] if parts[1] == "down_blocks" else told[f"OUT{place:02}"]

    for i, weigh in ((0, share), (1, lambda path: float(path.startswith(("unet.mid_block", "unet.time"))))):
        layers = {
            path: Layer(layer.down, layer.up, layer.scale * weigh(path))  # type: ignore[union-attr, no-untyped-call]
            for path, layer in lora.layers.items()
            if path.startswith("unet.")
        }
        expected = run(merged(tiny, (Adapter("scaled", layers), 1.0)))[i]
        assert (out[i] - expected).abs().max() < CLOSE
        assert (run(merged(tiny, (lora, 1.0)))[i] - expected).abs().max() > APART
    with pytest.raises(
        ModelError, match=f"3 block weights; allowed: {len(attentive)} .BASE.* or {len(everything)} "
    ):
        bank.stage(lora, (1.0, 1.0, 1.0))


def test_a_row_does_not_depend_on_who_shares_the_batch(tiny: Model, model: Model) -> None:
    bank = Bank(model, slots=2, max_rank=4)
    bank.load(1, made(tiny, 1))
    bank.load(2, made(tiny, 2))
    mixed = run_rows(bank, [[(1, 1.0)], [(2, 1.0)], [(1, 0.3), (2, 0.3)], []])
    alone = run_rows(bank, [[(1, 1.0)], [], [], []])
    assert (mixed[0] - alone[0]).abs().max() < CLOSE
    assert (mixed[1] - alone[1]).abs().max() > APART


def test_without_adapters_nothing_changes_to_the_bit(tiny: Model, model: Model) -> None:
    before = run(model)
    bank = Bank(model, slots=2, max_rank=4)
    names = list(model.unet.state_dict())  # type: ignore[union-attr]
    bank.load(1, made(tiny, 1, where=everywhere))
    assert list(model.unet.state_dict()) == names  # type: ignore[union-attr]
    assert torch.equal(run_rows(bank, [[], [(0, 1.0)], [(1, 0.0)], []]), before)
    assert bank.lay_out([[], [(1, 0.0)]], "cpu") == {}
    assert not torch.equal(run_rows(bank, [[(1, 1.0)], [], [], []]), before)


def test_detaching_gives_the_model_back(tiny: Model, model: Model) -> None:
    identity = models.identity(model.unet)  # type: ignore[arg-type]
    bank = Bank(model, slots=2, max_rank=4)
    bank.load(1, made(tiny, 1, where=everywhere))
    assert bank.nbytes > 0
    assert type(model.unet.conv_in) is not torch.nn.Conv2d  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="another adapter bank"):
        Bank(model, slots=1, max_rank=4).load(1, made(tiny, 1))
    bank.detach()
    assert type(model.unet.conv_in) is torch.nn.Conv2d  # type: ignore[union-attr]
    assert not any("bank" in name for name, _ in model.unet.named_buffers())  # type: ignore[union-attr]
    assert models.identity(model.unet) == identity  # type: ignore[arg-type]
    assert torch.equal(run(model), run(tiny))


def test_a_slot_is_swapped_and_cleared(tiny: Model, model: Model) -> None:
    bank = Bank(model, slots=1, max_rank=8)
    bank.load(1, made(tiny, 1, rank=8, where=everywhere))
    taken = bank.nbytes
    two = made(
        tiny, 2, rank=2, where=lambda path: path.endswith("to_q")
    )  # fewer layers and a lower rank: nothing of the first may be left
    bank.load(1, two)
    assert (bank.nbytes, bank.slot_of("made2"), bank.slot_of("made1")) == (taken, 1, None)
    assert bank.slot_of("made3") is None
    out = run_rows(bank, [[(1, 1.0)]] * 4)
    assert (out - run(merged(tiny, (two, 1.0)))).abs().max() < CLOSE
    bank.clear(1)
    assert (run_rows(bank, [[(1, 1.0)]] * 4) - run(tiny)).abs().max() < CLOSE
    assert (out - run(tiny)).abs().max() > APART


def test_matrices_are_kept_between_calls_and_never_stale(tiny: Model, model: Model) -> None:
    bank = Bank(model, slots=2, max_rank=4)
    one, two = made(tiny, 1, where=everywhere), made(tiny, 2, where=everywhere)
    bank.load(1, one)
    told = bank.lay_out([[(1, 1.0)]] * 4, "cpu")
    kept = model.unet.adapter_rows._kept  # type: ignore[union-attr]

    def call() -> torch.Tensor:
        with bank.applied("unet", told[SLOTS], told[WEIGHTS]):
            return run(model)

    first = call()
    assert len(kept[told[SLOTS]].matrices) == len([path for path in bank.layers if path[:5] == "unet."])
    assert torch.equal(call(), first)
    told[WEIGHTS].mul_(0.5)  # as captured code writes to what it was given
    assert (call() - run(merged(tiny, (one, 0.5)))).abs().max() < CLOSE
    bank.load(1, two)  # the slot changes under the same tensors
    halved = call()
    assert (halved - run(merged(tiny, (two, 0.5)))).abs().max() < CLOSE
    assert (halved - first).abs().max() > APART
    kept = model.unet.adapter_rows._kept  # type: ignore[union-attr]
    assert len(kept) == 1
    told.clear()
    assert len(kept) == 0  # nothing is held for a batch that is gone


def test_only_rows_with_adapters_are_multiplied(
    tiny: Model, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if all were, with a quarter of the products; rows without one keep the bits of a plain call."""
    bank = Bank(model, slots=2, max_rank=8)
    one, two = made(tiny, 1, where=everywhere), made(tiny, 2, rank=8, where=everywhere)
    bank.load(1, one)
    bank.load(2, two)
    multiplied: list[int] = []
    product = torch.bmm

    def counted(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        multiplied.append(len(first))
        return product(first, second)

    monkeypatch.setattr(torch, "bmm", counted)
    rows: list[Choice] = [[], [], [(1, 0.5), (2, -1.0)], []]
    out, some = run_rows(bank, rows), list(multiplied)
    multiplied.clear()
    bank.take_whole_calls()
    whole = run_rows(bank, rows)
    assert (set(some), set(multiplied)) == ({1}, {4})
    assert (out - whole).abs().max() < CLOSE
    plain = run(tiny)
    assert [torch.equal(*pair) for pair in zip(out, plain, strict=True)] == [True, True, False, True]
    assert (out[2] - plain[2]).abs().max() > APART
    assert (out[2] - run(merged(tiny, (one, 0.5), (two, -1.0)))[2]).abs().max() < CLOSE


def test_of_two_rows_the_one_without_adapters_keeps_its_bits(tiny: Model, model: Model) -> None:
    bank = Bank(model, slots=1, max_rank=4)
    bank.load(1, made(tiny, 1, where=everywhere))
    told = bank.lay_out([[], [(1, 1.0)]], "cpu")
    with torch.no_grad(), bank.applied("unet", told[SLOTS], told[WEIGHTS]):
        out = model.unet(X[:2], TIMES[:2], encoder_hidden_states=TEXT[:2], return_dict=False)[0]  # type: ignore[misc]
        assert rows_of(model.unet).adapted == slice(1, 2)
    with torch.no_grad():
        plain = tiny.unet(X[:2], TIMES[:2], encoder_hidden_states=TEXT[:2], return_dict=False)[0]  # type: ignore[misc]
    assert torch.equal(out[0], plain[0])
    assert (out[1] - plain[1]).abs().max() > APART


@pytest.mark.parametrize("places", [(1, 2), (0, 3)])
def test_no_more_than_the_largest_rank_among_the_rows_is_multiplied(
    tiny: Model, model: Model, places: tuple[int, int]
) -> None:
    """Whether the rows follow one another or not; with too small a rank the picture is another."""
    small, large = made(tiny, 1, rank=2, where=everywhere), made(tiny, 2, rank=8, where=everywhere)
    bank = Bank(model, slots=2, max_rank=16)
    bank.load(1, small)
    bank.load(2, large)
    for slots, rank in (((1, 1), 2), ((1, 2), 8)):
        rows: list[Choice] = [[], [], [], []]
        for place, slot in zip(places, slots, strict=True):
            rows[place] = [(slot, 1.0)]
        laid = bank.lay_out(rows, "cpu")
        with torch.no_grad(), bank.applied("unet", laid[SLOTS], laid[WEIGHTS]):
            assert rows_of(model.unet).call.rank == rank
        out = run_rows(bank, rows)
        for place, slot in zip(places, slots, strict=True):
            alone = run(merged(tiny, ({1: small, 2: large}[slot], 1.0)))[place]
            assert (out[place] - alone).abs().max() < CLOSE
    for adapters in bank._rows.values():
        adapters.ranks[2] = 2
        adapters.forget()
    assert (run_rows(bank, rows)[places[1]] - out[places[1]]).abs().max() > APART


def test_rows_with_adapters_are_rounded_in_bf16_as_in_a_batch_of_their_own(tiny: Model) -> None:
    """Of linear layers alone: a product and its sum are rounded once, whoever shares the batch."""
    half = copy.deepcopy(tiny).to(dtype=torch.bfloat16)
    bank = Bank(half, slots=1, max_rank=4)
    bank.load(1, made(tiny, 1, where=lambda path: path.endswith("attn1.to_q")))
    layer = next(module for path, module in half.unet.named_modules() if path.endswith("attn1.to_q"))  # type: ignore[union-attr]
    x = torch.randn(4, 16, layer.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()

    def outs(rows: list[Choice]) -> torch.Tensor:
        told = bank.lay_out(rows, "cpu")
        with torch.no_grad(), bank.applied("unet", told[SLOTS], told[WEIGHTS]):
            return layer(x)

    mixed, own = outs([[(1, 1.0)], [], [(1, 1.0)], []]), outs([[(1, 1.0)]] * 4)
    assert torch.equal(mixed[0::2], own[0::2])
    assert not torch.equal(mixed[1::2], own[1::2]), "the control: rows without it"


def test_calls_of_a_sealed_bank_have_one_shape(tiny: Model, model: Model) -> None:
    bank = Bank(model, slots=2, max_rank=4, most_a_row=3)
    one, two = made(tiny, 1), made(tiny, 2)
    bank.load(1, one)
    bank.load(2, two)
    bank.seal()
    for row, pairs in (([(1, 1.0)], [(one, 1.0)]), ([(1, 0.5), (2, 1.0)], [(one, 0.5), (two, 1.0)])):
        told = bank.lay_out([row] * 4, "cpu")
        with bank.applied("unet", told[SLOTS], told[WEIGHTS]):
            call = rows_of(model.unet).call
            assert call.slots_BK is not None
            assert call.weights_Bs1 is not None
            assert (call.slots_BK.shape, call.weights_Bs1.shape) == ((4, 3), (4, 3 * 4, 1))
            out = run(model)
        assert (out - run(merged(tiny, *pairs))).abs().max() < CLOSE
        assert (out - run(tiny)).abs().max() > APART


def test_a_part_of_a_batch_without_adapters_runs_the_plain_layers(tiny: Model, model: Model) -> None:
    bank = Bank(model, slots=1, max_rank=4)
    bank.load(1, made(tiny, 1, where=everywhere))
    told = bank.lay_out([[], [(1, 1.0)]] * 4, "cpu")
    gathered = []
    call = rows_of(model.unet).call
    for start in (0, 1):
        part = take_rows(told, slice(start, None, 2), range(start, 8, 2))
        with bank.applied("unet", part[SLOTS], part[WEIGHTS]):
            gathered.append((call.slots_BK is None, torch.equal(run(model), run(tiny))))
    assert gathered == [(True, True), (False, False)]


def test_gradients_pass_rows_with_and_without_adapters(tiny: Model, model: Model) -> None:
    bank = Bank(model, slots=1, max_rank=4)
    one = made(tiny, 1, where=everywhere)
    bank.load(1, one)
    told = bank.lay_out([[], [(1, 1.0)], [], []], "cpu")
    slopes = []
    for unet, slots in ((model.unet, told), (tiny.unet, {}), (merged(tiny, (one, 1.0)).unet, {})):
        x = X.clone().requires_grad_()
        with bank.applied("unet", slots.get(SLOTS), slots.get(WEIGHTS)):
            unet(x, TIMES, encoder_hidden_states=TEXT, return_dict=False)[0].square().sum().backward()  # type: ignore[misc]
        slopes.append(x.grad)
    mixed, plain, adapted = slopes
    assert mixed is not None
    assert plain is not None
    assert adapted is not None
    scale = plain.abs().max()
    assert (mixed[0] - plain[0]).abs().max() < CLOSE * scale
    assert (mixed[1] - adapted[1]).abs().max() < CLOSE * scale
    assert (mixed[1] - plain[1]).abs().max() > APART * scale


def test_only_layers_that_are_adapted_hold_memory(tiny: Model, model: Model) -> None:
    bank = Bank(model, slots=3, max_rank=4)
    assert bank.nbytes == 0
    bank.load(1, made(tiny, 1, where=lambda path: path.endswith("mid_block.attentions.0.proj_in")))
    assert bank.nbytes == (3 + 1) * 4 * (64 + 64) * 4  # slots and none, rank, in and out of 64, float32
    bank.seal()
    with pytest.raises(ModelError, match="has not reserved"):
        bank.load(2, made(tiny, 2))


def test_what_a_bank_cannot_hold_is_refused_by_name(tiny: Model, model: Model) -> None:
    bank = Bank(model, slots=2, max_rank=4, most_a_row=2)
    with pytest.raises(ModelError, match="'made1' has rank 8; allowed: at most 4"):
        bank.load(1, made(tiny, 1, rank=8))
    dora = Adapter("soft", made(tiny, 1).layers, kind="dora")
    sealed = Bank(copy.deepcopy(model), slots=1, max_rank=4)
    sealed.seal()
    with pytest.raises(ModelError, match="'soft' is a dora.*export MODEL --merge"):
        sealed.load(1, dora)
    for slot in (0, 3, -1):
        with pytest.raises(ModelError, match="1 to 2"):
            bank.load(slot, made(tiny, 1))
    assert bank.lay_out([[(1, 1.0)] * 2], "cpu")[SLOTS].tolist() == [[1, 1]]
    with pytest.raises(ModelError, match="3 adapters on one picture"):
        bank.lay_out([[(1, 1.0)] * 3], "cpu")
    for weight in (float("nan"), float("inf"), 1e6):
        with pytest.raises(ModelError, match="-100 to 100"):
            bank.lay_out([[(1, weight)]], "cpu")
    with pytest.raises(ModelError, match="too large for torch.float16"):
        Bank(copy.deepcopy(model).to(dtype=torch.float16), slots=1, max_rank=4).load(
            1, made(tiny, 1, size=1e6)
        )


def test_a_bank_has_at_least_one_of_each(model: Model) -> None:
    for wrong in ({"slots": 0}, {"max_rank": 0}, {"most_a_row": 0}):
        with pytest.raises(ModelError, match="allowed: 1 or more"):
            Bank(model, **{"slots": 1, "max_rank": 1, "most_a_row": 1, **wrong})
    Bank(model, slots=1, max_rank=1, most_a_row=1)


def test_a_convolution_that_leaves_pixels_out_is_adapted(tiny: Model) -> None:
    """Of one pixel a kernel, but not at each: no product of all pixels."""
    sparse = copy.deepcopy(tiny)
    old = sparse.unet.down_blocks[0].downsamplers[0].conv  # type: ignore[union-attr, index]
    torch.manual_seed(0)
    new = torch.nn.Conv2d(old.in_channels, old.out_channels, 1, stride=2)
    sparse.unet.down_blocks[0].downsamplers[0].conv = new  # type: ignore[union-attr, index]
    adapter = made(sparse, 1, where=everywhere)
    assert any("downsamplers" in path for path in adapter.layers)
    expected, plain = run(merged(sparse, (adapter, 1.0))), run(sparse)
    bank = Bank(sparse, slots=1, max_rank=4)
    bank.load(1, adapter)
    out = run_rows(bank, [[(1, 1.0)], [], [(1, 1.0)], []])
    assert (out[::2] - expected[::2]).abs().max() < CLOSE
    assert (out[1::2] - plain[1::2]).abs().max() < CLOSE
    assert (expected - plain).abs().max() > APART


def test_channels_last_and_bfloat16(tiny: Model, model: Model) -> None:
    adapter = made(tiny, 1, where=everywhere)
    expected = run(merged(tiny, (adapter, 1.0)))
    bank = Bank(model, slots=1, max_rank=4)
    bank.load(1, adapter)
    model.unet.to(memory_format=torch.channels_last)  # type: ignore[union-attr]
    assert (run_rows(bank, [[(1, 1.0)]] * 4) - expected).abs().max() < CLOSE
    model.to(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out = run_rows(bank, [[(1, 1.0)]] * 4).float()
    assert (out - expected).abs().max() < 0.1 < (run(tiny) - expected).abs().max()


def test_a_call_of_another_number_of_rows_is_refused(tiny: Model, model: Model) -> None:
    bank = Bank(model, slots=1, max_rank=4)
    bank.load(1, made(tiny, 1))
    for rows in (3, 5):
        with pytest.raises(ValueError, match=f"4 rows, and adapters for {rows}"):
            run_rows(bank, [[(1, 1.0)]] * rows)
    of_all, each = run_rows(bank, [[(1, 1.0)]]), run_rows(bank, [[(1, 1.0)]] * 4)
    assert (of_all - each).abs().max() < CLOSE


def test_fused_projections_are_not_passed_by(tiny: Model, model: Model) -> None:
    bank = Bank(model, slots=1, max_rank=4)
    bank.load(1, made(tiny, 1))
    bank.verify()
    for module in model.unet.modules():  # type: ignore[union-attr]
        if hasattr(module, "fused_projections"):
            module.fused_projections = True
    with pytest.raises(ModelError, match="no longer run by itself"):
        bank.verify()
    with pytest.raises(ModelError, match="are not in this tiny model"):
        merge(model, made(tiny, 1))


@pytest.mark.nightly
def test_compiled_blocks_never_compile_again_when_adapters_change(tiny: Model, model: Model) -> None:
    import torch._dynamo as dynamo

    def first_block(path: str) -> bool:
        return path.startswith("unet.down_blocks.0.") and ("attn" in path or path.endswith("conv1"))

    plain = run(model)
    bank = Bank(model, slots=2, max_rank=4, most_a_row=2)
    bank.load(1, made(tiny, 1, where=first_block))
    bank.seal()
    model.unet.down_blocks[0].compile(fullgraph=True)  # type: ignore[union-attr]
    assert (run_rows(bank, [[]] * 4) - plain).abs().max() < CLOSE
    run_rows(bank, [[(1, 1.0)], [], [], []])
    with dynamo.config.patch(error_on_recompile=True):
        two = made(tiny, 2, rank=2, where=first_block)
        bank.load(2, two)
        out = run_rows(bank, [[(2, 0.5)], [(1, 1.0), (2, 1.0)], [], []])
        assert (run_rows(bank, [[]] * 4) - plain).abs().max() < CLOSE
    assert (out[0] - run(merged(tiny, (two, 0.5)))[0]).abs().max() < CLOSE
    assert (out[1] - plain[1]).abs().max() > APART


def test_adapters_may_change_under_a_text_whose_keys_are_kept(tiny: Model, model: Model) -> None:
    lean = optimise(model, "lean").model
    kept = run(lean)
    assert torch.equal(run(lean), kept)
    bank = Bank(lean, slots=2, max_rank=4)
    one, two = made(tiny, 1), made(tiny, 2)
    bank.load(1, one)
    bank.load(2, two)
    for slot, adapter in ((1, one), (2, two), (1, one)):
        expected = run(merged(tiny, (adapter, 1.0)))
        assert (run_rows(bank, [[(slot, 1.0)]] * 4) - expected).abs().max() < CLOSE
        assert (kept - expected).abs().max() > APART


def test_keys_of_a_text_are_kept_while_its_rows_adapters_are(tiny: Model, model: Model) -> None:
    lean = optimise(model, "lean").model
    bank = Bank(lean, slots=1, max_rank=4)
    one, two = made(tiny, 1), made(tiny, 2)
    bank.load(1, one)
    told = bank.lay_out([[(1, 1.0)], [], [], []], "cpu")
    made_anew: list[int] = []
    attention = next(m for name, m in lean.unet.named_modules() if name.endswith("attn2"))  # type: ignore[union-attr]
    last = attention.to_kv if attention.fused_projections else attention.to_k
    last.register_forward_hook(lambda *_: made_anew.append(1))

    def call() -> tuple[torch.Tensor, int]:
        made_anew.clear()
        with bank.applied("unet", told[SLOTS], told[WEIGHTS]):
            out = run(lean)
        return out, len(made_anew)

    first, again = call(), call()
    assert (first[1], again[1]) == (1, 0)
    assert torch.equal(first[0], again[0])
    told[WEIGHTS].mul_(0.5)
    halved = call()
    assert (halved[0] - run_rows(bank, [[(1, 0.5)], [], [], []])).abs().max() < CLOSE
    bank.load(1, two)
    other = call()
    assert (halved[1], other[1]) == (1, 1)
    for out, adapter in ((halved[0], one), (other[0], two)):
        assert (out[0] - run(merged(tiny, (adapter, 0.5)))[0]).abs().max() < CLOSE
    assert (halved[0] - first[0])[0].abs().max() > APART
    assert (halved[0] - other[0])[0].abs().max() > APART
