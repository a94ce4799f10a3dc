"""Check the subject of a commit message: at most 72 characters, an imperative verb first.

python tools/release/commit_subject.py FILE     pre-commit passes the file with the message
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

MAX_LENGTH = 72
# git writes these subjects itself.
WRITTEN_BY_GIT = re.compile(r"Merge |Revert |(fixup|squash|amend)! ")
ARTICLES = {"A", "An", "The", "This", "That", "These", "Those", "No", "One"}
# "Added", "Adding" and "Adds" are no imperatives; "Feed", "Bring" and "Pass" are.
OTHER_FORM = re.compile(r"[A-Z][a-z]+(?:(?<!e)ed|[^r]ing|[^sui]s)")
IMPERATIVES = {"Embed", "Shed", "Swing", "Fling", "Alias", "Canvas"}


def problems(subject: str) -> list[str]:
    """Return what is wrong with a subject; an empty list if nothing is."""
    if WRITTEN_BY_GIT.match(subject):
        return []
    verb = subject.partition(" ")[0]
    reasons = []
    if len(subject) > MAX_LENGTH:
        reasons.append(f"{len(subject)} characters: at most {MAX_LENGTH} are allowed.")
    if not re.fullmatch("[A-Z][a-z]+", verb) or verb in ARTICLES:
        reasons.append(f"{verb!r}: start with a capitalized imperative verb, such as 'Add'.")
    elif OTHER_FORM.fullmatch(verb) and verb not in IMPERATIVES:
        reasons.append(f"{verb!r}: use the imperative form, 'Add' instead of 'Added' or 'Adds'.")
    if subject.endswith("."):
        reasons.append("it ends with a period: remove it.")
    return reasons


def main(file: str) -> int:
    lines = [line for line in Path(file).read_text().splitlines() if not line.startswith("#")]
    subject = next((line for line in lines if line.strip()), "")
    reasons = problems(subject)
    for reason in reasons:
        print(f"commit subject {subject!r}: {reason}", file=sys.stderr)
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
