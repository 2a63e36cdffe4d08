"""`python -m tiedgpt` is the command line."""

from tiedgpt.cli.main import main

raise SystemExit(main())
