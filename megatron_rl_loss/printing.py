"""Text on standard output: what a launch, the proof, the audit and the command line print."""

import sys


def print_text(text: str) -> None:
    """Print a report; characters that standard output cannot encode, as in a locale of ASCII, become ``?``."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, errors="replace").decode(encoding), flush=True)
