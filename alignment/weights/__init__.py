"""Checkpoints and what happens to weights between them and the engines."""
