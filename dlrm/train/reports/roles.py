"""Roles of rows in a training: those that choose the best weights, and those that report."""

from typing import NamedTuple

CHOSEN, NEVER_CHOSEN = "chosen on", "never chosen on"


class Roles(NamedTuple):
    """The names of the rows that are tested during a training and at its end.

    Metrics in logs and results begin with these names, as in `test_auc`.

    Attributes:
        chooses: the rows that are tested during the training and choose the best weights.
        reports: the rows that are evaluated once, at the end, with the weights chosen.
    """

    chooses: str = "test"
    reports: str | None = "validation"

    def facts(self) -> dict[str, str]:
        """Returns the roles by the keys that results and checkpoints use."""
        reports = {} if self.reports is None else {"never_chosen_on": self.reports}
        return {"chosen_on": self.chooses, **reports}

    def of(self, name: str) -> str:
        """Returns the role of the rows with this name."""
        return CHOSEN if name == self.chooses else NEVER_CHOSEN


OF_NVIDIA = Roles()
