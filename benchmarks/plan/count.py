"""Count again what the published tables need, for src/darkroom/plan/published_counts.json (some minutes)."""

from __future__ import annotations

import json
from typing import Any

from darkroom.plan.counts import Profile
from darkroom.proof import published
from darkroom.proof import tables as shipped


def main() -> None:
    """Note every profile that any table asks for."""
    noted: dict[str, Any] = {}

    def note(key: dict[str, Any], count: Any) -> Profile:
        profile: Profile = count()
        noted[json.dumps(key, sort_keys=True)] = shipped.packed(profile)
        return profile

    shipped._kept = note
    from darkroom.plan.roofline import efficiency

    for name in published.TABLES:
        print(name, flush=True)
        for row in published.table(name).rows:
            row.predict(efficiency())
    tight = {"separators": (",", ":")}
    lines = [f"{json.dumps(key)}: {json.dumps(value, **tight)}" for key, value in noted.items()]
    shipped.FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
