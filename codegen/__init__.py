"""Pullback's generator: from ops declared in YAML to a verified package of Triton kernels.

Takes spec files, returns source files. Imports neither torch nor triton, nor anything it generates.
"""

__version__ = "0.1.0"
