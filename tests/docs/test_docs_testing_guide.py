"""The programs of the page on testing pass, as a reader would run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, blocks


@pytest.mark.timeout(500)
def test_every_test_of_the_page_passes(tmp_path: Path) -> None:
    programs = [one for one in blocks(ROOT / "docs" / "testing.md") if one.language == "python"]
    for program in programs:
        (tmp_path / program.title).write_text(program.text)

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    written = sum(program.text.count("\ndef test_") for program in programs)
    assert f"{written} passed" in done.stdout
    assert written > 7
