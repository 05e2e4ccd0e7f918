"""Environment providers: a stack made runnable by a virtual environment, a container, an activation script, or
worktrees.
"""
