"""`fedclade` and `python -m fedclade`."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point. Ctrl-C while the command line itself is imported leaves one line, too."""
    try:
        from fedclade.cli.main import main as command_line
    except KeyboardInterrupt:
        print("fedclade: stopped.", file=sys.stderr)
        raise SystemExit(130) from None
    command_line()


if __name__ == "__main__":
    main()
