"""Sentences, words and names of version 0.1 that must not come back.

Version 0.1 was not written in plain English. Each row of `OLD_PROSE` is one of its sentences, by
the number that the house rules give it. Matching ignores case, line breaks, comment signs and the
ends of adjacent string literals, so that a line break does not hide a phrase.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HOUSE = ROOT.parent / "shared" / "HOUSE.md"
FOLDERS = ("src", "docs", "examples", "notebooks", "tools", "benchmarks", "tests", ".github")
FILES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CITATION.cff",
    "results/README.md",
    "Makefile",
    "pyproject.toml",
    "mkdocs.yml",
    ".ci/run",
    ".pre-commit-config.yaml",
)
SUFFIXES = {".py", ".md", ".toml", ".js", ".html", ".css", ".json", ".ipynb", ".txt", ".yml"}

OLD_PROSE = {
    1: ("send rubbish", "learnt wrong labels", "what is no model"),
    2: ("is gone on with",),
    3: ("Beside others",),
    4: ("everyone for himself",),
    5: ("less what is chosen by itself",),
    6: ("costs nothing else",),
    7: ("runs away",),
    8: ("decides nothing",),
    9: ("its last word is",),
    10: ("who is not known is admitted", "who still is not"),
    11: ("do not fit into that of", "who were not done", "has it so from the start"),
    12: ("another file than is meant", "get it again"),
    13: ("share of the disk is used up",),
    14: ("begins anew",),
    15: ("checksum is another",),
    16: ("goes on regardless",),
    17: ("under no name that it may", "a page of another site"),
    18: ("Of the first weights",),
    19: ("stands in a newcomer's way",),
    20: ("begin anew", "has lost what its clients remembered"),
    21: ("only the sum is formed",),
    22: ("cares for no more",),
    23: ("likes to read",),
    24: ("no business of",),
    25: ("has told when",),
    26: ("which there are none of",),
    27: ("asked for again and again", "worth making only for"),
    28: ("extends fc.Method and says",),
}
PHRASES = [phrase for phrases in OLD_PROSE.values() for phrase in phrases]
WORDS = ("anew", "in earnest", "so many", "who was done", "told", "believes", "beside")

# Names of version 0.1 that no new thing has. CHANGELOG.md and the message for an old key of an
# experiment file name some of them.
OLD_NAMES = (
    "_second_look",
    "ClientMemory",
    "InvalidInput",
    "NotVectorisable",
    "NotWritten",
    "clusters_alike",
    "draws_as",
    "drain_failures",
    "grown_to",
    "is_for_stacks",
    "last_linear",
    "memory0",
    "most_alike",
    "names_under",
    "noise_top",
    "on_stack",
    "one_after_the_other",
    "own_mean",
    "plus_gradient",
    "second_look",
    "seen_by",
    "set_aside_after",
    "show_names",
    "takes_stacks",
    "test_source",
    "with_counter",
    "without_refused",
)
RENAMED_KEYS = {("src/fedclade/training/experiment_file.py", "set_aside_after")}


def normalized(text: str) -> str:
    """Return the text as one line in lower case, without comment signs and without the quotation
    marks between adjacent string literals.
    """
    text = re.sub(r"""["']\s*\n\s*[bfr]*["']""", "", text)
    text = re.sub(r"\n\s*(?:#+|//+|\*+|>+)(?=\s)", "\n", text)
    return " ".join(text.split()).lower()


def occurrences(phrase: str, text: str) -> list[str]:
    """Return the phrase with the characters around it, once for each place in normalized text."""
    if normalized(phrase) not in text:
        return []
    pattern = re.compile(rf"(?<!\w){re.escape(normalized(phrase))}(?!\w)")
    return [text[max(0, match.start() - 40) : match.end() + 40] for match in pattern.finditer(text)]


def prose_of(file: Path) -> str:
    """Return the text of a file; of a notebook its cells and what they print."""
    text = file.read_text()
    if file.suffix != ".ipynb":
        return text
    return "\n\n".join(
        "".join(part)
        for cell in json.loads(text)["cells"]
        for part in [
            cell["source"],
            *(output.get("text", []) for output in cell.get("outputs", [])),
        ]
    )


@cache
def texts() -> dict[str, str]:
    """The normalized text of every file that people write or read, by path."""
    files = [ROOT / name for name in FILES] + [
        file
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*"))
        if file.suffix in SUFFIXES and file != Path(__file__).resolve()
    ]
    return {file.relative_to(ROOT).as_posix(): normalized(prose_of(file)) for file in files}


def places(phrase: str) -> list[str]:
    return [
        f"{name}: …{context}…"
        for name, text in texts().items()
        for context in occurrences(phrase, text)
    ]


def house_rows() -> dict[int, str]:
    """The verbatim sentences of the language table of the house rules, by number."""
    if not HOUSE.exists():
        pytest.skip(f"{HOUSE} is not there: the house rules are not part of the repository")
    rows = re.findall(r'^\| (\d+) \| [^|]* \| [^|"]*"(.*?)" \| ', HOUSE.read_text(), re.MULTILINE)
    return {int(number): sentence for number, sentence in rows}


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_phrase_of_version_0_1_does_not_occur(phrase: str) -> None:
    found = places(phrase)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("word", WORDS)
def test_a_word_that_the_house_rules_forbid_does_not_occur(word: str) -> None:
    found = places(word)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", OLD_NAMES)
def test_a_name_of_version_0_1_does_not_occur_in_the_package(name: str) -> None:
    found = {file for file, text in texts().items() if occurrences(name, text)}
    allowed = {file for file, renamed in RENAMED_KEYS if renamed == name}
    assert {file for file in found if file.startswith("src/")} == allowed


def test_every_row_has_a_phrase() -> None:
    assert list(OLD_PROSE) == list(range(1, 29))
    assert all(OLD_PROSE.values())


def test_each_phrase_is_part_of_its_row_in_the_house_rules() -> None:
    rows = house_rows()
    assert rows.keys() == OLD_PROSE.keys()
    for number, phrases in OLD_PROSE.items():
        for phrase in phrases:
            assert occurrences(phrase, normalized(rows[number])), (number, phrase)


def test_no_sentence_of_the_house_rules_occurs_verbatim() -> None:
    found = [place for sentence in house_rows().values() for place in places(sentence)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "It never\nSends   rubbish.",
        "# It never sends\n    # rubbish.",
        "// sends\n  // rubbish",
        "> sends\n> rubbish",
        'message = (\n    "it sends "\n    f"rubbish to {server}"\n)',
    ],
)
def test_a_line_break_does_not_hide_a_phrase(text: str) -> None:
    assert occurrences("sends rubbish", normalized(text))


def test_a_phrase_in_a_notebook_is_found(tmp_path: Path) -> None:
    cell = {"source": ["Clients\n", "send rubbish."], "outputs": [{"text": ["who\n", "was done"]}]}
    file = tmp_path / "planted.ipynb"
    file.write_text(json.dumps({"cells": [cell]}))
    text = normalized(prose_of(file))
    assert occurrences("send rubbish", text)
    assert occurrences("who was done", text)


def test_a_part_of_a_word_is_not_found() -> None:
    assert not occurrences("beside", normalized("besides, the others"))
    assert not occurrences("InvalidInput", normalized("InvalidInputError"))


def test_the_files_of_every_folder_are_read() -> None:
    assert {*FILES} <= texts().keys()
    for folder in FOLDERS:
        assert any(name.startswith(f"{folder}/") for name in texts()), folder
    assert "tests/integration/docs/test_language.py" not in texts()
