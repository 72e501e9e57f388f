"""The main job of penstock on one machine: flights, from an airline's database to an app and to a table of Spark.

    airline.py  two processes ─ transactions ─> topic `departures` ─┬─> aircraft.py  an app of 16 workers
                                                                    └─> totals.py    a process with Spark

`main_job.py` starts them, lets one sender die at the worst moment, and hands what it finds to `verdict.py`. The flights
come from `flights.py`, what happens to which of them from `plan.py`; `parts.py` and `progress.py` are about processes
and the screen. Read `airline.py` first, then `aircraft.py` and `totals.py`: they are what a job of yours would have.
"""
