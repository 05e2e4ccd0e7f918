"""The benchmark of ``alignment bisect``: ``python benchmarks/bisect.py [--trials 200] [--json]``; see bisection.py."""

import sys

if __name__ == "__main__":
    from bisection import main

    sys.exit(main())

# Python puts the folder of a script first on its path. Any script here that needs the standard library's `bisect`
# (random, tempfile and statistics do) finds this file, and is given what it asked for.
import importlib.util
import sysconfig

_spec = importlib.util.spec_from_file_location(__name__, f"{sysconfig.get_path('stdlib')}/bisect.py")
sys.modules[__name__] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules[__name__])
