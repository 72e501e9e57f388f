"""Files and variables for tests of settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def clean_settings(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Go to a folder, and leave no setting in the environment."""
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)
