"""Every kernel compiles without a GPU: for sm_90 all of them, for other targets one of each kind.

A process of its own compiles, for this one may have asked for Triton's interpreter.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parent / "compile_worker.py"


def compiled(*words: str) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(WORKER), *words], cwd=ROOT, env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[dict[str, object]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return rows


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_every_kernel_compiles_for_sm_90_with_wide_loads(dtype: str) -> None:
    rows = compiled("cuda:90", dtype)
    assert len(rows) > 40
    for row in rows:
        if row["layout"] == "dense" and row["loads"]:
            assert row["narrow"] == 0, f"{row['kernel']} loads less than 128 bits at a time"
        if row["layout"] == "step":
            assert row["narrow"] == 0, f"{row['kernel']} loads whole tiles less than 128 bits at a time"
        if row["layout"] == "rows":
            assert row["narrow"] == 0, f"{row['kernel']} loads elements of rows one at a time"


@pytest.mark.parametrize("target", ["cuda:80", "hip:gfx942"])
def test_one_of_each_kind_compiles_elsewhere(target: str) -> None:
    assert (
        len(
            compiled(
                target, "bf16", "add", "gelu", "glu", "pow", "rms_norm", "amax", "all", "logsumexp", "cumprod", "argmax"
            )
        )
        >= 21
    )
