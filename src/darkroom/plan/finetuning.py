"""What `bench finetune` asks of the plan: one recipe on so many cards of a kind, as plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from darkroom.plan.ask import Target, ask_recipe_object, plans

if TYPE_CHECKING:
    from darkroom.recipe import Recipe

STATE = ("gradients", "optimiser")


def planner(gpu: str, count: int) -> Callable[[Recipe], dict[str, Any]]:
    """Asks recipes on `count` cards; a batch smaller than that on as many cards as it has pictures."""

    def ask(recipe: Recipe) -> dict[str, Any]:
        number = min(count, recipe.train.global_batch)
        micro = recipe.train.model_copy(update={"micro_batch": -(-recipe.train.global_batch // number)})
        shared = recipe.model_copy(update={"train": micro})
        (plan,) = plans(ask_recipe_object(shared), Target(gpu=gpu, count=number))
        made = recipe.train.steps * recipe.train.global_batch
        masters = 4 * plan.parameters["trained"]
        price = plan.cost.price
        return {
            "device": plan.device,
            "count": plan.count,
            "memory_bytes": plan.peak_bytes,
            "trained_state_bytes": int(masters + sum(plan.memory_bytes[name] for name in STATE)),
            "images_per_s": plan.images_per_s,
            "usd_per_image": None if plan.cost.usd is None else plan.cost.usd / made,
            "trained": plan.parameters["trained"],
            "total": plan.parameters["unet"],
            "largest_batch": plan.largest_micro_batch,
            "note": "; ".join(["planned by fake tensors and a roofline, not run", price, *plan.notes]),
        }

    return ask
