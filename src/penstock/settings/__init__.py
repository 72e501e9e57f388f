"""Settings from outside the code: a file, the environment and the command line. Later ones override earlier ones.

For an option that the code leaves out, `penstock.toml` or `[tool.penstock]` of `pyproject.toml` in the current folder
counts. A file named by `PENSTOCK_SETTINGS`, a profile, `PENSTOCK_<OPTION>` and the command line override the code.
Commands take their connection from the same places. Types are checked here; the user of an option checks its value.
"""

from penstock.settings.effective import Effective, effective, outside
from penstock.settings.sources import OPTIONS, on_command_line
from penstock.settings.text import client_settings_text, shown_value

__all__ = ["OPTIONS", "Effective", "client_settings_text", "effective", "on_command_line", "outside", "shown_value"]
