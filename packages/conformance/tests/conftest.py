from __future__ import annotations

import sys
from pathlib import Path

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:  # the worker process finds the tests' backends by this process's path
    sys.path.insert(0, _HERE)
