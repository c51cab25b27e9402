"""The committed tree: files in memory become files on disk, and are compared with them.

Takes `{path: GeneratedFile}` and the project, writes what differs (`write`) or names it (`check`, `compare`).

    check(project)           -> (Finding("generated/ops/twice.py", "stale", "specs/basic.yaml#twice has changed", ...),)
    write(project, files)    -> Written(changed=("generated/ops/twice.py",), removed=(), kept=(), overwritten=())

Everything is staged first, under a lock, then renamed file by file, the manifest last. While the staged manifest lies
there, a run is unfinished: `check` says so, and the next `write` takes its files for its own. No heavy import is here.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from codegen import manifest
from codegen.config import Config, Project
from codegen.manifest import Entry, Manifest

WORK = ".pullback"
"""The folder beside the tree in which a run locks and stages. It is gone when the run has ended well."""
_PATIENCE = 30.0
"""Seconds to wait for another run's lock."""


@dataclass(frozen=True)
class GeneratedFile:
    """A file to be written."""

    path: str
    content: bytes
    sources: tuple[str, ...]
    """What it came from: `specs/basic.yaml#twice`, `templates/pointwise.py.j2`. The generator itself is understood."""
    facts: tuple[tuple[str, object], ...] = ()
    """What the manifest records of an op beside its digests: schedule, residuals."""
    listing: bool = False
    """A list with a line per op, in any order: two branches' additions are merged line by line."""


@dataclass(frozen=True)
class Finding:
    """A difference between the tree and what it should be. `kind` is stale, edited, missing, orphaned or unfinished."""

    path: str
    kind: str
    reason: str
    mend: str
    diff: str = ""
    ops: tuple[str, ...] = ()
    """The ops that the file came from."""

    def render(self) -> str:
        kinds = {"edited": "edited by hand"}
        head = f"{self.path}: {kinds.get(self.kind, self.kind)}: {self.reason}"
        return "\n".join([head, *([self.diff.rstrip("\n")] if self.diff else []), f"   mend: {self.mend}"])


@dataclass(frozen=True)
class Written:
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    """No longer generated, but edited by hand: left where they are."""
    overwritten: tuple[str, ...] = ()
    """Were edited by hand, and are as generated again."""


class TreeError(Exception):
    """The tree cannot be written as asked. Nothing was changed, unless the text says so."""


# ---------------------------------------------------------------------------------------------- state


@dataclass(frozen=True)
class _State:
    """What is on disk, and what the manifest and an unfinished run's manifest say about it."""

    root: Path
    old: Manifest
    staged: Manifest
    strays: tuple[str, ...] = ()

    @property
    def paths(self) -> frozenset[str]:
        return self.old.paths | self.staged.paths

    def entries(self, path: str) -> tuple[Entry, ...]:
        return self.old.entries.get(path, ()) + self.staged.entries.get(path, ())

    def wrote(self, path: str, content: bytes) -> tuple[Entry, ...]:
        return self.old.wrote(path, content) + self.staged.wrote(path, content)

    def knows(self, path: str, content: bytes) -> bool:
        return self.old.knows(path, content) or self.staged.knows(path, content)

    def content(self, path: str) -> bytes | None:
        file = self.root / path
        return file.read_bytes() if file.is_file() else None


def _state(project: Project) -> _State:
    root, config = project.root, project.config
    old = manifest.read(root / config.output / manifest.NAME)
    staged = manifest.read(_staging(root) / manifest.NAME)
    state = _State(root, old, staged)
    return replace(state, strays=tuple(_strays(state, config)))


def _strays(state: _State, config: Config) -> Iterator[str]:
    """Files that bear our mark, in a folder of ours, and that no manifest lists."""
    for folder in sorted({config.output, config.tests}):
        for base, folders, names in os.walk(state.root / folder):
            folders[:] = sorted(f for f in folders if f != "__pycache__")
            for name in sorted(names):
                path = Path(base, name).relative_to(state.root).as_posix()
                if path not in state.paths and name.endswith((".py", ".pyi")) and _is_marked(Path(base, name)):
                    yield path


