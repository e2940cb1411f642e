"""Options of commands as data, and the signatures made of them, which typer reads."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

import typer

REQUIRED = Parameter.empty


class Given(SimpleNamespace):
    """The values that a command was given, by the names of its options."""


class Option(NamedTuple):
    """An option or argument of a command.

    Attributes:
        name: its name in `Given`.
        type: the type of its values.
        info: `typer.Option` or `typer.Argument` with its panel and help.
        default: its value if it is not given.
    """

    name: str
    type: Any
    info: Any
    default: Any = None


class Panel:
    """A panel of a command's help, which makes the options in it.

    Args:
        title: its heading; without one its options are in the first panel.
    """

    def __init__(self, title: str | None = None) -> None:
        self._title = title

    def __call__(self, said: str, type: Any, help: str, default: Any = None, **more: Any) -> Option:
        """Makes an option; its first flag is its name in `Given`.

        Args:
            said: its flags, the long one first, and behind them a word for its value.
            default: its value if it is not given; for a switch False.
            more: other arguments of `typer.Option`.
        """
        flags = [word for word in said.split() if word.startswith("-")]
        value = said.split()[len(flags) :]
        more |= {"help": help, "metavar": "".join(value), "rich_help_panel": self._title}
        name = flags[0].split("/")[0].strip("-").replace("-", "_")
        if type is bool and default is None:
            default = False
        more |= _read(type)
        return Option(name, type, typer.Option(*flags, **more), default)


def argument(said: str, type: Any, help: str, default: Any = None) -> Option:
    """Makes an argument; the help shows it as `said`."""
    info = typer.Argument(metavar=said, help=help, **_read(type))
    return Option(said.lower(), type, info, default)


def _read(type: Any) -> dict[str, Any]:
    """Tells typer how to read values of a type."""
    return {"parser": _path} if type in (Path, Path | None, list[Path] | None) else {}


def _path(text: str) -> Path:
    """Reads a path, and refuses an empty text: `Path` would take it for the current folder."""
    if not text:
        raise typer.BadParameter("expected a path, got an empty text")
    return Path(text)


PLAIN = Panel()
MODEL = argument("MODEL", str, "A folder, or the id of a model on the hub.", REQUIRED)


def but(options: tuple[Option, ...], *names: str) -> tuple[Option, ...]:
    """Returns options without those of some names."""
    return tuple(option for option in options if option.name not in names)


def takes(*options: Option, **how: Any) -> Callable[[Callable[[Given], None]], Callable[..., None]]:
    """Makes a function of `Given` a command with these options, in the order of its help.

    Args:
        how: arguments of typer's `command`.
    """

    def command(run: Callable[[Given], None]) -> Callable[..., None]:
        def called(**given: Any) -> None:
            run(Given(**given))

        types = {one.name: Annotated[one.type, one.info] for one in options}
        kind = Parameter.POSITIONAL_OR_KEYWORD
        parameters = [
            Parameter(one.name, kind, default=one.default, annotation=types[one.name])
            for one in options
        ]
        called.__name__, called.__doc__ = run.__name__, run.__doc__
        called.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__, called.__dict__["how"] = types, how
        return called

    return command
