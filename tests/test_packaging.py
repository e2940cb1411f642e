"""The wheel is what people get: its contents, and that it works away from this folder."""

import shutil
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("pagedkv", "kernels", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(fresh_python, tmp_path_factory) -> Path:
    # From a copy: setuptools leaves build folders in the tree it works on.
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, source / name)
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", ".", source)
    fresh_python("-m", "pip", *map(str, build), cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """A folder with nothing but what the wheel installs."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def sources(folder: str) -> set[str]:
    prefix = "" if folder == "pagedkv" else "pagedkv/"
    paths = (ROOT / folder).rglob("*.py")
    return {prefix + path.relative_to(ROOT).as_posix() for path in paths}


def test_wheel_holds_the_package_with_its_kernels_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    files = {name for name in names if ".dist-info/" not in name}
    assert files == sources("pagedkv") | sources("kernels") | {"pagedkv/py.typed"}
    assert {name.split("/")[0] for name in names - files} == {"pagedkv-0.1.0.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_imports_from_another_folder(fresh_python, site, tmp_path):
    code = "import pagedkv, pagedkv.kernels.reference as r; print(pagedkv.__file__, r.__file__)"
    files = fresh_python("-c", code, cwd=tmp_path, path=site).split()
    assert files == [str(site / "pagedkv" / f) for f in ("__init__.py", "kernels/reference.py")]


def test_wheel_has_no_top_level_kernels(fresh_python, site, tmp_path):
    code = (
        "import importlib.util as u; s = u.find_spec('kernels');"
        "print(s and [str(p) for p in s.submodule_search_locations])"
    )
    assert str(site) not in fresh_python("-c", code, cwd=tmp_path, path=site)


def test_transformers_does_not_take_our_folder_for_kernels_that_it_knows(fresh_python):
    ours = pytest.importorskip("transformers.utils.import_utils")
    code = "from transformers.utils import import_utils; print(import_utils.is_kernels_available())"
    assert fresh_python("-c", code) == str(ours.is_kernels_available())


@pytest.mark.slow
def test_transformers_imports_from_the_repository_root(fresh_python):
    pytest.importorskip("transformers")
    code = (
        "from transformers import LlamaForCausalLM; import sys;"
        "print(getattr(sys.modules.get('kernels'), '__file__', None))"
    )
    assert str(ROOT / "kernels") not in fresh_python("-c", code)


def test_another_kernels_package_wins_over_our_folder(fresh_python, tmp_path):
    # As Hugging Face's would when it is installed: a package beats a plain folder on the path.
    theirs = tmp_path / "kernels" / "__init__.py"
    theirs.parent.mkdir()
    theirs.touch()
    path = f"import sys; sys.path.append({str(tmp_path)!r})"
    code = f"{path}; import kernels; print(kernels.__file__)"
    assert fresh_python("-c", code) == str(theirs)
