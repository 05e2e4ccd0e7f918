"""Versions as the ecosystem writes them: PEP 440 where they follow it, natural order where they do not."""

from __future__ import annotations

import fnmatch
import functools
import operator
import re

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from alignment.errors import InputError

_COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@functools.lru_cache(maxsize=65536)
def order(version: str) -> tuple:
    """A sort key: PEP 440 versions among each other (``8.2.RC1`` before ``8.2.0``), others by their numbers and
    words.
    """
    try:
        return (1, Version(version))
    except InvalidVersion:
        return (0, natural(version))


def natural(version: str) -> tuple:
    """``25.0.rc1.1`` as comparable parts; words sort before numbers, so that ``rc`` comes before a final release."""
    parts = re.findall(r"\d+|[a-z]+", version.lower())
    return tuple((1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts) + ((0, 1, ""),)


def is_prerelease(version: str) -> bool:
    """True for a.. b.. rc.. and dev versions of PEP 440."""
    try:
        return Version(version).is_prerelease
    except InvalidVersion:
        return False


def same(found: str, wanted: str) -> bool:
    """Is ``found`` the version that was ``wanted``? A local label (``2.7.1+cpu``) counts only where one was wanted."""
    try:
        left, right = Version(found), Version(wanted)
    except InvalidVersion:
        return found.strip() == wanted.strip()
    return left == right if right.local else left.public == right.public


def check_requirement(text: str, where: object) -> str:
    """``text`` if :func:`satisfies` can read it; InputError otherwise."""
    if not text or text[0] not in "=<>!~":
        return text
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        if not all(re.fullmatch(r"(==|!=|>=|<=|>|<)\s*[^\s=<>!~]\S*", part.strip()) for part in text.split(",")):
            raise InputError(
                "not a version requirement",
                where=where,
                expected="'==0.10.*', '>=8.2.RC1,<8.3' or a pattern '*core_r0.12*'",
                found=text,
            ) from None
    return text


def satisfies(version: str, requirement: str) -> bool:
    """Does a version meet ``==2.7.1.*`` or ``>=8.2.RC1,<8.3`` (PEP 440) or a pattern like ``*core_r0.12*``?"""
    if requirement[:1] not in tuple("=<>!~"):
        return fnmatch.fnmatchcase(version, requirement)
    try:
        return SpecifierSet(requirement).contains(Version(version), prereleases=True)
    except (InvalidVersion, InvalidSpecifier):
        return all(_holds(version, part.strip()) for part in requirement.split(","))


def _holds(version: str, clause: str) -> bool:
    sign = next((s for s in ("==", "!=", ">=", "<=", ">", "<") if clause.startswith(s)), None)
    if sign is None:
        return False
    bound = clause[len(sign) :].strip()
    if bound.endswith(".*"):
        within = version == bound[:-2] or version.startswith(bound[:-1])
        return within if sign == "==" else not within
    return _COMPARE[sign](natural(version), natural(bound))
