"""``python -m alignment``: the same as the console script."""

from alignment.cli import main

main()
