"""Roles of rows in a training: those that choose the best weights, and those that report."""

from collections.abc import Mapping
from typing import Any, NamedTuple

CHOSEN, NEVER_CHOSEN = "chosen on", "never chosen on"
RECALIBRATED = "recalibrated on"


class Roles(NamedTuple):
    """The names of the rows that are tested during a training and at its end.

    Metrics in logs and results begin with these names, as in `test_auc`.

    Attributes:
        chooses: the rows that are tested during the training and choose the best weights.
        reports: the rows that are evaluated once, at the end, with the weights chosen.
    """

    chooses: str = "test"
    reports: str | None = "validation"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Roles | None":
        """Returns the roles in a checkpoint's configuration; None if it has none."""
        facts = config.get("roles")
        return cls(facts["chosen_on"], facts.get("never_chosen_on")) if facts else None

    def facts(self) -> dict[str, str]:
        """Returns the roles by the keys that results and checkpoints use."""
        reports = {} if self.reports is None else {"never_chosen_on": self.reports}
        return {"chosen_on": self.chooses, **reports}

    def of(self, name: str) -> str | None:
        """Returns the role of the rows with this name, in words; None if they have none."""
        return {self.chooses: CHOSEN, self.reports: NEVER_CHOSEN}.get(name)


OF_NVIDIA = Roles()
