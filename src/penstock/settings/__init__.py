"""Settings from outside of the code: a file, the environment, the command line; each goes before the ones before it.

An option of `App` is what the code states; what it leaves out is what `penstock.toml` or `[tool.penstock]` of
`pyproject.toml` says. A file that somebody names, a profile, `PENSTOCK_<OPTION>` and the command line go before the
code. Commands take their connection from the same places. Types are checked here; what a value may be is checked by
whoever takes it.
"""

from penstock.settings.effective import Effective, effective, outside
from penstock.settings.sources import OPTIONS, on_command_line
from penstock.settings.text import client_settings_text, shown_value

__all__ = ["OPTIONS", "Effective", "client_settings_text", "effective", "on_command_line", "outside", "shown_value"]
