"""Count the families' common shapes again, for src/darkroom/plan/common_counts.json.gz.

    python benchmarks/plan/common_counts.py

Runs the plans below with an empty cache and packs what they counted (minutes of one core). A count is known
by the code and the versions of torch, diffusers, transformers and peft that made it; counts of others
are never used, so an old file only costs a first plan its seconds. Make it again before a release.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
DRAWN = (("sd15", 512), ("sd2", 512), ("sd2", 768), ("sdxl", 1024), ("tiny", 64))
PREPARED = (("sd15", 512), ("sd2", 512), ("sdxl", 1024))
ON_CPU = ("laptop", "emoji", "emoji-autoencoder", "sd15-lora")
UNPLANNED = ("extractor",)


def commands() -> list[list[str]]:
    """What is planned."""
    found = [
        ["generate", "--model", model, "--size", f"{side}x{side}", "--gpu", "A10G", "--precision", precision]
        for model, side in DRAWN
        for precision in ("float32", "bf16")
    ]
    found += [
        ["prepare", "--model", model, "--resolution", str(side), "--gpu", "A10G", *text]
        for model, side in PREPARED
        for text in ([], ["--text"])
    ]
    recipes = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if path.stem not in UNPLANNED)
    found += [[str(path), "--gpu", "A10G"] for path in recipes]
    found += [[str(path), "--gpu", "CPU AVX2"] for path in recipes if path.stem in ON_CPU]
    return [*found, *(["--fits", "RTX 4090", "--model", model] for model in ("sd15", "sdxl"))]


def main() -> None:
    """Plan, and pack the counts."""
    from typer.testing import CliRunner

    from darkroom.cli import app
    from darkroom.plan import counts

    file, counts.SHIPPED = counts.SHIPPED, Path("none")
    with tempfile.TemporaryDirectory(prefix="darkroom-counts-") as folder:
        os.environ["DARKROOM_CACHE"] = folder
        os.chdir(ROOT)
        for command in commands():
            began = time.process_time()
            result = CliRunner().invoke(app, ["plan", *command, "--json"], catch_exceptions=False)
            if result.exit_code:
                raise SystemExit(f"darkroom plan {' '.join(command)}: {result.output}")
            print(f"{time.process_time() - began:6.1f} s  {' '.join(command)}", flush=True)
        kept = {one.stem: json.loads(one.read_text()) for one in sorted(Path(folder, "plans").glob("*.json"))}
    profiles = {name: content for name, content in kept.items() if "kernels" in content}
    text = json.dumps(profiles, separators=(",", ":"))
    file.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{len(profiles)} counts, {file.stat().st_size / 1e3:.0f} kB in {file.name}")


if __name__ == "__main__":
    main()
