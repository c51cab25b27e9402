"""The net under emission: a module that Python would not run is refused, and a fault of the generator is a finding at its op."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from codegen import emit, verify
from codegen.cli import main
from codegen.soundness import EmissionFault, check_module

ROOT = Path(__file__).parents[2]
UNSOUND = {
    "no syntax": ("def f(x):\n    g(x, mask=)\n", "invalid syntax"),
    "a parameter twice": ("def f(x, x):\n    return x\n", "duplicate argument 'x'"),
    "a function twice": ("def f(x):\n    return x\n\n\ndef f(y):\n    return y\n", "defined twice: f"),
    "a class as a function": ("def f(x):\n    return x\n\n\nclass f:\n    pass\n", "defined twice: f"),
    "a function as an import": ("from m import f\n\n\ndef f(x):\n    return x\n", "defined twice: f"),
    "a method twice": ("class A:\n    def f(self): ...\n\n    def f(self): ...\n", "defined twice: f"),
    "an import unused": ("from m import f\n", "imported and not used: f"),
    "a name set nowhere": ("def f(x):\n    return y\n", "`f` reads names that nothing sets before: y"),
    "a name set later": (
        "def f(x):\n    z = y\n    y = x\n    return z\n",
        "`f` reads names that nothing sets before: y",
    ),
    "a name of the other branch": (
        "def f(x):\n    if x:\n        y = 1\n    else:\n        z = y\n        x = z\n    return x\n",
        "`f` reads names that nothing sets before: y",
    ),
    "a name set later in a loop": (
        "def f(x):\n    for k in x:\n        z = y + z\n        y = k\n    return z\n",
        "`f` reads names that nothing sets before: y, z",
    ),
    "a sum that has no start": ("def f(x):\n    y += x\n    return y\n", "`f` reads names that nothing sets before: y"),
    "a name of the module that is a local": ("y = 1\n\n\ndef f(x):\n    z = y\n    y = x\n    return z\n", "before: y"),
    "a kernel that is not there": (
        "class A:\n    forward = (g,)\n",
        "the module reads names that nothing sets before: g",
    ),
    "a decorator that is not there": (
        "@g\ndef f(x):\n    return x\n",
        "the module reads names that nothing sets before: g",
    ),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_what_python_would_not_run_is_refused(name: str) -> None:
    text, told = UNSOUND[name]
    with pytest.raises(EmissionFault) as fault:
        check_module("op", text)
    assert told in str(fault.value) and str(fault.value).startswith("op: ")


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    if x:\n        y = 1\n    if x:\n        return y\n",
        "def f(x):\n    y = 0\n    for k in x:\n        y += k\n    return k, y\n",
        "def f(x, *, y=1, **more):\n    return [a + y for a in x if a] + [more], (lambda b: b + x)\n",
        "from __future__ import annotations\n\n\ndef f(x: Unknown) -> Unknown:\n    y: Unknown = x\n    return y\n",
    ],
)
def test_what_python_would_run_is_sound(text: str) -> None:
    check_module("op", text)


@pytest.mark.parametrize("path", sorted((ROOT / "generated/ops").glob("*.py")), ids=lambda p: p.stem)
def test_every_committed_module_is_sound(path: Path) -> None:
    check_module(path.stem, path.read_text())


OPS = "".join(
    f"- op: {name}\n  doc: Twice.\n  inputs: {{x: [...]}}\n  outputs: {{y: [...]}}\n  forward: y = 2 * x\n  backward: {{x: 2 * dy}}\n"
    for name in ("good", "bad", "fine")
)


@pytest.mark.parametrize("where", ["verify_op", "schedule", "lowered", "check_module", "_test"])
@pytest.mark.parametrize("command", [("generate",), ("check", "--full")])
def test_a_fault_of_the_generator_is_a_finding_at_its_op(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, command: tuple[str, ...]
) -> None:
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs/basic.yaml").write_text(OPS)
    (tmp_path / "pyproject.toml").write_text("[tool.pullback]\n")
    monkeypatch.chdir(tmp_path)
    module = verify if where == "verify_op" else emit
    real = getattr(module, where)

    def failing(*given: object, **more: object) -> object:
        about = next(x for x in given if isinstance(x, str) or hasattr(x, "name") or hasattr(x, "op"))
        name = about if isinstance(about, str) else getattr(about, "op", about)
        if getattr(name, "name", name) == "bad":
            raise KeyError("s")
        return real(*given, **more)

    monkeypatch.setattr(module, where, failing)
    result = CliRunner().invoke(main, command)
    assert isinstance(result.exception, SystemExit) and result.exit_code == 1
    assert "specs/basic.yaml:7:7: error[internal-fault]: " in result.stderr and "`bad` failed" in result.stderr
    assert "KeyError: 's'" in result.stderr and "1 error\n" in result.stderr and "Traceback" not in result.output
    assert not (tmp_path / "generated").exists()


@pytest.mark.parametrize("command", [("explain", "bad"), ("list",), ("verify", "bad")])
def test_a_fault_of_the_generator_ends_no_command_in_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs/basic.yaml").write_text(OPS)
    monkeypatch.chdir(tmp_path)

    def failing(*given: object) -> object:
        raise AssertionError("cannot be")

    monkeypatch.setattr(verify, "typed", failing)
    result = CliRunner().invoke(main, command)
    assert isinstance(result.exception, SystemExit) and result.exit_code == 1
    assert "internal-fault" in result.stderr and "AssertionError: cannot be" in result.stderr
