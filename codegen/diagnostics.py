"""Diagnostics: where a fault is, what it is, and how it is printed.

Takes spans and texts, returns the lines that a user reads. Every stage reports into one `Report`; nothing is written
while a report holds an error.

    specs/norms.yaml:14:8: error[wrong-gradient]: the declared gradient of `x` is not the derivative
       14 |     x: rstd * weight * (dy - xhat * mean(dy * weight * xhat, N))
          |        ^
       hint: ...
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, order=True)
class Span:
    """A place in a spec file: 1-based line and columns, `end` exclusive and on the same line."""

    file: str
    line: int
    col: int
    end: int = 0


@dataclass(frozen=True)
class Note:
    """A further place or line that belongs to a diagnostic."""

    text: str
    span: Span | None = None


@dataclass(frozen=True)
class Diagnostic:
    """One finding. `severity` is `error` or `warning`; `code` is a stable kebab-case word."""

    span: Span
    code: str
    text: str
    hint: str = ""
    notes: tuple[Note, ...] = ()
    severity: str = "error"


@dataclass
class Report:
    """All findings of a run, and the source lines that they point into."""

    lines: dict[str, list[str]] = field(default_factory=dict)
    found: list[Diagnostic] = field(default_factory=list)

    def add_source(self, file: str, text: str) -> None:
        self.lines[file] = text.split("\n")

    def error(self, span: Span, code: str, text: str, hint: str = "", notes: Iterable[Note] = ()) -> None:
        self._add(Diagnostic(span, code, text, hint, tuple(notes)))

    def warning(self, span: Span, code: str, text: str, hint: str = "", notes: Iterable[Note] = ()) -> None:
        self._add(Diagnostic(span, code, text, hint, tuple(notes), "warning"))

    def _add(self, diagnostic: Diagnostic) -> None:
        # One fault seen in several variants of an op is one finding.
        known = {(d.span, d.code, d.text) for d in self.found}
        if (diagnostic.span, diagnostic.code, diagnostic.text) not in known:
            self.found.append(diagnostic)

    @property
    def errors(self) -> list[Diagnostic]:
        return [d for d in self.found if d.severity == "error"]

    def ordered(self) -> list[Diagnostic]:
        return sorted(self.found, key=lambda d: (d.span, d.code, d.text))

    def render(self) -> str:
        """All findings in the order of their places, as printed to a terminal."""
        return "\n".join(render(d, self.lines) for d in self.ordered())


def render(diagnostic: Diagnostic, lines: dict[str, list[str]]) -> str:
    """One finding: the place and text, the source line, a caret, the notes and the hint."""
    span = diagnostic.span
    out = [f"{span.file}:{span.line}:{span.col}: {diagnostic.severity}[{diagnostic.code}]: {diagnostic.text}"]
    out += _excerpt(span, lines)
    for note in diagnostic.notes:
        if note.span is None:
            out += [f"   {line}" for line in note.text.split("\n")]
        else:
            out.append(f"   {note.span.file}:{note.span.line}:{note.span.col}: {note.text}")
            out += _excerpt(note.span, lines)
    if diagnostic.hint:
        out.append(f"   hint: {diagnostic.hint}")
    return "\n".join(out)


def _excerpt(span: Span, lines: dict[str, list[str]]) -> list[str]:
    text = lines.get(span.file, [])
    if not 1 <= span.line <= len(text):
        return []
    line = text[span.line - 1].rstrip("\r")
    # A tab is printed as one blank, so that the caret stands under its character.
    shown = "".join(c if c.isprintable() else " " for c in line)
    width = max(1, min(span.end, len(line) + 1) - span.col)
    return [f"   {span.line:>4} | {shown}", f"        | {' ' * (span.col - 1)}{'^' * width}"]


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean ...?` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, sorted(set(known)), n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else ""


class Declared(Protocol):
    """What has a name and a place: an op."""

    @property
    def name(self) -> str: ...

    @property
    def span(self) -> Span: ...


@contextmanager
def guarded(op: Declared, doing: str, report: Report) -> Iterator[None]:
    """Work on one op, of which a fault of the generator itself becomes a finding: the other ops are worked on all the same."""
    try:
        yield
    except OSError:  # of a file, not of the op
        raise
    except Exception as fault:
        frames = [
            f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in traceback.extract_tb(fault.__traceback__)[-3:]
        ]
        first = str(fault).strip().split("\n")[0]
        notes = (Note(f"{type(fault).__name__}: {first}".rstrip(": ")), Note(f"in {', '.join(reversed(frames))}"))
        text = f"{doing} `{op.name}` failed: a fault of Pullback, not of the spec"
        report.error(op.span, "internal-fault", text, "report it with the spec; it may pass in another wording", notes)
