"""Write the address of this template, `__template` of cookiecutter.json, into the files that no program can ask for it:
CITATION.cff and pyproject.toml. `make fix` runs it.

These files name no address while the owner is the placeholder `org`.
"""

import re

from facts import QUESTIONS, ROOT, hook_constant


def with_address(name: str, text: str, address: str) -> str:
    """CITATION.cff or pyproject.toml with this address, or without one if nobody owns it."""
    is_known = not address.startswith(hook_constant("NOBODY"))
    if name == "CITATION.cff":
        text = re.sub(r"repository-code: .*\n", "", text)
        return f"{text}repository-code: {address}\n" if is_known else text
    text = re.sub(r"\[project\.urls\]\n.*\n\n", "", text)
    urls = f'[project.urls]\nTemplate = "{address}"\n\n' if is_known else ""
    return text.replace("[build-system]\n", f"{urls}[build-system]\n")


def main() -> None:
    for name in ("CITATION.cff", "pyproject.toml"):
        path = ROOT / name
        path.write_text(with_address(name, path.read_text(), QUESTIONS["__template"]))


if __name__ == "__main__":
    main()
