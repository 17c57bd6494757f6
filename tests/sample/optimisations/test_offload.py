"""Offloading's hooks with main memory on both sides: the same pictures, weights put away after calls."""

from __future__ import annotations

import pytest
import torch

from darkroom import sample
from darkroom.sample.backends.eager import torch_backend
from darkroom.sample.optimisations.applied import Applied
from darkroom.sample.optimisations.table import OPTIMISATIONS

SETTINGS = {"steps": 3, "guidance": 5.0, "seed": 2}


@pytest.mark.parametrize("name", ["offload_model", "offload_sequential", "offload_group"])
def test_offloaded_models_make_the_same_pictures(tiny, name):
    plain = sample.generate(tiny, "a red circle", optimise="none", **SETTINGS)[0]
    applied = Applied(tiny, torch.device("cpu"))
    OPTIMISATIONS[name].apply(applied, "")
    made = sample.generate(tiny, "a red circle", backend=torch_backend(applied), **SETTINGS)[0]
    torch.testing.assert_close(made.latents, plain.latents, atol=1e-5, rtol=1e-5)
    other = sample.generate(tiny, "a red circle", backend=torch_backend(applied), **{**SETTINGS, "seed": 5})[
        0
    ]
    assert (other.latents - plain.latents).abs().max() > 0.1
    assert not any(hasattr(module, "_hf_hook") for module in tiny.unet.modules())


def test_sequential_weights_are_nowhere_between_calls(tiny):
    applied = Applied(tiny, torch.device("cpu"))
    OPTIMISATIONS["offload_sequential"].apply(applied, "")
    assert all(p.device.type == "meta" for p in applied.model.unet.parameters())
    assert all(p.device.type == "cpu" for p in tiny.unet.parameters())
