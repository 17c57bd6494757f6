"""Where encoding happens: inline, before training (offline) or beside it (online), and by how many encoders.

    python benchmarks/cluster/data.py --out results.csv --plot cluster-data.png

The same U-Net, pictures, order and seed are fed in four ways by turns (A B C D A B C D ...), a chunk of steps
each, after steps that are not timed and use up what was made ahead:

- inline: this process encodes each batch before its step;
- offline: it reads the columns that `darkroom prepare` made;
- online: one encoder on a CPU core of a Ray cluster encodes for it, and a CPU task reads and cuts;
- online, rated: encoders that replay the really encoded rows of the prepared columns, at a rate that stands
  for devices this machine has not; together half as fast again as training needs.

Then the number of rated encoders grows, each a quarter as fast as training, until training is the limit
(Anyscale's figure 6). Training has one thread, so that one core of two is left to the cluster's processes.
Losses of offline and of online, rated must be equal to the bit, those of another seed must not: else exit 1.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
import darkroom  # noqa: F401 - sets the OpenMP spin count before torch is imported
from darkroom.measure.timing import Measurement, Timing, append_csv, measurement

SIDE, WIDTH, LEVELS = 128, 128, 4
CROSS = "CrossAttnDownBlock2D"
STAND_INS = "encoders are stood in for by actors that replay really encoded rows at a rated pace"
HEADROOM = 1.5  # the rated encoders of the comparison, against what training needs
PART = 4  # encoders of the curve that together are as fast as training
CPUS = 8  # that the cluster on this machine counts: stand-ins sleep


@dataclass(frozen=True)
class Sizes:
    """How much is measured, and of what."""

    batch: int = 8
    steps: int = 10  # a chunk
    drain: int = 10  # untimed steps before it
    rounds: int = 5
    pictures: int = 256
    unet: tuple[int, ...] = (32, 64)
    vae: int = 24  # first width; with it encoders take the published share of an inline step
    encoders: tuple[int, ...] = (1, 2, 3, 4, 6)


SMALL = Sizes(batch=4, steps=3, drain=3, rounds=2, pictures=32, unet=(16, 32), vae=4, encoders=(1, 5))


# ---- what is trained


def material(folder: Path, sizes: Sizes) -> tuple[Path, Path]:
    """A model of random weights, and a store with the columns of its encoders."""
    from darkroom import models
    from darkroom.data.importers import import_pictures
    from darkroom.data.store import Store
    from darkroom.measure.loading import make_source
    from darkroom.prepare.job import prepare

    vae = {
        "block_out_channels": [sizes.vae * k for k in (1, 2, 4, 4)],
        "down_block_types": ["DownEncoderBlock2D"] * LEVELS,
        "up_block_types": ["UpDecoderBlock2D"] * LEVELS,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": 4,
        "sample_size": SIDE,
    }
    levels = len(sizes.unet)
    unet = {
        "block_out_channels": list(sizes.unet),
        "layers_per_block": 2,
        "down_block_types": [CROSS] * (levels - 1) + ["DownBlock2D"],
        "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * (levels - 1),
        "cross_attention_dim": WIDTH,
        "attention_head_dim": 8,
        "norm_num_groups": 8,
        "sample_size": SIDE // 8,
    }
    text = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4}
    tokenizer = models.train_tokenizer([f"picture number {i}" for i in range(sizes.pictures)], vocab_size=640)
    made = models.create(
        "tiny",
        tokenizer=tokenizer,
        overrides={"unet": unet, "vae": vae, "text_encoder": text | {"projection_dim": WIDTH}},
    )
    models.save(made, folder / "base")
    store = Store.create(folder / "pictures.lance")
    import_pictures(make_source(folder / "pictures", sizes.pictures, SIDE, "PNG"), store)
    prepare(store, folder / "base", resolution=SIDE, text=True)
    return folder / "base", folder / "pictures.lance"


def recipe(base: Path, store: Path, sizes: Sizes, encode: str, *, seed: int = 0, **online: Any) -> Any:
    """The job, fed in one of the ways."""
    from darkroom.recipe import make_recipe

    content = {
        "task": "pretrain",
        "model": {"base": str(base)},
        "data": {
            "store": str(store),
            "resolution": SIDE,
            "encode": encode,
            "text": "stored" if encode == "stored" else "auto",
            "workers": 1,
            "online": {"fraction": 0.5, "cpu_workers": 2, **online},
        },
        "train": {
            "steps": 10**6,
            "global_batch": sizes.batch,
            "micro_batch": sizes.batch,
            "precision": "float32",
            "ema": {"enabled": False},
            "device": "cpu",
            "seed": seed,
        },
    }
    if encode == "inline":
        content["data"]["text"] = "inline"
    return make_recipe(content)


class Rated:
    """An encoder actor that replays the rows of the prepared columns, `rate` a second."""

    rate, store, columns = 0.0, "", ("", "")

    def __init__(self, parts: Any) -> None:
        from darkroom.data.loader import ReadSettings, row_assembler
        from darkroom.data.store import Store

        read = ReadSettings(latents=self.columns[0], text=self.columns[1])
        self._rows = row_assembler(Store.open(self.store), read)
        self._free_at = 0.0

    def ping(self) -> int:
        """That it is up."""
        return os.getpid()

    def encode(self, columns: Any, ask: Any) -> Any:
        """What the encoders made of these rows once, when a device of this rate would have made it."""
        from darkroom.cluster.encoders import BlockTimes

        began = time.perf_counter()
        made = self._rows.build(ask.rows).columns
        out = {name: value for name, value in columns.items() if name not in ("pixels", "ids")}
        out |= {name: made[name].numpy() for name in ("moments", "text")}
        self._free_at = max(began, self._free_at) + len(ask.rows) / self.rate
        # A sleep ends late; the next block then takes as much less.
        time.sleep(max(0.0, self._free_at - time.perf_counter()))
        return out, BlockTimes(encode_s=time.perf_counter() - began)


def rated(store: Path, rate: float) -> type[Rated]:
    """Encoders of so many rows a second that replay this store's columns."""
    from darkroom.data.store import Store

    names = Store.open(store).columns()
    columns = tuple(next(n for n in names if n.startswith(kind)) for kind in ("latents_", "text_"))
    return type("RatedEncoder", (Rated,), {"rate": rate, "store": str(store), "columns": columns})


