"""The app that `consume.py` runs in two processes: it sleeps, counts, and writes its count to a file every 50 ms."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

from penstock import App, Message

app = App(
    os.environ["BENCH_GROUP"], bootstrap_servers=os.environ["BENCH_BROKERS"], workers=int(os.environ["BENCH_WORKERS"])
)
seconds = float(os.environ["BENCH_SECONDS"])
lock = threading.Lock()
seen = {"count": 0, "begun": 0.0, "ended": 0.0}


@app.handler(os.environ["BENCH_TOPIC"])
def sleep(_message: Message) -> None:
    """Sleep for the time of the workload."""
    if not seen["begun"]:
        seen["begun"] = time.time()
    time.sleep(seconds)
    with lock:
        seen["count"] += 1
        seen["ended"] = time.time()


def report() -> None:
    """Write the count to the file in one step."""
    path = Path(os.environ["BENCH_FOLDER"]) / f"{os.getpid()}.json"
    while True:
        time.sleep(0.05)
        if seen["count"]:
            new = path.with_suffix(".new")
            new.write_text(json.dumps(seen))
            new.replace(path)


threading.Thread(target=report, daemon=True).start()
