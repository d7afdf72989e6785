"""The one exception for mistakes that a user can put right."""


class UserError(ValueError):
    """A mistake of the user: one sentence that names what is wrong, where, and the remedy.

    `python -m dml.run` prints the sentence and exits with code 2, without a traceback.
    """
