"""Tells when RTT has crossed a point for good: with persistence and hysteresis, so that noise crosses nothing."""

from dataclasses import dataclass
from typing import Final, Literal

from guard.estimate.shapes import Figure

BAND: Final = 0.05
"""RTT is beyond a point when it is so much beyond: two identical runs differ by 5 %."""

PERSISTENCE: Final = 3
"""Looks in a row that must agree."""

Side = Literal["below", "above"]


@dataclass(slots=True)
class Crossing:
    """On which side of one figure RTT is. The first side found is told only when it is `above`."""

    side: Side = "below"
    _other: int = 0

    def look(self, rtt: float | None, figure: Figure) -> Side | None:
        """Takes one look; returns the new side when it has changed. Priors cross nothing: they are not measured."""
        if rtt is None or figure.value is None or figure.source == "prior":
            self._other = 0
            return None
        up = self.side == "below"
        beyond = rtt > figure.value * (1.0 + BAND) if up else rtt < figure.value * (1.0 - BAND)
        self._other = self._other + 1 if beyond else 0
        if self._other < PERSISTENCE:
            return None
        self._other = 0
        self.side = "above" if self.side == "below" else "below"
        return self.side