# ---- one way of feeding


@dataclass
class Way:
    """A job that stands between two steps."""

    job: Any
    batches: Iterator[Any]
    k: int = 0
    losses: list[float] = field(default_factory=list)
    fed_s: float = 0.0  # waiting for a batch, and encoding it here

    def step(self) -> None:
        """One step, as the trainer takes it."""
        began = time.perf_counter()
        inputs = self.job.task.inputs(next(self.batches), self.job.device)
        self.fed_s += time.perf_counter() - began
        result = self.job.step(self.k, inputs)
        self.losses.append(float(result.losses["loss"].mean()))
        self.k += 1

    def chunk(self, sizes: Sizes) -> tuple[float, float]:
        """Seconds of a step, and of its feeding."""
        for _ in range(sizes.drain):
            self.step()
        self.fed_s, began = 0.0, time.perf_counter()
        for _ in range(sizes.steps):
            self.step()
        return (time.perf_counter() - began) / sizes.steps, self.fed_s / sizes.steps


@contextmanager
def opened(one: Any, folder: Path, encoder: Any = None) -> Iterator[Way]:
    """A way of feeding, ready at its first step."""
    from darkroom.cluster.encoders import OnlineEncoder
    from darkroom.cluster.feed import online
    from darkroom.train.jobs import Pinned
    from darkroom.train.setup import make_job

    with online(one.data, reserved_cpus=1, encoder=encoder or OnlineEncoder) as feed:
        job = make_job(one, Pinned(folder), feed)
        with job.feed(0) as batches:
            stream: Any = batches
            while feed is not None and len(stream.stages.pool.encoders) < int(one.data.online.encoders):
                time.sleep(0.05)  # nothing is timed while they start
            yield Way(job, batches)


# ---- both measurements


