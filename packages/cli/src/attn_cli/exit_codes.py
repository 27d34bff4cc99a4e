"""Exit codes of the command; errors of attn carry theirs in `exit_code`."""

from __future__ import annotations

__all__ = ["BROKEN_PIPE", "FAILURES_FOUND", "INTERRUPTED", "USAGE"]

FAILURES_FOUND = 1
"""The command did its work, and found something that fails; also a bug's."""

USAGE = 2
"""The command line was not understood."""

INTERRUPTED = 130
"""Ctrl-C; by the shell's convention 128 + SIGINT."""

BROKEN_PIPE = 141
"""Whoever read the output went away; by the shell's convention 128 + SIGPIPE."""
