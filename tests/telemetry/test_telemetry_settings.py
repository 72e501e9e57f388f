from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.errors import ConfigurationError
from penstock.telemetry import Telemetry


def test_the_global_providers_are_the_default_and_keys_are_left_out() -> None:
    telemetry = Telemetry()

    assert (telemetry.tracer_provider, telemetry.meter_provider, telemetry.record_keys) == (None, None, False)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((option, "yes") for option in ("tracer_provider", "meter_provider", "record_keys")),
        *(("sample_ratio", ratio) for ratio in (-0.1, 1.1, True, "1", float("nan"))),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(option: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"{option} must be"):
        Telemetry(**{option: value})  # type: ignore[arg-type] # the wrong type is the test


def test_the_packages_import_does_not_load_the_sdk() -> None:
    program = (
        "import sys, penstock.telemetry; print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    )

    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=True)

    assert child.stdout == "[]\n"
