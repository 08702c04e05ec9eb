"""Imports modules by name, one after the other: `python -m tests.fakes.import_all MODULE [MODULE ..]`."""

import sys
from importlib import import_module

if __name__ == "__main__":
    for name in sys.argv[1:]:
        import_module(name)
