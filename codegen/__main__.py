"""`python -m codegen` does what the console script `pullback` does."""

from codegen.cli import main

if __name__ == "__main__":
    main(prog_name="pullback")
