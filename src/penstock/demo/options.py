"""Options of the demo."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from penstock.demo.flights import Columns, Flight, read_csv, read_package
from penstock.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of the demo."""

    whole_year: bool = False
    #: A CSV file of the user, instead of the flights.
    input: Path | None = None
    columns: Columns = field(default_factory=Columns)
    #: Whether the SQLite files, the broker's data and the logs stay in a folder here, which is named.
    keep: bool = False
    #: Chooses the poison flight.
    seed: int = 2013
    #: Whether the Spark query takes part.
    spark: bool = True
    #: Whether the page is served meanwhile.
    page: bool = True
    #: Flights that the app's handler takes without folding them; for a test that wants a red verdict.
    ignored: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Refuse options that contradict each other, with `ConfigurationError`."""
        if self.whole_year and self.input is not None:
            raise ConfigurationError("--all and --input exclude each other: --all is about the built-in flights")

    def flights(self) -> list[Flight]:
        """Read the flights these options name, in schedule order; `ConfigurationError` when that cannot be."""
        if self.input is not None:
            return read_csv(self.input, self.columns)
        return read_package(whole_year=self.whole_year)
