"""Whether this process may write in a folder, asked before a library meets it and tells it in words of its own."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from penstock.clients.rights import MissingRightError

#: What may be done in a folder, by the names of access control lists.
_READ, _WRITE = "rx", "rwx"
#: Whether the system can be asked about the user as whom the process acts.
_EFFECTIVE = os.access in os.supports_effective_ids
_MODES = {"r": os.R_OK, "w": os.W_OK, "x": os.X_OK}


@dataclass(frozen=True, slots=True)
class FolderRight:
    """The right to read, or to write, in a folder: letters of `rwx`."""

    operations: str
    path: Path

    def __str__(self) -> str:
        """Return it as it stands in a sentence."""
        return f"{self.operations} on folder {self.path}"

    def command(self, principal: str) -> str:
        """Return the command that gives it to a user of the system."""
        return f"setfacl -m u:{principal}:{self.operations} '{self.path}'"


def local_path(address: str) -> Path | None:
    """Return the folder of an address, or None where it is none of this machine's file system."""
    split = urlsplit(address)
    if split.scheme == "file":
        return Path(unquote(split.path))
    return None if "://" in address else Path(address)


def require_access(what: str, folders: Iterable[Path], *, write: bool = True) -> None:
    """Raise `MissingRightError` naming the first folder that this process may not use.

    For one that is not there, the folder in which it would be made counts. `what` is what cannot be done then, as the
    beginning of a sentence.
    """
    for folder in folders:
        # `os.path` calls what may not be looked at absent; its parent, which forbids it, is then the one to name.
        there = next((one for one in (folder, *folder.parents) if os.path.exists(one)), folder)  # noqa: PTH110 - see above
        # What is not there needs nothing to be read: it is empty.
        if not write and there != folder and os.access(there, os.X_OK, effective_ids=_EFFECTIVE):
            continue
        operations = _WRITE if write else _READ
        mode = sum(_MODES[letter] for letter in operations)
        if not os.access(there, mode, effective_ids=_EFFECTIVE):
            raise MissingRightError(what, [FolderRight(operations, there)], _user())


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's user has no name
        return str(os.geteuid())
