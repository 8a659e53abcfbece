"""The errors that people see. Nothing here imports torch, numpy or MPI: input is checked before any of them is
loaded.
"""


def printable(text: str) -> str:
    """Control characters, and the bytes of a name that is not UTF-8, become escapes: the text is one line anywhere."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def obtainable(file: str) -> str:
    """A file that messages name as a clone has it, with the command that copies it out of an installed package.

    Args:
        file: "docs/data.md", perhaps with the heading: "docs/data.md, Rows and sequences".
    """
    folder = file.partition("/")[0]
    return f"{file} (hkd {folder} copy {folder})"


class UsageError(Exception):
    """The input is wrong: one line saying what, where and what is allowed. The program ends with exit code 2.

    Attributes:
        lines: what is told; more than one where several things are wrong.
    """

    def __init__(self, text: str):
        """Control characters of a quoted value are escaped: the message stays one line."""
        super().__init__(printable(text))
        self.lines = [str(self)]


class LocalUsageError(UsageError):
    """Wrong input that perhaps one rank alone sees, such as a file that is missing on its node."""


class RunError(Exception):
    """The job cannot go on although its input was right (a rank died, a disk is full). Exit code 1, one line."""


class LinkError(RunError):
    """A transfer between ranks broke, most often because another rank died a moment ago."""
