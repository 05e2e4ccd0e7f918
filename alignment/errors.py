"""The errors people see: one clear message that names the place, what was expected, what was found, and the next step."""

from __future__ import annotations


class InputError(Exception):
    """Bad input, configuration or environment. The command line prints its text and exits with 2.

    Args:
        problem: one sentence that says what is wrong.
        where: the file, field, stage or key it is wrong in.
        expected: what would have been accepted (its ``str`` is shown).
        found: what was there instead.
        next_step: the command or the edit that resolves it.
    """

    def __init__(
        self,
        problem: str,
        *,
        where: object = None,
        expected: object = None,
        found: object = None,
        next_step: str | None = None,
    ) -> None:
        self.problem = problem
        self.where = where
        self.expected = expected
        self.found = found
        self.next_step = next_step
        super().__init__(self._text())

    def _text(self) -> str:
        text = f"{self.where}: {self.problem}" if self.where is not None else self.problem
        if self.expected is not None:
            text += f"; expected {self.expected}"
        if self.found is not None:
            text += f"; found {self.found}"
        if self.next_step is not None:
            text += f". Next: {self.next_step}"
        # A damaged file may quote half a character, which no terminal prints.
        return text.encode("utf-8", "backslashreplace").decode("utf-8")

    def __reduce__(self):
        # Ray carries exceptions between processes by pickling; keyword-only arguments need their own recipe.
        return _rebuild, (type(self), self.problem, self.where, self.expected, self.found, self.next_step)


class UnavailableError(InputError):
    """A device, subject, engine or baseline that this machine does not have, with the reason."""


def _rebuild(cls, problem, where, expected, found, next_step):
    return cls(problem, where=where, expected=expected, found=found, next_step=next_step)
