"""Imports run downwards only: the files are held against an explicit table.

A unit is a module or sub-package directly under `pagedkv`. What a unit imports is read from its
source, wherever the import stands: at the top, in a function, under `TYPE_CHECKING`.
"""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# unit: the units it may import, besides itself and EVERYWHERE. From the ground up.
MAY_IMPORT = {
    "errors": "",
    "arrays": "",
    "interrupt": "",
    "names": "",
    "ranks": "errors",
    "retention": "arrays names",
    "models": "errors names",
    "kernels": "",
    "config": "retention kernels models",
    "pages": "retention arrays",
    "planner": "models arrays",
    "storage": "kernels retention arrays ranks",
    "step": "pages arrays kernels",
    "offload": "pages storage arrays interrupt",
    "saving": "pages storage arrays interrupt",
    "attention": "step storage kernels arrays",
    "stream": "models planner storage",
    "recording": "pages arrays interrupt",
    "cache": "pages storage step offload saving attention recording arrays interrupt ranks",
    "trace": "recording arrays",
    "hf": "cache attention step pages planner storage arrays interrupt kernels models ranks",
    "batch": "hf cache attention step pages planner offload arrays interrupt models ranks kernels",
    "quality": "batch hf cache storage",
    "integrations": "batch hf arrays",
    "cli": "pagedkv batch hf stream planner models storage cache attention pages trace quality "
    "interrupt integrations ranks kernels",
    "__main__": "cli",
    # The package itself: names that are loaded when they are first asked for.
    "pagedkv": "errors config planner pages step saving attention cache stream hf batch",
}
EVERYWHERE = {"config", "errors", "names"}
NOT_EVERYWHERE = {
    "errors",
    "arrays",
    "interrupt",
    "names",
    "ranks",
    "kernels",
    "retention",
    "models",
}

WITHOUT_TORCH = {
    "pagedkv",
    "errors",
    "arrays",
    "interrupt",
    "names",
    "retention",
    "config",
    "pages",
}
WITHOUT_TORCH |= {"planner", "models", "recording", "trace"}
WITH_TRANSFORMERS = {"hf", "batch", "cli", "stream", "quality", "integrations"}
AT_THE_ROOT = {"__init__", "__main__", "errors", "interrupt", "names", "arrays", "ranks"}
BEHIND_A_CALL = {"pagedkv.models.skeleton"}  # imported where a model is built


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


@cache
def imports_of_file(module: str) -> set[str]:
    path = MODULES[module]
    return imports_of(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")


def top(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def offenders(found: dict[str, set[str]]) -> dict[str, list[str]]:
    """The modules that import what they may not, with what that is."""
    return {module: sorted(names) for module, names in found.items() if names}


def test_the_table_has_no_cycle():
    TopologicalSorter({unit: allowed(unit) - {unit} for unit in MAY_IMPORT}).prepare()


def test_no_modules_import_each_other_in_a_circle_not_even_for_types():
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        graph[module] = set()
        for name in imports_of_file(module):
            while name not in MODULES and "." in name:
                name = name.rpartition(".")[0]
            if name != module and not module.startswith(f"{name}."):
                graph[module].add(name)
    TopologicalSorter(graph).prepare()


def test_every_file_is_in_a_room_but_for_five():
    assert {path.stem for path in (ROOT / "pagedkv").glob("*.py")} == AT_THE_ROOT


def test_every_room_says_what_it_owns():
    rooms = {path.parent for path in ROOT.glob("pagedkv/*/*.py")} - {ROOT / "pagedkv" / "kernels"}
    said = {room.name: (room / "__init__.py").read_text(encoding="utf-8") for room in rooms}
    assert said
    assert not [name for name, text in said.items() if not text.startswith('"""')]


def test_modules_import_only_what_their_floors_may():
    homeless = {unit_of(module) for module in MODULES} - MAY_IMPORT.keys()
    assert not homeless, f"say in MAY_IMPORT of {Path(__file__).name} what they may import"
    above = {}
    for module in MODULES:
        names = {name for name in imports_of_file(module) if name.split(".")[0] == "pagedkv"}
        above[module] = {unit_of(name) for name in names} - allowed(unit_of(module))
    assert offenders(above) == {}, "see MAY_IMPORT"


def test_only_an_integration_imports_the_program_it_is_for():
    foreign = {module: top(imports_of_file(module)) & {"lm_eval"} for module in MODULES}
    for module in ("pagedkv.integrations.lm_eval", "pagedkv.cli.eval"):
        assert foreign.pop(module)
    assert offenders(foreign) == {}


def test_ranks_alone_names_torch_distributed():
    found = {
        module: {name for name in imports_of_file(module) if name.startswith("torch.distributed")}
        for module in MODULES
    }
    assert found.pop("pagedkv.ranks")
    assert offenders(found) == {}


def test_modules_import_heavy_packages_only_where_they_belong():
    wrong = {}
    for module in MODULES:
        unit, has = unit_of(module), set()
        if unit not in WITHOUT_TORCH:
            has.add("torch")
        if module.startswith("pagedkv.kernels.triton."):
            has.add("triton")
        if unit in WITH_TRANSFORMERS:
            has.add("transformers")
        if module in BEHIND_A_CALL:
            has |= {"torch", "transformers"}
        heavy = top(imports_of_file(module)) & {"torch", "triton", "transformers", "kernels"}
        wrong[module] = heavy - has
    assert offenders(wrong) == {}


def test_plain_kernel_files_reach_no_triton_through_a_sibling():
    plain = [name for name in MODULES if name.startswith("pagedkv.kernels.")]
    plain = [name for name in plain if ".triton." not in name]
    assert plain
    found = {
        module: {n for n in imports_of_file(module) if n.startswith("pagedkv.kernels.triton")}
        for module in plain
    }
    assert offenders(found) == {}


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
    heavy = "{'torch', 'triton', 'transformers', 'lm_eval'}"
    code = f"import sys, pagedkv; print(sorted({heavy} & set(sys.modules)))"
    assert fresh_python("-c", code) == "[]"


def test_decisions_import_with_torch_blocked(fresh_python):
    units = sorted(u for u in WITHOUT_TORCH - {"pagedkv"} if f"pagedkv.{u}" in MODULES)
    assert {"config", "errors", "pages", "planner"} <= set(units)
    lines = ["import sys; sys.modules['torch'] = None", *(f"import pagedkv.{u}" for u in units)]
    fresh_python("-c", "\n".join(lines))


MAKES_TENSORS = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace",
    "logspace", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor",
    "tril_indices", "triu_indices", "zeros",
}  # fmt: skip


def test_every_tensor_is_made_on_a_device_that_is_named():
    """Else it is on whichever the caller gave to `torch.set_default_device`."""
    nameless = []
    for path in [*(ROOT / "pagedkv").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(ast.Attribute(ast.Name("torch"), name), _, keywords):
                    told = {keyword.arg for keyword in keywords} & {"device", None}
                    if name in MAKES_TENSORS and not told:
                        nameless.append(f"{path.relative_to(ROOT)}:{node.lineno}: torch.{name}")
    assert not nameless
