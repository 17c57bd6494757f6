"""How quickly processes of this machine sum what each holds: what data-parallel training waits for."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

SIZE_BYTES = {"cpu": 2**26, "cuda": 2**28}


def link_bytes_s(kind: str, budget_s: float) -> tuple[int, float] | None:
    """How many processes there were, and the bytes a second over each one's wire in their ring all-reduce:
    gloo between two on a CPU, NCCL between all GPUs. None where there is only one GPU.
    """
    import torch

    number = torch.cuda.device_count() if kind == "cuda" else 2
    if number < 2:
        return None
    with tempfile.TemporaryDirectory(prefix="darkroom-links-") as folder:
        spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]
        spawn(_rank, (number, folder, kind, budget_s), nprocs=number)
        seconds = float((Path(folder) / "seconds").read_text())
    return number, 2 * (number - 1) / number * SIZE_BYTES[kind] / seconds


def _rank(rank: int, number: int, folder: str, kind: str, budget_s: float) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=number,
    )
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    held = torch.zeros(SIZE_BYTES[kind] // 4, device=device)
    taken = []
    for _ in range(2 + max(3, min(50, int(10 * budget_s)))):  # as many in all processes
        if kind == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        dist.all_reduce(held)
        if kind == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    if rank == 0:
        (Path(folder) / "seconds").write_text(str(median(taken[2:])))
    dist.destroy_process_group()
