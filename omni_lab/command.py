"""What the commands have in common: their exit statuses, and mistakes of their options told in one line."""

from __future__ import annotations

import argparse
from typing import NoReturn

DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses: done; the work failed; an option, experiment or input file is wrong; stopped by the user."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage."""
        self.exit(WRONG, f"{self.prog}: {message}; --help shows all options\n")
