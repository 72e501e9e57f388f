"""Operations: an app reports what holds it up, its counts and its spans, and is changed while it runs.

`python examples/feed.py parcels` writes messages (see there for the broker); then `python examples/operations.py`.
"""

import os
import time

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import penstock

PARCELS = 100


seconds: list[float] = []


def timed(message: penstock.Message, call_next: penstock.CallNext) -> object:
    """Measure the handler. A middleware runs on the handler's thread."""
    begun = time.perf_counter()
    try:
        return call_next(message)
    finally:
        seconds.append(time.perf_counter() - begun)


spans, tracing = InMemorySpanExporter(), TracerProvider()
tracing.add_span_processor(SimpleSpanProcessor(spans))  # in production: a batch processor and an OTLP exporter
telemetry = penstock.Telemetry(tracer_provider=tracing)
servers = os.environ.get("PENSTOCK_BOOTSTRAP_SERVERS", "127.0.0.1:9092")
app = penstock.App("operations", bootstrap_servers=servers, workers=1, middlewares=[timed], telemetry=telemetry)


@app.handler("parcels", rate=0)  # holds all messages until it is changed
def deliver(_parcel: penstock.Message) -> None:
    """Deliver."""
    time.sleep(0.01)


if __name__ == "__main__":
    with app.start() as running:
        while sum(partition.lag or 0 for partition in running.explain()) < PARCELS:
            running.wait(0.1)
        print(*running.explain(), sep="\n")  # of each partition: the message that holds it, its place, and since when
        running.change(workers=4)
        running.change_handler("parcels", rate=None)
        while running.statistics().handled < PARCELS:
            running.wait(0.1)
        now = running.statistics()
        print(f"{now.handled} handled by {now.workers} workers, {now.failed} failures, {now.commits} commits")
    print(f"{len(seconds)} calls, the slowest took {max(seconds):.3f} s; spans:")
    print(*sorted({span.name for span in spans.get_finished_spans()}), sep="\n")
