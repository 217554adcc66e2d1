"""`python -m supervisor` is `lastgasp`."""

from supervisor.cli import main

main()
