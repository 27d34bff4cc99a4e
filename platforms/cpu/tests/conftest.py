"""Makes the tests' shared modules importable, whatever the import mode."""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).parent
for _folder in (str(_HERE), str(_HERE.parent)):  # the second holds the build backend
    if _folder not in sys.path:
        sys.path.insert(0, _folder)
