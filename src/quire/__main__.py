"""`python -m quire`: the command line, where the script `quire` is not on the path."""

from quire.cli.entry import main

main()
