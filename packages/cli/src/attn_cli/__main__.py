"""`python -m attn_cli` is the command `attn`."""

from __future__ import annotations

import sys

from attn_cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
