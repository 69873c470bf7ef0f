"""The commands that convert.py has are those of the modules commands_*.py in its room."""

SHARED = {"arrays", "repack", "info", "verify"}


def listed(help_text: str) -> set[str]:
    """The commands in the output of --help."""
    lines = help_text.partition("COMMAND\n")[2].partition("\n\n")[0].splitlines()
    return {line.split()[0] for line in lines if line.startswith("    ") and line[4] != " "}


def test_help_lists_every_command_with_an_example(convert):
    result = convert("--help")
    assert result.returncode == 0
    commands = listed(result.stdout)
    assert commands >= SHARED
    for command in commands:
        assert f"python convert.py {command} " in result.stdout
        assert convert(command, "--help").returncode == 0
