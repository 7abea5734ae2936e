"""The one exception type that users meet."""

__all__ = ["USAGE_EXIT_CODE", "ScaleVecError"]

USAGE_EXIT_CODE = 2


class ScaleVecError(Exception):
    """Something was asked for that cannot be given.

    The message is one sentence or two for a person: what was given, what was expected and what to do
    next. The command line prints it without a traceback and exits with :data:`USAGE_EXIT_CODE`.
    """
