"""When a planner is asked again: after news, or at a moment of its own. Pure: the caller gives a monotonic clock.

Law: a moment that was set stands until the planner is asked, whatever else is planned meanwhile.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Turn:
    """One planner's next turn."""

    is_wanted: bool = True
    """Something has changed that it depends on."""
    at_s: float = 0.0
    """When it is asked though nothing is new."""

    def is_due(self, now_s: float) -> bool:
        """True when the planner is to be asked now."""
        return self.is_wanted or now_s >= self.at_s

    def begin(self, at_latest_s: float) -> None:
        """Note that the planner is being asked; its next turn is by news, by `by`, or then."""
        self.is_wanted = False
        self.at_s = at_latest_s

    def by(self, moment_s: float | None) -> None:
        """Ask at that moment, unless that is done before; None for no such moment."""
        if moment_s is not None:
            self.at_s = min(self.at_s, moment_s)

    def put_off(self, moment_s: float) -> None:
        """Ask at that moment and not before."""
        self.is_wanted = False
        self.at_s = moment_s
