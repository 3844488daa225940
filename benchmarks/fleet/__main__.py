"""Simulates fleets of prefill and decode engines: ``python -m benchmarks.fleet COMMAND``.

calibrate   measures the simulator's constants on one real P and one real D, and the control server's messages
validate    runs a trace on one real P and one real D, and simulated
plot        answers questions beyond this machine, and draws the answers
run         simulates a trace of yours (``--trace FILE``, in the Mooncake paper's format) on x P and y D
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.fleet import calibrate, constants, plots, scenarios, validate
from benchmarks.fleet.node import Settings
from benchmarks.fleet.simulation import simulate, summary
from benchmarks.fleet.traces import TraceError, read
from examples.quickstart.servers import ServerFailed

VALIDATED = "fleet_validation"  # the results' file of ``validate``


def _calibrate(arguments: argparse.Namespace, words: Sequence[str]) -> None:
    _record(constants.MEASURED, words, lambda: calibrate.calibrate(arguments.repeats))


def _validate(arguments: argparse.Namespace, words: Sequence[str]) -> None:
    _record(VALIDATED, words, lambda: validate.validate(constants.measured(), arguments.times))


def _plot(_: argparse.Namespace, words: Sequence[str]) -> None:
    calibration = record.read(constants.MEASURED)
    path = _record("fleet", words, lambda: scenarios.answers(calibration["figures"]["control"]))
    for plot in plots.draw(record.read("fleet")["figures"], calibration, path.parent):
        print(f"wrote {plot}")


def _record(name: str, words: Sequence[str], measure: Callable[[], dict[str, Any]]) -> Path:
    """Write what is measured to a results' file, and return its path."""
    start = time.monotonic()
    with record.kept_output() as output:
        figures = measure()
    path = record.write(name, words, figures, output.kept, seconds=time.monotonic() - start)
    print(f"wrote {path}")
    return path


def _run(arguments: argparse.Namespace, _: Sequence[str]) -> None:
    arrivals = read(arguments.trace)
    settings = Settings(legs=arguments.legs)
    fleet = scenarios.ASSUMED if arguments.assumed else constants.measured()
    ran = simulate(arrivals, fleet, settings, arguments.prefills, arguments.decodes)
    print(json.dumps(asdict(summary(ran.outcomes)), indent=1))
    print(f"P computed {ran.prefill_busy:.0%} of the time, D {ran.decode_busy:.0%}")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fleet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("calibrate")
    command.add_argument("--repeats", type=int, default=5, help="of each measurement")
    command.set_defaults(command=_calibrate)
    command = commands.add_parser("validate")
    command.add_argument("--times", type=int, default=5, help="that real servers get each trace")
    command.set_defaults(command=_validate)
    command = commands.add_parser("plot")
    command.set_defaults(command=_plot)
    command = commands.add_parser("run")
    command.add_argument("--trace", type=Path, required=True)
    command.add_argument("--prefills", type=int, default=1)
    command.add_argument("--decodes", type=int, default=1)
    command.add_argument("--legs", choices=("in turn", "together"), default="together")
    command.add_argument("--assumed", action="store_true", help="engines as in the plots, not those measured here")
    command.set_defaults(command=_run)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """Run a command."""
    given = list(sys.argv[1:] if words is None else words)
    arguments = parse(given)
    try:
        arguments.command(arguments, ["benchmarks.fleet", *given])
    except ServerFailed as error:
        sys.exit(f"{error}. The end of its log:\n{error.log_tail}")
    except (TraceError, FileNotFoundError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
