"""`python -m attn_cli` is the command `attn`."""

from __future__ import annotations

from attn_cli.main import run

__all__: list[str] = []

if __name__ == "__main__":
    run()
