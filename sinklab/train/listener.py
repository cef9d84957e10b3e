class Listener:
    """Hears of a run while it goes on; this one lets everything pass."""

    def note(self, line: str) -> None:
        """Something that whoever reads the terminal should know."""

    def begin(self, step: int, attention: str, changes: list[str]) -> None:
        """An attempt goes on from a step: what computes attention now, and did before; what has changed there."""

    def record(self, record: dict, written: bool) -> None:
        """The numbers of every step, and whether metrics.jsonl has them."""
