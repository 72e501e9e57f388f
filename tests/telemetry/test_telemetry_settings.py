from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.errors import ConfigurationError
from penstock.telemetry import Telemetry


def test_the_global_providers_are_the_default_and_keys_are_left_out() -> None:
    telemetry = Telemetry()

    assert (telemetry.tracer_provider, telemetry.meter_provider, telemetry.record_keys) == (None, None, False)


@pytest.mark.parametrize("option", ["tracer_provider", "meter_provider", "record_keys"])
def test_a_wrong_option_is_refused_by_its_name(option: str) -> None:
    with pytest.raises(ConfigurationError, match=option):
        Telemetry(**{option: "yes"})  # type: ignore[arg-type] # the wrong type is the test


def test_the_packages_import_does_not_load_the_sdk() -> None:
    program = (
        "import sys, penstock.telemetry; print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    )

    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=True)

    assert child.stdout == "[]\n"


@pytest.mark.parametrize("ratio", [-0.1, 1.1, True, "1", float("nan")])
def test_a_part_to_sample_is_from_nothing_to_all(ratio: float) -> None:
    with pytest.raises(ConfigurationError, match="sample_ratio must be from 0 to 1"):
        Telemetry(sample_ratio=ratio)
