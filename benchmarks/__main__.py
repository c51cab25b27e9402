"""`python -m benchmarks`: the generator's times, and with a GPU those of its kernels beside eager and compiled torch."""

from __future__ import annotations

from benchmarks import generator


def main() -> None:
    generator.main()
    try:
        import torch
    except ImportError:
        return
    if torch.cuda.is_available():
        from benchmarks import pointwise

        pointwise.main()
    else:
        print("no GPU: the kernels were not timed")


if __name__ == "__main__":
    main()
