"""How a program ends that cannot go on: with one line, not a traceback."""

import os
import sys
from contextlib import contextmanager


class Refused(Exception):
    """What the user asked for cannot be done. The message is one line: what is wrong, and how to go on."""


@contextmanager
def one_line():
    """Around a whole program: a refusal, or Ctrl-C, is told in one line and ends it."""
    try:
        yield
    except Refused as refusal:
        sys.exit(f"error: {refusal}")
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from what was saved, if anything was", file=sys.stderr, flush=True)
        os._exit(130)  # at once, as XLA may be compiling in other threads
