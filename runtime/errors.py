"""Errors in what the user asked for: one line and a non-zero exit, no traceback."""

import os
import sys
from contextlib import contextmanager


class UserError(Exception):
    """Wrong input. The message is one line: the value, the problem, the remedy."""


def first_line(error: Exception) -> str:
    """Shorten a library's error to the first line of its message, or to its type if it has none.

    Long lines lose their middle: libraries tell what failed at the beginning, and why at the end.
    """
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if len(line) <= 200 else f"{line[:60]} … {line[-140:]}"


@contextmanager
def one_line_errors():
    """Print a UserError or Ctrl-C as one line and exit; wraps a whole program."""
    try:
        yield
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted; run the same command again to resume", file=sys.stderr, flush=True)
        os._exit(130)  # at once, as XLA may be compiling in other threads
