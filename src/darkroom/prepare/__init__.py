"""Encoding ahead of training: encoders, and the job that adds their latents and text states to a store."""

from darkroom.prepare.columns import (
    InlineEncoder,
    TextEncoder,
    VaeEncoder,
    latents_column,
    sample_latents,
    text_column,
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
