"""Two baselines side by side, value by value: what a reviewer of a new recording looks at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from alignment.baseline.store import BaselineStore, Entry

# Facts of the moment of recording; they differ always and mean nothing by themselves.
_OF_THE_MOMENT = {"provenance.date", "provenance.commit"}


@dataclass(frozen=True, kw_only=True)
class Change:
    """One value before and after; ``before`` is None for a new one, ``after`` for one that is gone."""

    entry: str
    value: str
    before: object
    after: object

    def __str__(self) -> str:
        text = f"{self.entry}: {self.value}: {_text(self.before)} → {_text(self.after)}"
        numbers = [v for v in (self.before, self.after) if isinstance(v, (int, float)) and not isinstance(v, bool)]
        if len(numbers) == 2 and numbers[0]:
            text += f" ({numbers[1] / numbers[0] - 1:+.1%})"
        return text


def _text(value: object) -> str:
    return "none" if value is None else f"{value:.9g}" if isinstance(value, float) else str(value)


def changes(before: Entry | None, after: Entry | None) -> list[Change]:
    """Every value that differs between two entries, in a stable order."""
    old, new = (dict(_values(entry)) if entry else {} for entry in (before, after))
    key = (after or before).key
    if before is None:
        return [Change(entry=key, value="entry", before=None, after=f"{len(new)} values")]
    if after is None:
        return [Change(entry=key, value="entry", before=f"{len(old)} values", after=None)]
    return [
        Change(entry=key, value=name, before=old.get(name), after=new.get(name))
        for name in dict.fromkeys([*old, *new])
        if name not in _OF_THE_MOMENT and old.get(name) != new.get(name)
    ]


def _values(entry: Entry) -> Iterator[tuple[str, object]]:
    yield from _flat("", {"inputs": entry.inputs, "hashes": entry.hashes, "golden": entry.golden, "case": entry.case})
    yield from _flat("", {"quantities": entry.quantities})
    yield from _flat("", {"provenance": entry.provenance.to_dict()})


def _flat(prefix: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, (list, tuple)) and value and all(isinstance(v, float) for v in value):
        for index, inner in enumerate(value):
            yield f"{prefix}[{index}]", inner
    else:
        yield prefix, list(value) if isinstance(value, tuple) else value


def diff(before: BaselineStore, after: BaselineStore) -> list[Change]:
    """Every value that differs between two folders of baselines; files are paired by kind, chip, layer and operator."""
    names = dict.fromkeys(path.relative_to(store.root) for store in (before, after) for path in store.paths())
    found = []
    for name in sorted(names):
        old, new = (_entries(store, name) for store in (before, after))
        for key in dict.fromkeys([*old, *new]):
            found += changes(old.get(key), new.get(key))
    return found


def _entries(store: BaselineStore, name) -> Mapping[str, Entry]:
    from alignment.baseline.store import load

    return load(store.root / name).entries if (store.root / name).exists() else {}
