"""What can go wrong, in words a user can act on.

Every error that a user can cause or mend is an `AnchorholdError`. Its message is one line that says what is
wrong and what to do; the command line prints that line and exits with 2.
"""

__all__ = ["AnchorholdError", "DataError", "Interrupted", "ModelError", "RunError", "SettingsError"]


class AnchorholdError(Exception):
    """Something is wrong that the user can mend; the message says what and how."""


class SettingsError(AnchorholdError):
    """A recipe, a key or a value that makes no sense."""


class DataError(AnchorholdError):
    """Images or labels that are missing, unreadable or unusable."""


class ModelError(AnchorholdError):
    """A backbone or a weights file that cannot be used."""


class RunError(AnchorholdError):
    """A run folder that cannot be written or resumed, or a training that had to stop."""


class Interrupted(AnchorholdError):
    """The user stopped a training; it was saved, and the message says how to go on."""
