"""`python -m dml`: all commands, one line each."""

import ast
import sys
from pathlib import Path

from dml.configuration.command_line import ending
from dml.errors import UserError


def commands() -> dict[str, str]:
    """Returns what each command is for, by the name of its module. It is the first line of the module's docstring."""
    package, found = Path(__file__).parent, {}
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        if path.name != "__main__.py" and '\nif __name__ == "__main__":\n' in text:
            said = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
            name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
            found[name] = said.rpartition("`: ")[2]
    return found


@ending()
def main() -> None:
    found = commands()
    for word in sys.argv[1:]:
        if f"dml.{word}" in found:
            raise UserError(f"'{word}' is a command of its own: type python -m dml.{word}.")
        if word not in ("-h", "--help"):
            raise UserError(f"there is no command '{word}': python -m dml lists all commands.")
    width = max(map(len, found))
    for name, said in found.items():
        print(f"python -m {name:{width}}  {said}")


if __name__ == "__main__":
    main()
