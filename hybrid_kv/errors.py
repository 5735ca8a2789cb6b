"""The one exception a user can cause: it names the field, the value and the fix."""


class UserError(ValueError):
    """A bad input or configuration, found before anything changed.

    The command line prints the message without a traceback and exits with code 2.
    """

    def __init__(self, field: str, value: object, fix: str) -> None:
        self.field, self.value, self.fix = field, value, fix
        super().__init__(f"{field}: got {value!r}; {fix}")
