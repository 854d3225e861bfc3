"""Where this checkout lies, and what a process of its own needs to import from it."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PYTHONPATH = os.pathsep.join(str(REPOSITORY / folder) for folder in (".", "runtime", "recipes", "export"))
HELPERS = REPOSITORY / "tests" / "support"
SUPPORT = os.pathsep.join(str(HELPERS / folder) for folder in (".", "files", "laws", "models", "programs"))
