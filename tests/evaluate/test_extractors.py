"""Extractors give what their networks give, from safetensors, and say which weights they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from makers import small_extractor, write_preprocess
from PIL import Image
from safetensors.torch import load_file, save_file

from darkroom import models
from darkroom.errors import InputError, ModelError
from darkroom.evaluate.extractors import Inception, open_extractor
from darkroom.evaluate.pictures import FolderPictures, Preprocess, images
from darkroom.evaluate.settings import SmallSettings
from darkroom.evaluate.small import word_ids


@pytest.fixture(scope="module")
def some(painted):
    return list(images(FolderPictures.of(painted)))[:6]


def test_resizing_and_cutting_are_those_of_transformers(shared_data):
    from transformers import BitImageProcessorPil, CLIPImageProcessorPil, ViTImageProcessorPil

    photo = Image.open(shared_data / "dreambooth" / "dog" / "00.jpg")
    for cut in ((0, 0, 780, 780), (0, 0, 333, 701), (10, 0, 600, 300)):
        for theirs in (CLIPImageProcessorPil(), ViTImageProcessorPil(), BitImageProcessorPil()):
            expected = theirs(photo.crop(cut), return_tensors="np")["pixel_values"][0]
            ours = Preprocess.of(theirs.to_dict())(photo.crop(cut)).numpy()
            np.testing.assert_allclose(ours, expected, atol=1e-6)
    squeezed = Preprocess.of(ViTImageProcessorPil().to_dict())(photo.crop((10, 0, 600, 300))).numpy()
    kept = Preprocess.of(CLIPImageProcessorPil(**CLIP_LIKE_VIT).to_dict())(
        photo.crop((10, 0, 600, 300))
    ).numpy()
    assert np.abs(squeezed - kept).max() > 0.1


CLIP_LIKE_VIT = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2}


def test_dinos_feature_is_the_class_token_after_the_last_norm(dino_folder, some):
    from transformers import ViTModel

    found = open_extractor(dino_folder)
    network = ViTModel.from_pretrained(dino_folder, add_pooling_layer=False).eval()
    x = torch.stack([Preprocess.read(dino_folder)(image) for image in some])
    with torch.no_grad():
        states = network(x).last_hidden_state
    features = found.pictures(some)
    np.testing.assert_allclose(features, states[:, 0].double().numpy(), atol=1e-5)
    assert np.abs(features - states[:, 1].double().numpy()).max() > 0.1
    assert found.sha256 == models.identity(network)
    with pytest.raises(InputError, match="reads no text"):
        found.texts(["a dog"])


def test_dinov2_takes_other_sizes_than_its_own(dinov2_folder, some):
    found = open_extractor(dinov2_folder)
    assert found.pictures(some).shape == (6, 32)
    maps = found.maps(torch.zeros(2, 3, 32, 32))
    assert [tuple(one.shape) for one in maps] == [(2, 32, 8, 8)] * 4


def test_clip_reads_pictures_and_prompts_as_transformers_does(clip_folder, some):
    from transformers import CLIPModel, CLIPTokenizer

    found = open_extractor(clip_folder)
    network = CLIPModel.from_pretrained(clip_folder).eval()
    tokenizer = CLIPTokenizer.from_pretrained(clip_folder)
    prompts = ["a photo of a dog", "a red circle"]
    tokens = tokenizer(prompts, padding=True, return_tensors="pt")
    x = torch.stack([Preprocess.read(clip_folder)(image) for image in some])
    with torch.no_grad():
        out = network(**tokens, pixel_values=x)
    pictures, texts = found.pictures(some), found.texts(prompts)
    for ours, theirs in ((pictures, out.image_embeds), (texts, out.text_embeds)):
        unit = ours / np.linalg.norm(ours, axis=1, keepdims=True)
        np.testing.assert_allclose(unit, theirs.double().numpy(), atol=1e-5)
    assert np.abs(texts[0] - texts[1]).max() > 1e-2


def test_features_do_not_depend_on_the_batch(small_folder, painted):
    found = open_extractor(small_folder)
    all_images = list(images(FolderPictures.of(painted)))
    together = found.pictures(all_images)
    alone = np.concatenate([found.pictures([image]) for image in all_images])
    np.testing.assert_allclose(together, alone, atol=1e-5)
    assert np.abs(together[0] - together[1]).max() > 1e-3


@pytest.mark.parametrize("kind", ["dino_folder", "clip_folder", "small_folder"])
def test_perceptual_distance_is_that_of_all_pairs(kind, request, some):
    found = open_extractor(request.getfixturevalue(kind))
    layers = [
        torch.cat(parts) for parts in zip(*[found.maps(found.preprocess(i)[None]) for i in some], strict=True)
    ]
    expected = []
    for layer in layers:
        unit = torch.nn.functional.normalize(layer.double(), dim=1)
        pairs = [(1 - (unit[i] * unit[j]).sum(0)).mean().item() for i in range(6) for j in range(6) if i != j]
        expected.append(np.mean(pairs))
    assert found.distance(some) == pytest.approx(np.mean(expected), rel=1e-4)
    assert found.distance([some[0]] * 3) == pytest.approx(0, abs=1e-5)
    assert found.distance(some) > 1e-3


def test_words_are_hashed_alike_everywhere():
    settings = SmallSettings(buckets=100, most_words=4)
    ids = word_ids(["A Dog, a dog!", "", "one two three four five"], settings)
    assert ids.tolist() == [[ids[0, 0], ids[0, 1]] * 2, [0] * 4, ids[2].tolist()]
    assert ids[0, 0] != ids[0, 1]
    assert (ids[2] > 0).all()


# ---- Inception


def test_inception_has_the_published_shape(tmp_path, some):
    """21,785,568 weights: torchvision's 23,834,568 without the 2,049,000 of its classifier."""
    torch.manual_seed(0)
    network = Inception().eval()
    assert sum(p.numel() for p in network.parameters()) == 21_785_568
    names = set(network.state_dict())
    assert {"Conv2d_1a_3x3.conv.weight", "Mixed_5b.branch3x3dbl_3.bn.running_var"} <= names
    assert {"Mixed_6e.branch7x7dbl_5.conv.weight", "Mixed_7c.branch3x3dbl_3b.conv.weight"} <= names
    state = {k: v for k, v in network.state_dict().items() if not k.endswith("num_batches_tracked")}
    state |= {"fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}
    save_file(state, str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text('{"kind": "fid-inception"}')
    found = open_extractor(tmp_path)
    features = found.pictures(some[:2])
    assert features.shape == (2, 2048)
    with torch.no_grad():
        expected = network(torch.stack([found.preprocess(image) for image in some[:2]]))
    np.testing.assert_allclose(features, expected.double().numpy(), atol=1e-5)
    del state["Mixed_7c.branch1x1.conv.weight"]
    save_file(state, str(tmp_path / "model.safetensors"))
    with pytest.raises(ModelError, match="lacks"):
        open_extractor(tmp_path)


@pytest.mark.parametrize("size", [(512, 340), (64, 80), (299, 299)])
def test_inception_sees_what_clean_fid_shows_it(size):
    """clean-fid 0.1.35's `make_resizer("PIL", False, "bicubic", (299, 299))` and its (x - 128) / 128."""
    from darkroom.evaluate.extractors import PREPROCESS

    pixels = np.random.default_rng(3).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    channels = [
        np.asarray(Image.fromarray(pixels[:, :, i].astype(np.float32)).resize((299, 299), Image.BICUBIC))
        for i in range(3)
    ]
    expected = (np.stack([channel.clip(0, 255) for channel in channels]) - 128) / 128
    found = PREPROCESS(Image.fromarray(pixels)).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert found.min() >= -1.00001
    assert found.max() <= 127 / 128 + 1e-5
    rounded = PREPROCESS.model_copy(update={"unrounded": False})(Image.fromarray(pixels)).numpy()
    if size != (299, 299):
        assert abs(rounded - expected).max() > 1e-3


def test_inceptions_mean_pools_leave_the_padding_out():
    from darkroom.evaluate.extractors import _mean_pool

    ones = torch.ones(1, 1, 4, 4)
    assert torch.equal(_mean_pool(ones), ones)
    assert torch.nn.functional.avg_pool2d(ones, 3, 1, 1).min() < 0.5


# ---- what is refused


def test_weights_that_are_missing_are_not_filled_with_random_ones(dino_folder, tmp_path):
    folder = tmp_path / "torn"
    shutil.copytree(dino_folder, folder)
    state = load_file(str(folder / "model.safetensors"))
    name = next(name for name in state if "layernorm" in name and "encoder" not in name)
    del state[name]
    save_file(state, str(folder / "model.safetensors"), metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lacks the weights"):
        open_extractor(folder)


def test_pickled_weights_and_unknown_networks_are_refused(dino_folder, tmp_path):
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(dino_folder / "config.json", pickled)
    torch.save({"a": torch.zeros(1)}, pickled / "pytorch_model.bin")
    with pytest.raises(ModelError, match="never opened"):
        open_extractor(pickled)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ModelError, match="bert, which is no known extractor"):
        open_extractor(other)
    with pytest.raises(ModelError, match="no extractor at './nowhere'"):
        open_extractor("./nowhere")
    with pytest.raises(ModelError, match="open_clip:NAME:FILE"):
        open_extractor("open_clip:coca_ViT-B-32:weights.bin")


def test_a_damaged_small_extractor_is_told(tmp_path):
    folder = small_extractor(tmp_path / "small")
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | {"embedding": 64}))
    with pytest.raises(ModelError, match="no whole extractor"):
        open_extractor(folder)


