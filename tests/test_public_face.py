"""What users see of the generated package, as a type checker sees it: strict, and complete."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = """\
import torch

from generated import add, gelu, glu, where


def program(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return add(where(mask, gelu(x, approximate="tanh"), 0.0), glu(x, dim=-1), alpha=2.0)
"""


def checked(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "program.py"
    file.write_text(text)
    words = ["--strict", "--follow-imports=silent", "--no-incremental", str(file)]
    return subprocess.run([sys.executable, "-m", "mypy", *words], cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_program_type_checks_strictly(tmp_path: Path) -> None:
    done = checked(tmp_path, PROGRAM)
    assert done.returncode == 0, done.stdout


def test_a_wrong_argument_is_found(tmp_path: Path) -> None:
    done = checked(tmp_path, PROGRAM.replace('approximate="tanh"', "approximate=3"))
    assert 'Argument "approximate" to "gelu" has incompatible type' in done.stdout
