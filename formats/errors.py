"""The one exception for everything that is wrong with the user's files or request."""

import unicodedata


def printable(text: str, limit: int = 300) -> str:
    """`text` with control, format and surrogate characters escaped and cut to `limit` characters.

    Names come from untrusted files: a raw escape sequence in one could rewrite the terminal.
    """
    safe = "".join(
        c
        if unicodedata.category(c)[0] != "C" and c not in "\u2028\u2029"
        else c.encode("unicode_escape", "backslashreplace").decode()
        for c in text[: limit + 1]
    )
    return safe if len(text) <= limit else safe[:limit] + "..."


class KizamiError(Exception):
    """A refusal: exit code 2, one line on stderr, the fields of `kizami.error/1` under `--json`.

    `code` is a stable snake_case word for scripts (`missing_scale`); `message` says what was found and what was
    expected; `hint` says what to do. `file` and `tensor` are names as the checkpoint spells them.
    """

    def __init__(
        self, message: str, *, code: str, file: str | None = None, tensor: str | None = None, hint: str | None = None
    ) -> None:
        self.message = printable(message, 2000)
        self.code = code
        self.file = None if file is None else printable(file)
        self.tensor = None if tensor is None else printable(tensor)
        self.hint = None if hint is None else printable(hint, 1000)
        super().__init__(str(self))

    def __str__(self) -> str:
        where = [part for part in (self.file, self.tensor) if part]
        line = ": ".join([*where, self.message])
        end = "" if line.endswith(("?", "!")) else "."
        return f"{line}{end} hint: {self.hint}" if self.hint else line

    def __reduce__(self) -> tuple[object, ...]:  # survives a process pool
        return _rebuild, (self.message, self.code, self.file, self.tensor, self.hint)


def _rebuild(message: str, code: str, file: str | None, tensor: str | None, hint: str | None) -> KizamiError:
    return KizamiError(message, code=code, file=file, tensor=tensor, hint=hint)