def _is_marked(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return manifest.MARK in stream.read(400)
    except OSError:
        return False


def _staging(root: Path) -> Path:
    return root / WORK / "staging"


def fresh_ops(project: Project, inputs: Mapping[str, str]) -> dict[str, dict[str, object]]:
    """The ops whose files are all as the present inputs would make them, by their hashes, each with the recorded facts.

    Empty where the manifest cannot be trusted: lines that cannot be read, files of ours that it does not list.
    """
    state = _state(project)
    if state.old.faults or state.strays:
        return {}
    fresh: dict[str, dict[str, object]] = {}
    behind: set[str] = set()
    for path in state.old.entries:
        content = state.content(path)
        true = [e for e in state.old.wrote(path, content) if not e.changed(inputs)] if content is not None else []
        for op in ops_of(name for e in state.old.entries[path] for name, _ in e.sources):
            if true:
                fresh.setdefault(op, {}).update(true[0].facts)
            else:
                behind.add(op)
    return {op: facts for op, facts in fresh.items() if op not in behind}


def written_ops(project: Project) -> frozenset[str]:
    """The ops that the manifest lists files of."""
    old = manifest.read(project.root / project.config.output / manifest.NAME)
    return frozenset(ops_of([name for entries in old.entries.values() for e in entries for name, _ in e.sources]))


def paths_of(project: Project, ops: Collection[str]) -> frozenset[str]:
    """The paths that the manifest lists for these ops, and for no other."""
    old = manifest.read(project.root / project.config.output / manifest.NAME)
    found = set()
    for path, entries in old.entries.items():
        names = ops_of(name for e in entries for name, _ in e.sources)
        if names and set(names) <= set(ops):
            found.add(path)
    return frozenset(found)


def ops_of(sources: Iterator[str] | Sequence[str]) -> tuple[str, ...]:
    """The ops among the names of sources: `twice` of `specs/basic.yaml#twice`."""
    return tuple(sorted({name.partition("#")[2] for name in sources if "#" in name}))


# ---------------------------------------------------------------------------------------------- check


def check(project: Project, inputs: Mapping[str, str] | None = None) -> tuple[Finding, ...]:
    """Compares hashes: of the committed files with the manifest's, of the inputs with those that it records."""
    inputs = inputs if inputs is not None else manifest.inputs(project.root, project.config)
    state = _state(project)
    found = [*_about_manifest(project, state)]
    for path in state.paths:
        finding = _listing_finding(state, path) if path in state.old.listings else _finding(state, path, inputs)
        found += [finding] if finding else []
    if state.old.exists:
        found += _without_output(state, inputs)
        found += [_stray_finding(path) for path in state.strays]
    return tuple(sorted(found, key=lambda f: f.path))


def _about_manifest(project: Project, state: _State) -> Iterator[Finding]:
    path = f"{project.config.output}/{manifest.NAME}"
    if state.staged.exists:
        yield Finding(WORK, "unfinished", _unfinished_reason(project.root), "pullback generate")
    if not state.old.exists:
        yield Finding(
            path, "missing", "nothing was generated yet, or the manifest was deleted", "pullback generate --all"
        )
    elif state.old.faults:
        where = ", ".join(str(n) for n in state.old.faults[:5])
        yield Finding(
            path, "edited", f"not readable at line {where}, as after a merge with conflicts", "pullback generate --all"
        )


def _unfinished_reason(root: Path) -> str:
    if _is_locked(root):
        return "a run is writing at this moment"
    return "a run was cut short while it wrote: some files are new, some are old"


def _finding(state: _State, path: str, inputs: Mapping[str, str]) -> Finding | None:
    entries = state.entries(path)
    content = state.content(path)
    true = state.wrote(path, content) if content is not None else ()
    if any(not e.changed(inputs) for e in true):
        return None
    nearest = min(true or entries, key=lambda e: len(e.changed(inputs)))
    ops = ops_of([name for name, _ in nearest.sources])
    if _is_gone(nearest, inputs):
        return _orphan(path, content is None or bool(true), ops) if content is not None else _orphan_gone(path)
    if content is None:
        return Finding(path, "missing", "the manifest lists it, but it is not there", "pullback generate", ops=ops)
    changed = nearest.changed(inputs)
    if true:
        return Finding(path, "stale", _changed_reason(changed), "pullback generate", ops=ops)
    return Finding(path, "edited", _edited_reason(changed), _edited_mend(state.root, nearest.sources), ops=ops)


def _is_gone(entry: Entry, inputs: Mapping[str, str]) -> bool:
    """Whether an op that the file came from is declared nowhere any more, or a template that it copies was deleted."""
    declared = set(ops_of(list(inputs)))
    ops = ops_of([name for name, _ in entry.sources])
    templates = [name for name, _ in entry.sources if name.startswith("templates/")]
    return any(op not in declared for op in ops) or (
        not ops and bool(templates) and all(t not in inputs for t in templates)
    )


def _orphan(path: str, untouched: bool, ops: tuple[str, ...]) -> Finding:
    reason = f"`{ops[0]}` is no longer declared" if ops else "it is no longer generated"
    if untouched:
        return Finding(path, "orphaned", reason, "pullback generate", ops=ops)
    return Finding(path, "orphaned", f"{reason}, and it was edited by hand", f"git rm {path}, or move it away", ops=ops)


def _orphan_gone(path: str) -> Finding:
    return Finding(
        path,
        "orphaned",
        "it is no longer generated, and already deleted; the manifest still lists it",
        "pullback generate",
    )


def _changed_reason(changed: Sequence[str]) -> str:
    words = []
    for name in changed:
        if name == manifest.GENERATOR:
            words.append("the generator has changed")
        elif name == manifest.SETTINGS:
            words.append("[tool.pullback] in pyproject.toml has changed")
        elif name.startswith("templates/"):
            words.append(f"the template {name} has changed")
        else:
            words.append(f"the spec {name} has changed")
    return ", ".join(words) or "its bytes would differ"


def _edited_reason(changed: Sequence[str]) -> str:
    return "its bytes are not those that were written" + (f"; besides, {_changed_reason(changed)}" if changed else "")


def _edited_mend(root: Path, sources: Sequence[tuple[str, str]]) -> str:
    """What a project has of the sources is where a change may be made: the templates are the generator's own."""
    own = {name.partition("#")[0] for name, _ in sources if name not in (manifest.GENERATOR, manifest.SETTINGS)}
    origin = sorted(name for name in own if (root / name).is_file())
    place = f"make it in {' or '.join(origin)}" if origin else "copy the file under another name"
    return f"pullback generate (to keep the change, {place})"


def _listing_finding(state: _State, path: str) -> Finding | None:
    content = state.content(path)
    if content is None:
        return Finding(path, "missing", "the manifest lists it, but it is not there", "pullback generate")
    if state.knows(path, content):
        return None
    return Finding(path, "edited", "its lines are not those that were written", "pullback generate")


def _without_output(state: _State, inputs: Mapping[str, str]) -> Iterator[Finding]:
    known = {op for path in state.paths for e in state.entries(path) for op in ops_of([name for name, _ in e.sources])}
    for name, digest in inputs.items():
        op = name.partition("#")[2]
        if op and op not in known and digest != manifest.VERIFIED_ONLY:
            yield Finding(name, "missing", f"nothing was generated for `{op}` yet", "pullback generate", ops=(op,))


def _stray_finding(path: str) -> Finding:
    return Finding(
        path,
        "orphaned",
        "it bears Pullback's mark, but the manifest does not list it",
        f"git rm {path}, or move it away",
    )


def compare(
    project: Project,
    files: Mapping[str, GeneratedFile],
    known: Sequence[Finding] = (),
    ops: Collection[str] | None = None,
    inputs: Mapping[str, str] | None = None,
) -> tuple[Finding, ...]:
    """Compares bytes: the tree with `files`, the outcome of a run in memory.

    Args:
        known: what `check` found; reasons are taken from there, and findings of files that are not compared stay.
        ops: where given, `files` holds only the output of these ops and what all share.
    """
    inputs = inputs if inputs is not None else manifest.inputs(project.root, project.config)
    files = complete(project, files)
    state = _state(project)
    by_path = {f.path: f for f in known}
    found = {f.path: f for f in known if f.path not in files}
    for path, file in files.items():
        finding = _difference(state, file, by_path.get(path), inputs)
        if finding:
            found[path] = finding
    made = {op for file in files.values() for op in ops_of(file.sources)}
    found = {path: f for path, f in found.items() if "#" not in path or not made.issuperset(f.ops)}
    for path in state.paths - set(files) if ops is None else ():
        content = state.content(path)
        if path not in found:
            found[path] = _orphan(path, state.knows(path, content), ()) if content is not None else _orphan_gone(path)
    return tuple(sorted(found.values(), key=lambda f: f.path))


def _difference(state: _State, file: GeneratedFile, known: Finding | None, inputs: Mapping[str, str]) -> Finding | None:
    content = state.content(file.path)
    ops = ops_of(file.sources)
    mend = f"pullback generate {' '.join(ops)}" if ops else "pullback generate --all"
    if content is None:
        reason = known.reason if known else "it is generated, but it is not there"
        return Finding(file.path, "missing", reason, mend, ops=ops)
    if _same(file, content):
        lines = {entry.line() for entry in state.entries(file.path)}
        if known is None and not file.listing and _recorded(file, inputs).line() not in lines:
            known = Finding(file.path, "stale", "the manifest's line is not that of a run", mend, ops=ops)
        return replace(known, reason=f"{known.reason}; its bytes would be the same") if known else None
    diff = _diff(file, content)
    if known:
        return replace(known, diff=diff)
    if state.knows(file.path, content) or file.path not in state.paths:
        return Finding(file.path, "stale", "its bytes would differ", mend, diff, ops)
    return Finding(file.path, "edited", _edited_reason(()), mend, diff, ops)


def _same(file: GeneratedFile, content: bytes) -> bool:
    if file.listing:
        return manifest.listed(content) == manifest.listed(file.content)
    return content == file.content


def _diff(file: GeneratedFile, content: bytes) -> str:
    """From what is committed to what would be written, with ends of lines made visible where they alone differ."""
    old, new = (data.decode("utf-8", "backslashreplace") for data in (content, file.content))
    if old.replace("\r\n", "\n") == new:
        return f"   {file.path} has CRLF ends of lines; they are LF"
    lines = difflib.unified_diff(
        old.splitlines(), new.splitlines(), f"{file.path} (committed)", f"{file.path} (generated)", lineterm=""
    )
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------- write


@dataclass
class _Plan:
    """What a run is about to do."""

    stage: dict[str, bytes] = field(default_factory=dict)
    remove: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    overwritten: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def complete(project: Project, files: Mapping[str, GeneratedFile]) -> dict[str, GeneratedFile]:
    """`files` and the attributes that git needs for them: LF on every system, and lists merged line by line."""
    output, tests = project.config.output, project.config.tests
    listings = sorted(f.path for f in files.values() if f.listing and f.path.startswith(f"{output}/"))
    lists = [manifest.NAME, *(path.removeprefix(f"{output}/") for path in listings)]
    head = ["# Generated by Pullback.", "* text eol=lf linguist-generated"]
    texts = {output: [*head, *(f"/{name} merge=union" for name in lists)]}
    if any(path.startswith(f"{tests}/") for path in files) and not tests.startswith(f"{output}/"):
        texts[tests] = head
    extra = [
        GeneratedFile(f"{folder}/.gitattributes", ("\n".join(lines) + "\n").encode(), ())
        for folder, lines in texts.items()
    ]
    return {**files, **{file.path: file for file in extra}}


def write(project: Project, files: Mapping[str, GeneratedFile], keep: Collection[str] = (),
          inputs: Mapping[str, str] | None = None) -> Written:  # fmt: skip
    """Brings the tree to `files`: all of them, or an error and nothing.

    Args:
        keep: paths that the manifest lists and this run leaves as they are. What it lists besides is removed.
    """
    inputs = inputs if inputs is not None else manifest.inputs(project.root, project.config)
    files = complete(project, files)
    _check_paths(project, files)
    lines = [line for file in files.values() for line in _lines(file, inputs)]
    with _locked(project.root):
        state = _state(project)
        lines += [entry.line() for path in keep if path not in files for entry in _kept_entries(state, path, inputs)]
        plan = _planned(project, state, files, keep)
        if plan.refused:
            raise TreeError("\n".join(plan.refused))
        wanted = manifest.render(lines)
        if set(state.old.lines) == set(_body(wanted)) and len(state.old.lines) == len(set(state.old.lines)):
            wanted = b""
        if plan.stage or plan.remove or wanted or _staging(project.root).exists():
            _carry_out(project, plan, wanted or manifest.render(lines), replace_manifest=bool(wanted))
    changed = tuple(sorted(plan.stage))
    return Written(changed, tuple(sorted(plan.remove)), tuple(sorted(plan.kept)), tuple(sorted(plan.overwritten)))


def _kept_entries(state: _State, path: str, inputs: Mapping[str, str]) -> tuple[Entry, ...]:
    """The lines of a file that a run leaves alone: the true one where there is one, else all."""
    content = state.content(path)
    true = [e for e in state.wrote(path, content) if not e.changed(inputs)] if content is not None else []
    return tuple(true[:1]) or state.entries(path)


def _recorded(file: GeneratedFile, inputs: Mapping[str, str]) -> Entry:
    names = sorted({*file.sources, manifest.GENERATOR, manifest.SETTINGS})
    unknown = [name for name in names if name not in inputs]
    if unknown:
        raise ValueError(f"{file.path} names a source that is none: {unknown[0]}")
    sources = tuple((name, inputs[name]) for name in names)
    return Entry(file.path, hashlib.sha256(file.content).hexdigest(), sources, file.facts)


def _lines(file: GeneratedFile, inputs: Mapping[str, str]) -> Iterator[str]:
    if file.listing:
        yield from manifest.listing_lines(file.path, file.content)
    else:
        yield _recorded(file, inputs).line()


def _body(rendered: bytes) -> list[str]:
    return [line for line in rendered.decode().split("\n") if line not in ("", "{", "}")]


def _check_paths(project: Project, files: Mapping[str, GeneratedFile]) -> None:
    """No path leaves the folders of ours, and no two are one file where case does not count."""
    faults = []
    folders = (project.config.output, project.config.tests)
    seen: dict[str, str] = {}
    for path, file in sorted(files.items()):
        if path != file.path:
            faults.append(f"{path}: its file calls itself {file.path}")
        if not manifest.is_safe(path) or not any(path.startswith(f"{folder}/") for folder in folders):
            faults.append(f"{path}: outside of {' and '.join(folders)}")
        if path == f"{project.config.output}/{manifest.NAME}":
            faults.append(f"{path}: this name is the manifest's")
        other = seen.setdefault(path.casefold(), path)
        if other != path:
            faults.append(f"{path}: differs from {other} only in case")
        if b"\r" in file.content:
            faults.append(f"{path}: has a carriage return; ends of lines are LF")
    if faults:
        raise TreeError("\n".join(faults))


def _planned(project: Project, state: _State, files: Mapping[str, GeneratedFile], keep: Collection[str]) -> _Plan:
    plan = _Plan()
    target = f"{project.config.output}/{manifest.NAME}"
    plan.refused += _link_faults(state.root, [target, f"{WORK}/staging", *files])
    if state.old.exists and not state.old.ours:
        plan.refused.append(f"{target}: Pullback did not write this file; move it away")
    if plan.refused:
        return plan
    for path, file in files.items():
        _plan_file(plan, state, path, file)
    for path in sorted(state.paths - set(files) - set(keep)):
        content = state.content(path)
        if content is None or _link_faults(state.root, [path]):
            continue
        (plan.remove if state.knows(path, content) else plan.kept).append(path)
    return plan


def _plan_file(plan: _Plan, state: _State, path: str, file: GeneratedFile) -> None:
    if (state.root / path).is_dir():
        plan.refused.append(f"{path}: a folder stands where this file belongs; move it away")
        return
    content = state.content(path)
    if content is not None and _same(file, content):
        return
    if content is not None and not state.knows(path, content):
        if path not in state.paths:
            known = (
                "no manifest lists this file" if manifest.MARK in content[:400] else "Pullback did not write this file"
            )
            plan.refused.append(f"{path}: {known}, so it is not overwritten; delete it, or move it away")
            return
        plan.overwritten.append(path)
    plan.stage[path] = file.content


def _link_faults(root: Path, paths: Collection[str]) -> list[str]:
    """Paths that are links, or lead out of the root through one."""
    real = os.path.realpath(root)
    faults = []
    for path in sorted(paths):
        folder = os.path.realpath((root / path).parent)
        if folder != real and not folder.startswith(real.rstrip(os.sep) + os.sep):
            faults.append(f"{path}: a link leads out of the project, to {folder}")
        elif (root / path).is_symlink():
            faults.append(f"{path}: this is a link; Pullback writes plain files")
    return faults


def _carry_out(project: Project, plan: _Plan, lines: bytes, replace_manifest: bool) -> None:
    """Stages, renames, removes. From the moment when the staged manifest is there, the run counts as begun."""
    root, staging = project.root, _staging(project.root)
    try:
        mark = _stage(root, staging, plan, lines)
        for path in plan.stage:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / "tree" / path, root / path)
        for path in plan.remove:
            (root / path).unlink(missing_ok=True)
            _remove_empty(root / path, root)
        if replace_manifest:
            (root / project.config.output).mkdir(parents=True, exist_ok=True)
            os.replace(staging / "next", root / project.config.output / manifest.NAME)
        mark.unlink()
        shutil.rmtree(staging)
    except OSError as error:
        raise TreeError(
            f"{error.filename or root}: {error.strerror or error}; the run is unfinished, the next one takes it up"
        ) from error


