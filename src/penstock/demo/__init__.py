"""`penstock demo`: the main job, end to end, on a real broker, with a verdict computed from the data itself."""

from penstock.demo.flights import Columns
from penstock.demo.main_job import run
from penstock.demo.options import DemoOptions

__all__ = ["Columns", "DemoOptions", "run"]
