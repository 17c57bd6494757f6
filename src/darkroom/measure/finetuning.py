"""`darkroom bench finetune`: what teaching a model one subject takes, and what it gives.

Memory, time and the largest batch are measured on the model given; a larger model's are asked of a `planner`
where one is handed in. Quality is followed over the steps. Both stand in `finetuning_results`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from darkroom.data.images import pictures_below
from darkroom.errors import InputError
from darkroom.hardware import machine
from darkroom.hardware.machine import versions
from darkroom.measure.timing import Measurement, _commit, append_csv, read_csv
from darkroom.recipe.recipe import Recipe, make_recipe

TASKS = {
    "full": "finetune",
    "lora": "lora",
    "dreambooth": "dreambooth",
    "dreambooth-lora": "dreambooth-lora",
}
METHODS = tuple(TASKS)
STEP, LARGEST, PARAMETERS = "finetune-step", "finetune-largest-batch", "finetune-parameters"
PLANNED, FIDELITY = "finetune-planned", "finetune-fidelity"
RATES, BEST = "finetune-rates", "finetune-best"

Say = Callable[[str], None]
Planner = Callable[[Recipe], Mapping[str, Any]]
"""Of a recipe: device, count, memory_bytes, images_per_s, usd, hours, trained, total, largest_batch, note."""


@dataclass(frozen=True)
class Case:
    """One way to train."""

    method: str
    batch: int = 1
    rank: int = 8
    resolution: int = 512
    lr: float | None = None

    @property
    def has_rank(self) -> bool:
        """Whether it trains an adapter."""
        return self.method.endswith("lora")

    @property
    def name(self) -> str:
        """`lora batch 4 rank 8 512 px`."""
        rank = f" rank {self.rank}" if self.has_rank else ""
        return f"{self.method} batch {self.batch}{rank} {self.resolution} px"

    def settings(self) -> dict[str, Any]:
        """What a row says of it."""
        settings: dict[str, Any] = {
            "method": self.method,
            "batch": self.batch,
            "resolution": self.resolution,
        }
        return (
            settings | ({"rank": self.rank} if self.has_rank else {}) | ({"lr": self.lr} if self.lr else {})
        )


@dataclass(frozen=True)
class Finetuning:
    """What is measured: a subject, a model, and over which settings."""

    base: str
    photos: Path
    class_word: str
    work: Path  # runs and pictures
    token: str = "sks"
    methods: tuple[str, ...] = METHODS
    batches: tuple[int, ...] = (1, 2, 4, 8)
    ranks: tuple[int, ...] = (4, 8, 16, 32)
    resolutions: tuple[int, ...] = (256, 512, 768)
    resolution: int = 512
    batch: int = 4
    rank: int = 8
    targets: str = "attention"
    steps: int = 400
    every: int = 100
    method_steps: Mapping[str, int] = field(default_factory=dict)  # by method; `steps` for others
    rates: Mapping[str, float] = field(default_factory=dict)  # by method; the task's own for others
    sweep: tuple[float, ...] = ()
    sweep_method: str = "lora"
    sweep_batch: int = 5
    class_images: int = 24
    checkpointing: bool = False
    precision: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for method in (*self.methods, *self.rates, *self.method_steps, self.sweep_method):
            if method not in METHODS:
                raise InputError(f"method '{method}'", allowed=", ".join(METHODS))
        if not self.photos.is_dir() or not pictures_below(self.photos):
            raise InputError(
                f"no photographs in '{self.photos}'", allowed="a folder with 3 to 30 of one subject"
            )
        for steps in (self.steps, *self.method_steps.values()):
            if steps < 1 or not 1 <= self.every <= steps:
                raise InputError(
                    f"steps {steps}, scored every {self.every}", allowed="1 or more; every at most steps"
                )
        numbers = (self.batch, self.rank, self.resolution, *self.batches, *self.ranks, *self.resolutions)
        if min(numbers) < 1 or not self.methods:
            raise InputError("a batch, rank or resolution below 1, or no method", allowed="1 or more of each")

    @property
    def prompt(self) -> str:
        """The instance's prompt, with its token."""
        return f"a photo of {self.token} {self.class_word}"

    @property
    def class_prompt(self) -> str:
        """The prompt of any of its class."""
        return f"a photo of {self.class_word}"

    def steps_of(self, method: str) -> int:
        """How long a method is trained, in steps."""
        return self.method_steps.get(method, self.steps)

    def case(self, method: str, **changes: Any) -> Case:
        """A method with the settings that are not varied."""
        rate = self.rates.get(method)
        return replace(Case(method, self.batch, self.rank, self.resolution, rate), **changes)

    def cases(self) -> list[Case]:
        """By method and batch, by method and resolution, adapters by rank; each once."""
        found = [self.case(m, batch=b) for m in self.methods for b in self.batches]
        found += [self.case(m, resolution=r) for m in self.methods for r in self.resolutions]
        found += [self.case(m, rank=r) for m in self.methods if m.endswith("lora") for r in self.ranks]
        return list(dict.fromkeys(found))

    def content(self, case: Case, *, base: str | None = None, steps: int | None = None) -> dict[str, Any]:
        """A case's recipe, as a file would say it."""
        count = steps or self.steps_of(case.method)
        data: dict[str, Any] = {"resolution": case.resolution, "prompt": self.prompt}
        data["instance" if case.method.startswith("dreambooth") else "folder"] = str(self.photos)
        if case.method.startswith("dreambooth"):
            data |= {
                "class_prompt": self.class_prompt,
                "num_class_images": self.class_images,
                "class_images": str(self.work / f"class-{case.resolution}"),
            }
        content: dict[str, Any] = {
            "task": TASKS[case.method],
            "model": {"base": base or self.base},
            "data": data,
            "optim": {} if case.lr is None else {"lr": case.lr},
            "train": {
                "steps": count,
                "global_batch": case.batch,
                "micro_batch": case.batch,
                "gradient_checkpointing": self.checkpointing,
                "precision": self.precision,
                "seed": self.seed,
                "log_every": max(1, count // 10),
            },
            "checkpoint": {"every": min(self.every, count), "keep": count},
        }
        if case.has_rank:
            content["adapter"] = {"targets": self.targets, "rank": case.rank}
        return content

    def recipe(self, case: Case, **changes: Any) -> Recipe:
        """A case's recipe, checked."""
        return make_recipe(self.content(case, **changes))


def row(benchmark: str, case: str, settings: Mapping[str, Any], **columns: Any) -> Measurement:
    """A row of what was not timed in repeats, with where and when."""
    here = machine()
    values: dict[str, Any] = {
        "machine": here.name,
        "device": here.devices[0].name if here.devices else here.cpu_class,
        "versions": versions(("torch", "diffusers", "peft", "numpy")),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return Measurement(benchmark=benchmark, case=case, settings=dict(settings), **(values | columns))


# ---- another model, by its plan


def planned_rows(
    bench: Finetuning,
    planner: Planner,
    *,
    base: str,
    samples: int = 1000,
    step_counts: Sequence[int] = (),
    table: Growing | None = None,
    say: Say = lambda _: None,
) -> list[Measurement]:
    """Memory, parameters, speed, largest batch and cost of each case on a model that is not run.

    `samples` pictures are what methods and batches are compared over; `step_counts` what steps cost.
    """
    rows, table = [], table or Growing()
    asked: list[tuple[Case, int | None]] = [(case, None) for case in bench.cases()]
    asked += [(bench.case(method), steps) for steps in step_counts for method in bench.methods]
    for case, steps in asked:
        name = case.name if steps is None else f"{case.name} {steps} steps"
        one = table.find(PLANNED, name)
        if one is None:
            say(f"plan {base}: {name}")
            found = planner(bench.recipe(case, base=base, steps=steps))
            one = table.add(_planned(name, case, found, base, samples, steps))
        rows.append(one)
    return rows


def _planned(
    name: str, case: Case, found: Mapping[str, Any], base: str, samples: int, steps: int | None
) -> Measurement:
    usd = found.get("usd_per_image")
    samples = samples if steps is None else steps * case.batch
    more = {
        "model": base,
        "source": "planned",
        "trained": found["trained"],
        "total": found["total"],
        "trained_state_bytes": found["trained_state_bytes"],
        "largest_batch": found["largest_batch"],
        "samples": samples,
        "usd": None if usd is None else round(usd * samples, 5),
    }
    return row(
        PLANNED,
        name,
        case.settings() | more | ({} if steps is None else {"steps": steps}),
        peak_memory_bytes=int(found["memory_bytes"]),
        images_per_s=found["images_per_s"],
        usd_per_image=usd,
        device=found["device"],
        num_devices=found["count"],
        note=found["note"],
    )


def parameter_rows(measured: Iterable[Measurement]) -> list[Measurement]:
    """Trainable parameters by method and rank, of every model that was measured or planned."""
    found: dict[tuple[str, str, Any], Measurement] = {}
    for one in measured:
        row_settings = one.settings
        if "trained" not in row_settings:
            continue
        key = (row_settings["model"], row_settings["method"], row_settings.get("rank"))
        case = " ".join(
            filter(
                None,
                [row_settings["method"], f"rank {row_settings['rank']}" if "rank" in row_settings else ""],
            )
        )
        kept = ("model", "method", "rank", "trained", "total")
        settings = {name: row_settings[name] for name in kept if name in row_settings}
        settings["percent"] = round(100 * row_settings["trained"] / row_settings["total"], 4)
        found.setdefault(
            key, row(PARAMETERS, f"{row_settings['model']} {case}", settings, device="", note="counted")
        )
    return list(found.values())


class Growing:
    """Rows in the order they were made; in a file, or without one in memory alone."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.rows = read_csv(file) if file is not None and file.is_file() else []

    def find(self, benchmark: str, case: str) -> Measurement | None:
        """The row that stands there already."""
        return next((row for row in self.rows if (row.benchmark, row.case) == (benchmark, case)), None)

    def add(self, row: Measurement) -> Measurement:
        """Keep a row, at once, unless its case has one; returns the one that is kept."""
        there = self.find(row.benchmark, row.case)
        if there is not None:
            return there
        self.rows.append(row)
        if self.file is not None:
            append_csv(self.file, [row])
        return row


def check_same(file: Path, table: Path, asked: Mapping[str, Any]) -> None:
    """Note what was asked next to its table. InputError where other rows than these are in the table."""
    settings = json.loads(json.dumps(asked, default=str))
    if not table.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        return
    before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    other = [key for key, value in settings.items() if before.get(key) != value]
    if other:
        raise InputError(
            f"'{table}' was measured with another {other[0]} ({before.get(other[0], 'not noted')})",
            mend="choose another --out, or say the same as before to go on",
        )
