"""Compiled code that this platform's backends call, found and loaded on demand."""
