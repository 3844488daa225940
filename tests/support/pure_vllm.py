"""Unpack the Python files of a vLLM wheel whose compiled parts this machine cannot load.

    python -m tests.support.pure_vllm vllm-0.33.0-*.whl DIRECTORY

With the directory on PYTHONPATH, before another vLLM, the scheduler and the classes that connectors meet can be run.
"""

import argparse
import re
import zipfile
from pathlib import Path


def unpack_sources(wheel: Path, directory: Path) -> None:
    """Write the Python files of the package ``vllm`` to ``directory``."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory, [name for name in archive.namelist() if re.fullmatch(r"vllm/.*\.py", name)])


def main() -> None:
    """Unpack the wheel that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    unpack_sources(arguments.wheel, arguments.directory)


if __name__ == "__main__":
    main()
