"""Roles of rows in a training: those that choose the best weights, and those that judge them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

SELECTION, HOLDOUT, RECALIBRATED = "selection", "hold-out", "recalibrated on"


class Roles(NamedTuple):
    """Names the rows that are tested during a training and at its end, as in `test_auc`.

    Attributes:
        chooses: the selection rows, which choose the best weights during the training.
        reports: the hold-out rows, which are evaluated once, at the end, with the weights chosen.
    """

    chooses: str = "test"
    reports: str | None = "validation"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Roles | None":
        """Returns the roles in a checkpoint's configuration; None if it has none."""
        facts = config.get("roles")
        return cls(facts["selection_split"], facts.get("holdout_split")) if facts else None

    def facts(self) -> dict[str, str]:
        """Returns the roles by the keys that results and checkpoints use."""
        reports = {} if self.reports is None else {"holdout_split": self.reports}
        return {"selection_split": self.chooses, **reports}

    def of(self, name: str) -> str | None:
        """Returns the role of the rows with this name, in words; None if they have none."""
        return {self.chooses: SELECTION, self.reports: HOLDOUT}.get(name)


OF_NVIDIA = Roles()
