"""`python -m edgespec`."""

from edgespec.cli import main

raise SystemExit(main())
