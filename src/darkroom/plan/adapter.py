"""Parameters and file size of a LoRA adapter, from the layers it would be put into; no weights are made."""

from __future__ import annotations

import json

from darkroom.plan.cache import cached


def adapter_facts(base: str, rank: int, targets: str = "qv") -> dict[str, int]:
    """Trained and total parameters of the U-Net, and bytes of the float32 safetensors file; kept."""
    key = {"job": "adapter", "base": base, "rank": rank, "targets": targets}
    return cached(key, lambda: _facts(base, rank, targets))


def _facts(base: str, rank: int, targets: str) -> dict[str, int]:
    from darkroom.models.outline import outlined
    from darkroom.train.adapter import AdapterSettings, add_adapters, parameter_table

    model = outlined(base, ("unet",))
    parts = add_adapters(model, AdapterSettings(targets=targets, rank=rank))
    trained, total = parameter_table(parts)
    shapes = {
        f"unet.{name.replace('.default', '')}": tuple(param.shape)
        for name, param in parts["unet"].named_parameters()
        if param.requires_grad
    }
    return {"trained": trained, "total": total, "file_bytes": safetensors_bytes(shapes)}


def safetensors_bytes(shapes: dict[str, tuple[int, ...]], item_bytes: int = 4) -> int:
    """Size of a safetensors file: eight bytes, a JSON header padded to eight, the tensors."""
    header, offset = {}, 0
    for name, shape in sorted(shapes.items()):
        size = item_bytes
        for side in shape:
            size *= side
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    length = len(json.dumps(header, separators=(",", ":")))
    return 8 + -(-length // 8) * 8 + offset
