"""Options of commands as data, of which the signature is made that typer reads."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

import typer

REQUIRED = Parameter.empty


class Given(SimpleNamespace):
    """The options of a command as it was given them, by their names."""


class Option(NamedTuple):
    """An option or argument of a command.

    Attributes:
        name: by which `Given` has it; its flag is made of it where `info` gives none.
        type: of its values.
        info: `typer.Option` or `typer.Argument` with its panel and help.
        default: its value where it is not given.
    """

    name: str
    type: Any
    info: Any
    default: Any = None


MODEL = Option(
    "model",
    str,
    typer.Argument(metavar="MODEL", help="A folder, or the id of a model on the hub."),
    REQUIRED,
)


def but(options: tuple[Option, ...], *names: str) -> tuple[Option, ...]:
    """Options without some of them."""
    return tuple(option for option in options if option.name not in names)


def takes(*options: Option) -> Callable[[Callable[[Given], None]], Callable[..., None]]:
    """Makes a function of `Given` a command with these options, in the order of its help."""

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
        called.__annotations__ = types
        return called

    return command
