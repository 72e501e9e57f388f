"""Programs around a page, installed or from Debian's packages in the cache, and one of them: an nginx before it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.debian import libraries_in, unpacked
from waiting import wait_until

_CONFIG = """user root; daemon off; worker_processes 1; pid {folder}/pid; error_log stderr;
events {{ worker_connections 64; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{
    listen 127.0.0.1:{port};
    location /penstock/ {{
      proxy_pass {behind}/;
      proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
    }}
  }}
}}
"""


def program_of(package: str, inside: str, *names: str, deep: bool = False) -> tuple[str, dict[str, str]]:
    """Return a program by its names on different systems, or of a package, and its environment; or skip."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    found = next((found for name in names if (found := shutil.which(name, path=path))), None)
    if found is not None:
        return found, dict(os.environ)
    try:
        root = unpacked(package, package, deep=deep)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no {package} can be had: {error}; apt-get install {package}")
    return str(root / inside), {**os.environ, **libraries_in(root)}


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def proxied(behind: str, port: int, folder: Path) -> Iterator[str]:
    """Serve an address under `/penstock/` of a port; the block gets the new one. Skips where no nginx can be had."""
    program, environment = program_of("nginx", "usr/sbin/nginx", "nginx")
    (folder / "nginx.conf").write_text(_CONFIG.format(folder=folder, port=port, behind=behind), encoding="utf-8")
    server = subprocess.Popen([program, "-e", "stderr", "-p", folder, "-c", folder / "nginx.conf"], env=environment)
    try:
        wait_until(lambda: _answers(port), 60)
        yield f"http://127.0.0.1:{port}/penstock/"
    finally:
        server.terminate()
        server.wait(60)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
