"""Timelines of the guarantees: the steps in order, and below each gap the result of a crash there."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from pictures.canvas import Canvas

_WIDTH, _EDGE, _LINE = 960, 70, 118


@dataclass(frozen=True, slots=True)
class Timeline:
    """The timeline of a guarantee.

    Args:
        title: its heading.
        steps: the steps in order. The guarantee rests on those that begin with `!`.
        crashes: the result of a crash before each step and after the last one: a role and a text.
    """

    title: str
    steps: Sequence[str]
    crashes: Sequence[tuple[str, str]]

    def svg(self) -> str:
        """Return the picture."""
        count = len(self.steps)
        gap = (_WIDTH - 2 * _EDGE) / count
        wide = (_WIDTH - 40) / (count + 1)
        lines = [textwrap.wrap(text, width=int((wide - 26) / 6.3)) for _, text in self.crashes]
        height = _LINE + 88 + 16 * max(map(len, lines))
        canvas = Canvas(_WIDTH, height, self.title)
        canvas.text(24, 32, self.title, kind="h")
        canvas.arrow((24, _LINE), (_WIDTH - 24, _LINE))
        for number, step in enumerate(self.steps):
            x = _EDGE + gap * (number + 0.5)
            canvas.dot(x, _LINE, role="done" if step.startswith("!") else "work")
            label = textwrap.wrap(step.lstrip("!"), width=int(gap / 6.8))
            for place, line in enumerate(label):
                canvas.text(x, _LINE - 18 - 16 * (len(label) - 1 - place), line, anchor="middle")
        for number, ((role, _), result) in enumerate(zip(self.crashes, lines, strict=True)):
            x, mark = 20 + wide * (number + 0.5), _EDGE + gap * number
            canvas.text(mark, _LINE + 5, "\u2716", kind="h", anchor="middle", role="fail")
            canvas.line((mark, _LINE + 14), (mark, _LINE + 30), (x, _LINE + 30), (x, _LINE + 44), role=role)
            canvas.box(x - wide / 2 + 5, _LINE + 44, wide - 10, 16 * len(result) + 24, role=role)
            for place, line in enumerate(result):
                canvas.inner(x, _LINE + 67 + 16 * place, line, role=role)
        return canvas.svg()
