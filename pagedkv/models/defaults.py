"""Reads the defaults of a type's configuration from the source of transformers' class.

A configuration's class lists its fields with their defaults, and older names for some of them.
Both are literals, so they can be read from its source. Importing transformers instead would take
seconds, for which no plan of a checkpoint should wait. Values that a class computes from other
fields are in `facts.py` and `names.py`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple


class Defaults(NamedTuple):
    """The literals of a configuration's class.

    Attributes:
        values: the defaults, by field; without fields that are None by default.
        older: the fields' present names, by the names that files may have.
        decoder: the type of the decoder inside a model; empty if it has none.
        any_decoder: whether a file may name another type for it.
        is_flat: whether a file may have the decoder's fields beside all others.
    """

    values: dict[str, Any]
    older: dict[str, str]
    decoder: str = ""
    any_decoder: bool = True
    is_flat: bool = True


@cache
def defaults_of(kind: str) -> Defaults:
    """Returns the defaults of a type; empty if the installed transformers does not have it."""
    values: dict[str, Any] = {}
    older: dict[str, str] = {}
    decoder, fixed, is_flat = "", "", False
    classes, name = _classes(kind)
    for statement in _inherited(classes, name):
        if isinstance(statement, ast.AnnAssign):
            values[_target(statement)] = _literal(statement.value)
        elif isinstance(statement, ast.Assign) and _target(statement) == "attribute_map":
            older |= _literal(statement.value) or {}
        elif isinstance(statement, ast.Assign) and _target(statement) == "sub_configs_defaults":
            fixed, decoder = _decoder(statement.value)
        elif isinstance(statement, ast.FunctionDef) and statement.name == "__post_init__":
            older |= _taken(statement, values)
            is_flat |= _fills_decoder(statement)
    if fixed in classes:
        decoder = _type_of(classes[fixed])
    values = {name: value for name, value in values.items() if value is not None}
    return Defaults(values, older, decoder, fixed not in classes, is_flat or not decoder)


def decoder_type(kind: str, said: str) -> str:
    """Returns the decoder's type in a model of a type, whose file names the decoder's as `said`."""
    found = defaults_of(kind)
    taken = found.any_decoder and (named_with(said) or models_folder() is None)
    return said if taken else found.decoder or said


def _decoder(parts: ast.expr | None) -> tuple[str, str]:
    """Returns the class of a model's decoder, or its usual type, from the classes of its parts."""
    if isinstance(parts, ast.Dict):
        for key, part in zip(parts.keys, parts.values):
            if _literal(key) == "text_config" and isinstance(part, ast.Name):
                return part.id, ""
            if _literal(key) == "text_config" and isinstance(part, ast.Call):
                words = {word.arg: word.value for word in part.keywords}
                cls, usual = words.get("config_class"), _literal(words.get("model_type"))
                return cls.id if isinstance(cls, ast.Name) else "", usual or ""
    return "", ""


def _taken(made: ast.FunctionDef, fields: Mapping[str, Any]) -> dict[str, str]:
    """Finds names of a file that a class takes for fields: `self.X = kwargs.pop("Y", self.X)`."""
    found = {}
    for statement in ast.walk(made):
        if not isinstance(statement, ast.Assign):
            continue
        target, value = statement.targets[0], statement.value
        value = value.body if isinstance(value, ast.IfExp) else value
        if not isinstance(target, ast.Attribute) or not isinstance(value, ast.Call):
            continue
        if target.attr in fields and ast.unparse(value.func).startswith("kwargs."):
            found[str(_literal(value.args[0]))] = target.attr
    return found


def _fills_decoder(made: ast.FunctionDef) -> bool:
    """Whether a class makes the decoder's configuration of what a file says beside it."""
    given = [x for x in ast.walk(made) if isinstance(x, ast.Assign)]
    return any(
        ast.unparse(one.targets[0]).endswith("text_config") and "kwargs" in ast.unparse(one.value)
        for one in given
    )


@cache
def named_with(kind: str) -> tuple[str, ...]:
    """Returns the names that transformers lists for a type: its class, and perhaps its module.

    Without transformers there are none.
    """
    text = "".join(file.read_text("utf-8") for file in _lists())
    return tuple(re.findall(rf'"{re.escape(kind)}"[,:]\s*"([\w-]+)"', text))


def _lists() -> Iterator[Path]:
    """Yields the files in which transformers lists its types."""
    for name in ("auto_mappings.py", "configuration_auto.py"):
        if (models := models_folder()) and (file := models / "auto" / name).exists():
            yield file


def models_folder() -> Path | None:
    """Returns the folder with the models of the installed transformers, without importing it."""
    found = find_spec("transformers")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / "models"


def _classes(kind: str) -> tuple[dict[str, ast.ClassDef], str]:
    """Returns the classes in the file of a type's configuration, and the name of its own class."""
    folder, names = models_folder(), named_with(kind)
    for module in (*names, kind.replace("-", "_")) if folder else ():
        assert folder is not None
        file = folder / module / f"configuration_{module}.py"
        if not file.exists():
            continue
        tree = ast.parse(file.read_text("utf-8"))
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        own = (name for name, node in classes.items() if _type_of(node) == kind)
        return classes, next((name for name in names if name in classes), None) or next(own, "")
    return {}, ""


def _type_of(node: ast.ClassDef) -> Any:
    """Returns the type that a class names as its own."""
    said = (one for one in node.body if isinstance(one, ast.Assign))
    values = (one.value for one in said if _target(one) == "model_type")
    return _literal(next(values, None))


def _target(statement: ast.stmt) -> str:
    """Returns the name to which a statement of a class assigns."""
    target = getattr(statement, "target", None) or getattr(statement, "targets", [None])[0]
    return target.id if isinstance(target, ast.Name) else ""


def _inherited(classes: dict[str, ast.ClassDef], name: str) -> list[ast.stmt]:
    """Returns the statements of a class, those of its bases first."""
    if name not in classes:
        return []
    node = classes[name]
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    return [*(each for base in bases for each in _inherited(classes, base)), *node.body]


def _literal(node: ast.expr | None) -> Any:
    """Returns the value of a literal, or of a call's literal `default`; None for anything else."""
    if isinstance(node, ast.Call):
        node = next((word.value for word in node.keywords if word.arg == "default"), None)
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
