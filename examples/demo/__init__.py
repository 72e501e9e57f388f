"""The main demo of penstock on one machine: flights go from an airline's database to an app and to a Spark table.

    airline.py  two processes ─ transactions ─> topic `departures` ─┬─> aircraft.py  an app of 16 workers
                                                                    └─> totals.py    a process with Spark

`main_job.py` starts them, kills one sender at the worst moment, and gives its findings to `verdict.py`. `flights.py`
reads the flights, and `plan.py` chooses the special ones. `parts.py` and `stage.py` handle processes and the screen.
Read `airline.py` first, then `aircraft.py` and `totals.py`: your own job would have such files.
"""
