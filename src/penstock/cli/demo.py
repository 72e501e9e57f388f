"""`penstock demo`: the main job on real Kafka and real Spark, from the folder `examples/demo` of a checkout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

import penstock
from penstock.errors import ConfigurationError


def demo(
    *,
    whole_year: Annotated[bool, typer.Option("--all", help="All departures of 2013, not those of January.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep databases, topics and logs in a folder here.")] = False,
    seed: Annotated[int, typer.Option(help="Chooses the flight that is planted as poison.")] = 2013,
    spark: Annotated[bool, typer.Option("--spark/--no-spark", help="Whether Spark takes part.")] = True,
    page: Annotated[bool, typer.Option("--page/--no-page", help="Whether a page shows it live meanwhile.")] = True,
) -> None:
    """Run the main job end to end on an embedded Kafka, and check every promise against the data itself.

    It is in `examples/demo` of penstock's repository: run it in a checkout.

    Exit codes: 0 every promise was kept, 1 one was not, 2 wrong use.
    """
    sys.path.insert(0, str(_examples()))
    from demo.flights import read_flights
    from demo.main_job import run
    from rich.console import Console

    flights = read_flights(whole_year=whole_year)
    raise typer.Exit(run(flights, Console(), seed=seed, spark=spark, page=page, keep=keep))


def _examples() -> Path:
    """Return the folder `examples` of the checkout that penstock is installed from, or of the current folder."""
    for checkout in (Path(penstock.__file__).parents[2], Path.cwd()):
        if (checkout / "examples" / "demo" / "main_job.py").is_file():
            return checkout / "examples"
    raise ConfigurationError(
        "the demo is not in the installed package: it is the folder examples/demo of penstock's repository. "
        "Clone that (`pip show --verbose penstock` names its address) and run `make demo` there; or run "
        "`pip install 'penstock[demo]'` and then `penstock demo` in the folder of the clone"
    )
