"""`make docs`: lay out the pages for MkDocs, in build/docs: those of the template, and a project with every file.

The pages of a project have conditions of cookiecutter in them, so they are taken from one that is baked.
"""

import shutil
from pathlib import Path

from cookiecutter.main import cookiecutter
from template import ALL_FILES, FOLDER, ROOT, tracked

TARGET = ROOT / "build" / "docs"
PROJECT_SLUG = "project"


def main() -> None:
    shutil.rmtree(TARGET, ignore_errors=True)
    for name in tracked():
        if name.startswith((f"{FOLDER}/", "tests/")):
            continue
        path = TARGET / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":  # its links lead to the baked project
            path.write_text(
                Path(ROOT / name).read_text(encoding="utf-8").replace(FOLDER, PROJECT_SLUG), encoding="utf-8"
            )
        else:
            shutil.copyfile(ROOT / name, path)
    answers = ALL_FILES | {"project_slug": PROJECT_SLUG, "workload": "both"}
    cookiecutter(str(ROOT), no_input=True, output_dir=str(TARGET), extra_context=answers)


if __name__ == "__main__":
    main()
