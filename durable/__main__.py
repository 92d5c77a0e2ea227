"""`python -m durable` is the command line, also where the console script is not on the path."""

from durable.cli import main

main()