def side_by_side(base: Path, store: Path, sizes: Sizes, folder: Path) -> list[Measurement]:
    """Rows of all four ways, in turns."""
    need = sizes.batch / alone(base, store, sizes, folder)
    each = HEADROOM * need / 2
    plans = {
        "inline": (recipe(base, store, sizes, "inline"), None),
        "offline": (recipe(base, store, sizes, "stored"), None),
        "online": (recipe(base, store, sizes, "online", encoders=1, fraction=1.0), None),
        "online, rated": (recipe(base, store, sizes, "online", encoders=2), rated(store, each)),
    }
    load, seconds, fed = os.getloadavg()[0], {name: [] for name in plans}, {name: [] for name in plans}
    with ExitStack() as stack:
        ways = {
            name: stack.enter_context(opened(one, folder / name, encoder))
            for name, (one, encoder) in plans.items()
        }
        for number in range(sizes.rounds + 1):  # the first is warm-up
            for name, way in ways.items():
                step_s, fed_s = way.chunk(sizes)
                say(f"round {number} {name}: {sizes.batch / step_s:.1f} images/s")
                seconds[name].append(step_s)
                fed[name].append(fed_s)
    equal(ways, base, store, sizes, folder)
    timings = {name: Timing(name, tuple(each[1:]), each[0], load) for name, each in seconds.items()}
    share = statistics.median(f / s for f, s in zip(fed["inline"][1:], seconds["inline"][1:], strict=True))
    return [
        row(
            "cluster-data",
            timing,
            sizes,
            {"encoder_share_of_inline": round(share, 4)}
            | ({"encoders": 2, "rate_each": round(each, 2)} if "rated" in name else {}),
            baseline=timings["offline" if name.startswith("online") else "inline"],
            note=STAND_INS if "rated" in name else "",
        )
        for name, timing in timings.items()
    ]


def alone(base: Path, store: Path, sizes: Sizes, folder: Path) -> float:
    """Seconds of a step with everything prepared: what encoders have to keep up with."""
    with opened(recipe(base, store, sizes, "stored"), folder / "alone") as way:
        return min(way.chunk(sizes)[0] for _ in range(3))


def equal(ways: Mapping[str, Way], base: Path, store: Path, sizes: Sizes, folder: Path) -> None:
    """Exit unless the stand-ins fed what the columns hold."""
    mine, theirs = ways["online, rated"].losses, ways["offline"].losses
    with opened(recipe(base, store, sizes, "stored", seed=1), folder / "control") as way:
        way.chunk(sizes)
    if mine != theirs or way.losses == theirs[: len(way.losses)]:
        sys.exit("the losses of offline and of online, rated differ, or those of two seeds do not")


def curve(base: Path, store: Path, sizes: Sizes, folder: Path) -> list[Measurement]:
    """Rows by the number of rated encoders."""
    limit_s = alone(base, store, sizes, folder)
    each = sizes.batch / limit_s / PART
    rows = []
    for number in sizes.encoders:
        one = recipe(base, store, sizes, "online", encoders=number, fraction=0.25)
        load = os.getloadavg()[0]
        with opened(one, folder / f"{number}", rated(store, each)) as way:
            began = time.perf_counter()
            settle(way)
            warm = time.perf_counter() - began
            own = Sizes(**vars(sizes) | {"drain": 0})
            found = tuple(way.chunk(own)[0] for _ in range(max(2, math.ceil(sizes.rounds / 2))))
            said = way.batches.stages.use.bottleneck()  # type: ignore[attr-defined]
        timing = Timing(f"{number} encoders", found, warm, load)
        told = {"encoders": number, "rate_each": round(each, 2), "training_alone": sizes.batch / limit_s}
        rows.append(row("cluster-encoders", timing, sizes, told, note=f"{STAND_INS}; {said}"))
        say(f"{number} encoders: {sizes.batch / timing.median_s:.1f} images/s; {said}")
    return rows


def settle(way: Way) -> None:
    """Steps until what was made ahead is used up, or it shows that it never will be."""
    stream: Any = way.batches
    for _ in range(PART * stream.ahead):
        way.step()
        if not stream.ready:
            return


