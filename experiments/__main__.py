"""`python -m kvjax.experiments` lists and starts the programs, as `kvjax`."""

from kvjax.experiments.main import main

main()
