"""`penstock demo`: the main job on real Kafka and real Spark, from the folder `examples/demo` of a checkout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

import penstock
from penstock.errors import ConfigurationError

#: The beginning of the help of column options.
_WITH_INPUT = "With --input: "


def demo(
    *,
    whole_year: Annotated[bool, typer.Option("--all", help="All departures of 2013, not only January.")] = False,
    input_file: Annotated[
        Path | None, typer.Option("--input", metavar="FILE.csv", help="Your own CSV file instead of the flights.")
    ] = None,
    key: Annotated[str, typer.Option(help=f"{_WITH_INPUT}column of the key, which is kept in order.")] = "tailnum",
    order: Annotated[
        str, typer.Option(help=f"{_WITH_INPUT}columns of the order, most significant first, separated by commas.")
    ] = "year,month,day,sched_dep_time",
    status: Annotated[str, typer.Option(help=f"{_WITH_INPUT}column that is empty in cancelled rows.")] = "dep_time",
    delay: Annotated[str, typer.Option(help=f"{_WITH_INPUT}column of the delay in minutes.")] = "dep_delay",
    place: Annotated[str, typer.Option(help=f"{_WITH_INPUT}column of the place.")] = "dest",
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep databases, topics and logs in a folder below the current one.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Selects the flight whose message always fails.")] = 2013,
    spark: Annotated[bool, typer.Option("--spark/--no-spark", help="Whether Spark takes part.")] = True,
    page: Annotated[bool, typer.Option("--page/--no-page", help="Whether a page shows it live.")] = True,
) -> None:
    """Run the main job end to end on an embedded Kafka, and check every promise against the data.

    The demo is in `examples/demo` of penstock's repository: run it in a checkout.

    Exit codes: 0 every promise was kept, 1 one was not, 2 wrong use.
    """
    if whole_year and input_file is not None:
        raise ConfigurationError("--all and --input exclude each other: --all is for the built-in flights")
    sys.path.insert(0, str(_examples()))
    from demo.flights import Columns, read_csv, read_package
    from demo.main_job import run
    from rich.console import Console

    if input_file is None:
        flights = read_package(whole_year=whole_year)
    else:
        names = tuple(name.strip() for name in order.split(",") if name.strip())
        flights = read_csv(input_file, Columns(key, names, status, delay, place))
    raise typer.Exit(run(flights, Console(), seed=seed, spark=spark, page=page, keep=keep))


def _examples() -> Path:
    """Return the folder `examples` of the checkout that penstock is installed from, or of the current directory."""
    for checkout in (Path(penstock.__file__).parents[2], Path.cwd()):
        if (checkout / "examples" / "demo" / "main_job.py").is_file():
            return checkout / "examples"
    raise ConfigurationError(
        "the demo is not in the installed package: it is the folder examples/demo of penstock's repository. "
        "Clone the repository (`pip show --verbose penstock` prints its address) and run `make demo` in it; or run "
        "`pip install 'penstock[demo]'` and then `penstock demo` in it"
    )
