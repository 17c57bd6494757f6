"""The recipe: one YAML file that describes a training job completely.

`sections` holds every section as a pydantic model, `recipe` the whole of them, `rules` what sections ask of
each other, `read` the reader with its error messages. Nothing here imports torch.
"""

from darkroom.recipe.read import make_recipe, read_recipe, read_sweep
from darkroom.recipe.recipe import Recipe

__all__ = ["Recipe", "make_recipe", "read_recipe", "read_sweep"]
