"""What a run did: its table and report.html, also after a kill. With --compare: how runs differ.

python report.py runs/a                                    print the table, write runs/a/report.html
python report.py --compare runs/a runs/b                   settings, speed, waiting and metrics that differ
python report.py --compare runs/a runs/b -o ab.html        the same as a page, with the curves of all runs
"""

import argparse
import sys
from pathlib import Path

from fastgpu.process.launch import UserError, exit_with_message, stop_at_closed_pipe
from fastgpu.report import page, results


def main(argv: list[str]) -> None:
    """Report on the runs that are named on the command line. Raises UserError."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="folder of a run")
    parser.add_argument("--compare", action="store_true", help="show how the runs differ, instead of each alone")
    parser.add_argument("-o", "--output", "--html", metavar="FILE", type=Path, help="with --compare: write this page")
    args = parser.parse_args(argv)
    if args.output and not args.compare:
        raise UserError(f"-o is {args.output}; it names the page of --compare: give both")
    for folder in args.runs:
        if not results.read_metrics(folder):
            raise UserError(
                f"{folder} holds no metrics.jsonl with points; name the folder of a run, such as runs/first"
            )
    if args.compare:
        compare(args.runs, args.output)
        return
    for folder in args.runs:
        points = results.read_metrics(folder)
        print(results.table(points))
        if verdict := results.run_verdict(points):
            print(verdict.text)
        page.write_report(folder)
        print(folder / "report.html")


def compare(folders: list[Path], path: Path | None) -> None:
    """Print how runs differ and, if a path is given, write it as a page."""
    names = [folder.resolve().name for folder in folders]
    labels = names if len({*names}) == len(names) else [str(folder) for folder in folders]
    runs = dict(zip(labels, folders, strict=True))
    print(results.as_text(results.differing_settings(runs)))
    print()
    print(results.as_text(results.differing_values(runs)))
    if path:
        page.write_comparison(runs, path)
        print(path)


if __name__ == "__main__":
    with exit_with_message("interrupted"), stop_at_closed_pipe(sys.stdout):
        main(sys.argv[1:])
