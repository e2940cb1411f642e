"""Imports run downwards only: the files are held against an explicit table.

A unit is a module or sub-package directly under `pagedkv`. What a unit imports is read from its
source, wherever the import stands: at the top, in a function, under `TYPE_CHECKING`.
"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# unit: the units it may import, besides itself and EVERYWHERE. From the ground up.
MAY_IMPORT = {
    "errors": "",
    "retention": "",
    "config": "retention",
    "kernels": "",
    "pages": "retention",
    "checkpoint": "",
    "planner": "checkpoint",
    "pace": "",
    "storage": "kernels pace",
    "device_tables": "pages",
    "metadata": "pages device_tables",
    "backends": "storage metadata kernels",
    "attention": "backends storage metadata",
    "statistics": "storage metadata retention",
    "step_bytes": "statistics storage metadata pages",
    "merging": "storage pages",
    "interrupt": "",
    "poison": "pages storage",
    "pressure": "pages",
    "elsewhere": "pages storage statistics poison interrupt pressure",
    "cache": "pages storage device_tables metadata statistics step_bytes merging poison interrupt "
    "elsewhere pressure",
    "stream": "planner checkpoint",
    "hf": "cache attention backends storage metadata pages kernels planner",
    "lookup": "",
    "rows": "lookup",
    "aside": "rows cache pace",
    "schedule": "rows lookup aside cache metadata pages interrupt",
    "steps": "rows schedule hf cache metadata pages",
    "generate": "rows steps schedule hf cache pages planner",
    "cli": "pagedkv generate steps hf stream checkpoint cache attention pages storage planner",
    "__main__": "cli",
    # The package itself: names that are loaded when they are first asked for.
    "pagedkv": "errors config planner pages kernels storage metadata attention cache pressure "
    "stream hf generate",
}
EVERYWHERE = {"config", "errors"}
NOT_EVERYWHERE = {"errors", "kernels", "retention"}

WITHOUT_TORCH = {"pagedkv", "errors", "retention", "config", "pages", "checkpoint", "planner"}
WITHOUT_TORCH |= {"lookup", "rows"}
WITH_TRANSFORMERS = {"hf", "generate", "cli", "stream"}
# The files of kernels/ that run where there is no Triton.
PLAIN_KERNELS = {"reference", "gather", "cascade", "buckets", "formats", "coded", "sparse", "mass"}
PLAIN_KERNELS |= {"sdpa"}


def allowed(unit: str) -> set[str]:
    free = EVERYWHERE - {unit} if unit not in NOT_EVERYWHERE else set()
    return {unit, *MAY_IMPORT[unit].split(), *free}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for folder, prefix in ((ROOT / "pagedkv", "pagedkv"), (ROOT / "kernels", "pagedkv.kernels")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if folder.name == "pagedkv" and parts[0] == "kernels":
                continue  # the link; followed by some Python versions only
            found[".".join((prefix, *parts)).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def unit_of(module: str) -> str:
    """The unit a dotted name under `pagedkv` belongs to; the package itself is `pagedkv`."""
    return module.split(".")[1] if "." in module else module


def imports_of(source: str, module: str, is_package: bool = False) -> set[str]:
    """Dotted names that the source of `module` imports, relative ones resolved.

    `from a import b` counts as `a.b` where that may be a module of ours, else as `a`.
    """
    package = module.split(".") if is_package else module.split(".")[:-1]
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            parent = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                name = f"{parent}.{alias.name}"
                known = name in MODULES or (parent == "pagedkv" and alias.name in MAY_IMPORT)
                names.add(name if known else parent)
    return names


def imports_of_file(module: str) -> set[str]:
    path = MODULES[module]
    return imports_of(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")


def top(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def test_the_table_has_no_cycle():
    TopologicalSorter({unit: allowed(unit) - {unit} for unit in MAY_IMPORT}).prepare()


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_what_its_floor_may(module):
    unit = unit_of(module)
    assert unit in MAY_IMPORT, (
        f"{module} has no floor yet: say in MAY_IMPORT of {Path(__file__).name} what it may import"
    )
    ours = {unit_of(name) for name in imports_of_file(module) if name.split(".")[0] == "pagedkv"}
    above = ours - allowed(unit)
    assert not above, f"{module} may not import {', '.join(sorted(above))}: see MAY_IMPORT"


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_heavy_packages_only_where_they_belong(module):
    unit, name = unit_of(module), module.split(".")[-1]
    heavy = top(imports_of_file(module)) & {"torch", "triton", "transformers", "kernels"}
    has = set()
    if unit not in WITHOUT_TORCH:
        has.add("torch")
    if unit == "kernels" and name not in PLAIN_KERNELS:
        has.add("triton")
    if unit in WITH_TRANSFORMERS:
        has.add("transformers")
    assert heavy <= has, f"{module} may not import {', '.join(sorted(heavy - has))}"


@pytest.mark.parametrize("name", sorted(PLAIN_KERNELS))
def test_plain_kernel_files_reach_no_triton_through_a_sibling(name):
    module = f"pagedkv.kernels.{name}"
    siblings = {i.split(".")[-1] for i in imports_of_file(module) if i.startswith("pagedkv.")}
    assert siblings <= PLAIN_KERNELS


def test_kernels_folder_is_linked_and_no_package():
    assert (ROOT / "pagedkv" / "kernels").resolve() == ROOT / "kernels"
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.nn", {"torch.nn"}),
        ("import pagedkv.cache as c", {"pagedkv.cache"}),
        ("from pagedkv import errors, PagedKVCache", {"pagedkv.errors", "pagedkv"}),
        ("from pagedkv.cache import PagedKVCache", {"pagedkv.cache"}),
        ("from . import cache", {"pagedkv.cache"}),
        ("from .cache import PagedKVCache", {"pagedkv.cache"}),
        ("def f():\n    from pagedkv import cache", {"pagedkv.cache"}),
        ("if TYPE_CHECKING:\n    from pagedkv.hf import X", {"pagedkv.hf"}),
    ],
)
def test_imports_are_seen_in_every_form(source, expected):
    assert imports_of(source, "pagedkv.attention") == expected


def test_relative_imports_are_resolved_from_sub_packages():
    assert imports_of("from ..cache import X", "pagedkv.pages.pool") == {"pagedkv.cache"}
    assert imports_of("from .. import cache", "pagedkv.pages", is_package=True) == {"pagedkv.cache"}
    assert imports_of("from .tile import x", "pagedkv.kernels.decode") == {"pagedkv.kernels.tile"}


def test_importing_pagedkv_loads_no_heavy_package(fresh_python):
    heavy = "{'torch', 'triton', 'transformers'}"
    code = f"import sys, pagedkv; print(sorted({heavy} & set(sys.modules)))"
    assert fresh_python("-c", code) == "[]"


def test_decisions_import_with_torch_blocked(fresh_python):
    units = sorted(u for u in WITHOUT_TORCH - {"pagedkv"} if f"pagedkv.{u}" in MODULES)
    assert {"config", "errors", "pages"} <= set(units)
    lines = ["import sys; sys.modules['torch'] = None", *(f"import pagedkv.{u}" for u in units)]
    fresh_python("-c", "\n".join(lines))
