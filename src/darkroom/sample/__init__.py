"""From prompts to pictures: solvers as tables, the denoising loop over them, and what stands around it.

`schedule` reads noise schedules, `solvers` fills a `SolverTable` for each solver (`table` says what is in
one) and `flow` those of rectified flow, `choice` picks the solver; `denoise` packs rows and takes the steps;
`prompts` encodes text; `pictures` decodes, saves and reads back; `backends` computes the U-Net and VAE,
`optimisations` makes them quicker or smaller and `memory` keeps them under a limit; `generate` is the whole
way in one call.
"""

from darkroom.options import BACKENDS
from darkroom.picture_settings import GenerateSettings, Hires
from darkroom.sample import optimisations
from darkroom.sample.adapters import Named, read_tags
from darkroom.sample.backends import open_backend
from darkroom.sample.backends.backend import Backend
from darkroom.sample.choice import default_solver, make_table, solvers_of
from darkroom.sample.control import Control
from darkroom.sample.denoise import (
    Condition,
    KnownPart,
    Row,
    RunningBatch,
    StepState,
    Unet,
    advance,
    denoise,
    unet_call,
)
from darkroom.sample.generate import Generation, generate
from darkroom.sample.pictures import Picture, decode, make_grid, prompt_in, read_parameters, save_pictures
from darkroom.sample.prompt_files import cells, expand, read_axes, read_prompts
from darkroom.sample.prompts import PromptChunk, encode_prompts, read_prompt
from darkroom.sample.schedule import Schedule
from darkroom.sample.solvers import SolverTable

__all__ = [
    "BACKENDS",
    "Backend",
    "Condition",
    "Control",
    "GenerateSettings",
    "Generation",
    "Hires",
    "KnownPart",
    "Named",
    "Picture",
    "PromptChunk",
    "Row",
    "RunningBatch",
    "Schedule",
    "SolverTable",
    "StepState",
    "Unet",
    "advance",
    "cells",
    "decode",
    "default_solver",
    "denoise",
    "encode_prompts",
    "expand",
    "generate",
    "make_grid",
    "make_table",
    "open_backend",
    "optimisations",
    "prompt_in",
    "read_axes",
    "read_parameters",
    "read_prompt",
    "read_prompts",
    "read_tags",
    "save_pictures",
    "solvers_of",
    "unet_call",
]
