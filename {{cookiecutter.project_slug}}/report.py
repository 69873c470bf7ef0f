"""What a run did: a summary and report.html, also after a kill. With --compare: one line a run, the best one first.

python report.py runs/a                      print the summary, write runs/a/report.html
python report.py --compare runs/*            metric, speed, data wait, and the settings that differ
python report.py --csv runs/*                the same for a spreadsheet
"""

import argparse
import csv
import signal
import sys
from pathlib import Path

from fastgpu.process.launch import UserError, exit_with_message, say
from fastgpu.process.tools import csv_cell, start_tool
from fastgpu.report import ledger, page, results


def main(argv: list[str]) -> None:
    """Report on the runs that are named on the command line. Raises UserError."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="folder of a run")
    parser.add_argument("--compare", action="store_true", help="one line for each run")
    parser.add_argument("--csv", action="store_true", help="the same as CSV")
    args = parser.parse_args(argv)
    if missing := [str(run) for run in args.runs if not run.is_dir()]:
        raise UserError(f"{missing[0]} is no folder (looked in {Path.cwd()}); name the folder of a run")
    read = [results.read_run(run) for run in args.runs]
    runs = [run for run in read if run.points]
    empty = [str(run.folder) for run in read if not run.points]
    if not runs:
        raise UserError(f"{', '.join(empty)}: no points in metrics.jsonl; it is no run, or has just begun")
    if empty:  # such as runs that failed at their start, which a sweep is about
        say(f"left out: {len(empty)} without a point in metrics.jsonl: {', '.join(empty)}", sys.stderr)
    if args.csv:
        compared = results.compare(runs, str)
        csv.writer(sys.stdout, lineterminator="\n").writerows(map(csv_cell, line) for line in compared)
    elif args.compare:
        print(results.as_text(results.compare(runs, results.number)))
    else:
        for run in runs:
            lines = [[f"  {name}", results.number(value)] for name, value in results.summary(run).items()]
            print(results.as_text(lines))
            if rows := ledger.as_rows(run.ledger):
                print("  where the time went:")
                print(results.as_text([[f"    {kind}", *values] for kind, *values in rows]))
            print(page.write_report(run))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the program
    start_tool()
    with exit_with_message(OSError):
        main(sys.argv[1:])
