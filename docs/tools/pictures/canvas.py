"""Draws pictures: boxes, arrows and texts in the colours of a role, for light and dark mode.

A picture follows the reader's setting (`prefers-color-scheme`). It has its own background, so that it is readable on a
page whose mode was chosen by hand, too. It uses only fonts of the reader's system.
"""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

#: Colours of each role: (background, line, text), for light and for dark mode.
_ROLES = {
    "plain": (("#ffffff", "#64748b", "#0f172a"), ("#1e293b", "#94a3b8", "#f1f5f9")),
    "done": (("#ccfbf1", "#0f766e", "#134e4a"), ("#134e4a", "#2dd4bf", "#ccfbf1")),
    "work": (("#dbeafe", "#1d4ed8", "#1e3a8a"), ("#1e3a8a", "#60a5fa", "#dbeafe")),
    "wait": (("#fef3c7", "#b45309", "#78350f"), ("#5b3a0e", "#fbbf24", "#fef3c7")),
    "fail": (("#fee2e2", "#b91c1c", "#7f1d1d"), ("#661a1a", "#f87171", "#fee2e2")),
    "hint": (("#f8fafc", "#cbd5e1", "#475569"), ("#0f172a", "#334155", "#cbd5e1")),
}
_TEXT = ("#0f172a", "#f1f5f9")
_FAINT = ("#475569", "#cbd5e1")
_GROUND = ("#f8fafc", "#0f172a")
_FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_MONO = "ui-monospace, SFMono-Regular, Menlo, 'DejaVu Sans Mono', monospace"


class Canvas:
    """A picture; each call adds to it.

    Args:
        width: in pixels.
        height: in pixels.
        title: describes it for readers who cannot see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", *, role: str = "plain", note: str = ""
    ) -> None:
        """Draw a box with centred lines of text; `note` is small text below them."""
        self._parts.append(f'<rect class="b {role}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>')
        lines = [(line, "t", 17.0) for line in text.split("\n") if line]
        lines += [(line, "n", 14.0) for line in note.split("\n") if line]
        at = y + height / 2 - sum(step for _, _, step in lines) / 2
        for line, kind, step in lines:
            at += step
            self._parts.append(
                f'<text class="{kind} {role}" x="{x + width / 2:g}" y="{at - step / 2 + 4.5:g}" '
                f'text-anchor="middle">{escape(line)}</text>'
            )

    def text(self, x: float, y: float, text: str, *, kind: str = "t", anchor: str = "start", role: str = "") -> None:
        """Write lines of text on top. Kinds: `h` heading, `t` text, `n` small text, `m` code."""
        for number, line in enumerate(text.split("\n")):
            self._parts.append(
                f'<text class="{kind} o {role}" x="{x:g}" y="{y + number * 16:g}" text-anchor="{anchor}">'
                f"{escape(line)}</text>"
            )

    def inner(self, x: float, y: float, text: str, *, role: str) -> None:
        """Write a small line into a box of this role, centred at `x`."""
        self._parts.append(f'<text class="n {role}" x="{x:g}" y="{y:g}" text-anchor="middle">{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float], role: str = "plain", dashed: bool = False) -> None:
        """Draw an arrow along points."""
        path = " ".join(f"{'M' if not number else 'L'}{x:g} {y:g}" for number, (x, y) in enumerate(points))
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(f'<path class="a {role}" d="{path}" marker-end="url(#{role})"{dash}/>')

    def line(self, *points: tuple[float, float], role: str = "hint", dashed: bool = False) -> None:
        """Draw a line along points."""
        path = " ".join(f"{'M' if not number else 'L'}{x:g} {y:g}" for number, (x, y) in enumerate(points))
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(f'<path class="a {role}" d="{path}"{dash}/>')

    def dot(self, x: float, y: float, *, role: str = "plain") -> None:
        """Draw a dot."""
        self._parts.append(f'<circle class="b {role}" cx="{x:g}" cy="{y:g}" r="6"/>')

    def svg(self) -> str:
        """Return the picture."""
        width, height = self._size
        markers = "".join(
            f'<marker id="{role}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path class="k {role}" d="M0 0 L8 4 L0 8 z"/></marker>'
            for role in _ROLES
        )
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}">',
            f"<title>{escape(self._title)}</title>",
            f"<style>{_style()}</style>",
            f"<defs>{markers}</defs>",
            f'<rect class="ground" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10"/>',
            *self._parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def _style() -> str:
    base = (
        f"text{{font-family:{_FONT}}}.t{{font-size:13px}}.n{{font-size:11.5px}}"
        f".h{{font-size:14px;font-weight:600}}.m{{font-size:12px;font-family:{_MONO}}}"
        ".b{stroke-width:1.4}.a{fill:none;stroke-width:1.6}"
    )
    return base + "".join(_colours(0)) + "@media (prefers-color-scheme:dark){" + "".join(_colours(1)) + "}"


def _colours(shade: int) -> Iterable[str]:
    yield f".ground{{fill:{_GROUND[shade]};stroke:{_ROLES['hint'][shade][1]}}}text{{fill:{_TEXT[shade]}}}"
    yield f"text.n{{fill:{_FAINT[shade]}}}.o{{paint-order:stroke;stroke:{_GROUND[shade]};stroke-width:6px}}"
    for role, shades in _ROLES.items():
        ground, line, text = shades[shade]
        yield f".b.{role}{{fill:{ground};stroke:{line}}}.a.{role}{{stroke:{line}}}.k.{role}{{fill:{line}}}"
        yield f"text.{role}{{fill:{text}}}text.h.{role}{{fill:{line}}}"
