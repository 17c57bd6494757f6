"""The rows of a store that a recipe trains on."""

from __future__ import annotations

from darkroom.data.mixing import MixedRows, MixedStore
from darkroom.data.order import Rows
from darkroom.data.store import Store
from darkroom.errors import RecipeError
from darkroom.recipe.sections import DataSettings


def select_rows(store: Store, data: DataSettings) -> tuple[Rows, Rows]:
    """The rows that are trained on, and those held out; of several stores, those of each."""
    if isinstance(store, MixedStore):
        parts = [_matching(one, data) for one in store.stores]
        rows: Rows = MixedRows.over(parts, store.offsets)
    else:
        rows = _matching(store, data)
    if data.holdout >= 1 and data.holdout != int(data.holdout):
        raise RecipeError("data.holdout", f"{data.holdout}", allowed="a share below 1, or a whole number")
    if data.holdout * 2 > len(rows) or 0.5 < data.holdout < 1:
        raise RecipeError(
            "data.holdout", f"{data.holdout:g} of {len(rows)} rows", allowed="at most half of the rows"
        )
    return rows.split(data.holdout if data.holdout < 1 else int(data.holdout))


def _matching(store: Store, data: DataSettings) -> Rows:
    """The rows of one store that the recipe's filter lets through; RecipeError where there are none."""
    given = data.filter
    rows = Rows.of(store.choose(given) if given else store.num_rows)
    if len(rows):
        return rows
    of = f" of '{store.path}'" if data.stores else ""
    if given:
        raise RecipeError("data.filter", f"no row of {store.num_rows}{of} matches '{given}'")
    raise RecipeError("data.stores" if data.stores else "data.store", f"the store{of} is empty")
