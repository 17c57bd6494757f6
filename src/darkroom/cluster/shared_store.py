"""Which machines see a store's folder: nodes are asked before the work, and workers look where they run."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from darkroom.errors import StoreError

if TYPE_CHECKING:
    from darkroom.recipe.sections import DataSettings

ANSWER_S = 30.0  # how long all nodes together may take to answer
NAMED = 3  # machines that a line names


def stores_here(data: DataSettings) -> list[str]:
    """The folders of a recipe's stores that this machine sees, which others must see too."""
    stores = [data.store, *(one.store for one in data.stores)]
    return [str(Path(store).absolute()) for store in stores if store and Path(store).is_dir()]


def check_here(store: str) -> None:
    """StoreError where a store's folder is not on this machine."""
    if host := blind(store):
        raise _unseen(store, [host])


def blind(store: str) -> str:
    """This machine's name where a store's folder is not on it; else nothing."""
    return "" if "://" in store or Path(store).is_dir() else socket.gethostname()


def check_nodes(store: str, say: Callable[[str], None], *, answer_s: float = ANSWER_S) -> None:
    """StoreError where a store's folder is not on every node that may take work: one that has CPUs.

    The tasks that look take no CPU, so busy nodes answer too. Those that do not in time are said, and left to
    their first block. The driver's own node is not asked.
    """
    import ray

    here = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    asked = {_look(store, node): node["NodeManagerHostname"] for node in nodes if node["NodeID"] != here}
    answers, silent = _answers(asked, answer_s)
    if without := sorted({*filter(None, answers)}):
        raise _unseen(store, without)
    if silent:
        say(f"{_named(sorted({*silent}))} did not tell within {answer_s:g} s whether {store} is there")


def _look(store: str, node: dict[str, Any]) -> Any:
    import ray

    there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ray.remote(blind).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(store)


def _answers(asked: dict[Any, str], answer_s: float) -> tuple[list[str], list[str]]:
    """What the nodes reported, and the names of those that reported nothing."""
    import ray

    if not asked:
        return [], []
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=answer_s)
    answers, silent = [], [asked[ref] for ref in late]
    for ref in late:
        ray.cancel(ref, force=True)
    for ref in done:
        try:
            answers.append(ray.get(ref))
        except ray.exceptions.RayError:  # the node went, or cannot start a worker: blocks tell why
            silent.append(asked[ref])
    return answers, silent


def _unseen(store: str, hosts: Sequence[str]) -> StoreError:
    return StoreError(
        f"{store} is not on {_named(hosts)}",
        mend="keep the store in a folder that every node mounts at the same place",
    )


def _named(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - NAMED} more" if len(hosts) > NAMED else ""
    return f"the machine{'s' if len(hosts) > 1 else ''} {', '.join(hosts[:NAMED])}{more}"
