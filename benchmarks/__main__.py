"""`python -m benchmarks`: the generator's times, and with a GPU those of its kernels beside eager and compiled torch."""

from __future__ import annotations

import os
import sys

from benchmarks import generator


def main() -> int:
    generator.main()
    try:
        import torch
    except ImportError:
        return 0
    if not torch.cuda.is_available():
        print("no GPU: the kernels were not timed")
        return 0
    from benchmarks import models, pointwise, rows, steps

    warm = ["--warm", str(min(16, os.cpu_count() or 1))]
    return max(pointwise.main(warm), rows.main(warm), steps.main([]), models.main([]))


if __name__ == "__main__":
    sys.exit(main())
