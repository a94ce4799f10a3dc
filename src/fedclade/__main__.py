"""`python -m fedclade`."""

from fedclade.cli.main import main

main()
