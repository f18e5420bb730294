"""The exceptions. Each stands for one status of the C interface (tessera/c/tessera.h)."""


class Error(Exception):
    """Any error of tessera. Its text is one line: the operation, what was found, and what was expected."""


class InvalidArgumentError(Error, ValueError):
    """Invalid or inconsistent arguments."""


class CorruptError(Error):
    """Bytes that contradict their format, their checksum or each other."""


class UnsupportedError(Error):
    """Well-formed input that this version does not handle."""


class NotFoundError(Error, LookupError):
    """A file, a tensor or an object that does not exist."""


class StorageError(Error, OSError):
    """The operating system refused or failed."""


class OutcomeUnknownError(StorageError):
    """A commit failed and could not be undone: the old checkpoint or the new one is there, complete."""


class RankFailureError(Error):
    """Another rank failed or died."""


class CancelledError(Error):
    """The operation was cancelled."""


class InternalError(Error):
    """A defect of tessera, or no memory."""


# By the number of the status.
CLASSES = {
    1: InvalidArgumentError,
    2: CorruptError,
    3: UnsupportedError,
    4: NotFoundError,
    5: StorageError,
    6: RankFailureError,
    7: CancelledError,
    8: InternalError,
}
