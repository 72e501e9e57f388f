"""Lanes: the hash of a key selects an ordered queue, and free workers take queues; one key is parked."""

from __future__ import annotations

from pictures.canvas import Canvas


def lanes() -> str:
    """Return the picture."""
    canvas = Canvas(960, 420, "The hash of a message's key selects its lane; workers take lanes")
    for x, head in ((40, "Kafka"), (258, "poll thread"), (440, "lanes"), (770, "workers")):
        canvas.text(x, 36, head, kind="h")
    canvas.text(40, 54, "partitions, in offset order", kind="n")
    canvas.text(258, 54, "only this thread polls", kind="n")
    canvas.text(440, 54, "queues: keys with one hash, in order", kind="n")
    canvas.text(770, 54, "oldest head first", kind="n")
    _partition(canvas, 92, "orders:0", "ABAC")
    _partition(canvas, 232, "orders:1", "DEDB")
    canvas.box(258, 118, 120, 160, "hash(key)\n% lanes", role="plain", note="register the\noffset, put\nit on its lane")
    canvas.arrow((206, 122), (256, 160))
    canvas.arrow((206, 262), (256, 236))
    rows = [
        ("AAC", "work", "lane 17", "A and C share it; worker 1 holds it"),
        ("BB", "wait", "lane 203", "B is parked: its head failed"),
        ("DD", "work", "lane 511", "worker 2 holds it"),
        ("E", "plain", "lane 640", "ready"),
    ]
    for number, (keys, role, name, note) in enumerate(rows):
        y = 84 + number * 74
        canvas.box(440, y, 230, 40, role="hint")
        for place, key in enumerate(keys):
            canvas.box(626 - place * 42, y + 5, 34, 30, key, role=role)
        canvas.text(440, y + 55, f"{name}: {note}", kind="n")
        canvas.arrow((378, 198), (410, 198), (410, y + 20), (438, y + 20))
    canvas.box(770, 76, 150, 56, "worker 1", role="work", note="handler(A)")
    canvas.arrow((670, 104), (768, 104), role="work")
    canvas.box(770, 224, 150, 56, "worker 2", role="work", note="handler(D)")
    canvas.arrow((670, 252), (768, 252), role="work")
    canvas.box(770, 150, 150, 56, "timer", role="wait", note="next try in 0.8 s")
    canvas.arrow((670, 178), (768, 178), role="wait", dashed=True)
    canvas.box(770, 298, 150, 56, "worker 3", role="plain", note="free: takes E")
    canvas.arrow((670, 326), (768, 326), dashed=True)
    canvas.text(
        40,
        394,
        "One lane has one holder at a time, so a key never runs twice at once. 64 lanes for each worker: "
        "a slow key delays almost nobody.",
        kind="t",
    )
    return canvas.svg()


def _partition(canvas: Canvas, y: float, name: str, keys: str) -> None:
    canvas.text(40, y - 8, name, kind="m")
    for place, key in enumerate(keys):
        canvas.box(40 + place * 42, y, 36, 40, key, role="wait" if key == "B" else "plain")
        canvas.text(58 + place * 42, y + 56, str(place), kind="n", anchor="middle")
