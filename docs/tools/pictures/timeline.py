"""Timelines of the guarantees: what happens in order, and below each gap what a crash there leaves behind."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from pictures.canvas import Canvas

_WIDTH, _EDGE, _LINE = 960, 70, 118


@dataclass(frozen=True, slots=True)
class Timeline:
    """A guarantee's way through time.

    Args:
        title: what happens on it.
        steps: what happens, in order; one that begins with `!` is what makes it safe.
        crashes: what is seen after a crash before each step and after the last: a role and a text.
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
            said = textwrap.wrap(step.lstrip("!"), width=int(gap / 6.8))
            for place, line in enumerate(said):
                canvas.text(x, _LINE - 18 - 16 * (len(said) - 1 - place), line, anchor="middle")
        for number, ((role, _), said) in enumerate(zip(self.crashes, lines, strict=True)):
            x, mark = 20 + wide * (number + 0.5), _EDGE + gap * number
            canvas.text(mark, _LINE + 5, "\u2716", kind="h", anchor="middle", role="fail")
            canvas.line((mark, _LINE + 14), (mark, _LINE + 30), (x, _LINE + 30), (x, _LINE + 44), role=role)
            canvas.box(x - wide / 2 + 5, _LINE + 44, wide - 10, 16 * len(said) + 24, role=role)
            for place, line in enumerate(said):
                canvas.inner(x, _LINE + 67 + 16 * place, line, role=role)
        return canvas.svg()
