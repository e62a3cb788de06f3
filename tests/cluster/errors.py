"""Everything that can go wrong here and that a caller may want to name.

SandboxError
├── BuildError            a binary could not be built
├── StateError            a state folder is missing, taken, or not one of ours
├── ComponentError        a component ended or did not become ready in time
└── CommandError          kubectl or helm exited with an error
"""

from __future__ import annotations


class SandboxError(Exception):
    """The sentence of an error names the thing, its value, and what would work."""


class BuildError(SandboxError):
    pass


class StateError(SandboxError):
    pass


class ComponentError(SandboxError):
    pass


class CommandError(SandboxError):
    """A command line tool exited with an error.

    Attributes: ``returncode``, ``stdout`` and ``stderr`` of the command.
    """

    def __init__(self, argv: list[str], returncode: int, stdout: str, stderr: str) -> None:
        super().__init__(f"{' '.join(argv)}: exit {returncode}: {stderr.strip() or stdout.strip()}")
        self.returncode, self.stdout, self.stderr = returncode, stdout, stderr
