"""Raw click logs whose best reachable AUC is known: dlrm simulate --output DIR"""

from dataclasses import dataclass

from dlrm.limits import check_features
from dlrm.settings import check_settings, setting


@dataclass(frozen=True)
class Simulation:
    """Parameters of simulated logs, which determine every number in them."""

    rows: int = setting(700_000, "total number of rows")
    days: int = setting(8, "number of day files, of equal size, the last of which is held out")
    seed: int = setting(0, "random seed; the same seed writes the same bytes")
    num_numerical: int = setting(13, "number of integer columns")
    num_categorical: int = setting(26, "number of categorical columns")
    click_rate: float = setting(0.25, "share of clicks on day 0", above=0, below=1)
    missing: float = setting(1.0, "factor on the shares of missing values", least=0, most=1)
    drift: float = setting(
        0.0,
        "angle, in radians, by which all effects turn each day to others: effects that are N days "
        "apart have the correlation cos(N * drift)",
        least=0,
    )
    new_ids: float = setting(
        0.0, "share of the ids that others replace each day, for good", least=0, most=1
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.days < 2:
            raise ValueError(f"--days {self.days}: expected 2 or more, the last is held out")
        if self.rows < 2 * self.days:
            raise ValueError(f"--rows {self.rows}: expected 2 or more a day, of {self.days} days")
        check_features("--num_numerical", self.num_numerical)
        check_features("--num_categorical", self.num_categorical)
        if self.num_numerical + self.num_categorical < 1:
            raise ValueError("--num_numerical 0 --num_categorical 0: expected a feature")

    def day_rows(self, day: int) -> int:
        """Returns the number of rows of a day."""
        return (day + 1) * self.rows // self.days - day * self.rows // self.days
