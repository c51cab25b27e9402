"""How long the generator takes, as whole processes: everything from nothing, an unchanged check, one edited op.

    python benchmarks/generator.py

Works on a copy in a temporary folder. Reports medians; judges nothing.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = 5


def run(folder: Path, *words: str) -> float:
    """Seconds of one run, interpreter start included."""
    before = time.perf_counter()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "codegen", *words], cwd=folder, env=env, check=True, capture_output=True)
    return time.perf_counter() - before


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "specs", folder / "specs")
        (folder / "pyproject.toml").write_text("[tool.pullback]\n")
        count = sum(p.read_text().count("- op:") for p in (folder / "specs").glob("*.yaml"))
        nothing, unchanged, edited = [], [], []
        spec = folder / "specs" / "activations.yaml"
        for k in range(RUNS):
            shutil.rmtree(folder / "generated", ignore_errors=True)
            shutil.rmtree(folder / "tests", ignore_errors=True)
            nothing.append(run(folder, "generate"))
            unchanged.append(run(folder, "check"))
            text = spec.read_text()
            spec.write_text(text.replace("  doc: ", f"  doc: Again {k}. ", 1))
            edited.append(run(folder, "generate"))
            spec.write_text(text)
        total, check, one = (statistics.median(v) for v in (nothing, unchanged, edited))
        print(
            f"{os.cpu_count()} processors, Python {sys.version.split()[0]}, {count} ops, median of {RUNS} runs, whole processes"
        )
        print(f"all from nothing   {total:6.2f} s   ({total / count * 110:.1f} s for 110 such ops)")
        print(f"check, unchanged   {check:6.2f} s")
        print(f"one edited op      {one:6.2f} s")


if __name__ == "__main__":
    main()
