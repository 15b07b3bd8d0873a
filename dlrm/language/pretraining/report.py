"""Reports the preparation of text: progress bars while it runs, and lines at its end."""

from tqdm import tqdm

from dlrm.language.pretraining.writer import TextSummary

_UNITS = {"tokenize": "B", "cut": "documents", "write": "rows"}


class Bars:
    """A progress bar for each stage; it is `on_progress` of `write_dataset`."""

    def __init__(self) -> None:
        self._stage, self._bar = "", tqdm(disable=True)

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._bar.close()
            self._stage = stage
            unit = _UNITS[stage]
            self._bar = tqdm(
                total=total, desc=stage, unit=unit, unit_scale=unit == "B", disable=None
            )
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Ends the last bar."""
        self._bar.close()


def summary_text(summary: TextSummary, seconds: float) -> str:
    """Returns the text that the command prints at the end."""
    read = (
        f"{summary.files:,} file{'s' * (summary.files != 1)}, {summary.documents:,} documents, "
        f"{summary.sentences:,} sentences, {summary.tokens:,} tokens"
    )
    masked = summary.masked_tokens / max(summary.rows, 1)
    return (
        f"read: {read}\n"
        f"rows: {summary.rows:,} in {summary.shards:,} files, {summary.rows / seconds:,.0f} a "
        f"second; {masked:.1f} masked tokens a row, {summary.random_share:.1%} of the rows with B "
        f"from elsewhere, {summary.padding_share:.1%} padding"
    )
