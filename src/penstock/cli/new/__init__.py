"""`penstock new`: creates a small runnable project, with a test, settings and a Dockerfile."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.output import Result
from penstock.errors import ConfigurationError

#: The files of the folder `project`, with their names in the new project.
_FILES = {
    "app.py.txt": "app.py",
    "tests/test_app.py.txt": "tests/test_app.py",
    "penstock.toml.txt": "penstock.toml",
    "pyproject.toml.txt": "pyproject.toml",
    "Dockerfile.txt": "Dockerfile",
    "dockerignore.txt": ".dockerignore",
    "README.md.txt": "README.md",
}
#: The allowed name of a project, which is also that of a consumer group, a package and topics.
_NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the project, its folder and its App.")],
) -> Result:
    """Create a small project in a new folder: an app, its test, its settings, a Dockerfile."""
    if _NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"{name!r} cannot be the name of a project; use lower-case letters, digits and hyphens, as in order-worker"
        )
    folder = Path(name)
    project = resources.files("penstock.cli.new") / "project"
    try:
        folder.mkdir()
        for source, target in _FILES.items():
            (folder / target).parent.mkdir(exist_ok=True)
            (folder / target).write_text((project / source).read_text(encoding="utf-8").format(name=name), "utf-8")
    except FileExistsError:
        raise ConfigurationError(f"{folder.resolve()} exists already; use another name or another folder") from None
    except OSError as error:
        raise ConfigurationError(
            f"{folder.resolve()} cannot be written: {error.strerror}; change to a writable folder"
        ) from error
    lines = [
        f"{folder} has {', '.join(sorted(_FILES.values()))}",
        f"next: cd {folder} && python -m pytest, then penstock check app:app and penstock run app:app --reload",
    ]
    return Result(facts={"folder": str(folder.resolve()), "files": sorted(_FILES.values())}, lines=lines)