def row(
    benchmark: str,
    timing: Timing,
    sizes: Sizes,
    settings: Mapping[str, Any],
    *,
    baseline: Timing | None = None,
    note: str = "",
) -> Measurement:
    """A row of seconds a step."""
    sized = {"batch": sizes.batch, "resolution": SIDE, "unet": list(sizes.unet), "vae": sizes.vae}
    chunk = f"seconds of a step, means of {sizes.steps}, cases in turns" if baseline else "seconds of a step"
    return measurement(
        benchmark,
        timing,
        baseline=baseline,
        images=sizes.batch,
        steps=1,
        settings={**sized, "threads": int(os.environ["OMP_NUM_THREADS"]), **settings},
        note="; ".join(filter(None, (chunk, note))),
    )


def draw(rows: Sequence[Measurement], file: Path) -> None:
    """Both measurements as one picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 3.4))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.4))
    sides = [one for one in rows if one.benchmark == "cluster-data"]
    for i, one in enumerate(sides):
        rate, span = (
            one.images_per_s or 0.0,
            [one.settings["batch"] / (s or 1) for s in (one.p90_s, one.p10_s)],
        )
        left.bar(i, rate, color=f"C{i}", width=0.65)
        left.vlines(i, *span, color="#333333", lw=1)
        left.annotate(
            f"{rate:.0f}", (i, max(rate, *span)), xytext=(0, 3), textcoords="offset points", ha="center"
        )
    left.set_xticks(range(len(sides)), [one.case.replace(", ", ",\n") for one in sides])
    share = sides[0].settings["encoder_share_of_inline"] if sides else 0.0
    left.set(title=f"Encoders take {share:.0%} of an inline step", ylabel="images/s")
    points = [one for one in rows if one.benchmark == "cluster-encoders"]
    if points:
        x = [one.settings["encoders"] for one in points]
        each, limit = points[0].settings["rate_each"], points[0].settings["training_alone"]
        right.plot(x, [one.images_per_s for one in points], "-o", color="C3", label="measured", zorder=3)
        right.plot(
            [0, limit / each], [0, limit], ":", color="#888888", label=f"{each:.0f} images/s an encoder"
        )
        right.axhline(limit, color="#888888", ls="--", lw=1, label="training alone, all prepared")
        right.set(title="Throughput by the number of rated encoders", xlabel="encoders", ylabel="images/s")
        right.set_xlim(0, max(x) + 0.5)
        right.legend(frameon=False, fontsize=8, loc="lower right")
    for axes, there in ((left, sides), (right, points)):
        axes.set_visible(bool(there))
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=110, facecolor="white")


def say(line: str) -> None:
    """Progress, beside the table."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, write the table, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("cluster-data.csv"))
    parser.add_argument("--plot", type=Path, default=None, help="a PNG of both")
    parser.add_argument("--small", action="store_true", help="a trial of a minute; its numbers mean nothing")
    parser.add_argument("--only", choices=("sides", "curve"), default=None)
    told = parser.parse_args()
    for library in ("torchao", "torch.utils._pytree"):  # torchao, where it is, tells of kernels it lacks
        logging.getLogger(library).setLevel(logging.ERROR)
    from darkroom.cluster.connect import connected

    sizes, rows = SMALL if told.small else Sizes(), []
    with tempfile.TemporaryDirectory() as name, connected("local", num_cpus=CPUS) as cluster:
        say(cluster.line())
        folder = Path(name)
        base, store = material(folder, sizes)
        if told.only != "curve":
            rows += side_by_side(base, store, sizes, folder)
        if told.only != "sides":
            rows += curve(base, store, sizes, folder)
    append_csv(told.out, rows)
    for one in rows:
        ratio = f", {one.ratio:.3f} of the time of {one.ratio_to}" if one.ratio_to else ""
        print(f"{one.benchmark} {one.case}: {one.images_per_s:.1f} images/s{ratio}")
    if told.plot is not None:
        draw(rows, told.plot)


if __name__ == "__main__":
    main()
