"""Fixtures and options come from the installed plugin, ``alignment.pytest_plugin``; this file only loads its test tool."""

pytest_plugins = ["pytester"]
