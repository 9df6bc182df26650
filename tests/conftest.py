"""Puts `tests/` on the import path, so that every area can use the shared helpers (`import tiny`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
