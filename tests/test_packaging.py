"""The wheel and the source archive are what people get: what they hold, and that it works."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOT_SOURCE = (".*", "__pycache__", "*.egg-info", "build", "dist", "site")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the tree, for setuptools leaves build folders in the one it works on."""
    folder = tmp_path_factory.mktemp("copy") / "source"
    ignore = shutil.ignore_patterns(*NOT_SOURCE)
    return Path(shutil.copytree(ROOT, folder, symlinks=True, ignore=ignore))


@pytest.fixture(scope="module")
def wheel(fresh_python, source, tmp_path_factory) -> Path:
    return built(fresh_python, source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked(fresh_python, source, tmp_path_factory) -> Path:
    """Unpacks the source archive."""
    folder = tmp_path_factory.mktemp("sdist")
    code = f"from setuptools import build_meta as b; b.build_sdist({str(folder)!r})"
    fresh_python("-W", "ignore", "-c", code, cwd=source)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def built(fresh_python, source: Path, folder: Path) -> Path:
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    fresh_python("-m", "pip", *map(str, build), cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


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
    data = {"pagedkv/py.typed", "pagedkv/trace/page.html", "pagedkv/kernels/triton/proved.json"}
    data |= {f"pagedkv/quality/texts/{name}" for name in ("README.md", "docs.txt", "prose.txt")}
    data |= {f"pagedkv/kernels/c/{path.name}" for path in (ROOT / "kernels" / "c").glob("*.[ch]")}
    assert files == sources("pagedkv") | sources("kernels") | data
    assert {name.split("/")[0] for name in names - files} == {"pagedkv-0.1.0.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_imports_from_another_folder(fresh_python, site, tmp_path):
    code = "import pagedkv, pagedkv.kernels.reference as r; print(pagedkv.__file__, r.__file__)"
    files = fresh_python("-c", code, cwd=tmp_path, path=site).split()
    assert files == [str(site / "pagedkv" / f) for f in ("__init__.py", "kernels/reference.py")]


def test_transformers_does_not_take_our_folder_for_kernels_that_it_knows(fresh_python):
    ours = pytest.importorskip("transformers.utils.import_utils")
    code = "from transformers.utils import import_utils; print(import_utils.is_kernels_available())"
    assert fresh_python("-c", code) == str(ours.is_kernels_available())


@pytest.mark.slow
def test_transformers_imports_from_the_repository_root(fresh_python):
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


def test_our_benchmarks_are_found_before_another_package_of_that_name(fresh_python, tmp_path):
    theirs = tmp_path / "benchmarks" / "__init__.py"
    theirs.parent.mkdir()
    theirs.write_text("raise RuntimeError('another package')")
    code = "import benchmarks.gpu; print(benchmarks.__file__)"
    assert fresh_python("-c", code, path=tmp_path) == str(ROOT / "benchmarks" / "__init__.py")
    collect = ("-P", "-m", "pytest", "--collect-only", "-q", "benchmarks/bench_bookkeeping.py")
    assert "::bench_page_tables" in fresh_python(*collect, path=tmp_path)


def test_the_source_archive_holds_what_its_tests_and_docs_need(source, unpacked):
    needed = [
        path.relative_to(source).as_posix()
        for folder in ("benchmarks", "docs", "kernels", "pagedkv", "tests")
        for path in (source / folder).rglob("*")
        if path.is_file()
    ]
    needed += [p.name for p in source.glob("[A-Z]*.*") if p.name != "MANIFEST.in"]
    needed += ["LICENSE", "Makefile", "constraints.txt", "pyproject.toml"]
    assert not [name for name in needed if not (unpacked / name).is_file()]


@pytest.mark.slow
def test_the_source_archive_builds_the_same_wheel(fresh_python, wheel, unpacked, tmp_path):
    contents = []
    for path in (wheel, built(fresh_python, unpacked, tmp_path)):
        with zipfile.ZipFile(path) as archive:
            contents.append(
                {i.filename: i.CRC for i in archive.infolist() if "RECORD" not in i.filename}
            )
    assert contents[0] == contents[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [("--collect-only", "tests"), ("tests/models/test_layers.py", "tests/pages/test_staging.py")],
)
def test_tests_run_from_the_source_archive(what, unpacked):
    env = os.environ | {"PYTHONPATH": str(unpacked), "PYTHONSAFEPATH": "1"}
    command = (sys.executable, "-m", "pytest", "-q", "-n0", *what)
    done = subprocess.run(command, cwd=unpacked, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    where = (sys.executable, "-c", "import pagedkv; print(pagedkv.__file__)")
    found = subprocess.run(where, cwd=unpacked, env=env, capture_output=True, text=True)
    assert Path(found.stdout.strip()).is_relative_to(unpacked)
