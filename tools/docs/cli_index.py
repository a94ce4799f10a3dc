"""src/fedclade/cli/index.json: the names and descriptions that `fedclade list` shows.

python tools/docs/cli_index.py

Run it after adding or renaming a method, model, partition, data set, setting, preset or paper
table. A test compares the file with the registry.
"""

from __future__ import annotations

import json

from fedclade.cli.index import INDEX, build_index


def main() -> None:
    text = json.dumps(build_index(), indent=1, ensure_ascii=False)
    INDEX.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
