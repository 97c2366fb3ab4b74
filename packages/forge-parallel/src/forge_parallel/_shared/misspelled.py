# Copied from scripts/shared/misspelled.py; edit that file, then run scripts/copy_shared.py.
"""Names that are almost one that is read: a method that would never be called."""

from __future__ import annotations


def misspells(name: str, known: str) -> bool:
    """Whether `name` is almost `known`: the same words, some with one wrong, missing, further or swapped letter, or
    longer or shorter at the end.

    The ratio of difflib would take other words, too: text_inputs for extra_inputs, parallel_modules for parallel_roles.
    """
    words, wanted = name.lower().split("_"), known.split("_")
    if "".join(words) == "".join(wanted):  # parallelRoles
        return True
    # one word is near to too many others, so only a long one, and without further letters: prepared is a word, too
    if len(wanted) == 1:
        return len(known) > 6 and len(name) <= len(known) and _near(name, known)
    if len(words) != len(wanted) or name[0] != known[0]:
        return False
    return all(
        _near(a, b) or (min(len(a), len(b)) > 2 and (a.startswith(b) or b.startswith(a)))
        for a, b in zip(words, wanted)
    )


def _near(word: str, other: str) -> bool:
    """Whether one letter wrong, missing, further or swapped with the next makes one word of the other."""
    same = 0
    while same < min(len(word), len(other)) and word[same] == other[same]:
        same += 1
    a, b = word[same:], other[same:]
    return a[1:] in (b, b[1:]) or b[1:] == a or (a[:2], a[2:]) == (b[:2][::-1], b[2:])
