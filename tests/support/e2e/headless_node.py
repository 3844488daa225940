"""What ``vllm serve --headless`` does: ``python -m tests.support.e2e.headless_node``, with its options.

vLLM's own command wants a distribution named vllm, which its build for CPUs is not. Workers are forked, as by
``forked_server``.
"""

from vllm.utils import system_utils

from tests.support.e2e.forked_server import forking


def main() -> None:
    """Run a node's workers until the first node ends."""
    system_utils.get_mp_context = forking
    # Where these are imported, they have their own name of it.
    from vllm.entrypoints.cli.serve import run_headless  # noqa: PLC0415
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    options = make_arg_parser(FlexibleArgumentParser()).parse_args()
    options.api_server_count = 0
    validate_parsed_serve_args(options)
    run_headless(options)


if __name__ == "__main__":
    main()
