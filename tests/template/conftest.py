"""Fixtures that build the engine as a package from a clean copy of the template."""

import shutil
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from support.ranks import printed_by


@pytest.fixture(scope="session")
def wheels(template: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The engine as a package, twice: built from the template, and from an sdist of it."""
    folder = tmp_path_factory.mktemp("wheel")
    build = (sys.executable, "-m", "hatchling", "build", "-d")
    printed_by([*build, folder], template)
    (sdist,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder, filter="data")
    printed_by([*build, folder / "from-sdist", "-t", "wheel"], folder / sdist.name.removesuffix(".tar.gz"))
    return sorted(folder.rglob("*.whl"))


@pytest.fixture(scope="session")
def python_with_engine(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment that has the engine as a package, and all that is installed here."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv", with_pip=False)
    (site,) = folder.glob("venv/lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(others))  # behind its own
    with zipfile.ZipFile(wheels[0]) as packed:
        packed.extractall(site)
    return folder / "venv/bin/python"
