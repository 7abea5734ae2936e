"""What a run writes, value by value, without the steps that it gave up."""

from __future__ import annotations

__all__ = ["Series"]


class Series:
    """Values by name and step, in the order in which they were written; the later one of a step counts.

    A run that goes on from a checkpoint takes the steps after it again, and may end before those that it had
    taken. So a training step below the last one gives up all that was said of it and of later ones, and one
    that comes again what was said of later ones. Other values may be late: they give up nothing.
    """

    def __init__(self) -> None:
        self.values: dict[str, dict[int, float]] = {}
        """By name, those that a run has."""
        self.abandoned: int | None = None
        """The last step that was given up; it may have been taken again."""
        self.last: int | None = None
        """The last training step."""
        self._since: list[tuple[str, int]] = []

    def of(self, name: str) -> dict[int, float]:
        """The values of a name by step, which later ones join."""
        return self.values.setdefault(name, {})

    def add(self, name: str, step: int, value: float) -> None:
        """Note a value."""
        self.of(name)[step] = value
        self._since.append((name, step))

    def trained(self, step: int, began: bool = False) -> None:
        """A training step was taken; its values are added after this, or were just before.

        Args:
            step: Its number.
            began: Whether it is known to be the first one of a process: then all that was said of it and of
                later ones is given up, as losses may be written more rarely than other values.
        """
        before = self.last is not None and step < self.last
        if began or before or step == self.last:
            given_up = {self.last} if before else set()
            for name, values in self.values.items():
                for one in [one for one in values if one >= step]:
                    # What was said of this step since the last one was taken belongs to the new beginning.
                    if one > step or began or (name, one) not in self._since:
                        del values[one]
                        given_up.add(one)
            if given_up:
                self.abandoned = max(*given_up, self.abandoned or 0)
        self.last = step
        self._since.clear()
