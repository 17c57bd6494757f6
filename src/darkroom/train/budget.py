"""How much a run may use before it stops by itself."""

from __future__ import annotations

from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict, Field

from darkroom.bill import Bill, format_usd


class BudgetSettings(BaseModel):
    """The most that a run (or a whole sweep) may use; it then stops with its state saved."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    usd: float | None = Field(default=None, gt=0, description="dollars, where the device's price is known")
    hours: float | None = Field(default=None, gt=0, description="wall-clock hours, all sessions together")
    deadline: datetime | None = Field(
        default=None, description="moment at which it stops, such as 2026-12-01T06:00+00:00; no zone is UTC"
    )

    def spent(self, bill: Bill) -> str:
        """What of the budget a bill has used up, as words; empty while it has not."""
        if self.deadline is not None and datetime.now(UTC) >= _with_zone(self.deadline):
            return f"budget.deadline {self.deadline.isoformat()}"
        if self.hours is not None and bill.wall_s >= self.hours * 3600:
            return f"budget.hours {self.hours:g}"
        if self.usd is not None and bill.usd is not None and bill.usd >= self.usd:
            return f"budget.usd {self.usd:g} ({format_usd(bill.usd)} used)"
        return ""

    def less(self, bill: Bill) -> BudgetSettings | None:
        """What is left after a bill; None where nothing is."""
        if self.spent(bill):
            return None
        hours = None if self.hours is None else self.hours - bill.wall_s / 3600
        usd = None if self.usd is None else self.usd - (bill.usd or 0.0)
        return BudgetSettings(usd=usd, hours=hours, deadline=self.deadline)


def _with_zone(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