def _stage(root: Path, staging: Path, plan: _Plan, lines: bytes) -> Path:
    """Writes everything into the staging folder, its manifest last; the path of that one, which marks the run as begun.

    What an earlier unfinished run has written stays known: its lines are taken over.
    """
    mark = staging / manifest.NAME
    shutil.rmtree(staging / "tree", ignore_errors=True)
    staging.mkdir(parents=True, exist_ok=True)
    for path, content in plan.stage.items():
        target = staging / "tree" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    (staging / "next").write_bytes(lines)
    earlier = [line for line in manifest.read(mark).lines if not line.startswith('"format":')]
    own = [line for line in _body(lines) if not line.startswith('"format":')]
    (staging / "mark").write_bytes(manifest.render([*own, *earlier]))
    os.replace(staging / "mark", mark)
    return mark


def _remove_empty(file: Path, root: Path) -> None:
    """Removes the folders that a deleted file leaves empty."""
    for folder in file.parents:
        if folder == root:
            return
        with suppress(OSError):
            shutil.rmtree(folder / "__pycache__") if set(os.listdir(folder)) == {"__pycache__"} else None
            folder.rmdir()
            continue
        return


# ---------------------------------------------------------------------------------------------- lock


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One run at a time. The lock's file is deleted with the lock, so that a tree at rest has nothing beside it."""
    folder = root / WORK
    if folder.is_symlink():
        raise TreeError(f"{WORK}: this is a link; Pullback stages in a plain folder")
    until = time.monotonic() + _PATIENCE
    while (held := _try_lock(folder)) is None:
        if time.monotonic() > until:
            raise TreeError(f"{WORK}/lock: another run is writing here; if there is none, delete this file")
        time.sleep(0.02)
    try:
        yield
    finally:
        (folder / "lock").unlink(missing_ok=True)
        os.close(held)
        if not (folder / "staging").exists():
            (folder / ".gitignore").unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()


def _try_lock(folder: Path) -> int | None:
    """A descriptor that holds the lock, or None. By `flock` where there is one (it ends with its process), else by the
    file's existence."""
    try:
        folder.mkdir(exist_ok=True)
        (folder / ".gitignore").write_bytes(b"*\n")
        try:
            import fcntl
        except ImportError:
            return os.open(folder / "lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        handle = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    except (FileNotFoundError, FileExistsError):
        return None
    except OSError as error:
        raise TreeError(f"{error.filename or folder}: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The file may have been deleted by the run that held it: then this lock guards nothing.
        if os.fstat(handle).st_ino == os.stat(folder / "lock").st_ino:
            return handle
    except OSError:
        pass
    os.close(handle)
    return None


def _is_locked(root: Path) -> bool:
    try:
        import fcntl

        handle = os.open(root / WORK / "lock", os.O_RDWR)
    except (ImportError, OSError):
        return (root / WORK / "lock").exists() and os.name == "nt"
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(handle)
