"""YAML as positions and texts: composed, never constructed, so `no`, `1e-5` and `null` stay what was written.

Takes the text of a file, returns `Scalar`, `Sequence` and `Mapping` nodes with spans, or reports what YAML or the
language forbids: duplicate keys, anchors, aliases, tags, tabs, a formula cut by a comma in braces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from codegen.diagnostics import Note, Report, Span

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DEEPEST = 40


@dataclass(frozen=True)
class Scalar:
    text: str
    style: str
    """`plain`, `'`, `"`, `|` or `>`."""
    span: Span
    flow: bool
    last_line: int


@dataclass(frozen=True)
class Sequence:
    items: tuple[Tree, ...]
    span: Span


@dataclass(frozen=True)
class Mapping:
    items: tuple[tuple[Scalar, Tree], ...]
    span: Span

    def get(self, key: str) -> Tree | None:
        return next((v for k, v in self.items if k.text == key), None)


Tree = Scalar | Sequence | Mapping


class _Stop(Exception):
    """A fault after which the rest of the file cannot be read; it is in the report."""


def compose(file: str, text: str, report: Report) -> Tree | None:
    """The tree of a file; None where YAML cannot read on. Faults of single nodes leave the rest to be read."""
    tab = next(
        (
            (n, line.index("\t"))
            for n, line in enumerate(text.split("\n"), 1)
            if "\t" in line[: len(line) - len(line.lstrip())]
        ),
        None,
    )
    if tab is not None:
        report.error(Span(file, tab[0], tab[1] + 1), "tab", "a tab in the indentation", "YAML indents by blanks")
        return None
    composer = _Composer(file, report)
    try:
        tree = composer.document(yaml.parse(text, Loader=_LOADER))
    except _Stop:
        return None
    except yaml.YAMLError as error:
        _report_yaml(file, error, text, report)
        return None
    except (RecursionError, ValueError) as error:
        report.error(Span(file, 1, 1), "yaml-syntax", f"not readable as YAML: {error}")
        return None
    return tree


def _report_yaml(file: str, error: yaml.YAMLError, text: str, report: Report) -> None:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be read"
    line, col = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
    hint = "quote the formula if it begins with one of * & ! % @ ` > | { [ or holds `: `"
    report.error(Span(file, min(line, text.count("\n") + 1), col), "yaml-syntax", f"not YAML: {problem}", hint)


class _Composer:
    def __init__(self, file: str, report: Report) -> None:
        self.file, self.report = file, report

    def document(self, events: Iterator[yaml.Event]) -> Tree | None:
        tree: Tree | None = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent) and tree is not None:
                self._fault(event, "several-documents", "a second document begins here", "one file is one list of ops")
                raise _Stop
            if isinstance(event, (yaml.ScalarEvent, yaml.SequenceStartEvent, yaml.MappingStartEvent, yaml.AliasEvent)):
                tree = self.node(event, events, False, 0)
        return tree

    def _span(self, event: yaml.Event) -> Span:
        start, end = event.start_mark, event.end_mark
        if start is None or end is None:  # the C parser marks every event
            return Span(self.file, 1, 1)
        stop = end.column + 1 if end.line == start.line else 0
        return Span(self.file, start.line + 1, start.column + 1, stop)

    def _fault(self, event: yaml.Event, code: str, text: str, hint: str = "") -> None:
        self.report.error(self._span(event), code, text, hint)

    def node(self, event: yaml.Event, events: Iterator[yaml.Event], flow: bool, depth: int) -> Tree:
        assert isinstance(event, yaml.NodeEvent)
        if isinstance(event, yaml.AliasEvent):
            self._fault(
                event,
                "alias",
                f"`*{event.anchor}` is a YAML alias",
                "quote the formula: `'*g'`; aliases are not in the language",
            )
            span = self._span(event)
            return Scalar("", "plain", span, flow, span.line)
        if depth > _DEEPEST:
            self._fault(event, "too-deep", f"nested deeper than {_DEEPEST} levels")
            raise _Stop
        if event.anchor is not None:
            self._fault(
                event,
                "anchor",
                f"`&{event.anchor}` is a YAML anchor",
                "quote the formula; anchors are not in the language",
            )
        tag = getattr(event, "tag", None)
        if tag is not None:
            self._fault(event, "tag", f"`{tag}` is a YAML tag", "quote the formula; tags are not in the language")
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event, flow)
        if isinstance(event, yaml.SequenceStartEvent):
            return self.sequence(event, events, flow, depth)
        assert isinstance(event, yaml.MappingStartEvent)
        return self.mapping(event, events, flow, depth)

    def scalar(self, event: yaml.ScalarEvent, flow: bool) -> Scalar:
        style = event.style or "plain"
        if flow and style == "plain" and any(event.value.count(a) != event.value.count(b) for a, b in ("()", "[]")):
            self._fault(event, "cut-formula", f"`{event.value}` is cut at a comma or bracket: YAML ends it inside braces",
                        "quote the formula, or write it on a line of its own")  # fmt: skip
        last = event.end_mark.line + 1 if event.end_mark is not None else 0
        return Scalar(event.value, style, self._span(event), flow, last)

    def sequence(
        self, start: yaml.SequenceStartEvent, events: Iterator[yaml.Event], flow: bool, depth: int
    ) -> Sequence:
        items = []
        for event in events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            items.append(self.node(event, events, flow or bool(start.flow_style), depth + 1))
        return Sequence(tuple(items), self._span(start))

    def mapping(self, start: yaml.MappingStartEvent, events: Iterator[yaml.Event], flow: bool, depth: int) -> Mapping:
        flow = flow or bool(start.flow_style)
        items: list[tuple[Scalar, Tree]] = []
        for event in events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            key = self.node(event, events, flow, depth + 1)
            value = self.node(next(events), events, flow, depth + 1)
            if not isinstance(key, Scalar):
                self.report.error(
                    key.span, "key", "a key is a plain name", "quote the formula: YAML reads `{` and `[` as its own"
                )
                continue
            first = next((k for k, _ in items if k.text == key.text), None)
            if first is not None:
                self.report.error(key.span, "duplicate-key", f"`{key.text}` is written twice", "",
                                  [Note("first here:", first.span)])  # fmt: skip
                continue
            items.append((key, value))
        return Mapping(tuple(items), self._span(start))
