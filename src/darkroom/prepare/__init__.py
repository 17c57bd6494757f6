"""Encoding ahead of training: encoders, and the job that adds their latents and text states to a store."""

from darkroom.prepare.columns import latents_column, text_column
from darkroom.prepare.encoders import (
    InlineEncoder,
    TextEncoder,
    VaeEncoder,
    sample_latents,
    text_states,
    tokenize,
)
from darkroom.prepare.job import PrepareReport, prepare

__all__ = [
    "InlineEncoder",
    "PrepareReport",
    "TextEncoder",
    "VaeEncoder",
    "latents_column",
    "prepare",
    "sample_latents",
    "text_column",
    "text_states",
    "tokenize",
]
