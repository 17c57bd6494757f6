"""Count the families' common shapes again, for src/darkroom/plan/common_counts.json.gz.

    python benchmarks/plan/common_counts.py              count and pack them
    python benchmarks/plan/common_counts.py --check      count them again and compare: 1 if any differs
    python benchmarks/plan/common_counts.py --check 7    those of every seventh command

Runs the plans below with an empty cache (ten minutes of one core). A count is known by what is asked, by
darkroom's code that counts and by the releases of torch, diffusers, transformers and peft: after a change of
the code none is taken, which costs time alone. So they are made last before a release. The check tells that
the same code counts the same again; nightly it is run on a part.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DRAWN = (("sd15", 512), ("sd2", 512), ("sd2", 768), ("sdxl", 1024), ("tiny", 64))
PREPARED = (("sd15", 512), ("sd2", 512), ("sdxl", 1024))
ON_CPU = ("laptop", "four-steps", "emoji", "emoji-autoencoder", "sd15-lora")
UNPLANNED = ("extractor",)
WARM_UP = ["recipes/sd15-lora.yaml", "--gpu", "A10G"]


def commands() -> list[list[str]]:
    """What is planned."""
    found = [
        ["generate", "--model", model, "--size", f"{side}x{side}", "--gpu", "A10G", "--precision", precision]
        for model, side in DRAWN
        for precision in ("float32", "bf16")
    ]
    # Its VAE is decoded in float32 where the rest is in fp16; of others bf16's counts serve both.
    found.append([*found[DRAWN.index(("sdxl", 1024)) * 2][:-1], "fp16"])
    found += [
        ["prepare", "--model", model, "--resolution", str(side), "--gpu", "A10G", *text]
        for model, side in PREPARED
        for text in ([], ["--text"])
    ]
    recipes = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if path.stem not in UNPLANNED)
    found += [[str(path), "--gpu", "A10G"] for path in recipes]
    found += [[str(path), "--gpu", "CPU AVX2"] for path in recipes if path.stem in ON_CPU]
    return [*found, *(["--fits", "RTX 4090", "--model", model] for model in ("sd15", "sdxl"))]


def counted(chosen: list[list[str]]) -> dict[str, dict[str, Any]]:
    """The counts of some plans by `shipped_digest`, made anew."""
    from typer.testing import CliRunner

    from darkroom import count_cache
    from darkroom.cli import app
    from darkroom.plan import counts

    shipped, own, before = counts.SHIPPED, count_cache._digest, os.environ.get("DARKROOM_CACHE")
    counts.SHIPPED, count_cache._digest = Path("none"), count_cache.shipped_digest
    try:
        with tempfile.TemporaryDirectory(prefix="darkroom-counts-") as folder:
            os.environ["DARKROOM_CACHE"] = folder
            # What PyTorch makes once in a process, a kilobyte, belongs to none of the plans.
            for number, command in enumerate((WARM_UP, *chosen)):
                began = time.process_time()
                result = CliRunner().invoke(app, ["plan", *command, "--json"], catch_exceptions=False)
                if result.exit_code:
                    raise SystemExit(f"darkroom plan {' '.join(command)}: {result.output}")
                print(f"{time.process_time() - began:6.1f} s  {' '.join(command)}", flush=True)
                if number == 0:
                    shutil.rmtree(folder)
                    counts._OPENED.clear()
            files = sorted(Path(folder, "plans").glob("*.json"))
            kept = {one.stem: json.loads(one.read_text(encoding="utf-8")) for one in files}
    finally:
        counts.SHIPPED, count_cache._digest = shipped, own
        os.environ.pop("DARKROOM_CACHE")
        if before is not None:
            os.environ["DARKROOM_CACHE"] = before
    return {name: content for name, content in kept.items() if "kernels" in content}


def differing(now: dict[str, dict[str, Any]]) -> list[str]:
    """Digests of the counts that are not shipped so."""
    from darkroom.plan import counts

    shipped = counts._shipped(counts.SHIPPED)
    return [digest for digest, content in now.items() if shipped.get(digest) != content]


def main(arguments: list[str]) -> int:
    """Plan, and pack the counts or compare them."""
    os.chdir(ROOT)
    if arguments[:1] == ["--check"]:
        wrong = differing(counted(commands()[:: int(arguments[1]) if len(arguments) > 1 else 1]))
        print(f"{len(wrong)} counts differ: make them again" if wrong else "all counts are today's")
        return int(bool(wrong))
    from darkroom.plan import counts

    profiles = counted(commands())
    text = json.dumps(profiles, separators=(",", ":"))
    counts.SHIPPED.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{len(profiles)} counts, {counts.SHIPPED.stat().st_size / 1e3:.0f} kB in {counts.SHIPPED.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
