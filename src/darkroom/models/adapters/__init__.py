"""Adapters: LoRA and its kin, read from every common layout, merged, written, and held in a bank.

`adapter` is what one is and does to a layer; `files` opens files with bounds and knows what one says of
itself, `keys` the layouts; `read` reads, fits, merges and writes; `bank` holds many at once, chosen row by
row.
"""

from darkroom.models.adapters.adapter import Adapter, Factors, Layer
from darkroom.models.adapters.read import adaptable, fit, merge, read_adapter, write_adapter

__all__ = ["Adapter", "Factors", "Layer", "adaptable", "fit", "merge", "read_adapter", "write_adapter"]
