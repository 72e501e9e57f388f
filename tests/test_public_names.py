"""The public names are what `__all__` says, and importing penstock loads no engine."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import penstock
from penstock import transactions


def test_every_public_name_can_be_had() -> None:
    missing = [name for name in penstock.__all__ if not hasattr(penstock, name)]

    assert missing == []
    assert set(penstock.__all__) <= set(dir(penstock))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = penstock.Nothing


def test_importing_penstock_loads_no_engine() -> None:
    program = "import sys, penstock; print(sorted(n for n in sys.modules if n.startswith(('penstock', 'confluent'))))"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "['penstock']"


@pytest.mark.parametrize("package", [penstock, transactions])
def test_no_module_has_a_public_name_which_it_would_hide_once_it_is_imported(package: ModuleType) -> None:
    assert not {one.name for one in pkgutil.iter_modules(package.__path__)} & set(package.__all__)
