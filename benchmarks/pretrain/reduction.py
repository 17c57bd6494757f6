"""What summing gradients in bf16 (`parallel.reduce`) costs in loss, against float32 and against another seed.

    python benchmarks/pretrain/reduction.py --out results.csv

The same job three times on several processes over gloo: pictures, order, noise and start are alike, but for
the last one's seed, whose distance says how much losses differ for other reasons. The held-out loss is of the
averaged weights at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import darkroom  # noqa: F401 - sets the OpenMP spin count before torch is imported
from darkroom.measure.timing import Measurement, Timing, append_csv, measurement

sys.path.insert(0, str(Path(__file__).parent))
from material import content, make_base, make_store, write_recipe

LAST = 0.25
"""Of the steps: their mean is the loss at the end."""
CASES = {"float32": {}, "bf16": {"reduce": "bf16"}, "float32, another seed": {"seed": 1}}


def trained(folder: Path, name: str, made: dict[str, Any], given: Any) -> dict[str, Any]:
    """A case's losses and seconds."""
    case = dict(CASES[name])
    made["train"] |= {"seed": case.pop("seed", 0)}
    made["parallel"] = {"mode": "ddp", "devices": given.processes, **case}
    recipe, out = write_recipe(folder / "recipe.yaml", made), folder / name
    command = [sys.executable, "-m", "darkroom", "train", str(recipe), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    return {
        "loss": statistics.fmean(losses[-max(1, int(LAST * len(losses))) :]),
        "first_loss": losses[0],
        "heldout_loss": rows[-1]["heldout_loss"],
        "seconds": tuple(given.batch / row["images_per_s"] for row in rows if "images_per_s" in row),
    }


def compare(folder: Path, given: Any) -> list[Measurement]:
    """A row a case, with its distance from float32."""
    base = make_base(folder, tuple(given.channels))
    store = make_store(folder, base, given.pictures)
    train = {"steps": given.steps, "global_batch": given.batch, "precision": given.precision, "device": "cpu"}
    found: dict[str, dict[str, Any]] = {}
    for name in CASES:
        made = content(base, store, **train, micro_batch=given.batch // given.processes, log_every=10)
        made["data"] |= {"holdout": 0.125}
        made["optim"] |= {"lr": 1e-3}
        found[name] = trained(folder, name, made, given)
        print(
            f"{name}: {json.dumps({k: v for k, v in found[name].items() if k != 'seconds'})}", file=sys.stderr
        )
    plain, rows = found["float32"], []
    for name, result in found.items():
        settings: dict[str, Any] = {"processes": given.processes, "batch": given.batch, "steps": given.steps}
        settings |= {"precision": given.precision, "channels": given.channels, **CASES[name]}
        settings |= {key: result[key] for key in ("first_loss", "loss", "heldout_loss")}
        if name != "float32":
            settings |= {f"{key}_off": result[key] / plain[key] - 1 for key in ("loss", "heldout_loss")}
        note = f"loss: mean of the last {LAST:.0%} of the steps; off: against float32"
        timing = Timing(name, result["seconds"][1:], 0.0, None)
        rows.append(
            measurement(
                "pretrain-reduction", timing, images=given.batch, steps=1, settings=settings, note=note
            )
        )
    return rows


def main() -> None:
    """Read the command line, run, print, and write the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--precision", choices=("float32", "bf16"), default="bf16")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--channels", type=int, nargs="+", default=[32, 64], help="of the U-Net's levels")
    parser.add_argument("--pictures", type=int, default=128)
    parser.add_argument("--out", type=Path, help="CSV that rows are added to")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="darkroom-bench-", ignore_cleanup_errors=True) as folder:
        rows = compare(Path(folder), given)
    for row in rows:
        off = row.settings.get("heldout_loss_off")
        print(f"{row.case}: {row.settings['heldout_loss']:.5g}" + ("" if off is None else f" ({off:+.2%})"))
    if given.out is not None:
        append_csv(given.out, rows)


if __name__ == "__main__":
    main()
