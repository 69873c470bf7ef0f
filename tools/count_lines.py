"""Print how many lines of Python a generated project has, without its tests, for each workload."""

from template import LEAF_ROOMS, PROJECT, WORKLOAD_ANSWERS, project_files, removed_files


def room_of(path: str) -> str:
    """The leaf room that a file belongs to with its script, or `core`."""
    for room in LEAF_ROOMS:
        if path == f"{room}.py" or path.startswith(f"fastgpu/{room}/"):
            return room
    return "core"


def count(answer: str) -> dict[str, int]:
    """{part: lines} of a project with this answer to the question `workload`."""
    lines = dict.fromkeys(("core", *LEAF_ROOMS), 0)
    for path in set(project_files()) - removed_files(answer):
        if path.endswith(".py") and not path.startswith("tests/"):
            text = (PROJECT / path).read_text(encoding="utf-8")
            lines[room_of(path)] += len(text.splitlines())
    return lines


def main() -> None:
    """Print one line for each workload."""
    print(f"{'workload':10}{'core':>8}" + "".join(f"{room:>10}" for room in LEAF_ROOMS) + f"{'total':>8}")
    for answer in WORKLOAD_ANSWERS:
        lines = count(answer)
        rooms = "".join(f"{lines[room]:10,}" for room in LEAF_ROOMS)
        print(f"{answer:10}{lines['core']:8,}{rooms}{sum(lines.values()):8,}")


if __name__ == "__main__":
    main()
