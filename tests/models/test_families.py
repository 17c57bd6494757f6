"""The families have the published models' sizes; random weights follow the seed."""

from __future__ import annotations

import pytest
import torch

from darkroom import models
from darkroom.errors import ModelError

PUBLISHED = {
    "sd15": {"unet": 859_520_964, "vae": 83_653_863, "text_encoder": 123_060_480},
    "sd2": {"unet": 865_910_724, "vae": 83_653_863, "text_encoder": 340_387_840},
    "sd2-v": {"unet": 865_910_724, "vae": 83_653_863, "text_encoder": 340_387_840},
    "sdxl": {
        "unet": 2_567_463_684,
        "vae": 83_653_863,
        "text_encoder": 123_060_480,
        "text_encoder_2": 694_659_840,
    },
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_full_size_families_count_the_published_parameters(family):
    model = models.create(family, parts=("unet", "vae", "text_encoder"), device="meta")
    assert model.num_parameters == PUBLISHED[family]


def test_same_seed_same_weights_other_seed_other_weights():
    one, same, other = (models.create("tiny", seed=seed, parts=("unet",)) for seed in (1, 1, 2))
    assert models.identity(one.unet) == models.identity(same.unet)
    assert models.identity(one.unet) != models.identity(other.unet)


def test_creating_leaves_the_global_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    models.create("tiny", parts=("vae",))
    assert torch.equal(torch.rand(1), expected)


def test_overrides_change_the_architecture():
    model = models.create(
        "tiny",
        overrides={"vae": {"block_out_channels": [8, 16]}, "scheduler": {"prediction_type": "v_prediction"}},
    )
    assert model.vae_factor == 2
    assert model.scheduler["prediction_type"] == "v_prediction"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"family": "sd16"}, "no model family 'sd16'; allowed: sd15"),
        ({"family": "tiny", "overrides": {"clip": {}}}, "no part 'clip'"),
        ({"family": "tiny", "overrides": {"unet": {"widths": [1]}}}, "no setting 'widths' in the unet"),
        ({"family": "tiny", "overrides": {"unet": {"norm_num_groups": 7}}}, "the unet cannot be built"),
        (
            {"family": "tiny", "overrides": {"unet": {"cross_attention_dim": 24}}},
            "its unet takes text of width 24, its text encoders give 64; a part is of another model",
        ),
        ({"family": "sd15", "tokenizer": "nowhere"}, "no tokenizer folder at 'nowhere'"),
    ],
)
def test_a_wrong_request_is_told_in_one_line(arguments, message):
    with pytest.raises(ModelError, match=message) as caught:
        models.create(**arguments)
    assert "\n" not in str(caught.value)


def test_sd2_pads_with_the_exclamation_mark(shared_data):
    sd2 = models.create("sd2", tokenizer=shared_data / "clip_tokenizer", parts=("tokenizer",))
    sd15 = models.create("sd15", tokenizer=shared_data / "clip_tokenizer", parts=("tokenizer",))
    assert (sd2.tokenizers[0].pad_token_id, sd15.tokenizers[0].pad_token_id) == (0, 49407)
    told = [model.tokenizers[0]("a photo of sks dog", padding="max_length") for model in (sd2, sd15)]
    assert [len(ids.input_ids) for ids in told] == [77, 77]
    assert told[0].input_ids[:7] == told[1].input_ids[:7] == [49406, 320, 1125, 539, 48136, 1929, 49407]
    assert sd2.tokenizers[0].decode([320, 1125]) == sd15.tokenizers[0].decode([320, 1125]) == "a photo"
