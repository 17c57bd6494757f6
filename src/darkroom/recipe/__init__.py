"""The recipe: one YAML file that describes a training job completely.

`sections` holds every section as a pydantic model, `recipe` the whole of them and the reader with its error
messages, `rules` what sections ask of each other. Nothing here imports torch.
"""

from darkroom.recipe.recipe import Recipe, make_recipe, read_recipe, read_sweep

__all__ = ["Recipe", "make_recipe", "read_recipe", "read_sweep"]
