"""Where a project is found."""

import sys
from pathlib import Path

import pytest

from fastgpu.process.project import install_command
from support.ranks import printed_by

CODE = "from fastgpu.process.project import project_folder; print(project_folder())"


@pytest.mark.parametrize("evidence", ["workloads/", "config.yaml", ""])
def test_project_folder_is_beside_the_script(tmp_path: Path, evidence: str):
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    (project / "tool.py").write_text(CODE)
    if evidence.endswith("/"):
        (project / evidence).mkdir()
    elif evidence:
        (project / evidence).touch()
    paths = {"PYTHONPATH": str(Path(sys.modules["fastgpu"].__file__).parents[1])}
    (tmp_path / "link.py").symlink_to(project / "tool.py")
    for script in ("../project/tool.py", "../link.py"):
        shown = printed_by([sys.executable, script], elsewhere, **paths).strip()
        assert Path(shown) == (project if evidence else elsewhere)
    assert printed_by([sys.executable, "-c", CODE], elsewhere, **paths).strip() == str(elsewhere)


def test_install_command_is_of_a_project_or_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert install_command("cloud") == "pip install 'fastgpu-engine[cloud]'"
    (tmp_path / "constraints.txt").touch()
    assert install_command("cloud") == "pip install -c constraints.txt -e '.[cloud]'"
