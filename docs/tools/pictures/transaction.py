"""The way of a transaction: half, local transaction, decision, publication; and the check if no decision comes."""

from __future__ import annotations

from pictures.canvas import Canvas

_LINES = {"producer": 110, "database": 290, "store": 480, "coordinator": 670, "consumer": 860}
_NOTES = {
    "producer": "your program",
    "database": "yours",
    "store": "half, op, done",
    "coordinator": "any number",
    "consumer": "read_committed",
}


def transaction() -> str:
    """Return the picture."""
    canvas = Canvas(970, 620, "Half, local transaction, decision, publication; a crash, a check, an answer")
    for name, x in _LINES.items():
        canvas.line((x, 70), (x, 596))
        canvas.box(x - 66, 24, 132, 46, name, role="work" if name == "producer" else "plain", note=_NOTES[name])
    canvas.text(24, 100, "without a fault", kind="h")
    _step(canvas, 126, "producer>store", "1  half: durable, invisible", "wait")
    _step(canvas, 168, "producer>database", "2  local transaction", "work")
    _step(canvas, 210, "producer>store", "3  op: COMMIT (left the block) or ROLLBACK (raised)", "done")
    _step(canvas, 252, "store>coordinator", "4  reads half and op", "plain")
    _step(canvas, 294, "coordinator>consumer", "5  message", "done")
    _step(canvas, 294, "coordinator>store", "5  done", "done")
    canvas.text(670, 318, "one Kafka transaction: seen once, or not at all", kind="n", anchor="middle")
    canvas.line((24, 346), (946, 346), dashed=True)
    canvas.text(24, 376, "the producer dies between 2 and 3", kind="h")
    _step(canvas, 402, "producer>store", "1  half", "wait")
    _step(canvas, 434, "producer>database", "2  local transaction", "work")
    canvas.text(110, 470, "\u2716", kind="h", anchor="middle", role="fail")
    canvas.text(126, 470, "no decision comes", kind="n")
    _step(canvas, 470, "coordinator>store", "after 6 s: check", "fail")
    _step(canvas, 506, "store>producer", "any live producer of the group is asked", "fail", dashed=True)
    _step(canvas, 542, "producer>database", "looks it up, or a barrier", "work", dashed=True)
    _step(canvas, 578, "producer>store", "3  op: the first decision wins", "done", dashed=True)
    canvas.text(690, 578, "then 4 and 5, as above", kind="n")
    return canvas.svg()


def _step(canvas: Canvas, y: float, way: str, text: str, role: str, *, dashed: bool = False) -> None:
    start, stop = (_LINES[name] for name in way.split(">"))
    inwards = 4 if stop > start else -4
    canvas.dot(start, y, role=role)
    canvas.arrow((start + 2 * inwards, y), (stop - inwards / 2, y), role=role, dashed=dashed)
    left = min(start, stop)
    canvas.text(left + 14, y - 8, text, kind="n")