@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json"])
@pytest.mark.parametrize("content", ["[]", "5", "[" * 50_000, '{"image_mean": 5, "crop_size": {}}', "{"])
def test_a_damaged_file_of_an_extractor_is_one_line(tmp_path, file, content):
    folder = small_extractor(tmp_path / "small")
    kind = json.loads((folder / "config.json").read_text())["kind"]
    if file == "config.json" and content.startswith('{"'):
        content = json.dumps({"kind": kind, "resolution": [], "text": 1, "labels": None})
    (folder / file).write_text(content)
    with pytest.raises(ModelError, match=str(folder)) as error:
        open_extractor(folder)
    assert "\n" not in str(error.value)


def test_a_clip_without_words_is_refused(clip_folder, tmp_path):
    """transformers opens it, and then all prompts are the same to it."""
    folder = Path(shutil.copytree(clip_folder, tmp_path / "clip"))
    told = json.loads((folder / "tokenizer.json").read_text())
    told["model"] |= {"vocab": {}, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(told))
    with pytest.raises(ModelError, match="its vocabulary is empty"):
        open_extractor(folder)


def test_preprocessing_must_be_said(dino_folder, tmp_path):
    folder = tmp_path / "unsaid"
    shutil.copytree(dino_folder, folder)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match="preprocessor_config"):
        open_extractor(folder)
    write_preprocess(folder)
    assert open_extractor(folder).preprocess.shortest == 32
